"""Which rank keeps the others waiting: what the detector finds in steps made here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from make import labels_of, step_facts, step_of
from otel_ddp.diagnosis.say import past_sentence
from otel_ddp.diagnosis.step_facts import StepFacts, facts_of
from otel_ddp.diagnosis.steps import Step
from otel_ddp.diagnosis.straggler import limits
from otel_ddp.diagnosis.verdict import Change
from otel_ddp.journal.layout import OF_BUFFERS
from otel_ddp.vocabulary.words import PHASES, WORK_PHASES
from ranks import Job, summary

MS = 1_000_000
S = 1000 * MS
NOW = 1_700_000_000 * S
OTHER, DATA, FORWARD = PHASES["other"], PHASES["data"], PHASES["forward"]


# --- Facts ----------------------------------------------------------------------------------------


def made(pieces: Sequence[tuple[int, int]], **given: Any) -> Step:
    """In milliseconds."""
    pieces = [(code, ms * MS) for code, ms in pieces]
    return step_of(given.pop("number", 7), NOW, pieces, **{"work": 5, **given})


def facts_of_one(step: Step) -> StepFacts:
    (facts,) = facts_of([step])
    return facts


def by_word(facts: StepFacts) -> dict[str, int]:
    """Milliseconds."""
    return {word: each_ns // MS for word, each_ns in zip(WORK_PHASES, facts.phases_ns, strict=True)}


USUAL = ((PHASES["data"], 10), (PHASES["comm_wait"] | OF_BUFFERS, 20), (PHASES["forward"], 30),
         (PHASES["comm_wait"], 15), (PHASES["optimizer"], 25))  # fmt: skip


def test_facts_hold_waits_and_unusual_phases_apart_from_work() -> None:
    facts = facts_of_one(made((*USUAL, (PHASES["eval"], 3), (11, 4))))

    assert (facts.number, facts.took_ns, facts.work) == (7, 107 * MS, 5)
    assert (facts.wait_ns, facts.unusual_ns) == (35 * MS, {"eval": 3 * MS})
    spent = {"data": 10, "forward": 30, "optimizer": 25, "other": 4}
    assert by_word(facts) == {**dict.fromkeys(WORK_PHASES, 0), **spent}


@pytest.mark.parametrize(
    ("pieces", "given", "unusual"),
    [
        ((*USUAL, (PHASES["checkpoint"], 1)), {}, True),
        (USUAL, {"skipped": True}, True),
        (USUAL, {}, False),
        (USUAL, {"gc_s": 0.002}, True),
        (USUAL, {"gc_s": 0.0009}, False),
    ],
)
def test_unusual_steps_are_tagged(
    pieces: tuple[tuple[int, int], ...], given: dict[str, Any], unusual: bool
) -> None:
    facts = facts_of_one(made(pieces, **given))

    assert facts.unusual is unusual
    assert facts.garbage_ns == (given.get("gc_s", 0) * S if unusual else 0)


@pytest.mark.parametrize("step", [made(USUAL, number=None), made(())], ids=["number", "length"])
def test_a_step_without_a_number_or_without_length_has_no_facts(step: Step) -> None:
    assert facts_of([step]) == []


# --- Who, and in which phase ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("late", "work", "named"),
    [
        (
            *({2: {"forward": 0.005, "backward": 0.010, "optimizer": 0.002}}, 1000),
            *([("straggler", "2", "compute")],),
        ),
        # Of this excess 75 % is in backward, because most of the work is.
        ({2: {"forward": 0.004, "backward": 0.014}}, 1000, [("straggler", "2", "compute")]),
        ({2: {"data": 0.010, "other": 0.010}}, 1000, [("straggler", "2", "mixed")]),
        # More tokens are no excuse where they are too few, or it is late in another phase.
        ({2: {"forward": 0.005, "backward": 0.010}}, 1050, [("straggler", "2", "compute")]),
        ({2: {"data": 0.02}}, 1300, [("straggler", "2", "data")]),
        (
            *({1: {"data": 0.03}, 2: {"backward": 0.02}}, 1000),
            *([("straggler", "1", "data"), ("straggler", "2", "backward")],),
        ),
    ],
)
def test_late_ranks_are_named_with_kind_and_phase(
    late: dict[int, dict[str, float]], work: int, named: list[tuple[str, str, str]]
) -> None:
    changes = Job().steps(200, late, {2: {"work": work}})

    assert sorted(summary(changes)) == [(*each, True) for each in named]


def test_more_tokens_that_explain_it_are_imbalance() -> None:
    changes = Job().steps(200, {1: {"forward": 0.005, "backward": 0.010}}, {1: {"work": 1200}})

    assert summary(changes) == [("imbalance", "1", "compute", True)]
    assert changes[0].verdict.evidence["more_to_do"] == pytest.approx(0.2)
    assert changes[0].verdict.sentence.startswith("work is unequal")


@pytest.mark.parametrize(
    ("ranks", "late"),
    [
        (4, {1: {"backward": 0.004}}),
        (3, {0: {"backward": 0.02}, 2: {"backward": 0.02}}),
        (4, {rank: {"backward": 0.05} for rank in range(4)}),
    ],
    ids=["a small excess", "one of three is fast", "all are slow together"],
)
def test_no_rank_is_named_where_none_is_late(ranks: int, late: dict[int, dict[str, float]]) -> None:
    job = Job(ranks)
    job.steps(200)

    assert job.steps(600, late) == []


# --- Whom it is silent about ----------------------------------------------------------------------


def test_less_than_half_a_millisecond_is_nothing_however_short_the_step() -> None:
    job = Job(2)
    for number in range(400):
        jitter_ms = 0.001 * (number % 7)
        fed(job, number, 2 + jitter_ms, 2.4 + jitter_ms, took_ms=3)

    assert job.detector.poll(0) == []


def test_steps_from_before_it_began_are_not_counted_in() -> None:
    job = Job()
    assert job.steps(200, {1: {"data": 0.004}}) == []

    assert job.steps(60, {1: {"backward": 0.05}}) == []
    assert len(job.steps(60, {1: {"backward": 0.05}})) == 1


def test_the_first_steps_and_unusual_ones_are_left_out() -> None:
    job = Job()
    assert job.steps(20, {1: {"backward": 0.5}}) == []
    assert job.steps(300, {1: {"backward": 0.5}}, {1: {"unusual": True}}) == []

    assert job.report().insufficient == (
        "insufficient data: most steps compile, save, evaluate, are skipped, or collect garbage"
    )


MAKES_UP = [(1, {0: {"data": 0.04}}), (4, {1: {"data": 0.01}})]


@pytest.mark.parametrize(
    ("ranks", "pattern", "named"),
    [
        (4, [(3, {1: {"backward": 0.010}}), (2, {1: {"backward": -0.010}})], []),
        (2, [*MAKES_UP * 6, (1, {1: {"other": 1.0}})], []),
        (4, [(1, {1: {"other": 0.5}}), (3, {})], []),
        (2, [(1, {0: {"other": 2.0}}), (59, {1: {"data": 0.02}})], [("1", "data")]),
    ],
    ids=["chance", "makes up for it", "pauses", "behind other's pauses"],
)
def test_a_rank_is_named_that_is_late_in_most_steps_and_in_sum(
    ranks: int,
    pattern: list[tuple[int, dict[int, dict[str, float]]]],
    named: list[tuple[str, str]],
) -> None:
    job = Job(ranks)
    changes: list[Change] = []
    while job.number < 400:
        for steps, late in pattern:
            changes += job.steps(steps, late)

    found = [each for each in summary(changes) if each[0] == "straggler"]
    assert found == [("straggler", *each, True) for each in named]


def fed(job: Job, number: int, *backward_ms: float, took_ms: int = 100) -> None:
    """One step, exactly as long as given, to the nanosecond."""
    ended_ns = NOW + number * took_ms * MS
    for rank, ms in enumerate(backward_ms):
        job.told.feed(rank, [step_facts(number, ended_ns, {"backward": ms}, took_ms)])


def test_a_late_rank_is_reported_once_and_stays_late_while_it_is_less_late() -> None:
    job = Job()

    assert len(job.steps(1000, {1: {"backward": 0.03}})) == 1
    assert job.steps(600, {1: {"backward": 0.004}}) == []


# --- An end of it ---------------------------------------------------------------------------------


def test_an_open_verdict_has_the_present_figures_and_is_not_reported_again() -> None:
    job = Job()
    ((opened, _),) = job.steps(150, {1: {"data": 0.007}})

    assert job.steps(150, {1: {"data": 0.02}}) == []
    (present,) = job.detector.present()
    assert opened.evidence["excess"] == pytest.approx(0.07 / 1.07, rel=0.1)
    assert present.evidence["excess"] == pytest.approx(0.2 / 1.2, rel=0.1)
    assert "in total it is late by 17 % of a step of 120 ms" in present.sentence
    assert (present.since_ns, present.step) == (opened.since_ns, opened.step)


def test_it_is_cleared_after_three_clean_windows_and_not_before() -> None:
    job = Job()
    opened = job.steps(200, {1: {"backward": 0.03}})

    assert job.steps(65) == []
    closed = job.steps(35)

    assert summary(closed) == [("straggler", "1", "backward", False)]
    # What is over is told with the figures of when it was not.
    over, began = closed[0].verdict, opened[0].verdict
    assert "in total it is late by 23 % of a step" in over.sentence
    assert (over.key, over.since_ns, over.step) == (began.key, began.since_ns, began.step)
    assert job.steps(500) == []


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize(
    ("ways", "phases"),
    [
        # Of 30 ms: 20 and 24 in forward.
        (({"forward": 0.020, "backward": 0.010}, {"forward": 0.024, "backward": 0.006}),
         ("compute", "forward")),
        # Backward slower by 22 %, forward by 8 or 14 %.
        (({"backward": 0.011, "forward": 0.0020}, {"backward": 0.011, "forward": 0.0035}),
         ("backward", "compute")),
    ],
)  # fmt: skip
def test_the_phase_of_a_verdict_does_not_flap(
    ways: tuple[dict[str, float], dict[str, float]], phases: tuple[str, str], first: int
) -> None:
    job = Job()
    ((opened, _),) = job.steps(150, {1: ways[first]})
    changes = [
        change for at in range(6) for change in job.steps(200, {1: ways[(first + at + 1) % 2]})
    ]

    # Either answer would do; the one that was given stays.
    assert opened.phase == phases[first]
    assert changes == []
    # What is really another phase is told, as the same incident.
    changes = job.steps(400, {1: {"optimizer": 0.03}})
    assert summary(changes) == [("straggler", "1", "optimizer", True)]
    assert changes[0].verdict.since_ns == opened.since_ns


# --- What it costs --------------------------------------------------------------------------------


def test_a_verdict_has_what_was_lost_since_it_began_and_ends_when_it_was_over() -> None:
    job = Job(ranks=4)
    ((opened, _),) = job.steps(200, {1: {"data": 0.03}})
    recovered_ns = job.now_ns
    ((first, _),) = job.steps(200)
    job.steps(1, {1: {"data": 0.03}})
    late_ns = job.now_ns
    job.steps(129, {1: {"data": 0.03}})
    # A rank that ends is late until its end, and what it has cost stays.
    job.told.forget(1)
    ((last, _),) = job.detector.poll(0)

    # It is named when 78 % of 90 steps were late, and charged for these: three others wait 30 ms in
    # each step. The first 20 steps are left out.
    assert 0 < opened.evidence["lost_s"] < first.evidence["lost_s"]
    assert first.evidence["lost_s"] == pytest.approx(180 * 0.03 * 3, rel=0.02)
    assert last.evidence["lost_s"] == pytest.approx(130 * 0.03 * 3, rel=0.02)
    assert (first.until_ns, last.until_ns) == (recovered_ns, 0)
    assert (last.since_ns, last.evidence["steps"]) == (late_ns, 130)
    lost_s = {each.labels: each.lost_s for each in job.report().ranks}
    total_s = first.evidence["lost_s"] + last.evidence["lost_s"]
    assert lost_s[labels_of(1)] == pytest.approx(total_s, abs=0.01)


def test_the_noise_of_a_rank_that_has_recovered_is_not_charged() -> None:
    job = Job(vary=0.3)
    job.steps(300, {1: {"backward": 0.1}})
    recovered_ns = job.now_ns
    ((over, _),) = job.steps(250)

    assert over.until_ns == recovered_ns


def test_a_verdict_that_is_over_has_the_figures_of_its_whole_time() -> None:
    job = Job(ranks=2)
    job.steps(180, {1: {"data": 0.09}})
    job.steps(80, {1: {"data": 0.03}})
    ((over, opened),) = job.steps(200)

    # The last steps are those of 30 ms, and the last figures would be of steps of 130 ms.
    assert not opened
    whole = 160 * 0.09 + 80 * 0.03
    assert over.evidence["steps"] == 240
    assert over.evidence["lost_s"] == pytest.approx(whole, rel=0.02)
    assert over.evidence["excess_s"] == pytest.approx(whole / 240, rel=0.02)
    assert over.evidence["step_s"] == pytest.approx(0.1 + whole / 240, rel=0.02)
    assert "by 41 % of a step of 170 ms, which cost the others 16." in past_sentence(over)


def test_two_late_ranks_share_one_waiting() -> None:
    job = Job(4)
    changes = job.steps(130, {1: {"data": 0.03}, 2: {"backward": 0.02}})

    # Named at once; ten more steps have been added by now.
    assert [each.verdict.evidence["lost_per_s"] for each in changes] == pytest.approx(
        [0.03 / 0.13 * 3 * 3 / 5, 0.03 / 0.13 * 3 * 2 / 5], rel=0.05
    )
    lost_s = [each.lost_s for each in job.report().ranks]
    assert lost_s == pytest.approx([0, 110 * 0.03 * 3 * 3 / 5, 110 * 0.03 * 3 * 2 / 5, 0], rel=0.05)


def test_a_second_late_rank_is_not_charged_for_what_the_first_has_been() -> None:
    job = Job(4)
    job.steps(80, {1: {"data": 0.03}})
    changes = job.steps(940, {1: {"data": 0.03}, 2: {"backward": 0.03}})

    assert sorted(summary(changes)) == [
        ("straggler", "1", "data", True),
        ("straggler", "2", "backward", True),
    ]
    assert changes[0].verdict.step != changes[1].verdict.step
    lost_s = sum(each.lost_s for each in job.report().ranks)
    assert lost_s == pytest.approx(1000 * 0.03 * 3, rel=0.03)


# --- The present ----------------------------------------------------------------------------------


def test_each_rank_is_compared_with_the_median_of_the_others() -> None:
    job = Job()
    for number in range(150):
        fed(job, number, 10, 20, 30, 40, 80)
    ranks = job.report().ranks

    for word in ("all", "backward"):
        excess = [each.excess[word] for each in ranks]
        assert excess == pytest.approx([-0.25, -0.15, 0.0, 0.15, 0.55])
    assert [each.excess["data"] for each in ranks] == [0.0] * len(ranks)


# --- Too little to say anything -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "pattern", "why"),
    [
        (1, [(300, ())], "fewer than two known ranks are at work"),
        (4, [(60, ())], "40 of the first 90 steps that a comparison needs"),
        (4, [(200, ()), (250, (3,))], "no steps any more from rank 3"),
        (4, [(1, ()), (2, (3,))] * 200, "for most steps, the records of some ranks are missing"),
    ],
)
def test_what_the_ranks_lack_to_be_compared_is_told(
    ranks: int, pattern: list[tuple[int, tuple[int, ...]]], why: str
) -> None:
    job = Job(ranks)
    for steps, silent in pattern:
        assert job.steps(steps, silent=silent) == []

    assert job.report().insufficient == f"insufficient data: {why}"


def test_ranks_that_have_made_no_step_yet_are_not_taken_for_absent() -> None:
    job = Job(1)
    for rank in range(3):
        job.told.know(rank)
    # Of a program that only logs no step is to be expected.
    assert job.report().insufficient == "insufficient data: the known ranks make no steps"

    job.steps(300)

    assert job.report().insufficient == "insufficient data: no step yet of rank 1, 2"


def test_where_waiting_is_not_known_there_is_no_verdict_on_a_rank() -> None:
    job = Job()
    job.steps(200, {1: {"backward": 0.03}})
    job.told.know(1, waits_known=False)

    assert summary(job.detector.poll(0)) == [("straggler", "1", "backward", False)]
    assert job.steps(300, {1: {"backward": 0.03}}) == []
    assert job.report().insufficient == (
        "insufficient data: waiting for other ranks cannot be told from work on rank 1"
    )
    job.told.know(1, waits_known=True)
    assert len(job.steps(200, {1: {"backward": 0.03}})) == 1


def test_a_rank_that_waits_in_a_collective_of_the_users_own_is_not_late() -> None:
    job = Job()
    # Of one rank it is enough: where one has them, all have.
    job.told.know(1, own_collectives=("other",))
    changes = job.steps(200, {2: {"forward": 0.02}, 0: {"other": 0.02}})

    assert summary(changes) == [("straggler", "2", "forward", True)]
    evidence = changes[0].verdict.evidence
    assert evidence["lost_per_s"] == pytest.approx(0.02 / 0.12 * 3, rel=0.05)
    assert evidence["not_compared"] == ["other"]
    assert evidence["work_s"] == pytest.approx(0.11, rel=0.02)
    assert "other" not in evidence["excess_by_phase"]
    report = job.report()
    assert report.ranks[0].work_s == pytest.approx(0.09, rel=0.02)
    assert report.insufficient == ""


@pytest.mark.parametrize(
    ("phases", "late", "hidden"),
    [
        (("other", "data"), {"other": 0.03}, "`data`, `other`"),
        (("a phase of a later version",), {"other": 0.03}, ""),
        # Little time in such a phase hides no rank.
        (("other",), {"other": -0.001}, ""),
    ],
)
def test_phases_that_could_hide_a_late_rank_are_mentioned(
    phases: tuple[str, ...], late: dict[str, float], hidden: str
) -> None:
    job = Job()
    job.told.know(0, own_collectives=phases)

    assert job.steps(200, dict.fromkeys(job.ranks, late)) == []
    why = f"collectives of your own in {hidden}: a rank that is late there cannot be named"
    assert job.report().insufficient == (f"insufficient data: {why}" if hidden else "")


def test_a_verdict_closes_when_collectives_of_the_users_own_turn_up() -> None:
    job = Job()
    late = {0: {"other": 0.03}}
    job.steps(200, late)
    job.told.know(2, own_collectives=("other",))

    assert summary(job.detector.poll(0)) == [("straggler", "0", "other", False)]
    assert "0 of the first 90 steps" in job.report().insufficient
    assert job.steps(200, late) == []
    # A new process with its labels may have none.
    job.told.forget(2)
    assert summary(job.steps(200, late)) == [("straggler", "0", "other", True)]


# --- Steps that come as they please ---------------------------------------------------------------


def fed_by_rank(job: Job, pieces: dict[int, list[StepFacts]], at_once: int) -> list[Change]:
    """As the agent reads: one process after the other, many steps at once."""
    for start in range(0, max(map(len, pieces.values())), at_once):
        for rank, facts in pieces.items():
            for each in facts[start : start + at_once]:
                job.told.feed(rank, [each])
    return job.detector.poll(0)


def collected(job: Job, steps: int, late: Mapping[int, Mapping[str, float]],
              numbers: Mapping[int, int] | None = None) -> dict[int, list[StepFacts]]:  # fmt: skip
    pieces: dict[int, list[StepFacts]] = {rank: [] for rank in job.ranks}
    job.counts_from = dict(numbers or {})
    for _ in range(steps):
        job.number += 1
        job.now_ns += 130 * MS
        for rank in job.ranks:
            pieces[rank].append(job.facts(rank, late.get(rank, {}), 0.13))
    return pieces


def test_ranks_that_are_read_apart_are_brought_together() -> None:
    job = Job()
    pieces = collected(job, 1200, {1: {"backward": 0.03}})

    assert summary(fed_by_rank(job, pieces, 300)) == [("straggler", "1", "backward", True)]


def test_steps_of_one_number_and_another_time_are_not_compared() -> None:
    # Rank 0 is 30 numbers ahead, as no hooks count: by these numbers, one of the two is slow if the
    # other is not.
    job = Job(2)
    pieces: dict[int, list[StepFacts]] = {0: [], 1: []}
    for block in range(20):
        slow_s = 0.03 * (block % 2)
        late = {0: {"backward": slow_s}, 1: {"backward": slow_s + 0.012}}
        for rank, facts in collected(job, 30, late, {0: 30}).items():
            pieces[rank] += facts

    assert fed_by_rank(job, pieces, 10) == []
    assert job.report().insufficient == (
        "insufficient data: the step numbers of the ranks do not match"
    )


def test_what_is_kept_is_bounded_when_a_rank_is_far_behind() -> None:
    job = Job(2)
    job.steps(100)
    job.steps(2_000, silent=(1,))

    assert len(job.detector._alignment._waiting) <= 1000
    assert len(job.detector._cases.ranks) <= 300


def test_a_rank_that_was_silent_is_compared_from_then_on() -> None:
    job = Job()
    job.steps(300)
    job.steps(30, silent=(3,))

    assert summary(job.steps(130, {3: {"data": 0.03}})) == [("straggler", "3", "data", True)]


# --- Slow steps, in which a clear case is named after twelve --------------------------------------


def late(*ranks: int, share: float, of: Job) -> Mapping[int, Mapping[str, float]]:
    return {rank: {"backward": share * of.slower * 0.1} for rank in ranks}


def named(changes: list[Change], began: int) -> list[tuple[str, str, int]]:
    """Rank or node, phase, and after how many steps."""
    assert all(each.opened for each in changes)
    steps = [(each.verdict.step or 0) - began for each in changes]
    return [(who, phase, n) for (_, who, phase, _), n in zip(summary(changes), steps, strict=True)]


@pytest.mark.parametrize(
    ("slower", "after"),
    [(100, 12), (10, 12), (5, 20), (1.5, 65), (1, 76)],
    ids=lambda each: str(each),
)
def test_a_late_rank_is_named_as_soon_as_it_was_late_for_12_s_and_12_steps(
    slower: float, after: int
) -> None:
    job = Job(4, slower=slower)
    # The steps begin in the middle of a stride.
    assert job.steps(124) == []

    ((who, phase, steps),) = named(job.steps(120, late(2, share=0.25, of=job)), 124)

    assert (who, phase) == ("2", "backward")
    assert steps == pytest.approx(after, abs=1)


def test_of_ten_slow_steps_nothing_is_said() -> None:
    job = Job(4, slower=10)
    job.steps(124)

    assert job.steps(10, late(2, share=1.0, of=job)) == []
    assert job.steps(200) == []


def test_a_late_node_is_named_as_soon_and_none_of_its_ranks() -> None:
    job = Job(4, nodes=2, slower=10)
    job.steps(124)

    assert named(job.steps(40, late(2, 3, share=0.25, of=job)), 124) == [("n2", "backward", 12)]


def test_where_steps_vary_as_much_it_takes_as_many_as_in_fast_ones() -> None:
    job = Job(4, slower=10, vary=0.3)
    job.steps(124)

    assert job.steps(60, late(2, share=0.25, of=job)) == []
    ((who, _, _),) = named(job.steps(60, late(2, share=0.25, of=job)), 124)
    assert who == "2"


def test_what_was_named_soon_is_charged_for_each_step_once() -> None:
    job = Job(4, slower=10)
    job.steps(124)

    changes = job.steps(76, late(2, share=0.25, of=job))

    assert len(changes) == 1
    (verdict,) = job.detector.present()
    # Three ranks waited a quarter of a second in each of 76 steps.
    assert verdict.evidence["lost_s"] == pytest.approx(3 * 0.25 * 76, rel=0.05)
    # It ends as soon.
    assert [opened for _, opened in job.steps(30)] == [False]


# --- Very many ranks ------------------------------------------------------------------------------

MANY = limits.MANY_RANKS


def test_a_late_rank_among_very_many_is_named_and_compared_once_a_stride() -> None:
    job = Job(MANY, world_size=MANY)

    changes = job.steps(limits.FIRST_STEPS + limits.LENGTHS[0], late={9: {"backward": 0.03}})

    assert summary(changes) == [("straggler", "9", "backward", True)]
    before = job.report()
    assert before.ranks[9].excess["backward"] == pytest.approx(0.03 / 0.13, 0.05)
    job.steps(limits.STRIDE - 1)
    assert job.report().ranks is before.ranks
    job.steps(1)
    assert job.report().ranks is not before.ranks
