"""Keeps messages on disk until each address has taken them: once each, and not too many.

There is a small file for each message that waits. `told.json` holds which messages there were in
the last day, so that an agent that starts again tells none twice and keeps to the limit.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from otel_ddp import files
from otel_ddp.agent.notify.addresses import Address
from otel_ddp.agent.notify.message import Message
from otel_ddp.history.terminal import shown_time

log = logging.getLogger("otel_ddp.agent")

# Of one kind, run and hour: a script's alerts must not leave out the run's death.
MOST_OF_A_KIND, _HOUR_S = 20, 3600.0
_MOST_WAITING = 100
_DAY_S = 86400.0
# An agent whose training has ended stays so long for a message that an address has not taken.
_STAY_S = 3600.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 5.0, 300.0
_LAST = (
    f"This is message {MOST_OF_A_KIND} of this kind and run within an hour: further ones are left "
    "out. `otel-ddp status` shows them."
)


class _Waiting:
    """A message, and the keys of the addresses that have not taken it."""

    def __init__(self, message: Message, to: Sequence[str], path: Path, since_s: float) -> None:
        self.message, self.to, self.path, self.since_s = message, list(to), path, since_s


class Outbox:
    """Only one thread touches it; any may read its counts."""

    def __init__(
        self,
        folder: Path,
        addresses: Sequence[Address],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._folder = folder
        self._addresses = addresses
        self._clock = clock
        self._waiting: list[_Waiting] = []
        # By message id: its kind, group and run, and when it was queued.
        self._told: dict[str, tuple[str, float]] = {}
        # By key: when to try again, and for how long it was left alone last.
        self._pauses: dict[str, tuple[float, float]] = {}
        self.delivered = self.left_out = self.dropped = 0
        self.last_failure = ""
        """When, where and why, without secrets."""
        self._problem = ""
        self._lock: int | None = None

    def load(self) -> None:
        """Take up what an earlier agent left; once, before all else."""
        known = {each.key for each in self._addresses}
        with self._problems():
            self._claim()
            for path in sorted(self._folder.glob("*-*.json")):
                content = files.read_mapping(path)
                try:
                    message = Message.from_json(content["message"])
                    to = [key for key in content["to"] if key in known]
                    since_s = float(content["since_s"])
                except (KeyError, TypeError, ValueError):
                    to = []
                if to:
                    self._waiting.append(_Waiting(message, to, path, since_s))
                else:
                    files.remove(path)
        with contextlib.suppress(TypeError, ValueError):
            told = files.read_mapping(self._folder / "told.json")
            self._told = {key: (str(kind), float(at)) for key, (kind, at) in told.items()}

    def put(self, message: Message) -> None:
        """Send it from now on, unless it was told before or there are too many of its kind."""
        now = self._clock()
        self._told = {key: each for key, each in self._told.items() if now - each[1] < _DAY_S}
        if message.id in self._told:
            return
        kind = f"{message.kind}/{message.group}/{message.run}"
        of_kind = sum(each == kind and now - at < _HOUR_S for each, at in self._told.values())
        if of_kind >= MOST_OF_A_KIND:
            self.left_out += 1
            return
        if of_kind == MOST_OF_A_KIND - 1:
            message = message._replace(text=f"{message.text}\n\n{_LAST}".strip())
        self._told[message.id] = kind, now
        path = self._folder / f"{int(now * 1000):015d}-{message.id}.json"
        waiting = _Waiting(message, [each.key for each in self._addresses], path, now)
        self._waiting.append(waiting)
        with self._problems():
            self._claim()
            files.replace(self._folder / "told.json", json.dumps(self._told))
        self._save(waiting)
        alerts_first = sorted(self._waiting, key=lambda each: each.message.kind != "alert")
        for each in alerts_first[:-_MOST_WAITING]:
            self._drop(each)

    def deliver(self) -> None:
        """Try each address whose time has come; the oldest message first."""
        now = self._clock()
        for each in [each for each in self._waiting if now - each.since_s > _DAY_S]:
            self._drop(each)
        for address in self._addresses:
            for each in [each for each in self._waiting if address.key in each.to]:
                if self._clock() < self._pauses.get(address.key, (0.0, 0.0))[0]:
                    break
                self._try(address, each)

    def _try(self, address: Address, waiting: _Waiting) -> None:
        outcome, now = address.send(waiting.message), self._clock()
        if outcome.taken:
            self.delivered += 1
            self._pauses.pop(address.key, None)
        else:
            at = shown_time(int(now * 1e9), int(now * 1e9))
            self.last_failure = f"{at}, {address.shown}: {outcome.why}"
            _, pause_s = self._pauses.get(address.key, (0.0, 0.0))
            if not pause_s or outcome.is_final:
                log.warning("no notification to %s: %s", address.shown, outcome.why)
            if not outcome.is_final:
                pause_s = min(max(2 * pause_s, _FIRST_PAUSE_S), _LONGEST_PAUSE_S)
                self._pauses[address.key] = now + pause_s, pause_s
                return
        waiting.to.remove(address.key)
        self._save(waiting)

    def _save(self, waiting: _Waiting) -> None:
        if not waiting.to:
            self._waiting.remove(waiting)
            files.remove(waiting.path)
            return
        content = {
            "message": waiting.message.to_json(),
            "to": waiting.to,
            "since_s": waiting.since_s,
        }
        with self._problems():
            self._claim()
            files.replace(waiting.path, json.dumps(content))

    def _drop(self, waiting: _Waiting) -> None:
        self.dropped += 1
        waiting.to.clear()
        self._save(waiting)

    def _claim(self) -> None:
        """Raises OSError unless the folder is ours, and of this agent alone."""
        files.make_kept(self._folder.parent, ours=True)
        files.private_directory(self._folder)
        if self._lock is None:
            handle = files.open_own(self._folder / "lock", os.O_RDWR | os.O_CREAT)
            try:
                files.lock(handle)
            except OSError:
                os.close(handle)
                raise
            self._lock = handle

    @contextlib.contextmanager
    def _problems(self) -> Iterator[None]:
        """Without a disk, messages wait in memory."""
        try:
            yield
        except OSError as error:
            self._problem = f"{self._folder} cannot be used: {error.strerror}"

    def is_awaited(self) -> bool:
        """Whether the agent should stay for what waits."""
        now = self._clock()
        return any(now - each.since_s < _STAY_S for each in list(self._waiting))

    def describe(self) -> str:
        """How it goes, in a sentence."""
        addresses = ", ".join(each.shown for each in self._addresses)
        count = len(self._addresses)
        parts = [f"to {count} address{'es' * (count > 1)} ({addresses}): {self.delivered} taken"]
        for number, word in (
            (len(self._waiting), "wait"),
            (self.left_out, f"left out beyond {MOST_OF_A_KIND} a kind, run and hour"),
            (self.dropped, "given up"),
        ):
            parts += [f"{number} {word}"] if number else []
        tail = "".join(f"; {each}" for each in (self._problem,) if each)
        failed = f"; last failure: {self.last_failure}" if self.last_failure else ""
        return ", ".join(parts) + tail + failed
