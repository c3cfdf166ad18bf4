"""The page in one file, scripts and style included: served, or saved with its answers inside."""

from __future__ import annotations

import base64
import json
import re
import secrets
from functools import cache
from pathlib import Path
from urllib.parse import quote

_FOLDER = Path(__file__).parent / "static"
# The library of plots: no module, as those of the page are.
_PLOTS = "uplot.min.js"
# As modules name each other.
_IMPORT = re.compile(r'"\./([\w]+\.js)"')
_NUMBER = "NUMBER-OF-THIS-FILE"
# What a data address cannot have as it is: all but these.
_AS_IT_IS = "!$&'()*+,-./:;=?@[]^_`{|}~"
# A script without the number of this file does not run, and nothing can be loaded.
_POLICY = (
    "default-src 'none'; script-src 'nonce-{}'; style-src 'unsafe-inline'; img-src data: blob:; "
    "base-uri 'none'; form-action 'none'"
)


def served() -> tuple[str, str]:
    """The page, which asks where it came from; and its content security policy."""
    number = secrets.token_urlsafe(16)
    policy = f"{_POLICY.format(number)}; connect-src 'self'; frame-ancestors 'none'"
    return _page().replace(_NUMBER, number), policy


def saved(answers: bytes) -> str:
    """The page with these answers inside: packed JSON, as saved.js reads it.

    Nothing of a run stands in it as text.
    """
    number = secrets.token_urlsafe(16)
    own = (
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY.format(number)}">\n'
        f'<script type="application/gzip" id="answers">{base64.b64encode(answers).decode()}'
        "</script>\n"
    )
    page = _page().replace(_NUMBER, number)
    return page.replace("<title>", f"{own}<title>", 1)


@cache
def _page() -> str:
    """With a mark where each file has a number of its own."""
    modules = {
        f"page/{path.name}": f"data:text/javascript,{quote(_module(path), safe=_AS_IT_IS)}"
        for path in sorted(_FOLDER.glob("*.js"))
        if path.name != _PLOTS
    }
    parts = (
        f"<style>{(_FOLDER / 'style.css').read_text()}</style>",
        f'<script nonce="{_NUMBER}">{(_FOLDER / _PLOTS).read_text()}</script>',
        f'<script nonce="{_NUMBER}" type="importmap">{json.dumps({"imports": modules})}</script>',
        f'<script nonce="{_NUMBER}" type="module">import "page/main.js";</script>',
    )
    index = (_FOLDER / "index.html").read_text()
    return index.replace("</head>", "\n".join((*parts, "</head>")), 1)


def _module(path: Path) -> str:
    text = _IMPORT.sub(r'"page/\1"', path.read_text())
    # By this name a debugger shows it.
    return f"{text}//# sourceURL={path.name}\n"
