"""Writes down a run as it was when it died, failed or stood still: for people and for programs."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from otel_ddp import errors, files
from otel_ddp.diagnosis.say import about, first_of, plural
from otel_ddp.journal.process_state import ProcessState

Plain = Mapping[str, Any]

_KEPT = 50
_LONGEST_NAME = 120
_MOST_NUMBERS = 10_000
_STALE_S = 60.0
# People read the files and send them by mail: they stay small, whatever the run has logged.
_LONGEST_TEXT = 2000
_MOST_MEMBERS = 1000
_DEEPEST = 8
_MOST_BYTES = 2 * 1024 * 1024
_MOST_ROWS = 64
_LONGEST_CELL = 60
_LONGEST_REASON = 300


def write(
    directory: Path,
    run: str,
    *,
    verdict: Plain,
    processes: Sequence[ProcessState],
    open_verdicts: Sequence[Plain] = (),
    gpus: Sequence[Plain] = (),
    now_ns: int,
    earlier: Path | None = None,
) -> Path | None:
    """Write the two files of an incident; the path of the `.json`, None where that fails.

    *earlier* is what an earlier call for the same incident returned: its files are replaced,
    because more is known now. A verdict is a mapping with `kind`, `who` (labels), `sentence`,
    `phase`, `step`, `since_ns` and `evidence`.
    """
    report = {
        "version": 1,
        "run": run,
        "written_ns": now_ns,
        "verdict": verdict,
        "processes": [each.to_json() for each in processes],
        "open_verdicts": open_verdicts,
        "gpus": gpus,
    }
    try:
        return _save(directory, run, _json(report), _text(report, processes), earlier)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        errors.warn_once("postmortem", "no post-mortem in %s: %s", directory, why)
        return None


def _json(report: Plain) -> str:
    plain = _plain(report)
    content = json.dumps(plain, indent=1, ensure_ascii=False)
    # The least useful parts go first.
    for part in ("open_verdicts", "processes"):
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
    files.make_kept(directory)
    path = earlier or _free_name(directory, run)
    try:
        files.replace(path, content)
    except OSError:
        if earlier is None:
            files.remove(path.with_suffix(".txt"))
        raise
    files.replace(path.with_suffix(".txt"), text)
    # Another agent may delete the same ones.
    with contextlib.suppress(FileNotFoundError):
        _delete_oldest(directory)
    return path


def _free_name(directory: Path, run: str) -> Path:
    """The first free name. Another agent may look for one too: its `.txt` is made at once."""
    name = re.sub(r"[^\w.-]+", "_", run).encode()[:_LONGEST_NAME].decode(errors="ignore") or "run"
    for number in range(1, _MOST_NUMBERS):
        suffix = "" if number == 1 else f"-{number}"
        path = directory / f"postmortem-{name}{suffix}.json"
        if not os.path.lexists(path):
            with contextlib.suppress(FileExistsError):
                os.close(files.create(path.with_suffix(".txt")))
                return path
    raise FileExistsError(17, f"{_MOST_NUMBERS} post-mortems of this name are there already")


def _delete_oldest(directory: Path) -> None:
    """Keep the newest, and no unfinished file of an agent that was killed."""
    written_at = {each: each.lstat().st_mtime for each in directory.glob("postmortem-?*.*")}
    ours = sorted(
        (each for each in written_at if each.suffix == ".json"), key=lambda each: written_at[each]
    )
    for path in ours[:-_KEPT]:
        files.remove(path, path.with_suffix(".txt"))
    for path, at in written_at.items():
        if path.suffix == ".half" and time.time() - at > _STALE_S:
            files.remove(path)


# -- the text: where every rank was, why it ended, what to look at


def _text(report: Plain, processes: Sequence[ProcessState]) -> str:
    now_ns, verdict = report["written_ns"], report["verdict"]
    processes = sorted(
        processes, key=lambda each: (each.node, each.rank is None, each.rank or 0, each.started_ns)
    )
    world = max((each.world_size or 0 for each in processes), default=0)
    whole = 0 < world <= len({each.rank for each in processes})
    began = time.gmtime((verdict.get("since_ns") or now_ns) / 1e9)
    sections = {
        "Where every rank was": _table([_HEADS, *(_row(each, now_ns) for each in processes)]),
        "What they reported": [
            f"{_name(each)}: {_line(each.reason)[:_LONGEST_REASON]}"
            for each in processes
            if each.reason
        ],
        "Also open at that moment": [_line(each["sentence"]) for each in report["open_verdicts"]],
        "What to look at": _advice(verdict, whole),
    }
    lines = [
        _line(verdict.get("sentence") or "an incident"),
        "",
        f"run {_line(report['run'])}, {time.strftime('%Y-%m-%d %H:%M:%S UTC', began)}, "
        f"as one agent knew it: {len(processes)} of {world or '?'} processes",
    ]
    for head, rows in sections.items():
        shown = rows[:_MOST_ROWS]
        more = [f"and {len(rows) - len(shown)} more, in the .json"] * (len(rows) > len(shown))
        if rows:
            lines += ["", head, *(f"  {row}" for row in (*shown, *more))]
    return "\n".join(lines) + "\n"


_HEADS = ("rank", "node", "state", "step", "phase", "for", "last seen")


def _row(each: ProcessState, now_ns: int) -> Sequence[Any]:
    seen_ns = each.seen_alive_ns if each.ended else now_ns
    spent = about(max(0, seen_ns - each.phase_since_ns) / 1e9) if seen_ns else ""
    seen = "now"
    if each.ended:
        seen = f"{about(max(0, now_ns - seen_ns) / 1e9)} ago" if seen_ns else "?"
    rank = f"p{each.pid}" if each.rank is None else each.rank
    return rank, each.node, each.state, each.step, each.phase, spent, seen


_LOOK = {
    "out_of_memory": [
        "host memory: batches kept in lists, data loader workers and their prefetching, "
        "data that every rank loads instead of one",
        "the limit of its container or job, if the memory is needed",
    ],
    "signal": [
        "the last lines that {owner} printed; PYTHONFAULTHANDLER=1 shows where it crashes",
        "the launcher's and the scheduler's log: time limits, preemption, memory limits",
    ],
    "exception": ["the traceback in the output of {owner}"],
    "lost_peer": [
        "the output of the ranks that had ended before, and the network between the ranks"
    ],
    "lost_peer elsewhere": [
        "the output and the post-mortems of the ranks that are not in the table: one of them "
        "ended first",
        "the network between the nodes, if no rank of any node reports another cause",
    ],
    "exit": ["the last lines that {owner} printed: it left by itself"],
    "unknown": [
        "the launcher's and the scheduler's log: they know the exit code",
        "the kernel's log, if you may read it: `dmesg -T | grep -i -e 'killed process' -e xid "
        "-e amdgpu`",
    ],
}


def _advice(verdict: Plain, whole: bool) -> list[str]:
    """*whole*: whether all ranks are on this node."""
    evidence = verdict["evidence"]
    if verdict["kind"] == "stall":
        named = evidence["culprits"]
        wait = ": the others wait" if len(named) < len(evidence["ranks"]) else ""
        ranks = [f"rank{plural(named)} {first_of(named, _MOST_ROWS)}{wait}"] if named else []
        return [*ranks, "`otel-ddp stacks` while the processes are still there"]
    if verdict["kind"] == "silence":
        node = verdict["who"]["node"]
        return [
            f"whether {node} is still there: its power, its kernel's log, the network to it",
            "the scheduler's log: it may have taken the node away",
        ]
    rank, cause = verdict["who"].get("rank"), evidence["cause"]
    if cause == "lost_peer" and not whole:
        cause = "lost_peer elsewhere"
    owner = f"rank {rank}" if rank else "each rank"
    found = [each.replace("{owner}", owner) for each in _LOOK[cause]]
    return found if whole else [*found, "the post-mortems of the other nodes, if the run has any"]


def _name(each: ProcessState) -> str:
    return f"process {each.pid}" if each.rank is None else f"rank {each.rank}"


def _table(rows: Sequence[Sequence[Any]]) -> list[str]:
    """Its lines; none where there is nothing below the heads."""
    cells = [["" if one is None else _line(one)[:_LONGEST_CELL] for one in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in cells]
    return lines if len(lines) > 1 else []


def _line(given: Any) -> str:
    """One line of text: names and reasons may contain control codes, which terminals obey."""
    text = "".join(c if c.isprintable() else " " for c in str(given)[:_LONGEST_TEXT])
    return " ".join(text.split())
