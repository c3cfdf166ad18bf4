"""Assembles the page as one file with its scripts and style, to be served, or saved with data."""

from __future__ import annotations

import base64
import json
import re
import secrets
from functools import cache
from pathlib import Path
from urllib.parse import quote

_FOLDER = Path(__file__).parent / "static"
# The chart library. It is a plain script, no JavaScript module, so it is included separately.
_PLOTS = "uplot.min.js"
_IMPORT = re.compile(r'"\./([\w]+\.js)"')
_NONCE = "NONCE-OF-THIS-FILE"
# Characters that a data URL need not escape.
_AS_IT_IS = "!$&'()*+,-./:;=?@[]^_`{|}~"
# The content security policy: only scripts with the nonce run, and the page cannot load any files.
_POLICY = (
    "default-src 'none'; script-src 'nonce-{}'; style-src 'unsafe-inline'; img-src data: blob:; "
    "base-uri 'none'; form-action 'none'"
)


def served() -> tuple[str, str]:
    """The page as it is served, and its content security policy. It requests its data later."""
    nonce = secrets.token_urlsafe(16)
    policy = f"{_POLICY.format(nonce)}; connect-src 'self'; frame-ancestors 'none'"
    return _page().replace(_NONCE, nonce), policy


def saved(answers: bytes) -> str:
    """The page with its data: gzipped JSON as base64, so that no text of a run acts as HTML."""
    nonce = secrets.token_urlsafe(16)
    own = (
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY.format(nonce)}">\n'
        f'<script type="application/gzip" id="answers">{base64.b64encode(answers).decode()}'
        "</script>\n"
    )
    page = _page().replace(_NONCE, nonce)
    return page.replace("<title>", f"{own}<title>", 1)


@cache
def _page() -> str:
    """The page with a placeholder instead of the nonce."""
    modules = {
        f"page/{path.name}": f"data:text/javascript,{quote(_module(path), safe=_AS_IT_IS)}"
        for path in sorted(_FOLDER.glob("*.js"))
        if path.name != _PLOTS
    }
    parts = (
        f"<style>{(_FOLDER / 'style.css').read_text()}</style>",
        f'<script nonce="{_NONCE}">{(_FOLDER / _PLOTS).read_text()}</script>',
        f'<script nonce="{_NONCE}" type="importmap">{json.dumps({"imports": modules})}</script>',
        f'<script nonce="{_NONCE}" type="module">import "page/main.js";</script>',
    )
    index = (_FOLDER / "index.html").read_text()
    return index.replace("</head>", "\n".join((*parts, "</head>")), 1)


def _module(path: Path) -> str:
    text = _IMPORT.sub(r'"page/\1"', path.read_text())
    # `sourceURL` sets the name of the module in a debugger.
    return f"{text}//# sourceURL={path.name}\n"
