"""Writes down a run as it was when it died, failed or stood still: for people and for programs."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import stat
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from otel_ddp import containment
from otel_ddp.journal.place import private_directory
from otel_ddp.journal.reader import JournalReader

Plain = Mapping[str, Any]

_KEPT = 50
_LONGEST_NAME = 120
_MOST_NUMBERS = 10_000
_STALE_S = 60.0
# A file is read by people and mailed around: it stays small whatever the run logged.
_LONGEST_TEXT = 2000
_MOST_MEMBERS = 1000
_DEEPEST = 8
_MOST_BYTES = 2 * 1024 * 1024
_MOST_RANKS_SHOWN = 64
_MOST_VALUES_SHOWN = 40
_LONGEST_CELL = 60
_LONGEST_REASON = 300

_OURS = re.compile(r"(postmortem-.+)\.(?:json|txt)")
# Not by the ending of a whole one: whoever looks for `*.json` must not find it.
_HALF = re.compile(rf"\.{_OURS.pattern}\.half")
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC

_ENDED = ("finished", "failed", "killed")


def directory(named: str) -> Path:
    """Where post-mortems lie: not in memory, so that they outlive the journals and a reboot."""
    if named:
        return Path(named).absolute()
    return Path("/var/tmp") / f"otel_ddp-{os.geteuid()}" / "postmortems"


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
    """Write the two files of an incident; the path of the `.json`, None where it cannot be.

    *earlier* is what an earlier call for the same incident gave back: its files are replaced, as
    more has become known. A verdict is a mapping with `kind`, `who` (labels), `sentence`, `phase`,
    `step`, `since_ns` and `evidence`; a process is what `survey.describe` makes.
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
        with _opened(directory) as opened:
            name = _write(opened, run, _json(report), _text(report), earlier)
            _prune(opened)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        containment.warn_once("postmortem", "no post-mortem in %s: %s", directory, why)
        return None
    return directory / f"{name}.json"


def last_values(reader: JournalReader, rank: object, node: object) -> list[dict[str, Any]]:
    """The last value of each name that a process logged."""
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


# -- the files


@contextlib.contextmanager
def _opened(directory: Path) -> Iterator[int]:
    own = directory.parent.name == f"otel_ddp-{os.geteuid()}"
    if own:
        # Where everybody may write somebody may have been faster, with a directory or a link.
        private_directory(directory.parent)
    else:
        directory.parent.mkdir(parents=True, exist_ok=True)
    private_directory(directory, named=not own)
    opened = os.open(directory, _DIRECTORY)
    try:
        yield opened
    finally:
        os.close(opened)


def _write(opened: int, run: str, whole: str, text: str, earlier: Path | None) -> str:
    if earlier is not None:
        name = earlier.stem
        _replace(opened, f"{name}.json", whole)
    else:
        name = _write_new(opened, _safe(run), whole)
    _replace(opened, f"{name}.txt", text)
    return name


def _write_new(opened: int, name: str, whole: str) -> str:
    """Under the first name that is free, also where another agent looks for one as well."""
    for number in range(1, _MOST_NUMBERS):
        stem = f"postmortem-{name}" if number == 1 else f"postmortem-{name}-{number}"
        hidden = _half(f"{stem}.json")
        if _exists(opened, f"{stem}.json"):
            continue
        try:
            _create(opened, hidden, whole)
        except FileExistsError:
            continue  # somebody is writing it at this moment
        if _exists(opened, f"{stem}.json"):
            os.unlink(hidden, dir_fd=opened)
            continue
        os.rename(hidden, f"{stem}.json", src_dir_fd=opened, dst_dir_fd=opened)
        return stem
    raise FileExistsError(17, f"{_MOST_NUMBERS} post-mortems of this name are there already")


def _half(name: str) -> str:
    return f".{name}.half"


def _replace(opened: int, name: str, content: str) -> None:
    hidden = _half(name)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(hidden, dir_fd=opened)
    _create(opened, hidden, content)
    os.rename(hidden, name, src_dir_fd=opened, dst_dir_fd=opened)


def _create(opened: int, name: str, content: str) -> None:
    handle = os.open(name, _NEW_FILE, 0o600, dir_fd=opened)
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


def _prune(opened: int) -> None:
    """Keep the newest, and nothing that somebody began and was killed over."""
    newest: dict[str, float] = {}
    for name in os.listdir(opened):
        match, half = _OURS.fullmatch(name), _HALF.fullmatch(name)
        if match is None and half is None:
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
    """A run's name as a part of a file's."""
    name = re.sub(r"[^\w.-]+", "_", run).encode()[:_LONGEST_NAME].decode(errors="ignore")
    return name or "run"


# -- for programs


def _json(report: Mapping[str, Any]) -> str:
    plain = _plain(report)
    content = json.dumps(plain, indent=1, ensure_ascii=False)
    # What tells most is kept longest.
    for part in ("values", "open_verdicts", "processes"):
        if len(content.encode("utf-8", "backslashreplace")) <= _MOST_BYTES:
            break
        plain[part] = []
        plain.setdefault("left_out", []).append(part)
        content = json.dumps(plain, indent=1, ensure_ascii=False)
    return content + "\n"


def _plain(given: Any, depth: int = 0) -> Any:
    """The same as JSON can hold it, within bounds."""
    if given is None or isinstance(given, (bool, int)):
        return given
    if isinstance(given, float):
        # JSON has no word for it, and strict readers refuse the one that Python writes.
        return given if math.isfinite(given) else str(given)
    if depth < _DEEPEST and isinstance(given, Mapping):
        members = list(given.items())[:_MOST_MEMBERS]
        return {str(key)[:_LONGEST_TEXT]: _plain(value, depth + 1) for key, value in members}
    if depth < _DEEPEST and isinstance(given, (list, tuple)):
        return [_plain(value, depth + 1) for value in given[:_MOST_MEMBERS]]
    return str(given)[:_LONGEST_TEXT]


# -- for a person


def _text(report: Mapping[str, Any]) -> str:
    now_ns, verdict = report["written_ns"], report["verdict"]
    processes = sorted(report["processes"], key=_seat)
    lines = [
        _line(verdict.get("sentence") or "an incident"),
        "",
        f"run {_line(report['run'])}, {_moment(verdict.get('since_ns') or now_ns)}, "
        f"told by the agent of one node: {len(processes)} of {_world(processes)} processes",
        "",
        "Where everyone was",
        *_table(_HEADS, [_row(each, now_ns) for each in processes[:_MOST_RANKS_SHOWN]]),
    ]
    if len(processes) > _MOST_RANKS_SHOWN:
        lines.append(f"  and {len(processes) - _MOST_RANKS_SHOWN} more, in the .json")
    if said := [
        f"  {_name(each)}: {_line(each['reason'])[:_LONGEST_REASON]}"
        for each in processes
        if each.get("reason")
    ]:
        lines += ["", "What they said", *said[:_MOST_RANKS_SHOWN]]
    if report["gpus"]:
        lines += ["", "Its GPUs", *_gpus(report["gpus"])]
    if report["values"]:
        lines += ["", "Last values", *_values(report["values"])]
    if report["open_verdicts"]:
        lines += ["", "Also open at that moment"]
        lines += [f"  {_line(each.get('sentence'))}" for each in report["open_verdicts"][:20]]
    lines += ["", "What to look at", *(f"  {hint}" for hint in _advice(verdict))]
    return "\n".join(lines) + "\n"


_HEADS = ("rank", "node", "state", "step", "phase", "for", "last seen")


def _row(each: Plain, now_ns: int) -> tuple[str, ...]:
    gone = each.get("state") in _ENDED
    seen_ns = each.get("seen_alive_ns") if gone else now_ns
    since_ns = each.get("phase_since_ns")
    spent = ""
    if seen_ns and since_ns:
        spent = _duration(max(0, seen_ns - since_ns) / 1e9)
    seen = "now"
    if gone:
        seen = f"{_duration(max(0, now_ns - seen_ns) / 1e9)} ago" if seen_ns else "?"
    rank = each.get("rank")
    return (
        f"p{_cell(each.get('pid'))}" if rank is None else _cell(rank),
        _cell(each.get("node")),
        _cell(each.get("state")),
        _cell(each.get("step")),
        _cell(each.get("phase")),
        spent,
        seen,
    )


def _gpus(gpus: Sequence[Plain]) -> list[str]:
    rows = []
    for each in gpus[:_MOST_RANKS_SHOWN]:
        labels, throttled = each.get("labels"), each.get("throttled")
        labels = labels if isinstance(labels, Mapping) else {}
        rows.append(
            (
                _cell(each.get("index")),
                _cell(labels.get("rank")),
                _number(each.get("busy_ratio"), 100, " %"),
                f"{_number(each.get('used_bytes'), 2**-30)} of "
                f"{_number(each.get('limit_bytes'), 2**-30)} GiB",
                _number(each.get("power_w"), 1, " W"),
                _number(each.get("temperature_c"), 1, " C"),
                ", ".join(map(_cell, throttled)) if isinstance(throttled, list) else "",
            )
        )
    return _table(("gpu", "rank", "busy", "memory", "power", "temp", "held back by"), rows)


def _number(given: Any, times: float, unit: str = "") -> str:
    return f"{given * times:.0f}{unit}" if isinstance(given, (int, float)) else "?"


def _values(values: Sequence[Plain]) -> list[str]:
    by_name: dict[tuple[str, str], list[Plain]] = {}
    for each in values:
        by_name.setdefault((_cell(each.get("name")), _cell(each.get("split"))), []).append(each)
    rows = []
    for (name, split), found in list(by_name.items())[:_MOST_VALUES_SHOWN]:
        numbers = [float(each["value"]) for each in found]
        finite = [number for number in numbers if math.isfinite(number)]
        low, high = min(finite, default=math.nan), max(finite, default=math.nan)
        shown = f"{low:.6g}" if low == high else f"{low:.6g} to {high:.6g}"
        odd = [
            f"{number} on rank {_cell(each.get('rank'))}"
            for each, number in zip(found, numbers, strict=True)
            if not math.isfinite(number)
        ]
        if not finite:
            shown, odd = odd[0], odd[1:]
        steps = [each["step"] for each in found if each.get("step") is not None]
        at = f"step {max(steps)}" if steps else ""
        ranks = f"{len(found)} ranks" if len(found) > 1 else f"rank {_cell(found[0].get('rank'))}"
        rows.append((name, split, ", ".join([shown, *odd[:3]]), at, ranks))
    lines = _table(("name", "split", "value", "at", "of"), rows)
    if len(by_name) > _MOST_VALUES_SHOWN:
        lines.append(f"  and {len(by_name) - _MOST_VALUES_SHOWN} more, in the .json")
    return lines


def _advice(verdict: Plain) -> list[str]:
    evidence = verdict.get("evidence")
    evidence = evidence if isinstance(evidence, Mapping) else {}
    who = verdict.get("who")
    rank = who.get("rank") if isinstance(who, Mapping) else None
    whose = f"rank {rank}" if rank else "each rank"
    if verdict.get("kind") == "stall":
        culprits = evidence.get("culprits")
        named = ", ".join(map(str, culprits)) if isinstance(culprits, (list, tuple)) else ""
        return [
            *([f"rank {named}: the others wait"] if named else []),
            "`otel-ddp stacks` while the processes are still there",
        ]
    hints = {
        "out_of_memory": [
            "host memory: batches kept in lists, data loader workers and their prefetching, "
            "what is loaded on every rank instead of one",
            "the limit of its container or job, where the memory is needed",
        ],
        "signal": [
            f"the last lines that {whose} printed; PYTHONFAULTHANDLER=1 shows where it crashes",
            "the launcher's and the scheduler's log: time limits, preemption, memory limits",
        ],
        "exception": [f"the traceback in the output of {whose}"],
        "lost_peer": [
            "the output and the post-mortems of the ranks that are not in the table: one of them "
            "went first",
            "the network between the nodes, where no rank of any node tells another cause",
        ],
        "exit": [f"the last lines that {whose} printed: it left by itself"],
    }
    unknown = [
        "the launcher's and the scheduler's log: they know the exit code",
        "the kernel's log, where you may read it: `dmesg -T | grep -i -e 'killed process' -e xid`",
    ]
    found = hints.get(str(evidence.get("cause")), unknown)
    return [*found, "the post-mortems of the other nodes, if the run has any"]


def _seat(each: Plain) -> tuple[str, bool, int, int]:
    rank, started_ns = each.get("rank"), int(each.get("started_ns") or 0)
    return str(each.get("node")), rank is None, int(rank or 0), started_ns


def _name(each: Plain) -> str:
    rank = each.get("rank")
    return f"process {_cell(each.get('pid'))}" if rank is None else f"rank {_cell(rank)}"


def _world(processes: Iterable[Plain]) -> str:
    sizes = [each["world_size"] for each in processes if isinstance(each.get("world_size"), int)]
    return str(max(sizes)) if sizes else "?"


def _table(heads: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    whole = [heads, *rows]
    widths = [max(map(len, column)) for column in zip(*whole, strict=True)]
    return ["  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in whole]


def _cell(given: Any) -> str:
    return "" if given is None else _line(given)[:_LONGEST_CELL]


def _line(given: Any) -> str:
    """One line of text: a name or a reason may hold anything, and a terminal obeys some of it."""
    text = "".join(c if c.isprintable() else " " for c in str(given)[:_LONGEST_TEXT])
    return " ".join(text.split())


def _duration(seconds: float) -> str:
    if seconds >= 120:
        return f"{seconds / 60:.0f} min"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"


def _moment(at_ns: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at_ns / 1e9))
