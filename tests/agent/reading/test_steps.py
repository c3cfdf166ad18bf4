"""Steps put together again: whole, in pieces, from the middle, with gaps, and from garbage."""

from __future__ import annotations

import json
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from make import phases_of, seconds_in
from otel_ddp.agent.reading.steps import StepStream
from otel_ddp.diagnosis.step_facts import facts_of
from otel_ddp.diagnosis.steps import Call, Part, Step
from otel_ddp.journal import layout
from otel_ddp.journal.parser import Name, Steps
from otel_ddp.vocabulary.words import PHASES

CREATED = 1_700_000_000_000_000_000
OTHER, DATA, FORWARD, BACKWARD, WAIT, OPTIMIZER = (
    PHASES[word] for word in ("other", "data", "forward", "backward", "comm_wait", "optimizer")
)
BUFFERS = WAIT | layout.OF_BUFFERS
MS = 1_000_000


def word(code: int, value: int) -> int:
    return code << layout.CODE_SHIFT | value


def told(*pairs: tuple[int, int]) -> list[int]:
    """Words of codes and values; times are in milliseconds."""
    counts = (layout.STEP_NUMBER, layout.STEP_SKIPPED, layout.STEP_RETRIES, layout.STEP_WORK)
    return [word(code, value if code in counts else value * MS) for code, value in pairs]


def feed(stream: StepStream, words: list[int], offset: int = 0) -> list[Step]:
    return stream.feed(Steps(offset, struct.pack(f"<{len(words)}Q", *words), 0, False))


def whole(words: list[int]) -> list[Step]:
    return feed(StepStream(CREATED), words)


def parts(step: Step) -> list[tuple[int, int, int]]:
    """In milliseconds since the journal was made."""
    return [
        (code, (began - CREATED) // MS, (ended - CREATED) // MS)
        for code, began, ended in step.parts.each()
    ]


def adds_up(step: Step) -> bool:
    edges = [step.began_ns, *(part.ended_ns for part in step.parts.each())]
    contiguous = [part.began_ns for part in step.parts.each()] == edges[:-1]
    return contiguous and step.ended_ns == edges[-1] and edges == sorted(edges)


# Two steps with every kind of word, after an evaluation that belongs to no step.
STORY = told(
    (PHASES["eval"], 1),
    (OTHER, 5),
    (layout.STEPS_BEGAN, 10),
    (DATA, 10),
    (BUFFERS, 14),
    (FORWARD, 15),
    (BACKWARD, 20),
    (WAIT, 30),
    (OPTIMIZER, 32),
    (layout.STEP_NUMBER, 7),
    (layout.STEP_GC, 2),
    (layout.STEP_GC, 1),
    (layout.STEP_SKIPPED, 1),
    (layout.STEP_RETRIES, 3),
    (layout.STEP_WORK, 512),
    (layout.STEP_ENDED, 40),
    (OTHER, 40),
    (FORWARD, 42),
    (OTHER, 50),
    (layout.STEP_NUMBER, 8),
    (layout.STEP_ENDED, 51),
    (OTHER, 51),
)


def test_a_step_is_whole_though_its_clock_is_known_better_in_its_midst() -> None:
    usual = whole(STORY)
    for at in range(len(STORY)):
        stream = StepStream(CREATED)
        before = feed(stream, STORY[:at])
        stream.created_ns = CREATED + 70 * MS
        found = before + feed(stream, STORY[at:], at)

        assert [adds_up(each) for each in found] == [True, True]
        assert [each.number for each in found] == [each.number for each in usual]
        assert [each.took_ns for each in found] == [each.took_ns for each in usual]
        assert found[1].ended_ns == usual[1].ended_ns + 70 * MS * (len(before) < 2)


def test_a_step_has_all_its_parts() -> None:
    first, second = whole(STORY)

    assert (first.began_ns, first.ended_ns) == (CREATED + 10 * MS, CREATED + 40 * MS)
    assert parts(first) == [
        (DATA, 10, 14),
        (BUFFERS, 14, 15),
        (FORWARD, 15, 20),
        (BACKWARD, 20, 30),
        (WAIT, 30, 32),
        (OPTIMIZER, 32, 40),
    ]
    assert parts(second) == [(OTHER, 40, 42), (FORWARD, 42, 50), (OTHER, 50, 51)]
    assert adds_up(first)
    assert adds_up(second)
    assert phases_of(first) == {DATA, WAIT, FORWARD, BACKWARD, OPTIMIZER}
    # Both kinds of waiting are waiting.
    assert seconds_in(first, WAIT) == pytest.approx(0.003)
    assert seconds_in(first, PHASES["eval"]) == 0.0
    # Numbers of a step belong to that step alone.
    assert (first.number, first.gc_s, first.skipped, first.retries) == (7, 0.003, True, 3)
    assert (second.number, second.gc_s, second.skipped, second.retries) == (8, 0.0, False, 0)
    assert (first.work, second.work) == (512, 0)


@pytest.mark.parametrize("size", [1, 2, 7])
def test_steps_are_the_same_however_their_words_are_split_into_records(size: int) -> None:
    stream = StepStream(CREATED)

    found = []
    for at in range(0, len(STORY), size):
        found += feed(stream, STORY[at : at + size], at)

    assert found == whole(STORY)


def test_the_phase_that_is_open_when_steps_begin_goes_on() -> None:
    (step,) = whole(told((DATA, 1), (layout.STEPS_BEGAN, 2), (layout.STEP_ENDED, 6)))

    assert parts(step) == [(DATA, 2, 6)]


def test_an_agent_that_starts_late_begins_with_the_next_whole_step() -> None:
    for late in range(4, STORY.index(word(layout.STEP_ENDED, 40 * MS)) + 1):
        found = feed(StepStream(CREATED), STORY[late:], late)

        assert found == whole(STORY)[1:]


def test_a_step_of_which_words_are_lost_is_dropped() -> None:
    words = STORY + told(
        (FORWARD, 52), (layout.STEP_NUMBER, 9), (layout.STEP_ENDED, 60), (DATA, 60)
    )
    expected = whole(words)
    ends = [at for at, each in enumerate(words) if each >> 56 == layout.STEP_ENDED]
    # Of the first step, and of the second one.
    for first, last, left in ((5, 8, [1, 2]), (ends[0] + 1, ends[1] - 1, [0, 2])):
        stream = StepStream(CREATED)

        found = feed(stream, words[:first])
        for at in range(last, len(words)):
            found += feed(stream, words[at : at + 1], at)

        assert found == [expected[at] for at in left]


def test_a_phase_that_took_no_time_does_not_divide_another_one() -> None:
    words = told((layout.STEPS_BEGAN, 0), (BACKWARD, 1), (WAIT, 5), (BACKWARD, 5))

    (step,) = whole(words + told((layout.STEP_ENDED, 9)))

    assert parts(step) == [(OTHER, 0, 1), (BACKWARD, 1, 9)]


def test_an_impossible_time_spoils_only_the_steps_that_have_it() -> None:
    nowhere = 2**50
    words = told((layout.STEPS_BEGAN, 0), (layout.STEP_ENDED, 10), (FORWARD, 12))
    words += [word(DATA, nowhere)]
    words += told((layout.STEP_ENDED, 20), (OTHER, 20), (layout.STEP_ENDED, 30))

    found = whole(words)

    assert [parts(step) for step in found] == [[(OTHER, 0, 10)], [(OTHER, 20, 30)]]


def test_a_step_of_very_many_words_is_kept_small_and_adds_up() -> None:
    stream = StepStream(CREATED)
    feed(stream, told((layout.STEPS_BEGAN, 0)))
    offset, time = 1, 0
    for _ in range(20):
        words = []
        for _ in range(500):
            words += [word(FORWARD, time), word(WAIT, time + 300)]
            time += 1000
        assert feed(stream, words, offset) == []
        offset += len(words)

    (step,) = feed(stream, [word(layout.STEP_ENDED, time)], offset)

    assert len(step.parts.codes) == 2002
    assert adds_up(step)
    assert seconds_in(step, FORWARD) == pytest.approx(10_000 * 300 / 1e9)
    assert seconds_in(step, WAIT) == pytest.approx(10_000 * 700 / 1e9)
    assert phases_of(step) == {FORWARD, WAIT}


def test_phases_of_a_later_version_keep_their_code_and_other_words_are_skipped() -> None:
    words = told((layout.STEPS_BEGAN, 0), (0x2A, 2), (0xEE, 3), (0xFF, 4), (layout.STEP_ENDED, 5))

    (step,) = whole(words)

    assert parts(step) == [(OTHER, 0, 2), (0x2A, 2, 5)]
    assert [*step.parts.each()][1] == Part(0x2A, CREATED + 2 * MS, CREATED + 5 * MS)


CODES = st.sampled_from([*range(9), BUFFERS, *range(0x80, 0x88), 0x33, 0x7F, 0xFF])
TIMES = st.one_of(st.integers(0, 1000), st.integers(0, 2**56 - 1))
WORDS = st.lists(st.one_of(st.builds(word, CODES, TIMES), st.integers(0, 2**64 - 1)))


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 3), WORDS)))
def test_whatever_the_words_say_the_steps_add_up(pieces: list[tuple[int, list[int]]]) -> None:
    stream = StepStream(CREATED)
    offset = 0
    for lost, words in pieces:
        offset += lost
        for step in feed(stream, words, offset):
            assert adds_up(step)
            spent = sum(seconds_in(step, phase) for phase in phases_of(step))
            assert spent == pytest.approx(step.took_ns / 1e9)
        offset += len(words)


# -- the calls to process groups

GATHER = ("0:ab", "shard", "allgather", -1, "forward", "shard")
SEND = ("1:cd", "pp", "send", 3, "other", "pp")
NAMES = {4: Name(json.dumps(GATHER), ""), 700: Name(json.dumps(SEND), ""), 6: Name("7", "")}


def call(name: int, after: int, idle: int = 0) -> int:
    """*idle*: of the time before it."""
    value = name << layout.CALL_SHIFT | idle << layout.CALL_IDLE_SHIFT
    return word(layout.STEP_CALL, value | after * MS >> layout.CALL_UNIT_SHIFT)


def step_with(*calls: int, count: int | None = None, began: int = 10, idle: int = 0) -> list[int]:
    words = told((layout.STEPS_BEGAN, began), (DATA, began), (FORWARD, began + 4))
    many = len(calls) if count is None else count
    words += [*calls, word(layout.STEP_CALLS, idle << layout.CALL_IDLE_SHIFT | many)]
    return words + told((layout.STEP_NUMBER, 7), (layout.STEP_ENDED, began + 10))


@pytest.mark.parametrize("size", [1, 3, 100])
def test_a_step_tells_each_call_and_when_it_was_made(size: int) -> None:
    stream = StepStream(CREATED, NAMES)
    words = step_with(call(4, 1, 90), call(700, 2, 7), call(4, 6, 255), idle=128)
    words += step_with(call(4, 1), call(700, 3), call(4, 5), began=20)[1:]

    found = [
        facts
        for at in range(0, len(words), size)
        for facts in facts_of(feed(stream, words[at : at + size], at))
    ]

    first, second = [each.calls for each in found]
    assert first is not None
    assert second is not None
    assert first.each == (Call(*GATHER), Call(*SEND), Call(*GATHER))
    assert first.idle == bytes([7, 255, 128])
    # In units of 256 ns since the step began.
    assert [at - CREATED - 10 * MS for at in first.at_ns] == [999_936, 1_999_872, 5_999_872]
    assert [at - CREATED - 20 * MS for at in second.at_ns] == [999_936, 2_999_808, 4_999_936]
    assert second.each is first.each


@pytest.mark.parametrize(
    "words",
    [
        step_with(call(4, 1), count=2),
        step_with(call(4, 1), call(5, 2)),
        step_with(call(4, 1), call(6, 2)),
        [each for each in step_with(call(4, 1)) if each >> 56 != layout.STEP_CALLS],
    ],
    ids=["one is missing", "a name is missing", "a name is no call", "not all are noted"],
)
def test_calls_are_known_whole_or_not_at_all(words: list[int]) -> None:
    (step,) = feed(StepStream(CREATED, NAMES), words)

    assert step.calls is None
    assert step.number == 7


def test_calls_and_bytes_that_were_added_up_are_no_arrivals() -> None:
    names = {
        **NAMES,
        5: Name(json.dumps((*GATHER[:4], "backward", "shard")), ""),
        6: Name(json.dumps((*GATHER[:4], "eval", "shard")), ""),
    }
    most = (1 << layout.CALL_SHIFT) - 1
    counts = {4: 3, 5: 2, 6: 9, 700: 8, 701: 1}
    words = [word(layout.STEP_CALL_COUNT, n << layout.CALL_SHIFT | c) for n, c in counts.items()]
    for name, size in ((4, most), (4, 7), (5, 100), (6, 50), (701, 5)):
        words.append(word(layout.STEP_CALL_BYTES, name << layout.CALL_SHIFT | size))
    words = [*step_with()[:3], *words, *told((layout.STEP_NUMBER, 7), (layout.STEP_ENDED, 20))]

    (step,) = feed(StepStream(CREATED, names), words)

    assert step.calls is None
    # All phases but those that are in no usual step; a barrier has no bytes.
    assert step.collectives == {
        ("shard", "all_gather"): [5, most + 107],
        ("pp", "send"): [8, 0],
    }


@pytest.mark.parametrize(
    ("op", "operation"),
    [
        ("allreduce_coalesced", "all_reduce"),
        ("reduce_scatter_tensor_coalesced", "reduce_scatter"),
        ("alltoall_base", "all_to_all"),
        ("gather", "gather"),
        ("new_window", "other"),
    ],
)
def test_operations_have_the_names_by_which_they_are_called(op: str, operation: str) -> None:
    assert Call("0:ab", "", op, -1, "forward", "world").kind == ("world", operation)
