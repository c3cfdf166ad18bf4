"""Who waits for whom in calls to process groups, by steps of which the truth is known."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import pytest
from tools.parallel_cases import Meet, Program, Training, Wait, Work

from make import labels_of, step_facts
from otel_ddp.diagnosis.detector import RankState
from otel_ddp.diagnosis.step_facts import StepFacts
from otel_ddp.diagnosis.steps import Call, Calls
from otel_ddp.diagnosis.straggler.detector import Stragglers
from otel_ddp.diagnosis.verdict import Change
from ranks import Told, summary

MS = 1_000_000


def call(group: str, op: str = "allgather_base", **more: Any) -> Meet:
    """A call in forward, which all wait for at once."""
    given = {"dimension": "", "peer": -1, "phase": "forward", "waited": op != "send", **more}
    return Meet(group, op=op, **given)


class Run:
    """Ranks that work, call, work, call, ... in each step."""

    def __init__(
        self,
        calls: Mapping[int, Sequence[Meet]],
        works_ms: Mapping[int, Sequence[float]],
        *,
        behind: Program = (),
        changed: Callable[[int, StepFacts], StepFacts] = lambda _, facts: facts,
        **known: Any,
    ) -> None:
        """*calls*: of each rank. *works_ms*: before each, and behind the last one.

        *behind*: what comes between the last call and the work behind it. *changed*: what is read
        of a step of a rank.
        """
        self.detector = Stragglers()
        self.bounds = self.detector.bounds
        given = {"world_size": len(calls), "waits_known": False, "calls_noted": True, **known}
        self.told = Told(self.detector, **given)
        self.calls, self.works_ms, self.behind = calls, works_ms, behind
        self.changed = changed
        self.training = Training([self._program(rank, []) for rank in calls])
        self.changes: list[Change] = []
        self._chance = random.Random(1)

    def _program(self, rank: int, more_ms: Sequence[float]) -> Program:
        works_ms = list(map(sum, zip_longest(self.works_ms[rank], more_ms, fillvalue=0.0)))
        program: list[Work | Meet | Wait] = []
        for ms, each in zip(works_ms, self.calls[rank], strict=False):
            program += [Work(each.phase, ms), each]
        return [*program, *self.behind, Work(self.calls[rank][0].phase, works_ms[-1])]

    def steps(self, many: int, late: Mapping[int, Sequence[float]] | None = None) -> list[Any]:
        """So many steps; what was opened and closed in them. *late*: milliseconds more of works."""
        self.changes = []
        programs = [self._program(rank, (late or {}).get(rank, [])) for rank in self.calls]
        for _ in range(many):
            facts = self.training.step(programs, [self._varied] * len(programs))
            for rank, each in zip(self.calls, facts, strict=True):
                self.told.feed(rank, [self.changed(rank, each)])
            self.changes += self.detector.poll(0)
        return summary(self.changes)

    def _varied(self, phase: str) -> float:
        return self._chance.uniform(0.99, 1.01)


def sharded(ranks: int = 4, **more: Any) -> Run:
    """One group, called four times, with work between."""
    calls = {rank: [call("all")] * 4 for rank in range(ranks)}
    return Run(calls, {rank: [10, 20, 20, 20, 5] for rank in range(ranks)}, **more)


def mesh() -> Run:
    """Two by two: in `tp` ranks 0 and 1, and 2 and 3, meet often; in `dp` 0 and 2, and 1 and 3."""
    calls = {
        rank: [
            *[call(f"tp{rank // 2}", "allreduce", dimension="tp")] * 3,
            call(f"dp{rank % 2}", dimension="dp"),
        ]
        for rank in range(4)
    }
    return Run(calls, {rank: [10, 20, 20, 20, 5] for rank in range(4)})


def pipeline(
    replicas: int = 2, stages: int = 2, heavier: float = 1.0, heavy: tuple[int, ...] = ()
) -> Run:
    """Forward to the last stage, backward to the first, three times; then all replicas meet.

    *heavy*: stages.
    """
    calls: dict[int, list[Call]] = {}
    works: dict[int, list[float]] = {}
    for rank in range(replicas * stages):
        stage, own, work, back = rank % stages, list[Call](), list[float](), 0.0
        ms = 10 * (heavier if stage in heavy else 1)
        for _ in range(3):
            if stage:
                own.append(call("pp", "recv", peer=rank - 1))
                work.append(0.1)
            if stage < stages - 1:
                own.append(call("pp", "send", peer=rank + 1))
                own.append(call("pp", "recv", peer=rank + 1))
                work += [ms + back, 0.1]
            if stage:
                own.append(call("pp", "send", peer=rank - 1))
                work.append(ms * (2 if stage == stages - 1 else 1))
            # The first stage sends nothing back.
            back = 0.0 if stage else ms
        own.append(call(f"dp{stage}", "allreduce", dimension="dp"))
        calls[rank], works[rank] = own, [*work, 1 + back, 2]
    return Run(calls, works)


def test_the_late_rank_of_a_sharded_group_is_named_and_no_one_is_before() -> None:
    run = sharded()

    assert run.steps(200) == []
    assert run.steps(120, {2: [0, 0, 12, 0, 0]}) == [("straggler", "2", "forward", True)]
    (change,) = run.changes
    assert abs(change.verdict.evidence["excess_s"] - 0.012) < 0.001
    assert change.verdict.evidence["waits_in"] == "process group: all ranks"
    assert "Others wait" not in change.verdict.sentence
    assert run.steps(200) == [("straggler", "2", "forward", False)]


def test_a_rank_that_has_waited_for_another_one_is_not_late_for_that() -> None:
    run = mesh()

    assert run.steps(100) == []
    # Rank 3 waits for it in `tp`, and comes to `dp` as late as this one.
    assert run.steps(120, {2: [0, 15, 0, 0, 0]}) == [("straggler", "2", "forward", True)]
    verdict = run.changes[0].verdict
    assert verdict.evidence["waits_in"] == "mesh dimension tp: ranks 2, 3"
    assert "Others wait for it first in mesh dimension tp: ranks 2, 3. Look" in verdict.sentence


def waits_ms(run: Run) -> list[dict[str, float]]:
    """Of each rank: how long it waits in a step, by dimension and operation."""
    return [
        {" ".join(kind): round(1000 * s, 1) for kind, s in each.waits_s.items()}
        for each in run.detector.report().ranks
    ]


def test_ranks_wait_in_the_dimension_in_which_the_late_rank_is_their_member() -> None:
    run = mesh()

    run.steps(30, {2: [0, 15, 0, 0, 0]})
    tp, dp = ([each[kind] for each in waits_ms(run)] for kind in ("tp all_reduce", "dp all_gather"))

    # Works differ by chance, by up to 2 % of 85 ms.
    assert (max(tp[0], tp[1], tp[2]), tp[3]) == (pytest.approx(0, abs=2), pytest.approx(15, abs=2))
    assert dp == [pytest.approx(each, abs=2) for each in (15, 15, 0, 0)]
    # They are those of the last steps.
    run.steps(100)
    assert max(ms for each in waits_ms(run) for ms in each.values()) < 2


def test_ranks_of_a_pipeline_wait_in_receives_and_a_send_has_no_wait() -> None:
    run = pipeline()

    run.steps(30)

    assert [[*each] for each in waits_ms(run)] == [["other recv", "dp all_reduce"]] * 4
    assert min(each["other recv"] for each in waits_ms(run)) > 5


def test_stages_that_are_slower_in_all_replicas_bound_the_run() -> None:
    run = pipeline(stages=4, heavier=2.5, heavy=(1, 2))
    opened = []
    for _ in range(400):
        run.steps(1)
        opened += [v.sentence for v, _ in run.bounds.poll(0)]

    assert run.changes == []
    assert "stage 1 and 2 of the pipeline, which works up to 42 %" in opened[0]


def test_the_only_rank_of_each_stage_is_compared_with_none_and_that_is_said() -> None:
    run = pipeline(replicas=1)

    assert run.steps(200, {1: [0, 9, 0, 0, 0, 0, 0, 0]}) == []
    assert run.detector.report().insufficient == (
        "insufficient data: each stage of the pipeline has one rank, and none is like another"
    )


def test_receives_of_equals_in_a_ring_are_no_pipeline() -> None:
    calls = {
        rank: [
            call("cp", "send", peer=(rank + 1) % 3),
            call("cp", "recv", peer=(rank - 1) % 3),
        ]
        * 3
        for rank in range(3)
    }
    run = Run(calls, {rank: [10, 0.05] * 3 + [5] for rank in range(3)})

    assert run.steps(100) == []
    assert run.steps(120, {1: [0, 0, 6, 0, 0, 0, 0]}) == [("straggler", "1", "forward", True)]
    assert run.changes[0].verdict.evidence["waits_in"] == "process group: sends to rank 2"


def test_a_wait_that_work_hides_is_not_counted_at_each_collective() -> None:
    calls = {rank: [call("all", "allreduce", waited=False)] * 20 for rank in range(4)}
    works_ms = {rank: [20, *[1.0] * 19, 40] for rank in range(4)}
    run = Run(calls, works_ms, behind=[Wait("forward")])

    # It is late at each of them, and costs the others that time once, at the end of all.
    assert run.steps(300, {1: [2, *[0.0] * 20]}) == []
    assert run.steps(200, {1: [12, *[0.0] * 20]}) == [("straggler", "1", "forward", True)]
    assert abs(run.changes[0].verdict.evidence["excess_s"] - 0.012) < 0.001


def test_what_is_received_at_once_is_waited_for_behind_all_of_it() -> None:
    detector = Stragglers()
    told = Told(detector, world_size=2, waits_known=False, calls_noted=True)
    calls = {
        rank: tuple([Call("pp", "", op, 1 - rank, "forward") for op in ("recv", "send")])
        for rank in range(2)
    }
    for number in range(1, 200):
        for rank in range(2):
            # Rank 0 receives and sends, and waits for both: rank 1 comes 10 ms later.
            at_ns = [(number * 100 - 80 + 10 * rank + ms) * MS for ms in (0, 1)]
            # Its thread stands still behind its send.
            noted = Calls(calls[rank], at_ns, bytes([0, 255]))
            facts = step_facts(number, number * 100 * MS, {"forward": 100}, calls=noted)
            told.feed(rank, [facts])
    works = [each.work_s for each in detector.report().ranks]

    # It sends 1 ms after it comes, and has waited from its own send on.
    assert works == [pytest.approx(0.09, abs=1e-5), pytest.approx(0.1)]


def test_what_ddp_waits_for_its_gradients_is_not_taken_twice() -> None:
    gradients = Call("ddp", "", "allreduce", -1, "backward")
    detector = Stragglers()
    told = Told(detector, world_size=2, calls_noted=True)
    works = []
    for number in range(1, 200):
        for rank in range(2):
            # Rank 1 needs 10 ms longer, for which rank 0 waits behind its own backward.
            late_ms = 10 * rank
            phases = {"backward": 80 + late_ms}
            at = (number * 100 - 20 + late_ms) * MS
            facts = step_facts(
                *(number, number * 100 * MS, phases, 100), calls=Calls((gradients,), [at], b"\xff")
            )
            told.feed(rank, [facts])
    works = [each.work_s for each in detector.report().ranks]

    assert works == [pytest.approx(0.08), pytest.approx(0.09)]


def test_tensor_parallel_backward_is_not_taken_for_the_gradients_of_ddp() -> None:
    # A little time passes between the last gradient and the optimizer, and is `comm_wait`.
    reduce = call("tp", "allreduce", phase="backward")
    calls = {rank: [reduce] * 4 for rank in range(3)}
    run = Run(calls, dict.fromkeys(calls, [10] * 4 + [9]), behind=[Work("comm_wait", 0.02)])

    assert run.steps(100) == []
    assert run.steps(120, {1: [0, 6]}) == [("straggler", "1", "backward", True)]


def test_ranks_that_do_not_agree_on_their_calls_are_not_compared_and_that_is_said() -> None:
    fewer = dict[int, tuple[Call, ...]]()

    def first_one_lost(rank: int, facts: StepFacts) -> StepFacts:
        calls = facts.calls
        if rank == 3 and calls is not None:
            each_left = fewer.setdefault(rank, calls.each[1:])
            calls = Calls(each_left, calls.at_ns[1:], calls.idle[1:])
        return facts._replace(calls=calls)

    run = sharded(changed=first_one_lost)

    assert run.steps(200, {2: [0, 0, 12, 0, 0]}) == []
    assert "do not agree on how often they call" in run.detector.report().insufficient


def test_one_rank_whose_calls_are_not_noted_is_enough_to_know_nothing() -> None:
    run = sharded()
    run.told.know(3, calls_noted=False)

    assert run.steps(200, {2: [0, 0, 12, 0, 0]}) == []
    assert "cannot be told from work on rank 0, 1, 2, 3" in run.detector.report().insufficient


def test_a_device_arrives_later_than_its_host_calls() -> None:
    run = sharded(device_clock=True)

    assert run.steps(200, {2: [0, 0, 12, 0, 0]}) == []


def test_ranks_that_wait_for_one_that_is_not_known_here_are_not_late() -> None:
    # Ranks 2 and 3 wait in `tp` for ranks of another node, and all meet in `dp`.
    run = mesh()
    run.told.known["world_size"] = 6

    assert run.steps(200, {2: [0, 15, 0, 0, 0], 3: [0, 15, 0, 0, 0]}) == []


def test_clocks_of_processes_that_disagree_are_turned_to_the_one_of_their_node() -> None:
    def shifted(rank: int, facts: StepFacts) -> StepFacts:
        ahead_ns, calls = 3 * MS * (rank == 1), facts.calls or Calls((), [], b"")
        calls = calls._replace(at_ns=[ns + ahead_ns for ns in calls.at_ns])
        return facts._replace(ended_ns=facts.ended_ns + ahead_ns, calls=calls)

    run = sharded(changed=shifted)
    run.told.know(1, clock_shift_ns=-3 * MS)

    assert run.steps(200) == []
    assert run.steps(120, {2: [0, 0, 12, 0, 0]}) == [("straggler", "2", "forward", True)]


def on_two_nodes(**known: Any) -> Run:
    run = sharded()
    for rank in range(4):
        labels = labels_of(rank, node=f"n{rank // 2}")
        run.told.states[rank] = RankState(labels, 4, calls_noted=True, **known)
    return run


def test_ranks_that_wait_for_another_node_are_not_compared_and_that_is_said() -> None:
    run = on_two_nodes(waits_known=False)

    assert run.steps(200, {2: [0, 0, 12, 0, 0]}) == []
    assert (
        "work on rank 0, 1, 2, 3: ranks wait for other nodes" in run.detector.report().insufficient
    )


def test_where_calls_are_of_no_use_ddp_is_compared_without_them() -> None:
    def with_known_waits(rank: int, facts: StepFacts) -> StepFacts:
        wait_ns = 0 if rank == 2 else 12 * MS
        phases_ns = (0, facts.phases_ns[1] - wait_ns, *facts.phases_ns[2:])
        return facts._replace(wait_ns=wait_ns, phases_ns=phases_ns)

    run = on_two_nodes(waits_known=True, own_collectives=("other",))
    run.changed = with_known_waits

    assert run.steps(200, {2: [0, 0, 12, 0, 0]}) == [("straggler", "2", "forward", True)]
    assert run.changes[0].verdict.evidence["not_compared"] == ["other"]
