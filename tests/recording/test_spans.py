"""Spans, events, exceptions and phases: who is inside whom, how long it took, what went wrong."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from typing import Any

import pytest

import otel_ddp
from conftest import Here
from odd_values import Rude
from otel_ddp.errors import ConfigError
from otel_ddp.vocabulary import catalog
from otel_ddp.vocabulary.catalog import TRAINING_CHECKPOINT_DURATION, TRAINING_CHECKPOINT_TIMESTAMP
from otel_ddp.vocabulary.words import PHASES


def test_a_span_knows_its_parent_and_shares_its_trace(place: Here) -> None:
    with otel_ddp.init() as run:
        run.log({"loss": 1.0}, step=7)
        with run.span("outer", shard=3), run.span("inner"):
            run.event("now", why="because")
        with run.span("next"):
            pass

    journal = place.only()
    outer, inner, after = (journal.spans[name] for name in ("outer", "inner", "next"))
    assert ("", outer["id"], "") == (outer["parent"], inner["parent"], after["parent"])
    assert {"step/7"} == {each["trace"] for each in journal.spans.values()}
    assert (outer["attributes"], outer["step"], outer["error"]) == ({"shard": 3}, 7, "")
    assert outer["start"] <= inner["start"] <= inner["end"] <= outer["end"]
    event = journal.events["now"]
    assert (inner["id"], "step/7") == (event["span"], event["trace"])
    assert event["attributes"] == {"why": "because"}
    assert inner["start"] <= event["time"] <= inner["end"]


def test_a_trace_goes_on_where_the_step_changes_inside(place: Here) -> None:
    with otel_ddp.init() as run, run.span("epoch"):
        run.log({"loss": 1.0}, step=1)
        with run.span("step"):
            pass

    journal = place.only()
    of_run = journal.facts["span"]
    assert {of_run["trace"]} == {each["trace"] for each in journal.spans.values()}
    assert journal.spans["epoch"]["parent"] == of_run["id"]


def test_a_span_of_a_run_that_has_ended_is_around_nothing_of_the_next(place: Here) -> None:
    with otel_ddp.init() as first, first.span("left open"):
        first.finish()
        with otel_ddp.init() as second, second.span("of the second"):
            second.event("now")

    (journal,) = (each for each in place.read() if each.spans)
    span = journal.spans["of the second"]
    of_run = journal.facts["span"]
    assert (span["parent"], span["trace"]) == (of_run["id"], of_run["trace"])
    assert journal.events["now"]["span"] == span["id"]


def test_tasks_keep_their_own_parents(place: Here) -> None:
    run = otel_ddp.init()

    async def task(name: str) -> None:
        with run.span(name):
            await asyncio.sleep(0)
            with run.span(f"in {name}"):
                await asyncio.sleep(0)

    async def main() -> None:
        await asyncio.gather(task("one"), task("two"))

    asyncio.run(main())
    run.finish()

    spans = place.only().spans
    for name in ("one", "two"):
        assert spans[name]["id"] == spans[f"in {name}"]["parent"]


def test_an_exception_is_written_down_and_goes_on_untouched(place: Here) -> None:
    error = KeyError("mine")
    with otel_ddp.init() as run:
        with pytest.raises(KeyError) as raised, run.phase("eval"), run.span("inner"):
            raise error
        with run.span("next"):
            pass

    assert raised.value is error
    assert (error.__context__, error.__cause__) == (None, None)
    spans = place.only().spans
    said = ("KeyError: 'mine'", ["KeyError", "KeyError"])
    assert {(each["error"], *each["exception"]) for each in (spans["inner"], spans["eval"])} == {
        (said[0], *said[1])
    }
    of_run = place.only().facts["span"]["id"]
    assert (spans["next"]["error"], spans["next"]["parent"]) == ("", of_run)
    assert "exception" not in spans["next"]
    assert place.only().phase == "other"


@pytest.mark.parametrize("error", [StopIteration(), GeneratorExit(), KeyboardInterrupt()])
def test_even_exceptions_that_steer_python_pass(error: BaseException, place: Here) -> None:
    run = otel_ddp.init()

    with pytest.raises(type(error)) as raised, run.span("inner"):
        raise error

    assert raised.value is error
    run.finish()
    assert type(error).__name__ == place.only().spans["inner"]["error"]


def test_attributes_are_scalars_or_short_text(place: Here) -> None:
    with otel_ddp.init() as run:
        odd = {"": 1, "sur\ud800": "\ud800"}
        run.event("now", name="own", self=1, rude=Rude(), inf=float("inf"), items=[1, 2], **odd)
        with run.span("then", name="as well", long="x" * 5000):
            pass

    plain = {"name": "own", "self": 1, "rude": "<Rude>", "inf": "inf", "items": "[1, 2]"}
    assert place.only().events["now"]["attributes"] == {**plain, "?": 1, "sur?": "?"}
    attributes = place.only().spans["then"]["attributes"]
    assert (attributes["name"], len(attributes["long"])) == ("as well", 1024)


@pytest.mark.parametrize("name", [None, "", 1j, Rude()], ids=lambda name: type(name).__name__)
def test_a_name_that_is_none_costs_the_span_and_not_the_training(
    name: Any, place: Here, caplog: pytest.LogCaptureFixture
) -> None:
    ran = []
    with otel_ddp.init() as run:
        for _ in range(2):
            with run.span(name), run.phase(name):
                ran.append(1)
            run.event(name)

    journal = place.only()
    assert ran == [1, 1]
    assert (journal.spans, journal.events) == ({}, {})
    assert journal.total(catalog.OTEL_DDP_VALUES_REFUSED, why="name") == 6
    assert len(caplog.messages) == 2


def test_attributes_too_large_cost_the_span_and_close_the_phase(
    place: Here, caplog: pytest.LogCaptureFixture
) -> None:
    with otel_ddp.init() as run, run.phase("eval"):
        run.event("huge", **{f"key{n}": "ñ" * 2000 for n in range(64)})

    journal = place.only()
    assert ({"eval"}, set()) == (set(journal.spans), set(journal.events))
    assert caplog.messages == ["'huge' was not recorded: it is too large."]


# -- phases


def seconds(journal: Any, phase: str) -> float:
    return float(journal.total(catalog.TRAINING_PHASE_TIME, phase=phase, clock="host"))


def test_the_progress_says_the_phase_that_is_open(place: Here) -> None:
    run = otel_ddp.init()
    seen = [place.only().state]

    with run.phase("eval"):
        seen.append(place.only().phase)
        with run.phase("checkpoint"):
            seen.append(place.only().phase)
        seen.append(place.only().phase)
    seen += [place.only().phase, place.only().state]

    assert seen == ["starting", "eval", "checkpoint", "eval", "other", "running"]


def test_the_progress_says_the_last_step_and_since_when(place: Here) -> None:
    run = otel_ddp.init()
    seen = [place.only().progress]

    run.log({"loss": 0.5}, step=7)
    with run.phase("eval"):
        seen.append(place.only().progress)
        run.log({"loss": 0.5}, step=8)
    seen.append(place.only().progress)
    run.log({"loss": 0.5}, step=9)
    run.finish()
    seen.append(place.only().progress)

    assert [each.step for each in seen] == [None, 7, 8, 9]
    first, inside, after, last = seen
    assert first.phase_after_ns < inside.phase_after_ns
    assert inside.phase_after_ns < after.phase_after_ns == last.phase_after_ns
    assert inside.state_since_ns == after.state_since_ns < last.state_since_ns <= time.time_ns()


def test_a_phase_may_have_a_name_of_the_users_own(place: Here) -> None:
    with otel_ddp.init() as run, run.phase("rollout"):
        inside = place.only()

    assert inside.phase == "rollout"
    assert PHASES["other"] == inside.progress.phase_code
    assert seconds(place.only(), "other") > 0
    assert {"rollout"} == set(place.only().spans)


def test_a_checkpoint_is_a_histogram_and_a_time(place: Here) -> None:
    before_s = time.time()
    with otel_ddp.init() as run:
        for _ in range(3):
            with run.phase("checkpoint"):
                pass
    after_s = time.time()

    journal = place.only()
    total_s, *buckets = journal.histogram(TRAINING_CHECKPOINT_DURATION)
    assert sum(buckets) == 3
    assert 0 < total_s <= after_s - before_s
    assert before_s <= journal.total(TRAINING_CHECKPOINT_TIMESTAMP) <= after_s


def test_phases_of_threads_may_end_in_any_order(place: Here) -> None:
    opened, close = threading.Event(), threading.Event()
    run = otel_ddp.init()

    def save() -> None:
        with run.phase("checkpoint"):
            opened.set()
            close.wait()

    thread = threading.Thread(target=save)
    with run.phase("eval"):
        thread.start()
        opened.wait()
    after_eval = place.only()
    close.set()
    thread.join()
    run.finish()

    assert after_eval.phase == "checkpoint"
    assert sum(place.only().histogram(TRAINING_CHECKPOINT_DURATION)[1:]) == 1
    assert place.only().phase == "other"


def test_how_long_a_phase_may_take_is_known_while_it_lasts(place: Here) -> None:
    with otel_ddp.init() as run:
        with run.phase("checkpoint", expect_s=90):
            within = place.only().progress
            with run.phase("eval"):
                inside = place.only().progress
            again = place.only().progress
        after = place.only().progress
        with run.phase("checkpoint", expect_s=float("nan")):
            senseless = place.only().progress

    expected = [each.expect_ms for each in (within, inside, again, after, senseless)]
    assert expected == [90_000, 0, 90_000, 0, 0]


def test_the_exception_that_ends_a_run_is_recorded_once_with_its_stack_trace(place: Here) -> None:
    def train() -> None:
        with otel_ddp.init() as run:
            run.log({"loss": 1.0}, step=3)
            raise ConfigError("of password=abcdefgh")

    with pytest.raises(ConfigError):
        train()

    journal = place.only()
    (record,) = journal.events.values()
    assert (record["name"], record["body"]) == ("exception", "ConfigError: of password=[hidden]")
    assert (record["severity"], record["step"], record["trace"]) == ("FATAL", 3, "step/3")
    attributes = record["attributes"]
    assert attributes["exception.type"] == "otel_ddp.errors.ConfigError"
    assert attributes["exception.message"] == "of password=[hidden]"
    trace = attributes["exception.stacktrace"]
    assert trace.startswith("Traceback (most recent call last):\n")
    assert trace.endswith("ConfigError: of password=[hidden]\n")
    assert (journal.state, journal.reason) == ("failed", record["body"])


def test_a_long_stack_trace_is_cut_in_the_middle_and_fits_into_the_smallest_journal(
    place: Here,
) -> None:
    os.environ["OTEL_DDP_JOURNAL_BYTES"] = "128k"

    def deep(calls: int) -> None:
        if not calls:
            raise ValueError("\N{PILE OF POO}" * 9000 + "z")
        deep(calls - 1)

    with pytest.raises(ValueError, match="z"), otel_ddp.init():
        deep(200)

    attributes = place.only().events["exception"]["attributes"]
    trace = attributes["exception.stacktrace"]
    assert trace.startswith("Traceback (most recent call last):\n")
    assert "\n[...]\n" in trace
    assert trace.endswith("z\n")
    assert len(trace) <= 8000


def test_a_process_that_leaves_by_sys_exit_has_no_exception(place: Here) -> None:
    with pytest.raises(SystemExit), otel_ddp.init():
        sys.exit(3)

    assert place.only().events == {}


def test_an_alert_is_an_event_with_its_words_and_without_secrets(place: Here) -> None:
    with otel_ddp.init() as run:
        run.log({"loss": 1.0}, step=7)
        run.alert("loss rises", "at https://me:s3cret@host/, it is 3.2", "WARN")  # type: ignore[arg-type]

    alert = place.only().events["training.alert"]
    text = "at https://host/, it is 3.2"
    assert (alert["step"], alert["trace"]) == (7, "step/7")
    assert (alert["severity"], alert["body"]) == ("WARN", f"loss rises: {text}")
    assert alert["attributes"] == {"title": "loss rises", "text": text, "level": "warn"}


def test_an_alert_of_any_words_is_recorded_and_raises_nothing(
    place: Here, caplog: pytest.LogCaptureFixture
) -> None:
    os.environ["OTEL_DDP_JOURNAL_BYTES"] = "128k"
    odd: Any = Rude()
    with otel_ddp.init() as run:
        run.alert(odd)
        otel_ddp.alert("损失" * 5000, "上升" * 5000, odd)

    journal = place.only()
    alert = journal.events["training.alert"]["attributes"]
    assert (len(alert["title"]), len(alert["text"]), alert["level"]) == (200, 1000, "info")
    assert journal.total(catalog.OTEL_DDP_VALUES_REFUSED, why="name") == 1
    assert journal.total(catalog.OTEL_DDP_VALUES_REFUSED, why="value") == 1
    assert len(caplog.messages) == 2
