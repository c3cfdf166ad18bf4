"""Writes down a run as it was when it died, failed or stood still: for people and for programs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from otel_ddp import files
from otel_ddp.agent.verdicts.postmortem_files import save
from otel_ddp.agent.verdicts.postmortem_text import Plain, as_text
from otel_ddp.errors import containment
from otel_ddp.journal.reader import JournalReader

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
        return save(directory, run, _json(report), as_text(report), earlier)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        containment.warn_once("postmortem", "no post-mortem in %s: %s", directory, why)
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
