"""When ranks count as stalled, and which the evidence names: no process, no clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from golden import Golden
from make import labels_of, step_of
from otel_ddp.diagnosis.death.cause import EndedProcess
from otel_ddp.diagnosis.detector import Observation, RankState
from otel_ddp.diagnosis.stall.culprits import find_culprits
from otel_ddp.diagnosis.stall.detector import Stalls
from otel_ddp.diagnosis.stall.evidence import (
    Collective,
    Evidence,
    Frame,
    Group,
    Kernel,
    Position,
    Suspect,
)
from otel_ddp.diagnosis.verdict import Change, Labels, Verdict
from otel_ddp.vocabulary.words import PHASES

SECOND = 1_000_000_000
BEGAN = 1_700_000_000 * SECOND
TICK_S = 0.5


def ended(labels: Labels, at_ns: int) -> EndedProcess:
    return EndedProcess(labels, "killed", None, "forward", at_ns, at_ns)


class Job:
    """Ranks that are where the test says, and the agent that looks at them."""

    def __init__(self, ranks: int = 2, floor_s: float = 60.0, world: int | None = None) -> None:
        self.stalls = Stalls(floor_s)
        self.now_ns = BEGAN
        self.world = world
        self.positions: dict[int, Position] = {}
        self.evidence: dict[Labels, Evidence] = {}
        self.asked: list[tuple[float, int, str]] = []
        self.answers: dict[int, dict[str, Any]] = {}
        self.answering = True
        for rank in range(ranks):
            self.put(rank)

    @property
    def now_s(self) -> float:
        return (self.now_ns - BEGAN) / SECOND

    def put(self, rank: int, phase: str = "forward", step: int | None = 7, **more: Any) -> None:
        """From now on a rank is here."""
        fields = {"alive": True, "state": "running", "world": self.world, **more}
        self.positions[rank] = Position(
            labels_of(rank), step=step, phase=phase, since_ns=self.now_ns, **fields
        )

    def log(self, rank: int) -> None:
        here = self.positions[rank]
        self.positions[rank] = here._replace(written=here.written + 1)

    def tick(self, seconds: float = TICK_S) -> list[Change]:
        self.now_ns += int(seconds * SECOND)
        for rank, here in self.positions.items():
            labels = labels_of(rank)
            state = RankState(labels, world_size=self.world or 0)
            seen = Observation(self.now_ns, position=here)
            if here.alive:
                evidence = self.evidence.get(labels, Evidence())
                self.stalls.feed(state, seen._replace(evidence=evidence))
            else:
                self.stalls.feed(state, seen._replace(ended=ended(labels, self.now_ns)))
        changes = self.stalls.poll(self.now_ns)
        for each, question in self.stalls.questions.items() if self.answering else ():
            rank = int(dict(each)["rank"])
            self.asked.append((self.now_s, rank, question))
            known = self.answers.get(rank, {})
            answers = {"answered": "silent_s" not in known, "answered_ns": self.now_ns + 1}
            self.evidence[each] = Evidence(kind=question, **answers, **known)
        return changes

    def learn(
        self,
        steps_s: list[float],
        longest_ns: dict[str, int] | None = None,
        began_ns: int = BEGAN,
        later_s: float = 0.0,
    ) -> None:
        """Rank 0 has made such steps; the longest stretch of each phase in them."""
        parts = step_of(
            1, began_ns, [(PHASES[word], ns) for word, ns in (longest_ns or {}).items()]
        )
        steps = [parts._replace(ended_ns=began_ns + round(each * SECOND)) for each in steps_s]
        seen = Observation(self.now_ns + round(later_s * SECOND), steps)
        self.stalls.feed(RankState(labels_of(0)), seen)

    def run(self, seconds: float) -> list[Change]:
        changes = []
        until = self.now_ns + int(seconds * SECOND)
        while self.now_ns < until:
            changes += self.tick()
        return changes

    def stalls_after(self, most_s: float = 2000.0) -> tuple[float, Verdict]:
        began = self.now_s
        for _ in range(int(most_s / TICK_S)):
            for each in self.tick():
                assert each.opened
                return self.now_s - began, each.verdict
        raise AssertionError("no verdict")


def test_no_rank_is_asked_before_half_of_the_limit_or_reported_before_the_whole() -> None:
    job = Job()
    job.tick()
    took_s, verdict = job.stalls_after()

    assert 60.0 <= took_s <= 62.0
    assert [(round(at), question) for at, rank, question in job.asked if rank == 0] == [
        (30, "where"),
        (60, "what"),
    ]
    assert verdict.kind == "stall"
    assert verdict.step == 7
    assert verdict.evidence["limit_s"] == 60.0
    assert [key for key, _ in verdict.labels] == ["group", "run", "node"]


def test_as_long_as_one_rank_moves_there_is_no_stall() -> None:
    job = Job()
    for _ in range(3):
        job.put(1, "data")
        assert job.run(50) == []


def test_an_evaluation_on_one_rank_while_the_others_wait_is_no_stall_until_its_own_limit() -> None:
    job = Job()
    job.put(0, "eval")
    job.put(1, "other")
    took_s, verdict = job.stalls_after()

    assert 600 <= took_s <= 602.5
    assert job.stalls.limits_s == {labels_of(0): 600.0, labels_of(1): 60.0}
    assert verdict.evidence["limit_s"] == 600.0


@pytest.mark.parametrize(("state", "alive"), [("finished", True), ("failed", False)])
def test_ranks_that_have_ended_do_not_count(state: str, alive: bool) -> None:
    job = Job()
    job.put(1, alive=alive, state=state)
    for _ in range(5):
        job.put(0, "eval")
        assert job.run(50) == []
    job.put(0, alive=alive, state=state)
    assert job.run(700) == []


def test_what_is_logged_is_a_sign_of_life_where_no_hook_gives_one() -> None:
    job = Job(ranks=1)
    job.put(0, "other")
    for _ in range(3):
        job.log(0)
        assert job.run(50) == []
    # Inside of a phase that has hooks, other code logs.
    job.put(0, "data")
    changes = []
    for _ in range(5):
        job.log(0)
        changes += job.run(20)
    assert [each.opened for each in changes] == [True]


@pytest.mark.parametrize(
    ("phase", "more", "limit_s"),
    [
        ("forward", {}, 60),
        ("forward", {"step": None}, 600),
        ("checkpoint", {}, 600),
        ("checkpoint", {"expect_s": 1000.0}, 1500),
        ("checkpoint", {"expect_s": 1.0}, 60),
    ],
)
def test_the_limit_is_the_phases_own(phase: str, more: dict[str, Any], limit_s: float) -> None:
    job = Job(ranks=1)
    job.put(0, phase, **more)
    job.tick()

    assert job.stalls.limits_s == {labels_of(0): limit_s}


def test_the_limit_grows_with_the_steps_and_with_the_longest_stretch_of_the_phase() -> None:
    job = Job(ranks=1, floor_s=2.0)
    job.tick()
    for number in range(200):
        # Of a hundred steps one may be as long as it likes.
        job.learn([100.0 if number == 99 else 1.0], {"data": 5 * SECOND, W: 100 * SECOND})
    limits = {}
    for phase in (F, D, W):
        job.put(0, phase)
        job.tick()
        limits[phase] = job.stalls.limits_s[labels_of(0)]

    # Ten steps of a second; three times five; and a wait is as long as others make it.
    assert limits == {F: 10.0, D: 15.0, W: 10.0}


def test_a_long_phase_is_learnt_and_a_process_that_was_stopped_is_not() -> None:
    limits = []
    for kernel in (Kernel("S", True, 0.0), Kernel("T", True, 0.0)):
        job = Job(ranks=1)
        job.answers[0] = {"kernel": kernel}
        job.run(100)
        job.put(0, "data")
        (change,) = job.tick()
        assert not change.opened
        job.put(0, "forward")
        job.tick()
        limits.append(job.stalls.limits_s[labels_of(0)])

    assert limits == [pytest.approx(300, abs=2), 60.0]


def test_when_the_agent_itself_could_not_run_no_rank_is_named_and_nothing_is_learnt() -> None:
    job = Job()
    job.run(20)
    job.learn([600.0], {"data": 600 * SECOND}, job.now_ns, later_s=600.0)
    assert job.tick(600.0) == []
    assert job.run(35) == []
    assert job.stalls_after(10.0)


def test_a_process_inherits_nothing_from_the_one_that_had_its_labels() -> None:
    job = Job(ranks=1)
    job.tick()
    job.learn([1.0], {"data": 500 * SECOND})
    job.put(0, "data", alive=False, state="killed")
    job.tick()
    job.put(0, "data", step=None)
    job.tick()

    # Before the first step it has ten times as long.
    assert job.stalls.limits_s == {labels_of(0): 600.0}


# -- which ranks the evidence names

DATA = (
    Frame("/usr/lib/python3.11/threading.py", 1, "wait"),
    Frame("/home/me/train.py", 31, "load"),
)
ASLEEP, BUSY = Kernel("S", True, 0.0), Kernel("R", True, 0.9)
WAITS = (Frame("/x/site-packages/torch/distributed/distributed_c10d.py", 3000, "barrier"),)

LAUNCHES = (
    Frame("/x/site-packages/torch/nn/modules/linear.py", 134, "forward"),
    Frame("/home/u/model.py", 7, "forward"),
)

# Python at the end of a program: it looks after threads that are left.
LEFT = (Frame("/usr/lib/python3.13/threading.py", 1540, "_shutdown"),)


def numbers(*enqueued: int) -> dict[str, Any]:
    return {"groups": tuple(Group(str(n), 2, each) for n, each in enumerate(enqueued))}


def calls(*each: tuple[int, int | None]) -> dict[str, Any]:
    """In groups of gloo: how many calls, and how many of these are sends and receives."""
    return {
        "groups": tuple(
            Group(str(n), 2, enqueued, None, "cpu:gloo", "", sends)
            for n, (enqueued, sends) in enumerate(each)
        )
    }


def on_device(state: str, phase: str = "", enqueued: int = 9, completed: int = 8) -> dict[str, Any]:
    """A rank under nccl, and the first collective that is under way there."""
    one = Collective("0", 9, "nccl:all_reduce", "[[1000]]", state)
    group = Group("0", 2, enqueued, completed, "nccl")
    under_way = (one,) if state else ()
    return {"groups": (group,), "collectives": under_way, "device_phase": phase}


def behind(enqueued: int, phase: str, step: int | None = None, **more: Any) -> dict[str, Any]:
    """A rank whose device is in this phase, under a backend of which no device tells anything."""
    group = Group("0", 2, enqueued, None, "cpu:gloo,acme:accl")
    return {"groups": (group,), "device_phase": phase, "device_step": step, **more}


def entered(number: int, op: str, sizes: str = "[[4]]") -> dict[str, Any]:
    one = Collective("0", number, f"gloo:{op}", sizes)
    return {"collectives": (Collective("0", number - 1, "gloo:all_reduce", "[[4]]"), one)}


GROUP_1 = (Group("1", 2, 12, 11, "nccl"),)
# It waits for a rank of the second group, in which others are not.
IN_GROUP_1 = Collective("1", 12, "nccl:all_gather", "[[8]]", "started")
HOSTS = Collective("0", 9, "gloo:barrier", "[[0]]")
W, D, F = "comm_wait", "data", "forward"
OURS = "/home/me/otel-ddp/src/otel_ddp/"
LOADER = Frame("/x/site-packages/torch/utils/data/dataloader.py", 700, "__next__")
STARTED, SCHEDULED = on_device("started"), on_device("scheduled")

# Where the ranks are, and what they answer.
TABLE: dict[str, tuple[list[str], list[dict[str, Any]]]] = {
    "the lower number did not reach the collective": ([W, D], [numbers(9), numbers(8)]),
    "rank 1 is late for rank 0 because it waits for rank 2": (
        [W, W, D],
        [numbers(9), numbers(8, 5), {"groups": (Group("1", 2, 4),)}],
    ),
    "each is ahead where the other is not": ([W, W], [numbers(9, 3), numbers(8, 4)]),
    "a stage in the middle of a pipeline sends more than the last one": (
        [F, F, F],
        [
            calls((2413, 2413)) | {"stack": WAITS},
            calls((4814, 4814)) | {"stack": DATA},
            calls((2409, 2409)) | {"stack": WAITS},
        ],
    ),
    "of a group with sends and collectives, the collectives count": (
        [F, F, F],
        [
            calls((906, 900)) | {"stack": WAITS},
            calls((305, 300)) | {"stack": DATA},
            calls((306, 300)) | {"stack": WAITS},
        ],
    ),
    "a rank that is late for its replica because it waits for a message": (
        [W, F, F],
        [numbers(9), numbers(8) | {"stack": WAITS}, {"stack": DATA}],
    ),
    "another operation under the same number: of three, the odd one": (
        [W, W, W],
        [entered(9, "all_reduce"), entered(9, "broadcast"), entered(9, "all_reduce")],
    ),
    "another size: of two, both": (
        [W, W],
        [entered(9, "all_reduce"), entered(9, "all_reduce", "[[5]]")],
    ),
    "uneven parts are what gathering is for": (
        [W, W],
        [entered(9, "all_gather"), entered(9, "all_gather", "[[5]]")],
    ),
    "without numbers: the rank that does not wait": ([W, D], [{}, {}]),
    "ranks that may all wait for messages: the one with the fewest calls": (
        ["other"] * 3,
        [calls((n, n - 79)) | {"stack": DATA, "kernel": ASLEEP} for n in (379, 375, 377)],
    ),
    "by its stack": (["other", "other"], [{"stack": WAITS}, {"stack": DATA}]),
    "none waits": ([D, D], [{}, {}]),
    "a device's queue that does not move on is a wait too": (
        ["other", D],
        [{"groups": (Group("0", 2, 9, 8, "cuda:nccl"),)}, {}],
    ),
    "the kernel's word comes first": (
        [W, D],
        [numbers(9), {"kernel": Kernel("T", True, 0.0), "silent_s": 30.0}],
    ),
    "it is in I/O": ([W, D], [numbers(9), {"kernel": Kernel("D", True, 0.9, "nfs_wait")}]),
    "it was in I/O for a moment, and computes": (
        [W, D],
        [numbers(9), {"kernel": Kernel("D", False, 0.9)}],
    ),
    "it is silent": ([W, D], [numbers(9), {"silent_s": 30.0}]),
    "it is silent for a second": ([W, D], [numbers(9), {"silent_s": 1.0}]),
    "what has raised in a collective does not wait in it any more": (
        [W, W],
        [{}, {"stack": LEFT}],
    ),
    # Neither torch's lines nor ours are what anybody looks for.
    "its loader, within ours": (
        [W, D],
        [{}, {"stack": (Frame(f"{OURS}torch/data.py", 56, "next"), *DATA)}],
    ),
    "in a step that was not measured, its stack tells the phase": (
        [W, "unmeasured"],
        [{}, {"stack": (Frame("/home/u/read.py", 5, "__getitem__"), LOADER)}],
    ),
    # -- under nccl, where the devices wait
    "a device has not come to what the others are in": (
        [F, F, F],
        [STARTED, on_device("scheduled", phase="backward"), STARTED],
    ),
    "phase and step are those of the device, which its host is ahead of": (
        [F, "optimizer"],
        [STARTED, {**on_device("scheduled", phase="backward"), "device_step": 3}],
    ),
    "a device that waits in another group is not the one": (
        [F, F, F],
        [
            STARTED,
            {**SCHEDULED, "collectives": (*SCHEDULED["collectives"], IN_GROUP_1)},
            {"groups": GROUP_1, "collectives": (IN_GROUP_1._replace(state="scheduled"),)},
        ],
    ),
    "torch times no collectives": ([F, F], [SCHEDULED, SCHEDULED]),
    "all devices are in it": ([F, F], [STARTED, STARTED]),
    "collectives of hosts and of devices in one group are told apart": (
        [W, F],
        [
            {**on_device("", completed=9), "collectives": (HOSTS,)},
            {**STARTED, "collectives": (HOSTS, *STARTED["collectives"])},
        ],
    ),
    "of hosts that run ahead, the one that the devices wait for": (
        [F, D, F],
        [
            on_device("started", enqueued=40),
            {**on_device("", enqueued=8), "stack": DATA},
            # It waits as rank 0 does, and its launch queue is full sooner.
            on_device("started", enqueued=31),
        ],
    ),
    # The host of rank 0 asks for its loss, and waits for its device: it has put fewer in line.
    "the device that computes": (
        ["other", F],
        [behind(806, W, 6), behind(822, "backward", 6, stack=LAUNCHES)],
    ),
    "a device has done all: it is the host that holds up the other rank": (
        ["other", D],
        [behind(822, W, 60), behind(806, D)],
    ),
    "a phase in which a device may wait names none": (
        [{"phase": each, "waits_in": frozenset({"backward"})} for each in ("other", F)],
        [behind(806, W, 60), behind(822, "backward", 60)],
    ),
    "it is silent in our own mark, and is not said to hold the GIL": (
        ["other", {"phase": "forward", "in_mark": True}],
        [behind(806, W, 60), {"silent_s": 30.0}],
    ),
}


@pytest.mark.parametrize(("phases", "answers"), TABLE.values(), ids=[*TABLE])
def test_the_table(
    phases: list[str | dict[str, Any]], answers: list[dict[str, Any]], golden: Golden
) -> None:
    job = Job(ranks=0)
    for rank, (phase, known) in enumerate(zip(phases, answers, strict=True)):
        job.put(rank, **(phase if isinstance(phase, dict) else {"phase": phase}))
        job.answers[rank] = known
    _, verdict = job.stalls_after()

    evidence = verdict.evidence
    culprits = evidence["culprits"]
    assert evidence["node"] == ("n1" if culprits else "")
    assert [row["rank"] for row in evidence["ranks"]] == [str(n) for n in range(len(phases))]
    assert verdict.since_ns == BEGAN
    named = f"{evidence['cause']} ({', '.join(culprits)})"
    golden.check(f"{named}, in {verdict.phase}, step {verdict.step}", verdict.sentence)


@pytest.mark.parametrize(
    ("held_up_by", "node"), [((2,), "node-b"), ((2, 3), "node-b"), ((1, 2), "")]
)
def test_of_a_run_on_several_nodes_the_one_is_told_that_all_culprits_are_on(
    held_up_by: tuple[int, ...], node: str
) -> None:
    suspects = []
    for rank in range(4):
        labels = labels_of(rank, node="node-a" if rank < 2 else "node-b")
        phase = "data" if rank in held_up_by else "comm_wait"
        suspects.append(Suspect(Position(labels, True, "running", 7, phase, BEGAN)))
    found = find_culprits(suspects, (), 60.0)

    assert found.culprits == tuple(map(str, held_up_by))
    assert found.node == node


# Where tensor parallelism waits, where a script waits for what it has begun, and where one hangs.
OPERATOR = (Frame("/x/site-packages/torch/_ops.py", 1350, "__call__"), *LAUNCHES)
OWN_LINE = (Frame("/home/u/train.py", 9, "step"),)


@pytest.mark.parametrize(
    ("of_1", "of_2", "of_3", "culprits"),
    [
        ((602, 401), (OPERATOR, ASLEEP), 601, "3"),
        ((602, 401), (OWN_LINE, BUSY), 601, "2 3"),
        # Rank 3 has begun to gather before it hung, while rank 1 waits for 0 as that does for 2: by
        # the numbers each waits for another.
        ((601, 402), (OPERATOR, ASLEEP), 602, "3"),
    ],
)
def test_a_rank_that_sleeps_in_a_collective_of_another_group_waits(
    of_1: tuple[int, int], of_2: tuple[Any, Kernel], of_3: int, culprits: str
) -> None:
    # Two by two: 0 gathers with 2 and 1 with 3; 0 sums up with 1 and 2 with 3.
    def rank(number: int, gathered: int, summed: int, stack: Any, kernel: Kernel) -> Suspect:
        groups = Group(f"g{number % 2}", 2, gathered), Group(f"s{number // 2}", 2, summed)
        known = Evidence(answered=True, groups=groups, stack=stack, kernel=kernel)
        return Suspect(Position(labels_of(number), True, "running", 7, "forward", BEGAN), known)

    found = find_culprits(
        [
            rank(0, 602, 401, WAITS, ASLEEP),
            rank(1, *of_1, WAITS, ASLEEP),
            rank(2, 601, 401, *of_2),
            rank(3, of_3, 400, OWN_LINE, ASLEEP),
        ],
        (),
        60.0,
    )

    assert (found.cause, found.culprits) == ("not_reached", tuple(culprits.split()))


def gone_on_until(over: Callable[[Job, list[Change]], bool], phase: str = "other") -> Job:
    """One rank waits; the other one is somewhere else in its program each time it is asked."""
    job = Job()
    job.put(0, "comm_wait")
    job.put(1, phase)
    while not over(job, job.tick()):
        job.answers[1] = {"stack": (Frame("/home/u/train.py", int(job.now_s), "evaluate"),)}
    return job


@pytest.mark.parametrize(("phase", "limit_s"), [("other", 600), ("data", 60)])
def test_a_program_that_goes_on_where_no_hook_sees_it_may_take_long(
    phase: str, limit_s: float
) -> None:
    job = gone_on_until(lambda job, changes: bool(changes), phase)

    assert limit_s <= job.now_s <= limit_s + 2


def test_a_rank_that_went_on_and_stopped_is_reported_when_its_limit_is_over() -> None:
    job = gone_on_until(lambda job, _: job.now_s >= 55)
    job.put(1, "forward", step=8)
    took_s, _ = job.stalls_after()

    assert 60 <= took_s <= 62


def test_a_rank_that_went_on_and_cannot_any_more_is_reported_at_once() -> None:
    job = gone_on_until(lambda job, _: job.now_s >= 45)
    job.answers[1] = {"silent_s": 30.0}
    took_s, _ = job.stalls_after()

    assert 15 <= took_s <= 17


@pytest.mark.parametrize(
    ("phase", "ended", "limit_s"),
    [
        ("comm_wait", "finished", 60.0),
        ("comm_wait", "failed", 60.0),
        # What comes after a training may take long, and so may ranks on another node.
        ("other", "finished", 600.0),
        ("other", "killed", 60.0),
        ("comm_wait", "", 600.0),
    ],
)
def test_what_those_that_are_left_wait_for(
    phase: str, ended: str, limit_s: float, golden: Golden
) -> None:
    job = Job(world=2 if ended else 4)
    job.put(0, phase)
    job.put(1, "comm_wait", alive=not ended, state=ended or "running")
    job.tick()
    if ended:
        # Its journal is deleted.
        del job.positions[1]
    took_s, verdict = job.stalls_after()

    assert limit_s <= took_s <= limit_s + 2
    assert verdict.evidence["limit_s"] == limit_s
    golden.check(verdict.evidence["cause"], verdict.evidence["culprits"], verdict.sentence)


def test_no_rank_waits_for_one_that_ended_before_the_last_step_began() -> None:
    job = Job(world=2)
    job.put(0, "comm_wait")
    job.put(1, alive=False, state="killed")
    job.tick()
    del job.positions[1]
    job.learn([1.0], began_ns=job.now_ns + SECOND)
    _, verdict = job.stalls_after()

    assert verdict.evidence["cause"] == "elsewhere"


def test_no_rank_waits_for_an_evaluator_that_ended() -> None:
    job = Job(world=2)
    job.put(0, "comm_wait")
    job.put(1, "comm_wait")
    job.put(2, alive=False, state="killed", world=1)
    job.tick()
    del job.positions[2]
    _, verdict = job.stalls_after()

    assert verdict.evidence["cause"] == "backend"


def test_one_incident_is_reported_again_when_its_cause_changes_and_when_it_ends() -> None:
    job = Job()
    job.put(0, "comm_wait")
    job.put(1, "data")
    job.answers = {0: numbers(9), 1: numbers(8)}
    job.stalls_after()
    assert job.run(200) == []

    job.evidence[labels_of(1)] = Evidence(silent_s=20.0, kernel=Kernel("T", True, 0.0))
    (changed,) = job.tick()
    assert changed.opened
    assert changed.verdict.evidence["cause"] == "stopped"

    job.put(0, "optimizer")
    (ended,) = job.tick()
    assert not ended.opened
    assert ended.verdict == changed.verdict
    assert job.run(20) == []


def test_what_was_known_of_a_hang_stands_when_its_ranks_end_one_after_the_other() -> None:
    job = Job()
    job.answers = {0: entered(9, "gloo:all_reduce"), 1: entered(9, "gloo:broadcast")}
    _, verdict = job.stalls_after()

    job.put(0, alive=False, state="failed")
    assert job.run(30) == []
    assert [each.evidence["cause"] for each in job.stalls.present()] == ["different_collectives"]
    assert job.stalls.summary.startswith("for 60 s: as collective number 9, rank 0 entered")
    job.put(1, alive=False)
    (ended,) = job.tick()
    assert not ended.opened
    assert ended.verdict == verdict
    assert job.stalls.summary == ""


def test_a_hang_is_over_when_one_of_its_ranks_finishes() -> None:
    job = Job()
    _, verdict = job.stalls_after()

    job.put(0, alive=False, state="finished")
    (over,) = job.tick()
    assert (over.opened, over.verdict) == (False, verdict)


def test_an_open_verdict_says_how_long_it_is_by_now() -> None:
    job = Job(floor_s=8.0)
    _, opened = job.stalls_after()

    assert job.run(30.0) == []
    (present,) = job.stalls.present()
    assert "no rank has moved for 8 s (limit 8 s)" in opened.sentence
    assert "no rank has moved for 38 s (limit 8 s)" in present.sentence
    assert present.evidence["ranks"][0]["still_s"] == pytest.approx(38.0, abs=1.0)
    assert present.since_ns == opened.since_ns


def test_an_answer_from_before_the_rank_moved_is_no_evidence() -> None:
    job = Job()
    job.put(0, "comm_wait")
    job.put(1, "data")
    job.answers = {0: numbers(9), 1: numbers(8)}
    job.run(40)
    # They go on, and no rank answers any more.
    job.answering = False
    job.put(0, "data")
    job.put(1, "comm_wait")
    _, verdict = job.stalls_after()

    assert verdict.evidence["culprits"] == ["0"]
