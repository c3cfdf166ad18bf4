"""Lines of Python's logging, and the exception that ends a run, as records of the journal."""

from __future__ import annotations

import io
import logging
import os
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import otel_ddp
from conftest import Here, Journal
from otel_ddp import errors
from otel_ddp.errors import ConfigError
from otel_ddp.journal import layout
from otel_ddp.recording.log_lines import severity_number
from otel_ddp.vocabulary import catalog

LOGGER = "train"


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    """A logger of the program that makes every line; nothing of the test stays on it."""
    found = logging.getLogger(LOGGER)
    before = found.level, found.propagate, list(found.handlers)
    found.setLevel(1)
    # Without a handler Python would print its lines.
    found.addHandler(logging.NullHandler())
    yield found
    found.setLevel(before[0])
    found.propagate, found.handlers[:] = before[1], before[2]


def lines(journal: Journal) -> list[dict[str, Any]]:
    return [each for each in journal._documents(layout.EVENT) if not each["name"]]


def bodies(journal: Journal) -> list[str]:
    return [each["body"] for each in lines(journal)]


def hears() -> bool:
    """Whether anything of ours is in Python's logging."""
    return logging.Logger.callHandlers.__module__ != "logging"


def test_a_line_has_its_severity_its_place_and_the_step_and_span_of_its_moment(
    place: Here, logger: logging.Logger
) -> None:
    with otel_ddp.init() as run:
        run.logs("debug,debug")
        logger.debug("before the first step")
        run.log({"loss": 1.0}, step=7)
        with run.span("epoch"):
            logger.warning("loss %.1f", 0.5, extra={"shard": 3, "api_key": "x" * 20})

    journal = place.only()
    early, late = lines(journal)
    assert (early["body"], early["severity"], early["severity_number"]) == (
        *("before the first step", "DEBUG"),
        5,
    )
    of_run = journal.facts["span"]
    assert (early["trace"], early["span"], early["step"]) == (of_run["trace"], of_run["id"], None)
    assert (late["body"], late["severity"], late["severity_number"]) == ("loss 0.5", "WARNING", 13)
    span = journal.spans["epoch"]
    assert (late["trace"], late["step"], late["span"]) == ("step/7", 7, span["id"])
    assert span["start"] <= late["time"] <= span["end"] + 10**7
    assert late["scope"] == LOGGER
    attributes = late["attributes"]
    assert attributes["code.file.path"] == __file__
    assert (
        attributes["code.function.name"]
        == test_a_line_has_its_severity_its_place_and_the_step_and_span_of_its_moment.__name__
    )
    assert (attributes["shard"], attributes["api_key"]) == (3, "[hidden]")


@pytest.mark.parametrize(
    ("level", "number"),
    [(10, 5), (25, 11), (50, 21), (0, 1), (99, 24)],
)
def test_levels_are_the_severities_of_the_specification(level: int, number: int) -> None:
    assert severity_number(level) == number


@pytest.mark.parametrize(
    ("rank", "words", "expected"),
    [
        (0, "info", ["info", "warning", "error"]),
        (1, "info", ["warning", "error"]),
        (1, "info,info", ["info", "warning", "error"]),
        (0, "error", ["error"]),
        (1, "debug,error", ["error"]),
    ],
)
def test_a_variable_alone_records_rank_0_from_its_level_and_others_from_warnings(
    rank: int, words: str, expected: list[str], place: Here, logger: logging.Logger
) -> None:
    os.environ["OTEL_DDP_LOGS"] = words
    with otel_ddp.init(global_rank=rank, world_size=2, run="one"):
        for level in ("info", "warning", "error"):
            getattr(logger, level)(level)

    assert bodies(place.only()) == expected


def test_nothing_is_recorded_unless_it_is_asked_for(place: Here, logger: logging.Logger) -> None:
    with otel_ddp.init():
        logger.error("not asked for")

    assert lines(place.only()) == []
    assert not hears()


def test_libraries_and_the_root_logger_are_heard_only_if_they_are_named(
    place: Here, logger: logging.Logger
) -> None:
    library = logging.getLogger(f"{np.__name__}.fft")
    with otel_ddp.init() as run:
        run.logs()
        logger.warning("program")
        library.warning("library")
        logging.getLogger().warning("root")
        run.logs("info,root")
        logging.getLogger(f"{LOGGER}.part").warning("part")
        library.warning("library, asked for")
        run.logs("info,numpy.fft,numpy")
        library.warning("once")
        logger.warning("no more")

    assert bodies(place.only()) == ["program", "part", "library, asked for", "once"]


def test_a_logger_that_comes_later_is_heard_from_its_first_line_on(place: Here) -> None:
    with otel_ddp.init() as run:
        run.logs()
        logging.getLogger(f"later_{os.getpid()}").warning("heard")

    assert bodies(place.only()) == ["heard"]


@pytest.mark.parametrize("words", ["verbose", "info,,root", ""])
def test_a_wrong_choice_raises_before_the_first_step_and_is_one_line_after_it(
    words: str, place: Here, logger: logging.Logger, caplog: pytest.LogCaptureFixture
) -> None:
    with otel_ddp.init() as run:
        with pytest.raises(ConfigError, match="must begin with a level"):
            run.logs(words)
        run.logs()
        run.log({"loss": 1.0}, step=1)
        run.logs(words)
        run.logs(words)
        logger.warning("still heard")

    assert bodies(place.only()) == ["still heard"]
    assert caplog.text.count("Log lines are recorded as before") == 1


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        (
            logging.WARNING,
            "Log lines are asked for from INFO on, and no logger of this program makes them: "
            'logging.basicConfig(level="INFO") lets them, OTEL_DDP_LOGS=info,root hears every '
            "logger.",
        ),
        (logging.INFO, None),
    ],
)
def test_who_asks_for_lines_that_no_logger_makes_is_told_once(
    level: int,
    expected: str | None,
    place: Here,
    logger: logging.Logger,
    caplog: pytest.LogCaptureFixture,
) -> None:
    logger.setLevel(level)
    with otel_ddp.init() as run:
        run.logs(f"info,{LOGGER}")
        for step in range(2):
            run.log({"loss": 1.0}, step=step)
            run._check_agent(0)

    assert caplog.messages == ([] if expected is None else [expected])


def test_what_handlers_there_are_and_what_python_prints_stays_as_it_is(
    place: Here, logger: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    logger.propagate = False
    logger.handlers.clear()
    # It has the standard error of before the test.
    shown = logging.StreamHandler(sys.stderr)
    shown.setLevel(logging.WARNING)
    last, logging.lastResort = logging.lastResort, shown
    before, logging.root.handlers[:] = list(logging.root.handlers), []
    try:
        with otel_ddp.init() as run:
            run.logs(f"error,root,{LOGGER}")
            logger.warning("printed by Python")
            logging.basicConfig(format="%(message)s", stream=io.StringIO())
            (configured,) = logging.root.handlers
            logging.root.error("heard")
            logger.handlers.clear()
            logger.error("printed and heard")
            assert logging.root.handlers == [configured]
    finally:
        logging.root.handlers[:] = before
        logging.lastResort = last

    assert capsys.readouterr().err == "printed by Python\nprinted and heard\n"
    assert bodies(place.only()) == ["heard", "printed and heard"]


def test_an_exception_has_the_attributes_of_the_conventions(
    place: Here, logger: logging.Logger
) -> None:
    with otel_ddp.init() as run:
        run.logs()
        try:
            raise ConfigError("token=hf_abcdefghijklmnopqrstuvwx")
        except ConfigError:
            logger.exception("it failed")

    (line,) = lines(place.only())
    attributes = line["attributes"]
    assert attributes["exception.type"] == "otel_ddp.errors.ConfigError"
    assert attributes["exception.message"] == "token=[hidden]"
    assert attributes["exception.stacktrace"].startswith("Traceback (most recent call last):\n")
    assert "hf_" not in attributes["exception.stacktrace"]


def test_of_a_line_that_cannot_be_formatted_the_bare_text_is_kept(
    place: Here, logger: logging.Logger
) -> None:
    logger.propagate = False
    with otel_ddp.init() as run:
        run.logs()
        logger.warning("%d items", "three")

    assert bodies(place.only()) == ["%d items"]
    assert errors.failures == {}


class Loud:
    """Its text logs by itself."""

    def __str__(self) -> str:
        logging.getLogger(LOGGER).warning("asked for %s", self)
        return "loud"


def test_neither_we_nor_a_text_that_logs_by_itself_come_round_again(
    place: Here, logger: logging.Logger, caplog: pytest.LogCaptureFixture
) -> None:
    logger.propagate = False
    with otel_ddp.init() as run:
        run.logs(f"info,root,{LOGGER}")
        errors.log.warning("of ours")
        logging.getLogger("opentelemetry.sdk").warning("of the SDK")
        logger.warning("%s", Loud())

    journal = place.only()
    assert bodies(journal) == ["loud"]
    assert journal.total(catalog.OTEL_DDP_VALUES_REFUSED, why="reentered") == 1


def test_long_lines_are_cut_in_the_middle_and_fit_into_the_smallest_journal(
    place: Here, logger: logging.Logger
) -> None:
    os.environ["OTEL_DDP_JOURNAL_BYTES"] = "128k"

    def deep(calls: int) -> None:
        if not calls:
            raise ValueError("\N{PILE OF POO}" * 9000)
        deep(calls - 1)

    with otel_ddp.init() as run:
        run.logs()
        try:
            deep(200)
        except ValueError:
            logger.exception("a%sz", "\N{PILE OF POO}" * 100_000, extra={"big": "b" * 10**6})

    (line,) = lines(place.only())
    assert (line["body"][0], line["body"][-1]) == ("a", "z")
    assert "\n[...]\n" in line["body"]
    assert len(line["attributes"]["exception.stacktrace"]) <= 8000


def test_what_comes_too_fast_is_left_out_and_counted_and_errors_come_through(
    place: Here, logger: logging.Logger, caplog: pytest.LogCaptureFixture
) -> None:
    logger.propagate = False
    with otel_ddp.init() as run:
        run.logs()
        for number in range(5000):
            logger.info("line %d", number)
        logger.error("an error")
        assert run._records is not None
        ring_bytes = run._records.recorder.writer.ring_bytes

    journal = place.only()
    kept = bodies(journal)
    left_out = journal.total(catalog.OTEL_DDP_VALUES_REFUSED, why="log_rate")
    assert len(kept) + left_out == 5001
    # Three quarters of a quarter of the ring, and what flows in meanwhile.
    assert ring_bytes * 0.1 < len(kept) * 512 < ring_bytes * 0.25
    assert kept[-1] == "an error"
    (warning,) = caplog.messages
    assert warning.startswith("Log lines are left out of what is recorded")


def test_a_forked_child_is_not_heard_by_the_parents_journal(
    place: Here, logger: logging.Logger
) -> None:
    with otel_ddp.init() as run:
        run.logs()
        if not (child := os.fork()):
            logger.warning("in the child")
            os._exit(hears())
        _, status = os.waitpid(child, 0)
        logger.warning("in the parent")

    assert status == 0
    assert bodies(place.only()) == ["in the parent"]


def test_after_the_end_of_its_run_nothing_of_ours_is_on_any_logger(
    place: Here, logger: logging.Logger
) -> None:
    run = otel_ddp.init()
    run.logs(f"info,root,{LOGGER}")
    run.finish()
    logger.warning("too late")

    assert lines(place.only()) == []
    assert not hears()


def test_who_hears_all_loggers_after_us_may_stay_where_it_is(
    place: Here, logger: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = []
    run = otel_ddp.init(run="first")
    run.logs()
    ours: Any = logging.Logger.callHandlers

    def both(self: logging.Logger, record: logging.LogRecord) -> None:
        theirs.append(record.getMessage())
        ours(self, record)

    with monkeypatch.context() as changes:
        changes.setattr(logging.Logger, "callHandlers", both)
        run.finish()
        with otel_ddp.init(run="second") as run:
            run.logs()
            logger.warning("heard by both")
    with otel_ddp.init(run="third") as run:
        run.logs()

    first, second, _ = sorted(place.read(), key=lambda each: str(each.identity["run"]))
    assert (bodies(first), bodies(second)) == ([], ["heard by both"])
    assert theirs == ["heard by both"]
    assert not hears()


def test_the_exception_that_ends_a_run_is_recorded_once_with_its_stack_trace(place: Here) -> None:
    def train() -> None:
        with otel_ddp.init() as run:
            run.log({"loss": 1.0}, step=3)
            raise ZeroDivisionError("of password=abcdefgh")

    with pytest.raises(ZeroDivisionError):
        train()

    journal = place.only()
    (record,) = journal._documents(layout.EVENT)
    assert (record["name"], record["body"]) == (
        *("exception",),
        "ZeroDivisionError: of password=[hidden]",
    )
    assert (record["severity"], record["severity_number"]) == ("FATAL", 21)
    assert (record["step"], record["trace"]) == (3, "step/3")
    attributes = record["attributes"]
    assert attributes["exception.type"] == "ZeroDivisionError"
    assert attributes["exception.message"] == "of password=[hidden]"
    assert attributes["exception.stacktrace"].endswith("ZeroDivisionError: of password=[hidden]\n")
    assert (journal.state, journal.reason) == ("failed", record["body"])


def test_a_process_that_leaves_by_sys_exit_has_no_exception(place: Here) -> None:
    with pytest.raises(SystemExit), otel_ddp.init():
        sys.exit(3)

    assert place.only().events == {}
