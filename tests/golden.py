"""What tests have been told once, in a file beside them: `pytest --update` writes it anew."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

_MARK = "== "


class Golden(NamedTuple):
    """What one test was told, within the file of all tests beside it."""

    file: Path
    test: str
    update: bool

    def check(self, *told: object) -> None:
        """Compare with what stands there, a line each; or put it there."""
        text = "\n".join(map(str, told))
        known = self._read()
        if self.update:
            known[self.test] = text
            blocks = (f"{_MARK}{test}\n{each}\n" for test, each in sorted(known.items()))
            self.file.write_text("\n".join(blocks))
        assert text == known.get(self.test)

    def _read(self) -> dict[str, str]:
        blocks = f"\n{self.file.read_text()}" if self.file.exists() else ""
        found = (block.partition("\n") for block in blocks.split(f"\n{_MARK}")[1:])
        return {test: text.strip("\n") for test, _, text in found}
