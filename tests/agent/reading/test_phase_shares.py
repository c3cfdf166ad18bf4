"""Time of steps that were not measured, as it is divided among phases."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fed import Fed
from make import phases_of, seconds_in, step_of
from otel_ddp.agent.reading.phase_shares import PhaseShares
from otel_ddp.diagnosis.steps import Step
from otel_ddp.vocabulary.words import PHASES, UNMEASURED, phase_word

MS = 1_000_000
USUAL = (("data", 10), ("forward", 30), ("backward", 50), ("comm_wait", 10))
NEVER_ESTIMATED = ("checkpoint", "eval", "compile")


def step(number: int, *pieces: tuple[str, int], began_ms: int = 0) -> Step:
    return step_of(number, began_ms * MS, [(PHASES[word], ms * MS) for word, ms in pieces])


def spent(step: Step) -> dict[str, float]:
    """Milliseconds by phase."""
    return {phase_word(code): round(seconds_in(step, code) * 1000, 3) for code in phases_of(step)}


def test_a_step_that_was_not_measured_is_taken_to_be_like_those_that_were() -> None:
    shares = PhaseShares()
    before, plain, after = shares.fill(
        [step(1, ("unmeasured", 7)), step(2, *USUAL), step(3, ("unmeasured", 50))]
    )

    assert spent(before) == {"other": 7}
    assert spent(plain) == dict(USUAL)
    assert spent(after) == {"data": 5, "forward": 15, "backward": 25, "comm_wait": 5}
    # They are known from one reading of the journal to the next.
    assert [spent(each) for each in shares.fill([step(4, ("unmeasured", 50))])] == [spent(after)]
    # The mean of the last 16 measured ones counts.
    others = [step(number, ("forward", 100)) for number in range(5, 21)]
    *_, mixed = shares.fill([*others[:1], step(5, ("unmeasured", 50))])
    assert spent(mixed) == {"data": 2.5, "forward": 32.5, "backward": 12.5, "comm_wait": 2.5}
    *_, new = shares.fill([*others[1:], step(21, ("unmeasured", 50))])
    assert spent(new) == {"forward": 50}


def test_what_is_always_measured_stays_as_it_is_and_the_rest_is_divided() -> None:
    shares = PhaseShares()
    measured = step(1, *USUAL, ("checkpoint", 900))
    saved = step(2, ("unmeasured", 30), ("checkpoint", 500), ("unmeasured", 70))

    _, found = shares.fill([measured, saved])

    assert spent(found) == {**dict(USUAL), "checkpoint": 500}


_PIECES = st.lists(
    st.tuples(st.sampled_from([*PHASES, *["unmeasured"] * 6]), st.integers(1, 10**4)),
    min_size=1,
    max_size=6,
)


@given(st.lists(_PIECES, min_size=1, max_size=30))
def test_no_time_is_lost_and_none_is_told_as_unmeasured(made: list[list[tuple[str, int]]]) -> None:
    steps = [step(number, *pieces) for number, pieces in enumerate(made)]
    found = PhaseShares().fill(steps)

    for before, after in zip(steps, found, strict=True):
        assert sum(after.parts.spans_ns) == after.took_ns == before.took_ns
        assert min(after.parts.spans_ns) >= 0
        assert UNMEASURED not in phases_of(after)
        for word in NEVER_ESTIMATED:
            assert seconds_in(after, PHASES[word]) == seconds_in(before, PHASES[word])


def test_a_device_that_tells_the_end_of_a_gap_alone_has_been_busy_all_the_time() -> None:
    shares = PhaseShares(on_device=True)
    end = step(5, ("unmeasured", 1), began_ms=499)
    first, *between, last = shares.fill(
        [step(1, *USUAL), end, step(6, *USUAL, began_ms=500)],
    )

    assert (first.number, last.number) == (1, 6)
    assert [each.number for each in between] == [2, 3, 4, 5]
    assert [(each.began_ns, each.ended_ns) for each in between] == [
        (at * 100 * MS, (at + 1) * 100 * MS) for at in range(1, 5)
    ]
    assert all(spent(each) == dict(USUAL) for each in between)


def test_a_gap_without_a_measured_step_before_it_stays_one() -> None:
    end = step(5, ("unmeasured", 1), began_ms=499)

    assert PhaseShares(on_device=True).fill([end]) == []


def test_a_journal_keeps_what_was_measured_apart_from_what_is_estimated(tmp_path: Path) -> None:
    fed = Fed(tmp_path)
    usual = {word: float(ms) for word, ms in USUAL}
    fed.rank.steps([usual, {"unmeasured": 60.0}, {"unmeasured": 40.0}, usual])
    fed.poll()
    new = fed.process.new

    assert [each.measured for each in new.steps] == [True, False, False, True]
    assert [each.took_ns for each in new.estimated] == [each.took_ns for each in new.steps]
    assert sum(seconds_in(each, PHASES["forward"]) for each in new.estimated) == pytest.approx(0.09)
    Fed.close_all()
