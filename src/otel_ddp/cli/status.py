"""otel-ddp status: what runs on this node, said from the journals even where no agent lives."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterable, Mapping
from typing import Any

from otel_ddp import settings
from otel_ddp.errors import ConfigError
from otel_ddp.journal.place import Place, existing
from otel_ddp.survey import survey

_LONGEST_CELL = 1000
_OVER = ("finished", "failed", "killed")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="the same, for programs")
    parser.add_argument(
        "--dir",
        default="",
        help="where journals and agent meet (default: OTEL_DDP_DIR, else a directory on tmpfs)",
    )


def run(asked: argparse.Namespace) -> int:
    try:
        conf = settings.read(directory=asked.dir or None)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    places: list[Place] = existing(conf.directory, os.environ)
    found = survey(places)
    if asked.json:
        return _tell(json.dumps(found, indent=2))
    return _tell("\n".join(lines(found, time.time_ns())))


def _tell(text: str) -> int:
    """Print the answer; the exit status."""
    try:
        encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
        print(text.encode(encoding, "backslashreplace").decode(encoding))
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        # What is still buffered would be tried again, and complained of, when Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return 0  # `| head` has read what it wanted
        print(f"The answer could not be written: {error.strerror}.", file=sys.stderr)
        return 1
    return 0


def lines(found: Mapping[str, Any], now_ns: int) -> Iterable[str]:
    """The survey in words, for a terminal."""
    alive = [agent for agent in _mappings(found.get("agents")) if agent.get("alive")]
    for agent in alive:
        pid, version = _cell(agent.get("pid"), "?"), _cell(agent.get("version"), "?")
        yield f"agent     pid {pid}, version {version}"
        yield f"endpoint  {_cell(agent.get('scrape'), 'none')}"
        yield f"export    {_cell(agent.get('export'), 'unknown')}"
        if remark := _cell(agent.get("remark")):
            yield f"note      {remark}"
    if not alive:
        yield "no agent runs on this node for this user; a training process starts one"
    yield from (f"note      {_cell(why)}" for why in found.get("unreadable") or ())
    runs: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    # A run stands where its first process does: in order of start.
    for each in sorted(_mappings(found.get("processes")), key=_started):
        key = (_cell(each.get("run"), "?"), _cell(each.get("group")), _cell(each.get("job_type")))
        runs.setdefault(key, []).append(each)
    if not runs:
        yield "no runs"
    for (name, group, job_type), ranks in runs.items():
        worlds = [_whole(each.get("world_size")) for each in ranks]
        world = max((size for size in worlds if size is not None), default=None)
        told = (group and f"group {group}", job_type, f"world {_cell(world, '?')}")
        yield ""
        yield ", ".join((f"run {name}", *filter(None, told)))
        yield _columns(_HEADS)
        yield from (_columns(_row(each, now_ns)) for each in sorted(ranks, key=_place))
        for verdict in _mappings(found.get("verdicts")):
            who = verdict.get("who")
            if isinstance(who, Mapping) and _cell(who.get("run"), "?") == name:
                yield f"  ! {_cell(verdict.get('sentence'), '?')}"


_HEADS = ("rank", "local", "node", "pid", "state", "step", "phase", "since")
_WIDTHS = (6, 6, 16, 8, 10, 10, 14, 10)


def _columns(cells: tuple[str, ...]) -> str:
    padded = (cell.ljust(width) for cell, width in zip(cells, _WIDTHS, strict=False))
    return "  " + " ".join(padded).rstrip() + "".join(f" {cell}" for cell in cells[len(_WIDTHS) :])


def _row(each: Mapping[str, Any], now_ns: int) -> tuple[str, ...]:
    since_ns, lost = _whole(each.get("phase_since_ns")), _whole(each.get("lost"))
    state = _cell(each.get("state"), "?")
    notes = []
    if reason := _cell(each.get("reason")):
        notes.append(reason)
    if state == "killed":
        notes.append("gone without a word")
    if lost:
        notes.append(f"{lost} records lost")
    if not each.get("settled", True) and state not in _OVER:
        notes.append("waits for its process group")
    return (
        _cell(each.get("rank"), "?"),
        _cell(each.get("local_rank"), "?"),
        _cell(each.get("node"), "?"),
        _cell(each.get("pid"), "?"),
        state,
        _cell(each.get("step"), "-"),
        _cell(each.get("phase"), "-"),
        "-" if since_ns is None else _ago(max(0.0, (now_ns - since_ns) / 1e9)),
        *notes,
    )


def _ago(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds < 3600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def _started(each: Mapping[str, Any]) -> int:
    return _whole(each.get("started_ns")) or 0


def _place(each: Mapping[str, Any]) -> tuple[bool, int, int]:
    """Ranks by number; those that do not know theirs last; of one rank's attempts the first."""
    rank = _whole(each.get("rank"))
    return rank is None, rank or 0, _started(each)


# Journals and agent.json are files: another version, or anybody with this user's rights, may have
# put anything there.


def _mappings(value: Any) -> list[Mapping[str, Any]]:
    return [each for each in value if isinstance(each, Mapping)] if isinstance(value, list) else []


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and abs(value) < 2**63 else None


def _cell(value: Any, otherwise: str = "") -> str:
    """Anything as one line that does nothing to a terminal: ESC and newlines are written out."""
    if value is None or value == "":
        return otherwise
    text = json.dumps(value, default=repr) if isinstance(value, (dict, list)) else str(value)
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode()
        for letter in text[:_LONGEST_CELL]
    )
