"""Keeps copies of what other nodes have kept of a run that this agent leads.

Another node is not trusted: what it sends has bounds, and chooses no path.
"""

from __future__ import annotations

import contextlib
import logging
import math
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from otel_ddp import errors, files
from otel_ddp.agent.history import part_pb2
from otel_ddp.agent.history.outgoing import FRACTIONS, LONGEST_TEXT, WHOLE
from otel_ddp.history import directory, tables
from otel_ddp.history.copied_file import CopiedFile
from otel_ddp.history.run_file import Unusable
from otel_ddp.history.tables import STEP_COLUMNS, SUM_COLUMNS, Event, Rows, RunKey, SeriesKey

log = logging.getLogger("otel_ddp.agent")

MOST_NODES = 64
"""Of all runs together. A page of more is no picture any more, and each has a file open."""
_LARGEST_PART = 512 * 1024
# What waits for the disk, of all nodes.
_MOST_WAITING_BYTES = 64 * 1024 * 1024
_CLOSE_AFTER_S, _TRY_AGAIN_S = 60.0, 60.0
_LONGEST_WORD, _MOST_LABELS = 1000, 64
_FURTHEST, _WIDEST = 2**62, 2**40
# That wait for a disk that fails.
_MOST_PARTS = 16
_KINDS = ("value", "steps", "node", "counter")
# Of `about`; the rest is ours.
_KEYS = frozenset(
    (
        *("project", "config", "texts", "environment", "summary", "job_type", "version"),
        *("began_ns", "seen_ns", "cost", "gaps", "time", "attempts"),
    )
)


class Senseless(ValueError):
    """A part that no agent of ours has made."""


class Parsed(NamedTuple):
    """A part as its copy takes it."""

    rows: list[Rows]
    about: dict[str, Any]
    ranks: dict[str, dict[str, Any]]
    events: list[tuple[int, Event]]


def parse(content: bytes, run: RunKey, node: str) -> Parsed:
    """What a part of this run and node says; raises Senseless."""
    try:
        part = part_pb2.Part.FromString(content)
        if part.version != tables.VERSION:
            raise Senseless(f"it is of version {part.version}, and we are of {tables.VERSION}")
        about = {each.key: _json(each.json) for each in part.about if each.key in _KEYS}
        about |= {"group": run[0], "run": run[1], "node": node}
        return Parsed(
            [_rows(each) for each in part.buckets],
            about,
            {_word(each.key): _mapping(each.json) for each in part.ranks},
            [_event(each) for each in part.events],
        )
    except Senseless:
        raise
    # Protobuf's own error is no ValueError in every version.
    except (ValueError, TypeError, DecodeError) as why:
        raise Senseless(str(why)) from None


def _word(text: str) -> str:
    if len(text) > _LONGEST_WORD:
        raise Senseless(f"a word of {len(text)} letters")
    return text


def _json(text: str) -> Any:
    if len(text) > LONGEST_TEXT:
        raise Senseless(f"a text of {len(text)} letters")
    return files.parse_json(text)


def _mapping(text: str) -> dict[str, Any]:
    found = _json(text)
    if not isinstance(found, dict):
        raise Senseless("a list where a mapping belongs")
    return found


def _number(value: Any, least: int = -_FURTHEST) -> int:
    if type(value) is not int or not least <= value <= _FURTHEST:
        raise Senseless(f"{str(value)[:20]!r} is no number here")
    return value


def _rows(found: Any) -> Rows:
    if found.kind not in _KINDS or not 1 <= found.width <= _WIDEST:
        raise Senseless(f"a series of kind {found.kind[:20]!r}, {found.width} wide")
    labels = [_word(each) for each in found.labels]
    if len(labels) % 2 or len(labels) > 2 * _MOST_LABELS:
        raise Senseless(f"{len(labels)} words as labels")
    pairs = tuple(zip(labels[::2], labels[1::2], strict=True))
    key = SeriesKey(found.kind, _word(found.name), _word(found.rank), pairs)
    of_steps = key.kind == "steps"
    names = STEP_COLUMNS if of_steps else WHOLE
    whole = list(_cut(found.whole, 1 + len(names)))
    fractions = list(_cut(found.fractions, 0 if of_steps else len(FRACTIONS)))
    if not of_steps and len(whole) != len(fractions):
        raise Senseless("rows without their other half")
    for start, first, until, *more in whole:
        ordered = -_FURTHEST <= start <= first <= until <= _FURTHEST
        if not ordered or start % found.width:
            raise Senseless(f"a bucket at {start}, from {first} to {until}")
        for value in more:
            _number(value)
    if of_steps:
        return Rows(key, found.width, whole)
    return Rows(key, found.width, [_sums(*each) for each in zip(whole, fractions, strict=True)])


def _cut(numbers: Sequence[Any], wide: int) -> Iterator[Sequence[Any]]:
    if not wide or len(numbers) % wide:
        if len(numbers):
            raise Senseless(f"{len(numbers)} numbers in rows of {wide}")
        return
    for at in range(0, len(numbers), wide):
        yield numbers[at : at + wide]


def _sums(whole: Sequence[int], fractions: Sequence[float]) -> list[Any]:
    start, *more = whole
    found = {**dict(zip(WHOLE, more, strict=True)), **dict(zip(FRACTIONS, fractions, strict=True))}
    # The last value may be infinite; what is summed up is not.
    if not math.isfinite(found["total"]) or math.inf in map(abs, (found["low"], found["high"])):
        raise Senseless("a sum that is not finite")
    return [start, *(None if found[each] != found[each] else found[each] for each in SUM_COLUMNS)]


def _event(found: Any) -> tuple[int, Event]:
    step = _number(found.step) if found.HasField("step") else None
    return _number(found.id, 1), Event(
        _number(found.time_ns),
        step,
        _word(found.rank),
        _word(found.name),
        _word(found.severity),
        found.body[: 10 * _LONGEST_WORD],
        _mapping(found.attributes),
    )


# -- where it is kept


class _Copy:
    """Of one run on one node."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.parts: list[Parsed] = []
        self.fed_at = 0.0
        self.file: CopiedFile | None = None
        # Until when it is not opened: another agent writes it.
        self.not_before = 0.0


class Incoming:
    """One an agent. Its loop takes parts; the thread of histories writes them."""

    def __init__(self, folder: Path, most_bytes: int) -> None:
        """*most_bytes*: of all copies whose runs go on."""
        self._folder = folder
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._waiting: list[tuple[RunKey, str, bytes]] = []
        self._waiting_bytes = 0
        # Only the thread's.
        self._copies: dict[tuple[RunKey, str], _Copy] = {}

    def take(self, run: RunKey, node: str, parts: Sequence[bytes]) -> None:
        """What a node has sent of a run. What is too much is left out, and told once."""
        for each in parts:
            with self._lock:
                fits = self._waiting_bytes + len(each) <= _MOST_WAITING_BYTES
                if fits and len(each) <= _LARGEST_PART:
                    self._waiting.append((run, node, each))
                    self._waiting_bytes += len(each)
                    continue
            errors.warn_once(
                f"part of {node}", "Parts of the history of %s are left out: too much waits.", node
            )

    def paths(self) -> set[Path]:
        """The copies that are written to."""
        return {each.path for each in self._copies.values() if each.file is not None}

    def write(self, now: float) -> None:
        """Write what was taken, or try it again the next time."""
        self._sort(now)
        full = self._size() > self._most_bytes
        for key, each in list(self._copies.items()):
            if each.parts and now >= each.not_before:
                if full:
                    errors.warn_once(
                        "copies of histories",
                        "The histories of other nodes take more than half of "
                        "OTEL_DDP_HISTORY_BYTES: no more of them is copied.",
                    )
                    each.parts.clear()
                else:
                    self._write(each, now)
            if now - each.fed_at > _CLOSE_AFTER_S:
                self._close(each)
                del self._copies[key]

    def _sort(self, now: float) -> None:
        with self._lock:
            waiting, self._waiting, self._waiting_bytes = self._waiting, [], 0
        for run, node, content in waiting:
            found = self._copies.get((run, node))
            if found is None:
                if len(self._copies) >= MOST_NODES:
                    text = "The histories of more than %d nodes are not copied: not that of %s."
                    errors.warn_once("copies of histories", text, MOST_NODES, node)
                    continue
                found = _Copy(self._folder / directory.file_name(*run, node))
                self._copies[run, node] = found
            found.fed_at = now
            if now < found.not_before:
                continue
            try:
                found.parts.append(parse(content, run, node))
            except Senseless as why:
                text = "A part of the history of %s makes no sense: %s"
                errors.warn_once(f"part of {node}", text, node, why)

    def _write(self, copy: _Copy, now: float) -> None:
        try:
            if copy.file is not None and not copy.file.is_there():
                self._close(copy)
            copy.file = copy.file or CopiedFile(copy.path)
            while copy.parts:
                copy.file.replace(**copy.parts[0]._asdict())
                copy.parts.pop(0)
        except Unusable as why:
            # Where the nodes share a home, nothing needs to travel.
            log.debug("%s", why)
            copy.not_before = now + _TRY_AGAIN_S
            copy.parts.clear()
        except (sqlite3.Error, OSError, OverflowError) as why:
            # This node's own history is on the same disk, and its agent tells of it.
            log.debug("%s: %s", copy.path, why)
            del copy.parts[:-_MOST_PARTS]

    def _size(self) -> int:
        found = 0
        for path in self.paths():
            with contextlib.suppress(OSError):
                found += path.stat().st_size
        return found

    @staticmethod
    def _close(copy: _Copy) -> None:
        file, copy.file = copy.file, None
        if file is not None:
            with contextlib.suppress(sqlite3.Error):
                file.close()

    def close(self) -> None:
        """Leave files that can be copied."""
        for each in self._copies.values():
            self._close(each)
