"""The artifacts that wait, and those that are shown. The agent's loop and its reader share it."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection
from pathlib import Path

from otel_ddp.agent.artifacts import work_file
from otel_ddp.agent.artifacts.artifact import (
    COMPLETE,
    INCOMPLETE,
    LEFT_OUT,
    WAITING,
    Artifact,
)
from otel_ddp.agent.ledger import Labels

log = logging.getLogger("otel_ddp.agent")

MOST_WAITING = 200
# Of one rank: each is up to three series.
MOST_SHOWN = 100


class WorkList:
    """What an agent that is killed leaves in the file is the next one's."""

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.news = threading.Event()
        """Set with each new artifact."""
        self._path = path
        self._clock = clock
        self._lock = threading.Lock()
        self._artifacts = {each.key: each for each in work_file.read(path)}
        self._done: list[Artifact] = []
        self._outcomes: Counter[str] = Counter()
        self._active = ""

    def add(self, artifact: Artifact) -> bool:
        """Take one more; False if it is known, as its record was read before. `keep` comes next."""
        with self._lock:
            if artifact.key in self._artifacts:
                return False
            for other in self._waiting():
                # What lay there is gone.
                same = other.slot == artifact.slot and other.told.uri == artifact.told.uri
                if same and other.key != self._active:
                    self._finish(other, INCOMPLETE, "the next one was written before it was read")
            self._artifacts[artifact.key] = artifact
            if len(self._waiting()) > MOST_WAITING:
                self._finish(artifact, LEFT_OUT, f"{MOST_WAITING} others waited")
                if self._outcomes[LEFT_OUT] == 1:
                    log.warning(
                        "Artifacts are left out, since %d others wait: name a directory rather "
                        "than each of its files. otel_ddp.artifacts counts them.",
                        MOST_WAITING,
                    )
            elif artifact.state != WAITING:
                self._finish(artifact, artifact.state, artifact.problem)
        return True

    def keep(self) -> None:
        """Write down what was added, and have it worked on."""
        with self._lock:
            self._keep()
        self.news.set()

    def _waiting(self) -> list[Artifact]:
        return [each for each in self._artifacts.values() if each.state == WAITING]

    def next(self) -> Artifact | None:
        """The first that may be worked on now."""
        with self._lock:
            now = self._clock()
            ready = [each for each in self._waiting() if each.not_before <= now]
            self._active = ready[0].key if ready else ""
            return ready[0] if ready else None

    def due_in_s(self) -> float | None:
        """In how many seconds the next one may be tried; None if none waits."""
        with self._lock:
            moments = [each.not_before for each in self._waiting()]
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
            self._keep()

    def _finish(self, artifact: Artifact, state: str, why: str) -> None:
        artifact.state, artifact.problem, artifact.done_ns = state, why, time.time_ns()
        self._outcomes[state] += 1
        self._done.append(artifact)
        # Newer ones of the same name replace it; too many names are not shown.
        shown = [
            each
            for each in self._artifacts.values()
            if each.state != WAITING and each.told.labels == artifact.told.labels
        ]
        shown.sort(key=lambda each: each.told.time_ns)
        newest = {each.slot: each for each in shown}
        keep = {each.key for each in list(newest.values())[-MOST_SHOWN:]}
        for each in shown:
            if each.key not in keep:
                del self._artifacts[each.key]

    def flush_done(self) -> list[Artifact]:
        """Those that were done with since the last call."""
        with self._lock:
            done, self._done = self._done, []
            return done

    def shown(self) -> list[Artifact]:
        """Those that have series: done with, or only waiting for a store that does not answer."""
        with self._lock:
            return [
                each
                for each in self._artifacts.values()
                if each.state != WAITING or (each.digest and each.attempts)
            ]

    def outcomes(self) -> dict[str, int]:
        """How many were done with, by how; empty before there is an artifact."""
        with self._lock:
            if not self._outcomes and not self._artifacts:
                return {}
            return {state: self._outcomes[state] for state in (COMPLETE, INCOMPLETE, LEFT_OUT)}

    def waiting(self) -> int:
        """How many are not done with."""
        with self._lock:
            return len(self._waiting())

    def forget(self, in_use: Collection[Labels], linger_s: float) -> None:
        """Drop what is done with, once its rank is no longer shown and it has been for a while."""
        before_ns = time.time_ns() - int(linger_s * 1e9)
        with self._lock:
            old = [
                each
                for each in self._artifacts.values()
                if each.state != WAITING
                and each.told.labels not in in_use
                and each.done_ns < before_ns
            ]
            for each in old:
                del self._artifacts[each.key]
            if old:
                self._keep()

    def _keep(self) -> None:
        work_file.keep(self._path, self._artifacts.values())
