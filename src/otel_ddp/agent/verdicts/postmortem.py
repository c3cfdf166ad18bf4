"""Writes down a run as it was when it died, failed or stood still: for people and for programs."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from otel_ddp import errors, files
from otel_ddp.agent.verdicts.postmortem_text import Plain, as_text
from otel_ddp.journal.reader import JournalReader

_KEPT = 50
_LONGEST_NAME = 120
_MOST_NUMBERS = 10_000
_STALE_S = 60.0

_OURS = re.compile(r"(postmortem-.+)\.(?:json|txt)")
# An unfinished file has another ending: a search for `*.json` must not find it.
_UNFINISHED = re.compile(rf"\.{_OURS.pattern}\.half")
# People read the file and send it by mail: it stays small, whatever the run has logged.
_LONGEST_TEXT = 2000
_MOST_MEMBERS = 1000
_DEEPEST = 8
_MOST_BYTES = 2 * 1024 * 1024


def directory(named: str) -> Path:
    """The directory of post-mortems: on a disk, so that they survive the journals and a reboot."""
    if named:
        return Path(named).absolute()
    return files.default_root() / "postmortems"


def write(
    directory: Path,
    run: str,
    *,
    verdict: Plain,
    processes: Sequence[Plain],
    values: Sequence[Plain] = (),
    open_verdicts: Sequence[Plain] = (),
    gpus: Sequence[Plain] = (),
    now_ns: int,
    earlier: Path | None = None,
) -> Path | None:
    """Write the two files of an incident; the path of the `.json`, None where that fails.

    *earlier* is what an earlier call for the same incident returned: its files are replaced,
    because more is known now. A verdict is a mapping with `kind`, `who` (labels), `sentence`,
    `phase`, `step`, `since_ns` and `evidence`. A process is a ProcessState, as JSON.
    """
    report = {
        "version": 1,
        "run": run,
        "written_ns": now_ns,
        "verdict": verdict,
        "processes": list(processes),
        "values": list(values),
        "open_verdicts": list(open_verdicts),
        "gpus": list(gpus),
    }
    try:
        return _save(directory, run, _json(report), as_text(report), earlier)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        errors.warn_once("postmortem", "no post-mortem in %s: %s", directory, why)
        return None


def last_values(reader: JournalReader, rank: object, node: object) -> list[dict[str, Any]]:
    """The last value of each name that a process has logged."""
    found: dict[int, dict[str, Any]] = {}
    for record in sorted(reader.latest(), key=lambda record: record.position):
        for number, value in record.values:
            name = reader.names.get(number)
            if name is not None:
                found[number] = {
                    "rank": rank,
                    "node": node,
                    "name": name.text,
                    "split": name.split,
                    "value": value,
                    "step": record.step,
                    "time_ns": record.time_ns,
                }
    return list(found.values())


def _json(report: Mapping[str, Any]) -> str:
    plain = _plain(report)
    content = json.dumps(plain, indent=1, ensure_ascii=False)
    # The least useful parts go first.
    for part in ("values", "open_verdicts", "processes"):
        if len(content.encode("utf-8", "backslashreplace")) <= _MOST_BYTES:
            break
        plain[part] = []
        plain.setdefault("left_out", []).append(part)
        content = json.dumps(plain, indent=1, ensure_ascii=False)
    return content + "\n"


def _plain(given: Any, depth: int = 0) -> Any:
    """The same value as JSON can hold it, within bounds."""
    if given is None or isinstance(given, (bool, int)):
        return given
    if isinstance(given, float):
        # JSON has no NaN, and strict readers refuse the one that Python writes.
        return given if math.isfinite(given) else str(given)
    if depth < _DEEPEST and isinstance(given, Mapping):
        members = list(given.items())[:_MOST_MEMBERS]
        return {str(key)[:_LONGEST_TEXT]: _plain(value, depth + 1) for key, value in members}
    if depth < _DEEPEST and isinstance(given, (list, tuple)):
        return [_plain(value, depth + 1) for value in given[:_MOST_MEMBERS]]
    return str(given)[:_LONGEST_TEXT]


# -- files: the newest ones in one directory, whole, and only this user's


def _save(directory: Path, run: str, content: str, text: str, earlier: Path | None) -> Path:
    """Write a `.json` and a `.txt`, or replace those of *earlier*; the path of the `.json`."""
    with _opened(directory) as opened:
        name = _write(opened, run, content, text, earlier)
        _delete_oldest(opened)
    return directory / f"{name}.json"


@contextlib.contextmanager
def _opened(directory: Path) -> Iterator[int]:
    files.make_kept(directory)
    opened = files.open_private(directory, os.O_DIRECTORY)
    try:
        yield opened
    finally:
        os.close(opened)


def _write(opened: int, run: str, content: str, text: str, earlier: Path | None) -> str:
    if earlier is not None:
        name = earlier.stem
        _replace(opened, f"{name}.json", content)
    else:
        name = _write_new(opened, _safe(run), content)
    _replace(opened, f"{name}.txt", text)
    return name


def _write_new(opened: int, name: str, content: str) -> str:
    """Write under the first free name. Another agent may look for one at the same time."""
    for number in range(1, _MOST_NUMBERS):
        stem = f"postmortem-{name}" if number == 1 else f"postmortem-{name}-{number}"
        hidden = _unfinished(f"{stem}.json")
        if _exists(opened, f"{stem}.json"):
            continue
        try:
            _create(opened, hidden, content)
        except FileExistsError:
            continue  # another agent is writing it at this moment
        if _exists(opened, f"{stem}.json"):
            os.unlink(hidden, dir_fd=opened)
            continue
        os.rename(hidden, f"{stem}.json", src_dir_fd=opened, dst_dir_fd=opened)
        return stem
    raise FileExistsError(17, f"{_MOST_NUMBERS} post-mortems of this name are there already")


def _unfinished(name: str) -> str:
    return f".{name}.half"


def _replace(opened: int, name: str, content: str) -> None:
    hidden = _unfinished(name)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(hidden, dir_fd=opened)
    _create(opened, hidden, content)
    os.rename(hidden, name, src_dir_fd=opened, dst_dir_fd=opened)


def _create(opened: int, name: str, content: str) -> None:
    handle = files.create(name, opened)
    try:
        with open(handle, "wb") as file:
            file.write(content.encode("utf-8", "backslashreplace"))
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=opened)
        raise


def _exists(opened: int, name: str) -> bool:
    try:
        os.stat(name, dir_fd=opened, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _delete_oldest(opened: int) -> None:
    """Keep the newest, and no unfinished file of an agent that was killed."""
    newest: dict[str, float] = {}
    for name in os.listdir(opened):
        match, unfinished = _OURS.fullmatch(name), _UNFINISHED.fullmatch(name)
        if match is None and unfinished is None:
            continue
        try:
            found = os.stat(name, dir_fd=opened, follow_symlinks=False)
        except FileNotFoundError:
            continue
        if not stat.S_ISREG(found.st_mode):
            continue
        if match is not None:
            newest[match[1]] = max(found.st_mtime, newest.get(match[1], 0.0))
        elif time.time() - found.st_mtime > _STALE_S:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=opened)
    for stem in sorted(newest, key=lambda stem: newest[stem])[:-_KEPT]:
        for ending in ("json", "txt"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{stem}.{ending}", dir_fd=opened)


def _safe(run: str) -> str:
    """The name of a run, as part of a file name."""
    name = re.sub(r"[^\w.-]+", "_", run).encode()[:_LONGEST_NAME].decode(errors="ignore")
    return name or "run"
