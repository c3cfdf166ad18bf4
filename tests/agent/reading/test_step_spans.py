"""Which steps become spans, why, how many at most, and what the spans contain."""

from __future__ import annotations

import random
from typing import Any

from make import labels_of, step_of
from otel_ddp.agent.reading.documents import StepSpans
from otel_ddp.diagnosis.steps import Step
from otel_ddp.journal.layout import OF_BUFFERS
from otel_ddp.vocabulary.words import PHASES

MS = 1_000_000
S = 1000 * MS
NOW = 1_700_000_000_000_000_000
NEVER = 10**9
PLAIN = ((PHASES["forward"], 40), (PHASES["backward"], 50), (PHASES["optimizer"], 10))


def made(
    number: int | None,
    pieces: tuple[tuple[int, int], ...] = PLAIN,
    began_ns: int | None = None,
    **said: Any,
) -> Step:
    """A step of phases and milliseconds."""
    at_ns = NOW + (number or 0) * 10 * S if began_ns is None else began_ns
    return step_of(number, at_ns, [(code, ms * MS) for code, ms in pieces], **said)


def slow(number: int | None, began_ns: int) -> Step:
    """Four times as long as all others."""
    return made(number, ((PHASES["forward"], 400),), began_ns)


def known() -> StepSpans:
    """It has seen how long steps take."""
    chosen = StepSpans()
    for _ in range(199):
        chosen.spans(made(None), labels_of(0), NEVER)
    return chosen


def took(number: int, nanoseconds: int) -> Step:
    return step_of(number, NOW + number * 10 * S, [(PHASES["forward"], nanoseconds)])


def reason(spans: list[dict[str, Any]]) -> str | None:
    return spans[0]["attributes"]["reason"] if spans else None


def alone(step: Step, every: int = NEVER) -> list[dict[str, Any]]:
    return StepSpans().spans(step, labels_of(0), every)


# -- which


def test_of_usual_steps_every_hundredth_is_a_span() -> None:
    chosen = StepSpans()

    found = {number: reason(chosen.spans(made(number), labels_of(0), 100)) for number in range(301)}

    shown = {number: why for number, why in found.items() if why}
    assert shown == dict.fromkeys((0, 100, 200, 300), "sampled")


def test_a_step_without_a_number_has_no_trace() -> None:
    chosen = known()

    assert chosen.spans(slow(None, NOW), labels_of(0), NEVER) == []


# -- slow


def test_in_a_job_that_varies_as_usual_hardly_a_step_is_slow() -> None:
    dice = random.Random(1)
    chosen = StepSpans()
    slow = 0
    for number in range(1, 5_001):
        step = took(number, int(100 * MS * dice.lognormvariate(0, 0.15)))
        slow += reason(chosen.spans(step, labels_of(0), NEVER)) == "slow"

    assert 0 < slow < 50


# -- how many


def test_a_broken_job_sends_twenty_spans_a_minute() -> None:
    chosen = known()
    went: list[int] = []
    for tenth in range(10 * 120):
        # One step in three is slow: that is not usual yet.
        for _ in range(2):
            chosen.spans(made(None), labels_of(0), 0)
        step = slow(tenth, NOW + tenth * S // 10)
        if chosen.spans(step, labels_of(0), 0):
            went.append(step.ended_ns)

    assert [at - went[0] for at in went] == [number * 3 * S for number in range(40)]


def test_sampled_steps_are_sent_beside_any_number_of_slow_ones() -> None:
    chosen = known()
    spans = []
    for number in range(1, 101):
        chosen.spans(made(None), labels_of(0), 100)
        spans.append(chosen.spans(slow(number, NOW + number * MS), labels_of(0), 100))

    assert [bool(each) for each in spans] == [True] + [False] * 98 + [True]
    assert spans[-1][0]["attributes"] == {"reason": "sampled,slow"}


# -- the contents of spans


def test_a_step_is_a_span_of_its_phases() -> None:
    waits = ((PHASES["comm_wait"] | OF_BUFFERS, 2), (PHASES["comm_wait"], 3), (0x2A, 4))
    step = made(100, (*PLAIN, *waits), gc_s=0.25)

    root, *children = alone(step, 100)

    assert (root["name"], root["parent"], root["step"]) == ("step", "", 100)
    assert (root["start"], root["end"]) == (step.began_ns, step.ended_ns)
    assert root["attributes"] == {"reason": "sampled", "gc_s": 0.25}
    assert [(each["name"], each["attributes"]) for each in children] == [
        ("forward", {}),
        ("backward", {}),
        ("optimizer", {}),
        ("comm_wait", {"sync": "buffers"}),
        ("comm_wait", {"sync": "gradients"}),
        ("other", {}),
    ]
    assert {each["parent"] for each in children} == {root["id"]}
    edges = [root["start"], *(each["end"] for each in children)]
    assert [each["start"] for each in children] == edges[:-1]
    assert edges[-1] == root["end"]


def test_a_step_that_is_read_twice_is_one_span_and_one_that_is_trained_twice_another() -> None:
    first = alone(made(100), 100)
    assert first == alone(made(100), 100)
    again = alone(made(100, began_ns=NOW), 100)
    elsewhere = StepSpans().spans(made(100), labels_of(0, run="other"), 100)
    of_rank_1 = StepSpans().spans(made(100), labels_of(1), 100)

    # All ranks share the trace of a step, and nothing else.
    assert {each["trace"] for each in first + of_rank_1} == {"step/100"}
    ids = [{each["id"] for each in spans} for spans in (first, again, elsewhere, of_rank_1)]
    assert len(set.union(*ids)) == sum(map(len, ids))


def test_of_very_many_parts_the_longest_are_shown_at_their_times() -> None:
    rounds = [((PHASES["forward"], 10 + n), (PHASES["comm_wait"], 1)) for n in range(70)]
    pieces = tuple(piece for each in rounds for piece in each)
    step = made(100, pieces)

    _, *children = alone(step, 100)

    longest = sorted(step.parts.each(), key=lambda part: part.began_ns - part.ended_ns)[:64]
    assert [(each["start"], each["end"]) for each in children] == sorted(
        (part.began_ns, part.ended_ns) for part in longest
    )
    assert {each["name"] for each in children} == {"forward"}


def test_where_not_every_step_is_measured_the_next_measured_one_is_sampled() -> None:
    spans = StepSpans()
    bare = ((PHASES["unmeasured"], 100),)
    found = {
        number: spans.spans(made(number, PLAIN if number in (3, 13) else bare), labels_of(0), 10)
        for number in range(1, 20)
    }

    assert [number for number, each in found.items() if each] == [13]
    assert [each["name"] for each in found[13]] == ["step", "forward", "backward", "optimizer"]
