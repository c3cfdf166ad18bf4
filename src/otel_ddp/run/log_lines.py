"""What `run.logs` and OTEL_DDP_LOGS ask for, and the handler that does it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from otel_ddp.errors import ConfigError
from otel_ddp.recording.logs.handler import LogHandler
from otel_ddp.recording.progress import Progress
from otel_ddp.recording.recorder import Recorder
from otel_ddp.recording.spans import open_span
from otel_ddp.settings import log_level


class Choice(NamedTuple):
    """From which level on, and of which loggers; without any, those of the program."""

    level: int
    others: int
    loggers: tuple[logging.Logger, ...]


def chosen(level: Any, others: Any, logger: Any) -> Choice:
    """What `run.logs` was given; raises ConfigError for what cannot be."""
    numbers = []
    for name, given in (("level", level), ("others", others)):
        number = log_level(given)
        if number is None:
            raise ConfigError(
                f'{name} must be a level of logging, such as "info" or logging.INFO; got {given!r}.'
            )
        numbers.append(number)
    one = logger is not None and not isinstance(logger, Collection)
    several = [logger] if one or isinstance(logger, str) else list(logger or ())
    found = [logging.getLogger(_name(e)) if isinstance(e, str) else e for e in several]
    if not all(isinstance(each, logging.Logger) for each in found):
        raise ConfigError(f"logger must be a logger, its name, or several; got {logger!r}.")
    return Choice(numbers[0], numbers[1], tuple(found))


def asked(words: str) -> Choice:
    """What OTEL_DDP_LOGS asks for: a level, maybe that of the others, maybe names of loggers."""
    level, *rest = words.split(",")
    of_others = bool(rest) and log_level(rest[0]) is not None
    return chosen(level, rest[0] if of_others else "warning", rest[of_others:])


def start(
    choice: Choice, recorder: Recorder, progress: Progress, is_rank_0: Callable[[], bool]
) -> LogHandler:
    """A handler that listens already."""
    handler = LogHandler(
        recorder,
        level=choice.level,
        others=choice.others,
        loggers=choice.loggers,
        is_rank_0=is_rank_0,
        moment=lambda: moment(recorder, progress),
    )
    handler.attach(started=progress.steps.began or recorder.steps.last >= 0)
    return handler


def moment(recorder: Recorder, progress: Progress) -> dict[str, Any]:
    """The span, the trace and the step of now, as a record has them."""
    span_id, trace = open_span(recorder)
    of_step, step = progress.steps.trace_and_step()
    if not trace and not of_step:
        span_id, trace = recorder.run_span["id"], recorder.run_span["trace"]
    return {"span": span_id, "trace": trace or of_step, "step": step}


def _name(word: str) -> str | None:
    # Before Python 3.9 a logger of this name was another one than the root.
    return None if word.strip().lower() == "root" else word.strip()
