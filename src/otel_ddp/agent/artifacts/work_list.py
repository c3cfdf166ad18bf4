"""The artifacts that ranks have told of: those that wait, and those that are shown.

The agent's loop and its reader share the list. It is in a file of the agent's directory too, so
that the next agent goes on with it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from otel_ddp import files
from otel_ddp.agent.ledger import Labels
from otel_ddp.journal.reader import clean_text
from otel_ddp.vocabulary.catalog import LONGEST_LABEL

WAITING, COMPLETE, INCOMPLETE, LEFT_OUT = "waiting", "complete", "incomplete", "left_out"
_STATES = (WAITING, COMPLETE, INCOMPLETE, LEFT_OUT)
_LATEST_NS = 2**63


class Told(NamedTuple):
    """What the rank has said."""

    labels: Labels
    project: str
    name: str
    type: str
    direction: str
    uri: str
    time_ns: int
    step: int | None
    span: str
    trace: str
    metadata: dict[str, Any]


@dataclass
class Artifact:
    """One of the agent's work list. Its lock guards all of it."""

    key: str
    """Of its record: the journal, and the position there. The same record may be read twice."""
    told: Told
    state: str = WAITING
    size: int | None = None
    digest: str = ""
    stored_uri: str = ""
    problem: str = ""
    """Why it is not complete, or not yet."""
    attempts: int = 0
    not_before: float = field(default=0.0, compare=False)
    """On the monotonic clock: when it is tried again."""
    began_ns: int = 0
    done_ns: int = 0

    @property
    def uri(self) -> str:
        """Where it lies: the copy, once there is one."""
        return self.stored_uri or self.told.uri

    @property
    def slot(self) -> tuple[Labels, str, str]:
        """Of those with the same one, the newest is shown."""
        return self.told.labels, self.told.name, self.told.direction

    def to_json(self) -> dict[str, Any]:
        """What the next agent needs."""
        content = vars(self).copy()
        del content["not_before"]
        return content


def told(labels: Labels, project: str, content: dict[str, Any]) -> Told | None:
    """What a record says; None if it makes no sense. Another process has written it."""
    words = [content.get(name) for name in ("name", "type", "direction", "uri", "span", "trace")]
    if not all(isinstance(word, str) for word in words):
        return None
    name, kind, direction, uri, span, trace = map(str, words)
    time_ns, step, metadata = (content.get(each) for each in ("time", "step", "metadata"))
    if direction not in ("output", "input") or not name or not uri:
        return None
    if not _is_whole(time_ns) or not (step is None or _is_whole(step)):
        return None
    more = metadata if isinstance(metadata, dict) else {}
    return Told(
        *(labels, project, name, kind, direction, uri, int(time_ns or 0), step, span, trace, more)
    )


def from_json(content: Any) -> Artifact | None:
    """One that an earlier agent has written down; None if that is damaged."""
    try:
        *before, metadata = content["told"]
        labels = tuple((str(name), str(value)) for name, value in before[0])
        names = ("name", "type", "direction", "uri", "time", "step", "span", "trace")
        said = dict(zip(names, before[2:], strict=True), metadata=metadata)
        known = told(labels, str(before[1]), said)
        size = content["size"]
        if known is None or content["state"] not in _STATES:
            return None
        if not (size is None or _is_whole(size)):
            return None
        found = Artifact(str(content["key"]), known, str(content["state"]), size)
        for name in ("digest", "stored_uri", "problem"):
            setattr(found, name, str(content[name]))
        for name in ("attempts", "began_ns", "done_ns"):
            setattr(found, name, int(content[name]))
    except (LookupError, TypeError, ValueError, OverflowError):
        return None
    texts = (found.digest, found.stored_uri, found.problem, *known[2:6], *sum(labels, ()))
    return found if all(map(_is_clean, texts)) else None


def label(text: str) -> str:
    """A text as a label, which stores want short."""
    return text if len(text) <= LONGEST_LABEL else f"{text[: LONGEST_LABEL - 1]}…"


def _is_clean(text: str) -> bool:
    """Whether it can be a label as it is, like every text that a journal gives."""
    return clean_text(text.encode(errors="replace")) == text


def _is_whole(value: Any) -> bool:
    return type(value) is int and 0 <= value < _LATEST_NS


log = logging.getLogger("otel_ddp.agent")

MOST_WAITING = 4000
# Each file of a thousand takes a millisecond, and the list tens of them to be written down.
_KEEP_EVERY_S = 1.0
# Of one rank: each is up to three series.
MOST_SHOWN = 100
# More than the list can hold.
_MOST_BYTES = 128 * 1024 * 1024


class WorkList:
    """What an agent that is killed leaves in the file is the next one's."""

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.news = threading.Event()
        """Set with each new artifact."""
        self._path = path
        self._clock = clock
        self._lock = threading.Lock()
        found = read(path)
        self._waiting = {each.key: each for each in found if each.state == WAITING}
        self._known = {each.key: each for each in found if each.state != WAITING}
        self._kept_at = -_KEEP_EVERY_S
        self._is_kept = True
        self._done: list[Artifact] = []
        self._outcomes: Counter[str] = Counter()
        self._active = ""

    def add(self, artifact: Artifact) -> bool:
        """Take one more; False if it is known, as its record was read before. `keep` comes next."""
        with self._lock:
            if artifact.key in self._waiting or artifact.key in self._known:
                return False
            for other in list(self._waiting.values()):
                # What lay there is gone.
                same = other.told.uri == artifact.told.uri and other.slot == artifact.slot
                if same and other.key != self._active:
                    self._finish(other, INCOMPLETE, "the next one was written before it was read")
            if artifact.state == WAITING and len(self._waiting) >= MOST_WAITING:
                self._finish(artifact, LEFT_OUT, f"{MOST_WAITING} others waited")
                if self._outcomes[LEFT_OUT] == 1:
                    log.warning(
                        "Artifacts are left out, since %d others wait: name a directory rather "
                        "than each of its files. otel_ddp.artifacts counts them.",
                        MOST_WAITING,
                    )
            elif artifact.state != WAITING:
                self._finish(artifact, artifact.state, artifact.problem)
            else:
                self._waiting[artifact.key] = artifact
        return True

    def keep(self) -> None:
        """Write down what was added, and have it worked on."""
        with self._lock:
            self._keep()
        self.news.set()

    def next(self) -> Artifact | None:
        """The first that may be worked on now."""
        with self._lock:
            now = self._clock()
            ready = (each for each in self._waiting.values() if each.not_before <= now)
            found = next(ready, None)
            self._active = found.key if found else ""
            if found is None and not self._is_kept:
                self._keep()
            return found

    def due_in_s(self) -> float | None:
        """In how many seconds the next one may be tried; None if none waits."""
        with self._lock:
            moments = [each.not_before for each in self._waiting.values()]
            return max(0.0, min(moments) - self._clock()) if moments else None

    def postpone(self, artifact: Artifact, why: str, wait_s: float) -> None:
        """Try it again after a while."""
        with self._lock:
            artifact.attempts += 1
            artifact.problem = why
            artifact.not_before = self._clock() + wait_s
            self._active = ""

    def finish(self, artifact: Artifact, state: str, why: str = "") -> None:
        """It is done with."""
        with self._lock:
            self._finish(artifact, state, why)
            self._active = ""
            # An agent that is killed leaves the files of this second to be read once more.
            self._is_kept = False
            if self._clock() - self._kept_at >= _KEEP_EVERY_S:
                self._keep()

    def _finish(self, artifact: Artifact, state: str, why: str) -> None:
        artifact.state, artifact.problem, artifact.done_ns = state, why, time.time_ns()
        self._outcomes[state] += 1
        self._done.append(artifact)
        self._waiting.pop(artifact.key, None)
        self._known[artifact.key] = artifact
        # Newer ones of the same name replace it; too many names are not shown.
        shown = [each for each in self._known.values() if each.told.labels == artifact.told.labels]
        shown.sort(key=lambda each: each.told.time_ns)
        newest = {each.slot: each for each in shown}
        keep = {each.key for each in list(newest.values())[-MOST_SHOWN:]}
        for each in shown:
            if each.key not in keep:
                del self._known[each.key]

    def flush_done(self) -> list[Artifact]:
        """Those that were done with since the last call."""
        with self._lock:
            done, self._done = self._done, []
            return done

    def shown(self) -> list[Artifact]:
        """Those that have series: done with, or only waiting for a store that does not answer."""
        with self._lock:
            half_done = (e for e in self._waiting.values() if e.digest and e.attempts)
            return [*self._known.values(), *half_done]

    def outcomes(self) -> dict[str, int]:
        """How many were done with, by how; empty before there is an artifact."""
        with self._lock:
            if not self._outcomes and not self._known and not self._waiting:
                return {}
            return {state: self._outcomes[state] for state in (COMPLETE, INCOMPLETE, LEFT_OUT)}

    def waiting(self) -> int:
        """How many are not done with."""
        with self._lock:
            return len(self._waiting)

    def forget(self, in_use: Collection[Labels], linger_s: float) -> None:
        """Drop what is done with, once its rank is no longer shown and it has been for a while."""
        before_ns = time.time_ns() - int(linger_s * 1e9)
        with self._lock:
            old = [
                each
                for each in self._known.values()
                if each.told.labels not in in_use and each.done_ns < before_ns
            ]
            for each in old:
                del self._known[each.key]
            if old:
                self._keep()

    def _keep(self) -> None:
        self._kept_at, self._is_kept = self._clock(), True
        content = json.dumps(
            [e.to_json() for e in (*self._known.values(), *self._waiting.values())]
        )
        # A full or deleted directory: only the next agent would need the file.
        with contextlib.suppress(OSError):
            files.replace(self._path, content)


def read(path: Path) -> list[Artifact]:
    """What an agent has written down; nothing of a damaged file."""
    content = files.read_json(path, _MOST_BYTES)
    rows = content if isinstance(content, list) else []
    return [found for found in map(from_json, rows) if found is not None]
