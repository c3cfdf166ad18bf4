"""The git commit of a script, read from git's files without running git."""

from __future__ import annotations

import re
from pathlib import Path

_SHA = re.compile(r"[0-9a-f]{40,64}")
_MOST_BYTES = 1_000_000


def revision(script: str) -> str:
    """The commit of the script's folder; empty if that is unknown."""
    try:
        first = Path(script).resolve().parent
        for folder in (first, *first.parents):
            if (git := folder / ".git").exists():
                return _head(_directory(git))
    except (OSError, ValueError, RuntimeError):
        pass
    return ""


def _directory(git: Path) -> Path:
    if git.is_dir():
        return git
    # In a worktree or a submodule, `.git` is a file that names the directory.
    return git.parent / _text(git).removeprefix("gitdir:").strip()


def _head(directory: Path) -> str:
    head = _text(directory / "HEAD")
    if not head.startswith("ref:"):
        return head if _SHA.fullmatch(head) else ""
    name = head.removeprefix("ref:").strip()
    common = directory
    if (link := directory / "commondir").is_file():
        common = directory / _text(link)
    for each in (directory / name, common / name):
        if each.is_file() and _SHA.fullmatch(found := _text(each)):
            return found
    for line in _text(common / "packed-refs").splitlines():
        sha, _, packed = line.partition(" ")
        if packed == name and _SHA.fullmatch(sha):
            return sha
    return ""


def _text(path: Path) -> str:
    if not path.is_file():
        return ""
    with path.open(encoding="utf-8", errors="replace") as file:
        return file.read(_MOST_BYTES).strip()
