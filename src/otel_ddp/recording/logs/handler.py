"""A handler for Python's logging that writes what the program says into the journal."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection
from typing import Any

from otel_ddp import errors
from otel_ddp.journal import layout
from otel_ddp.recording.logs import records
from otel_ddp.recording.logs.loggers import Loggers, is_ours
from otel_ddp.recording.recorder import Recorder
from otel_ddp.vocabulary import catalog

# A line costs as much as it takes in the journal, and this much at least.
_LEAST_BYTES = 512
# How fast lines may come in the long run: 32 short ones a second.
_BYTES_A_SECOND = 16 * 1024
# At once: this share of the journal, so that lines never push values out.
_SHARE_OF_RING = 0.25
# Of that, what is kept for errors.
_FOR_ERRORS = 0.25
# How often it says that lines were left out.
_SAY_EVERY_S = 10.0


class _Rate:
    """How many bytes of lines there is room for."""

    def __init__(self, most_bytes: float) -> None:
        self._most_bytes = self._room_bytes = most_bytes
        self._filled_at = self._said_at = time.monotonic()
        self.left_out = 0
        """How many lines found no room since it was said."""

    def has_room(self, is_error: bool) -> bool:
        """Whether a line may be written. If not, it counts as left out."""
        now = time.monotonic()
        room = self._room_bytes + (now - self._filled_at) * _BYTES_A_SECOND
        self._room_bytes, self._filled_at = min(room, self._most_bytes), now
        kept = 0.0 if is_error else self._most_bytes * _FOR_ERRORS
        if self._room_bytes - _LEAST_BYTES >= kept:
            return True
        self.left_out += 1
        return False

    def written(self, size_bytes: int) -> None:
        """A line of this size was written."""
        self._room_bytes -= max(_LEAST_BYTES, size_bytes)

    @property
    def saying_is_due(self) -> bool:
        """Whether it is time to say that lines were left out."""
        return self.left_out > 0 and time.monotonic() - self._said_at >= _SAY_EVERY_S

    def say(self) -> int:
        """How many lines were left out since the last call."""
        lost, self.left_out, self._said_at = self.left_out, 0, time.monotonic()
        return lost


class LogHandler(logging.Handler):
    """One a run. It never waits, never raises, and has no lock of its own."""

    def __init__(
        self,
        recorder: Recorder,
        *,
        level: int,
        others: int,
        loggers: Collection[logging.Logger],
        is_rank_0: Callable[[], bool],
        moment: Callable[[], dict[str, Any]],
    ) -> None:
        """*level* is that of rank 0, *others* that of all others. *loggers*: where it listens; none
        means those of the program. *moment*: trace and step of now."""
        # As low as Python's last resort, which it stands in for.
        super().__init__(min(level, others, logging.WARNING))
        self._recorder = recorder
        self._of_rank_0, self._of_others = level, others
        self._is_rank_0 = is_rank_0
        self._moment = moment
        self._here = threading.local()
        self._loggers = Loggers(self, loggers)
        self._rate = _Rate(recorder.writer.ring_bytes * _SHARE_OF_RING)

    def attach(self, *, started: bool) -> None:
        """Listen where it is to listen; called again, to the loggers that came since.

        *started*: the program has set up what it needs.
        """
        if self._loggers.attach(started=started) and self._is_rank_0():
            self._check_levels()

    def _check_levels(self) -> None:
        """Says once if no line of the asked level can come."""
        asked, attached = self._of_rank_0, self._loggers.attached
        if not attached:
            errors.warn_once(
                "log levels",
                "Log lines are asked for, and this program has no logger of its own: "
                "OTEL_DDP_LOGS=info,root hears every logger.",
            )
            return
        lowest = min(each.getEffectiveLevel() for each in attached)
        if lowest > asked:
            level, made = logging.getLevelName(asked), logging.getLevelName(lowest)
            errors.warn_once(
                "log levels",
                "Log lines are asked for from %s on, and the loggers of this program make them "
                'from %s on: logging.basicConfig(level="%s") makes the others.',
                *(level, made, level),
            )

    # -- without a lock: one of ours around the journal's could wait for it the other way round

    def createLock(self) -> None:
        """Python's handlers have a lock; this one needs none."""
        self.lock = None

    def _at_fork_reinit(self) -> None:
        pass

    @errors.contained(default=False)
    def handle(self, record: logging.LogRecord) -> bool:
        """Record one line; without the lock that other handlers take."""
        if is_ours(record.name) or not self.filter(record):
            return False
        self._last_resort(record)
        if self._loggers.look_is_due:
            self.attach(started=False)
        if record.levelno < (self._of_rank_0 if self._is_rank_0() else self._of_others):
            return False
        self.emit(record)
        return True

    def _last_resort(self, record: logging.LogRecord) -> None:
        """Python prints warnings of loggers without any handler: it must not miss them for us."""
        last, logger = logging.lastResort, logging.getLogger(record.name)
        if last is None or record.levelno < last.level:
            return
        found: logging.Logger | None = logger
        while found is not None:
            if any(each is not self for each in found.handlers):
                return
            found = found.parent if found.propagate else None
        last.handle(record)

    # -- what it writes

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line into the journal, if there is room for it."""
        if getattr(self._here, "busy", False):
            # The text of what is logged logs by itself, or a signal handler logs in between.
            self._recorder.totals.count(catalog.OTEL_DDP_VALUES_REFUSED, why="reentered")
            return
        self._here.busy = True
        try:
            self._write(record)
        finally:
            self._here.busy = False

    def _write(self, record: logging.LogRecord) -> None:
        # Asked before the line is formatted: a line in every iteration must stay cheap.
        if not self._rate.has_room(record.levelno >= logging.ERROR):
            errors.warn_once(
                "log rate",
                "Log lines are left out of what is recorded: they come faster than %d a second. "
                "They are counted, and a higher level (OTEL_DDP_LOGS) makes them fewer.",
                _BYTES_A_SECOND // _LEAST_BYTES,
            )
            self._recorder.totals.count(catalog.OTEL_DDP_VALUES_REFUSED, why="log_rate")
            return
        content = self._content(record)
        self._rate.written(records.size_bytes(content))
        self._append(content)
        if self._rate.saying_is_due:
            self._say()

    def _append(self, content: dict[str, Any]) -> None:
        self._recorder.documents.append(layout.EVENT, content | self._moment())

    def _content(self, record: logging.LogRecord) -> dict[str, Any]:
        hidden = self._recorder.documents.hidden_names
        try:
            return records.from_line(record, hidden)
        except errors.ANY_ERROR:
            errors.reraise_foreign()
            # As every handler does: prints, if `logging.raiseExceptions` is set, and goes on.
            self.handleError(record)
            bare = errors.attempt(lambda: str(record.msg), type(record.msg).__name__)
            plain = logging.makeLogRecord({**vars(record), "args": (), "msg": bare})
            return records.from_line(plain, hidden)

    def _say(self) -> None:
        text = (
            f"{self._rate.say()} log lines of this rank were left out: they came faster than "
            f"{_BYTES_A_SECOND // _LEAST_BYTES} a second"
        )
        self._append(records.of_the_handler(text))

    def end(self) -> None:
        """Say what was left out, and listen no more."""
        if self._rate.left_out:
            self._say()
        self.detach()

    def detach(self) -> None:
        """Listen no more."""
        self._loggers.detach()
