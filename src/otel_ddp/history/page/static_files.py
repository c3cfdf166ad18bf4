"""The files of the page, our own and the library of plots: served, or saved into one file."""

from __future__ import annotations

import base64
import gzip
import re
import secrets
from collections.abc import Mapping
from functools import cached_property
from hashlib import blake2s
from pathlib import Path
from typing import Any, NamedTuple

from otel_ddp.history.page.exchange import Answer, as_text

_FOLDER = Path(__file__).parent / "static"
_KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
INDEX = "index.html"
# The library of plots: no module, as those of the page are.
_PLOTS = "uplot.min.js"
# The elements of the index that name a file.
_NAMES_A_FILE = re.compile(r'<link rel="[a-z]+" href="/static/.*>\n|<script .*</script>\n')
# As modules name each other.
_IMPORT = re.compile(r'"\./([\w]+\.js)"')


class _File(NamedTuple):
    kind: str
    tag: str
    packed: bytes


class StaticFiles:
    """Read once; a browser that has a file is told so."""

    @cached_property
    def _files(self) -> dict[str, _File]:
        """Packed, by their bare names: no other file can be asked for."""
        found: dict[str, _File] = {}
        for path in _FOLDER.iterdir():
            if (kind := _KINDS.get(path.suffix)) is not None:
                packed = gzip.compress(path.read_bytes(), 6, mtime=0)
                found[path.name] = _File(kind, blake2s(packed, digest_size=8).hexdigest(), packed)
        return found

    def answer(self, name: str, headers: Mapping[str, str]) -> Answer:
        """A file of the folder, by its bare name."""
        found = self._files.get(name)
        if found is None:
            return as_text(404, "the page has no such file\n")
        given: dict[str, Any] = {
            "Content-Type": found.kind,
            "ETag": f'"{found.tag}"',
            # They are small, and asked for again after an update.
            "Cache-Control": "no-cache",
            "Vary": "Accept-Encoding",
        }
        if f'"{found.tag}"' in headers.get("if-none-match", ""):
            return Answer(304, given, b"")
        if "gzip" in headers.get("accept-encoding", ""):
            return Answer(200, {**given, "Content-Encoding": "gzip"}, found.packed)
        return Answer(200, given, gzip.decompress(found.packed))


def saved(answers: bytes, folder: Path = _FOLDER) -> str:
    """The page in one file, with these answers inside: packed JSON, as api.js reads it.

    Nothing of a run stands in it as text. A script without the number of this file does not run,
    and nothing can be loaded.
    """
    number = secrets.token_urlsafe(16)
    policy = (
        f"default-src 'none'; script-src 'nonce-{number}'; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )
    modules = ",".join(
        f'"page/{path.name}":"data:text/javascript;base64,{_text(_module(path))}"'
        for path in sorted(folder.glob("*.js"))
        if path.name != _PLOTS
    )
    parts = (
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        f"<style>{(folder / 'style.css').read_text()}</style>",
        f'<script type="application/gzip" id="answers">{_text(answers)}</script>',
        f'<script nonce="{number}">{(folder / _PLOTS).read_text()}</script>',
        f'<script nonce="{number}" type="importmap">{{"imports":{{{modules}}}}}</script>',
        f'<script nonce="{number}" type="module">import "page/main.js";</script>',
    )
    index = _NAMES_A_FILE.sub("", (folder / INDEX).read_text())
    return index.replace("</head>", "\n".join((*parts, "</head>")), 1)


def _module(path: Path) -> bytes:
    return _IMPORT.sub(r'"page/\1"', path.read_text()).encode()


def _text(content: bytes) -> str:
    return base64.b64encode(content).decode()
