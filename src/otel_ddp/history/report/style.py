"""The looks of the report: light or dark, as the reader's system is."""

from __future__ import annotations

from typing import Final

# The first phase is what most time went to; eight more have colours of their own.
_LIGHT = ("#2f6fb0", "#d9822b", "#4f8f4f", "#b04a5a", "#7a5fa8", "#8a7a3c", "#3f8f95", "#9a6a8a")
_DARK = ("#6ba5de", "#e8a45c", "#7fbf7f", "#dd8492", "#a991d6", "#bfae6a", "#74bfc5", "#c79ab8")


def _colours(found: tuple[str, ...]) -> str:
    return "".join(f"--p{number}:{colour};" for number, colour in enumerate(found))


_PARTS = "".join(
    f".part.p{number}{{fill:var(--p{number})}}.key.p{number}{{background:var(--p{number})}}"
    for number in range(8)
)
STYLE: Final = (
    ":root{color-scheme:light dark;--back:#fff;--text:#1c2126;--faint:#5c6670;--rule:#d7dce1;"
    f"--bad:#a8232f;--good:#23702f;--line:#2f6fb0;--p8:#8a9299;{_colours(_LIGHT)}}}"
    "@media(prefers-color-scheme:dark){:root{--back:#15181b;--text:#e4e8ec;--faint:#a3adb6;"
    f"--rule:#353b41;--bad:#ff8f98;--good:#86d494;--line:#6ba5de;--p8:#8a9299;{_colours(_DARK)}}}}}"
    "body{margin:0;background:var(--back);color:var(--text);"
    "font:15px/1.5 system-ui,sans-serif}"
    "main{max-width:960px;margin:0 auto;padding:1rem}"
    "h1{font-size:1.5rem;overflow-wrap:anywhere}h2{font-size:1.15rem;margin-top:2rem}"
    "h3{font-size:1rem;margin-bottom:.25rem;overflow-wrap:anywhere}"
    ".state{font-size:.9rem;padding:.1rem .6rem;border:1px solid;border-radius:1rem}"
    ".finished{color:var(--good)}.failed,.killed{color:var(--bad)}"
    "dl{display:grid;grid-template-columns:max-content 1fr;gap:.15rem 1rem}"
    "dt,footer,.tick{color:var(--faint)}dd{margin:0;overflow-wrap:anywhere}"
    ".wide{overflow-x:auto}table{border-collapse:collapse;font-variant-numeric:tabular-nums}"
    "th,td{text-align:left;padding:.2rem .8rem .2rem 0;border-bottom:1px solid var(--rule);"
    "vertical-align:top;overflow-wrap:anywhere}"
    "th,.short{white-space:nowrap}.wide td:not(.short){min-width:12em}"
    "svg{width:100%;height:auto;display:block;margin:.5rem 0}"
    ".tick{font-size:11px;fill:var(--faint)}.grid{stroke:var(--rule)}"
    ".line{fill:none;stroke:var(--line);stroke-width:1.5}.dot{fill:var(--line)}"
    ".band{fill:var(--line);fill-opacity:.18}.cell{fill:var(--bad)}"
    f".key{{display:inline-block;width:.8em;height:.8em;margin-right:.5em}}{_PARTS}"
    ".part.p8{fill:var(--p8)}.key.p8{background:var(--p8)}"
    "footer{margin-top:2rem;font-size:.85rem}summary{cursor:pointer}"
)
