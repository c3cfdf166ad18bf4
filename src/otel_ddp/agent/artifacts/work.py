"""The artifacts that ranks have told of, and the thread that reads and stores them.

The list is in a file of the agent's directory too, so that the next agent goes on with it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from otel_ddp import errors, files
from otel_ddp.agent.artifacts.content import (
    CannotRead,
    Content,
    File,
    Pace,
    Stopped,
    chunks,
    content_of,
    listed,
    opened,
    path_of,
)
from otel_ddp.agent.artifacts.store import CannotStore, Store, plain
from otel_ddp.agent.kept_thread import KeptThread
from otel_ddp.agent.ledger import Labels

log = logging.getLogger("otel_ddp.agent")

WAITING, COMPLETE, INCOMPLETE, LEFT_OUT = "waiting", "complete", "incomplete", "left_out"
MOST_WAITING = 4000
# Of one rank: each is up to three series.
MOST_SHOWN = 100
# More than the list can hold.
_MOST_BYTES = 128 * 1024 * 1024
# A file that is not there yet, or is still written to: two and a half minutes in all.
READ_AGAIN_S = (5.0, 10.0, 20.0, 40.0, 80.0)
# A store that does not take it: half an hour in all.
STORE_AGAIN_S = (*READ_AGAIN_S, *(160.0,) * 10)


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
    not_before: float = 0.0
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


def _kept(path: Path) -> Iterator[Artifact]:
    """What an agent has written down, as far as it makes sense to this version."""
    content = files.read_json(path, _MOST_BYTES)
    for row in content if isinstance(content, list) else ():
        with contextlib.suppress(TypeError, ValueError, LookupError, AttributeError):
            labels, *more = row.pop("told")
            told = Told(tuple((str(name), str(value)) for name, value in labels), *more)
            yield Artifact(told=told, **{**row, "not_before": 0.0})


class WorkList:
    """What an agent that is killed leaves in the file is the next one's."""

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.news = threading.Event()
        """Set with each new artifact."""
        self._path = path
        self._clock = clock
        self._lock = threading.Lock()
        self._waiting: dict[str, Artifact] = {}
        self._finished: dict[str, Artifact] = {}
        for each in _kept(path):
            (self._waiting if each.state == WAITING else self._finished)[each.key] = each
        self._is_kept = True
        self._done: list[Artifact] = []
        self._outcomes: Counter[str] = Counter()

    def add(self, artifact: Artifact) -> None:
        """Take one more, unless its record was read before. `keep` comes next."""
        with self._lock:
            if artifact.key in self._waiting or artifact.key in self._finished:
                return
            self._is_kept = False
            for other in list(self._waiting.values()):
                # What lay there is gone.
                if (other.told.uri, other.slot) == (artifact.told.uri, artifact.slot):
                    self._finish(other, INCOMPLETE, "the next one was written before it was read")
            if artifact.state != WAITING:
                self._finish(artifact, artifact.state)
            elif len(self._waiting) < MOST_WAITING:
                self._waiting[artifact.key] = artifact
            else:
                self._finish(artifact, LEFT_OUT, f"{MOST_WAITING} others waited")
                errors.warn_once(
                    "artifacts left out",
                    "Artifacts are left out, since %d others wait: name a directory rather than "
                    "each of its files. otel_ddp.artifacts counts them.",
                    MOST_WAITING,
                )
        self.news.set()

    def keep(self) -> None:
        """Write the list down if it has changed. The next agent may read the last ones twice."""
        with self._lock:
            if self._is_kept:
                return
            self._is_kept = True
            rows = [vars(each) for each in (*self._finished.values(), *self._waiting.values())]
            content = json.dumps(rows)
        # A full or deleted directory: only the next agent would need the file.
        with contextlib.suppress(OSError):
            files.replace(self._path, content)

    def next(self) -> Artifact | float | None:
        """The first that may be worked on now; or in how many seconds; None if none waits."""
        with self._lock:
            now = self._clock()
            for each in self._waiting.values():
                if each.not_before <= now:
                    return each
            return min((each.not_before - now for each in self._waiting.values()), default=None)

    def failed(self, artifact: Artifact, why: str, waits_s: tuple[float, ...] = ()) -> None:
        """Try it again after a while, but for no more than these times."""
        with self._lock:
            attempts = artifact.attempts
            if artifact.key not in self._waiting:
                return
            if attempts < len(waits_s):
                artifact.attempts, artifact.problem = attempts + 1, why
                artifact.not_before = self._clock() + waits_s[attempts]
                return
            self._finish(artifact, INCOMPLETE, why)
        run = dict(artifact.told.labels).get("run", "")
        text = "the artifact %r of run %s is not complete: %s"
        errors.warn_once(f"artifact: {why}", text, artifact.told.name, run, why)

    def complete(self, artifact: Artifact) -> None:
        """It is done with, unless the next one under its name came while it was read."""
        with self._lock:
            if artifact.key in self._waiting:
                self._finish(artifact, COMPLETE)

    def _finish(self, artifact: Artifact, state: str, why: str = "") -> None:
        artifact.state, artifact.problem, artifact.done_ns = state, why, time.time_ns()
        self._is_kept = False
        self._outcomes[state] += 1
        self._done.append(artifact)
        self._waiting.pop(artifact.key, None)
        self._finished[artifact.key] = artifact
        # Newer ones of the same name replace it; too many names are not shown.
        of_rank = [e for e in self._finished.values() if e.told.labels == artifact.told.labels]
        of_rank.sort(key=lambda each: each.told.time_ns)
        newest = {each.slot: each for each in of_rank}
        shown = {each.key for each in list(newest.values())[-MOST_SHOWN:]}
        for each in of_rank:
            if each.key not in shown:
                del self._finished[each.key]

    def flush_done(self) -> list[Artifact]:
        """Those that were done with since the last call."""
        with self._lock:
            done, self._done = self._done, []
            return done

    def shown(self) -> list[Artifact]:
        """Those that have series: done with."""
        with self._lock:
            return list(self._finished.values())

    def outcomes(self) -> dict[str, int]:
        """How many were done with, by how; empty before there is an artifact."""
        with self._lock:
            if not self._outcomes and not self._finished and not self._waiting:
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
            for each in list(self._finished.values()):
                if each.told.labels not in in_use and each.done_ns < before_ns:
                    del self._finished[each.key]
                    self._is_kept = False


class Worker:
    """One an agent. A file server that does not answer holds up this thread alone."""

    def __init__(
        self,
        work: WorkList,
        pace: Pace,
        roots: Collection[str] | None,
        make_store: Callable[[], Store] | None,
    ) -> None:
        """*roots*: as for `opened`. *make_store*: called in the thread, as it may block."""
        self._work = work
        self._pace = pace
        self._roots = roots
        self._make_store = make_store
        # What was read last: a store may want it again.
        self._found: tuple[File, ...] = ()
        self._last: Content | None = None
        self.thread = KeptThread("artifacts", self._run)

    def stop(self) -> None:
        """End soon; what is not done stays for the next agent."""
        self._pace.stopping.set()
        self._work.news.set()
        self.thread.join(1.0)

    def _run(self) -> None:
        # Of this thread alone.
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        while True:
            # In this order: `stop` does it the other way round.
            self._work.news.clear()
            if self._pace.stopping.is_set():
                return
            found = self._work.next()
            if not isinstance(found, Artifact):
                self._work.news.wait(found)
                continue
            with contextlib.suppress(Stopped):
                self.work_on(found)

    def work_on(self, artifact: Artifact) -> None:
        """Read it, store it, and say how that ended."""
        artifact.began_ns = artifact.began_ns or time.time_ns()
        try:
            self._read(artifact)
        except CannotRead as why:
            self._work.failed(artifact, str(why), READ_AGAIN_S if why.again else ())
        except CannotStore as why:
            again_s = STORE_AGAIN_S if why.again else ()
            self._work.failed(artifact, f"it is not stored: {why}", again_s)
        except (Stopped, MemoryError):
            raise
        except errors.ANY_ERROR as error:
            errors.record_failure("reading an artifact")
            self._work.failed(artifact, f"{type(error).__name__}: {error}")
        else:
            self._work.complete(artifact)

    def _read(self, artifact: Artifact) -> None:
        told, path = artifact.told, path_of(artifact.told.uri)
        if path is None:
            return
        with opened(path, self._roots) as top:
            content = self._content(top)
            artifact.size, artifact.digest = content.size, content.digest
            if self._make_store is None or told.direction != "output":
                return
            run = dict(told.labels).get("run", "")
            artifact.stored_uri = self._make_store().copy(
                f"{plain(run)}/{plain(told.name)}",
                os.path.basename(os.path.realpath(path)),
                content,
                lambda file: self._same(top, file, content.digests[file]),
            )

    def _content(self, top: int) -> Content:
        found = listed(top)
        if self._last is None or found != self._found:
            self._last = content_of(top, found, self._pace)
            self._found = found
        return self._last

    def _same(self, top: int, file: File, digest: str) -> Iterator[bytes]:
        """The content of a file. Raises at its end if its digest is another one by now."""
        seen = sha256()
        for chunk in chunks(top, file, self._pace):
            seen.update(chunk)
            yield chunk
        if seen.hexdigest() != digest:
            raise CannotRead("it was written to while the agent stored it", again=True)
