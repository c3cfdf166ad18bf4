"""The files of the page: our own, and the library of plots, compressed once."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Mapping
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
PLOTLY = "plotly.min.js"
# What stands in the index for the address of the library.
_PLOTLY_HERE = b"PLOTLY_ADDRESS"
_FOR_A_YEAR = "public, max-age=31536000, immutable"


class _File(NamedTuple):
    kind: str
    tag: str
    packed: bytes


class StaticFiles:
    """Read once; a browser that has a file is told so."""

    def __init__(self, folder: Path = _FOLDER) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._files: dict[str, _File] = {}

    def answer(self, name: str, headers: Mapping[str, str], *, for_a_year: bool = False) -> Answer:
        """A file of the folder, by its bare name."""
        found = self._read(name)
        if found is None:
            return as_text(404, "the page has no such file\n")
        given: dict[str, Any] = {
            "Content-Type": found.kind,
            "ETag": f'"{found.tag}"',
            # Our own files are small, and asked for again after an update.
            "Cache-Control": _FOR_A_YEAR if for_a_year else "no-cache",
            "Vary": "Accept-Encoding",
        }
        if f'"{found.tag}"' in headers.get("if-none-match", ""):
            return Answer(304, given, b"")
        if "gzip" in headers.get("accept-encoding", ""):
            return Answer(200, {**given, "Content-Encoding": "gzip"}, found.packed)
        return Answer(200, given, gzip.decompress(found.packed))

    def _read(self, name: str) -> _File | None:
        with self._lock:
            return self._read_once(name)

    def _read_once(self, name: str) -> _File | None:
        if name not in self._files:
            kind = _KINDS.get(Path(name).suffix)
            packed = None if kind is None or Path(name).name != name else self._pack(name)
            if kind is None or packed is None:
                return None
            tag = blake2s(packed, digest_size=8).hexdigest()
            self._files[name] = _File(kind, tag, packed)
        return self._files[name]

    def _pack(self, name: str) -> bytes | None:
        try:
            if name == PLOTLY:
                return (self._folder / f"{name}.gz").read_bytes()
            content = (self._folder / name).read_bytes()
        except OSError:
            return None
        if name == INDEX:
            found = self._read_once(PLOTLY)
            address = f"/lib/{found.tag}/{PLOTLY}" if found else ""
            content = content.replace(_PLOTLY_HERE, address.encode())
        return gzip.compress(content, 6, mtime=0)
