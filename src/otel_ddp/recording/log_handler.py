"""A handler for Python's logging that writes what the program says into the journal."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection
from typing import Any

from otel_ddp import catalog
from otel_ddp.errors import containment
from otel_ddp.journal import layout
from otel_ddp.recording import log_records, program_loggers
from otel_ddp.recording.recorder import Recorder

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
# How often a line looks for loggers that came since: a program may have thousands of them.
_LOOK_EVERY_S = 3.0


def _depth(logger: logging.Logger) -> int:
    return 0 if logger is logging.root else 1 + logger.name.count(".")


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
        self._loggers = list(loggers)
        self._attached: list[logging.Logger] = []
        self._waits_for_root = self._started = False
        self._loggers_seen = -1
        self._looked_at = -_LOOK_EVERY_S
        self._most_bytes = recorder.writer.ring_bytes * _SHARE_OF_RING
        self._room_bytes = self._most_bytes
        self._filled_at = time.monotonic()
        self._left_out = 0
        self._said_at = self._filled_at

    # -- where it listens

    def attach(self, *, started: bool) -> None:
        """Listen where it is to listen; called again, to the loggers that came since.

        *started*: the program has set up what it needs. Before that a root logger without handlers
        is left alone: with one of ours `logging.basicConfig` would do nothing.
        """
        self._looked_at = time.monotonic()
        known = len(logging.root.manager.loggerDict)
        is_first = started and not self._started
        # `basicConfig(force=True)` and `dictConfig` take handlers away.
        in_place = all(self in logger.handlers for logger in self._attached)
        if in_place and known == self._loggers_seen and not (self._waits_for_root or is_first):
            return
        self._loggers_seen = known
        wanted = self._loggers or list(program_loggers.own())
        self._waits_for_root = logging.root in wanted and not (started or logging.root.handlers)
        # The upper ones first: what they hear, those below them need not tell again.
        for logger in sorted(wanted, key=_depth):
            waits = logger is logging.root and self._waits_for_root
            if not waits and not self._hears(logger):
                logger.addHandler(self)
                if logger not in self._attached:
                    self._attached.append(logger)
        if is_first:
            self._started = True
            self._check_levels()

    def _check_levels(self) -> None:
        """Says once if no line of the asked level can come."""
        asked = self._of_rank_0
        if not self._is_rank_0():
            return
        if not self._attached:
            containment.warn_once(
                "log levels",
                "Log lines are asked for, and this program has no logger of its own: "
                "OTEL_DDP_LOGS=info,root hears every logger.",
            )
            return
        lowest = min(each.getEffectiveLevel() for each in self._attached)
        if lowest > asked:
            level, made = logging.getLevelName(asked), logging.getLevelName(lowest)
            containment.warn_once(
                "log levels",
                "Log lines are asked for from %s on, and the loggers of this program make them "
                'from %s on: logging.basicConfig(level="%s") makes the others.',
                *(level, made, level),
            )

    def detach(self) -> None:
        """Listen no more."""
        for logger in self._attached:
            logger.removeHandler(self)
        self._attached.clear()

    def _hears(self, logger: logging.Logger | None) -> bool:
        while logger is not None:
            if self in logger.handlers:
                return True
            logger = logger.parent if logger.propagate else None
        return False

    # -- without a lock: one of ours around the journal's could wait for it the other way round

    def createLock(self) -> None:
        """Python's handlers have a lock; this one needs none."""
        self.lock = None

    def _at_fork_reinit(self) -> None:
        pass

    @containment.contained(default=False)
    def handle(self, record: logging.LogRecord) -> bool:
        """Record one line; without the lock that other handlers take."""
        if program_loggers.is_ours(record.name) or not self.filter(record):
            return False
        self._last_resort(record)
        if time.monotonic() - self._looked_at >= _LOOK_EVERY_S:
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
            self._recorder.count(catalog.OTEL_DDP_VALUES_REFUSED, why="reentered")
            return
        self._here.busy = True
        try:
            self._write(record)
        finally:
            self._here.busy = False

    def _write(self, record: logging.LogRecord) -> None:
        now = time.monotonic()
        room = self._room_bytes + (now - self._filled_at) * _BYTES_A_SECOND
        self._room_bytes, self._filled_at = min(room, self._most_bytes), now
        kept = 0.0 if record.levelno >= logging.ERROR else self._most_bytes * _FOR_ERRORS
        # Asked before the line is formatted: a line in every iteration must stay cheap.
        if self._room_bytes - _LEAST_BYTES < kept:
            self._left_out += 1
            containment.warn_once(
                "log rate",
                "Log lines are left out of what is recorded: they come faster than %d a second. "
                "They are counted, and a higher level (OTEL_DDP_LOGS) makes them fewer.",
                _BYTES_A_SECOND // _LEAST_BYTES,
            )
            self._recorder.count(catalog.OTEL_DDP_VALUES_REFUSED, why="log_rate")
            return
        content = self._content(record)
        self._room_bytes -= max(_LEAST_BYTES, log_records.size_bytes(content))
        self._recorder.append(layout.EVENT, content | self._moment())
        if self._left_out and now - self._said_at >= _SAY_EVERY_S:
            self._say(now)

    def _content(self, record: logging.LogRecord) -> dict[str, Any]:
        try:
            return log_records.from_line(record, self._recorder.hidden_names)
        except containment.ANY_ERROR:
            containment.reraise_foreign()
            # As every handler does: prints, if `logging.raiseExceptions` is set, and goes on.
            self.handleError(record)
            bare = containment.attempt(lambda: str(record.msg), type(record.msg).__name__)
            plain = logging.makeLogRecord({**vars(record), "args": (), "msg": bare})
            return log_records.from_line(plain, self._recorder.hidden_names)

    def _say(self, now: float) -> None:
        lost, self._left_out, self._said_at = self._left_out, 0, now
        text = (
            f"{lost} log lines of this rank were left out: they came faster than "
            f"{_BYTES_A_SECOND // _LEAST_BYTES} a second"
        )
        self._recorder.append(layout.EVENT, log_records.of_the_handler(text) | self._moment())

    def end(self) -> None:
        """Say what was left out, and listen no more."""
        if self._left_out:
            self._say(time.monotonic())
        self.detach()
