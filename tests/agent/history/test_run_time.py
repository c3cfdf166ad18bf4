"""The attempts of a run, and what the time of its ranks is counted as."""

from __future__ import annotations

import json
from typing import Any

import pytest

from make import step_of
from otel_ddp.agent.history.attempts import Attempts
from otel_ddp.agent.history.run_time import ProcessTime, RunTime
from otel_ddp.diagnosis.steps import Parts, Step
from otel_ddp.vocabulary.words import PHASES

S = 10**9
BEGAN = 1000 * S
USUAL = {"forward": 300, "backward": 500, "data": 100, "comm_wait": 100}


def step(number: int, ended_s: float, took_s: float = 1.0, **more: Any) -> Step:
    """*more*: phases by their share in thousandths, and `logged`, the program's own number."""
    logged = more.pop("logged", None)
    phases, took_ns = more or USUAL, round(took_s * S)
    pieces = [
        (PHASES[each], took_ns * part // sum(phases.values())) for each, part in phases.items()
    ]
    return step_of(number, BEGAN + round(ended_s * S) - took_ns, pieces, logged=logged)


class Played:
    """Ranks, the first of which is the usual one; times are seconds since its process began."""

    def __init__(self, kept: dict[str, Any] | None = None) -> None:
        self.time = RunTime()
        if kept is not None:
            self.time.restore(kept)
        self.processes: dict[str, ProcessTime] = {}

    @property
    def process(self) -> ProcessTime:
        return self.processes["0"]

    def begins(
        self,
        at_s: float,
        started_s: float | None = None,
        *,
        rank: str = "0",
        node: str = "",
        by: str = "torchrun-1",
    ) -> None:
        """*by*: what launched it."""
        at_ns = BEGAN + round(at_s * S)
        started_ns = at_ns if started_s is None else BEGAN + round(started_s * S)
        process = ProcessTime(rank, at_ns, started_ns, 0, "running", launched_by=by, node=node)
        self.processes[rank] = process
        self.notes(at_s)

    def ends(self, at_s: float, state: str = "killed", *, rank: str = "0") -> None:
        ended_ns = BEGAN + round(at_s * S)
        self.processes[rank] = self.processes[rank]._replace(ended_ns=ended_ns, state=state)
        self.notes(at_s)

    def notes(self, at_s: float, *verdicts: dict[str, Any]) -> None:
        self.time.learn(self.processes.values())
        self.time.note(self.processes.values(), verdicts, BEGAN + round(at_s * S))

    def steps(self, first: int, last: int, ends_s: float, rank: str = "0", **more: Any) -> None:
        """Of one second each. *logged*: the program's number of the first one."""
        logged = more.pop("logged", None)
        for number in range(first, last + 1):
            told = {} if logged is None else {"logged": logged + number - first}
            each = step(number, ends_s + number - first, **told, **more)
            self.time.feed(rank, "host", [each])

    @property
    def seconds(self) -> dict[str, float]:
        return dict(self.time.to_json()["time"]["seconds"])

    @property
    def attempts(self) -> list[dict[str, Any]]:
        return list(self.time.to_json()["attempts"])


def trained(last: int, **more: Any) -> Played:
    """It has made so many steps from its first second on."""
    played = Played()
    played.begins(0)
    played.steps(1, last, 1, **more)
    return played


def numbered(first: int, last: int, at_s: float = 0, ahead: int | None = None) -> list[Step]:
    """Steps of a second each. *ahead*: the program's own numbers are so much larger."""
    return [
        step(n, at_s + n, logged=None if ahead is None else n + ahead)
        for n in range(first, last + 1)
    ]


def begun_again(first: list[Step], ranks: str = "0") -> Attempts:
    """A run whose ranks made these steps before it failed, and which is there once more."""
    attempts = Attempts()
    attempts.begin(BEGAN)
    for rank in ranks:
        attempts.place(rank, "host", first)
    attempts.end(BEGAN + 200 * S, "failed")
    attempts.begin(BEGAN + 300 * S)
    return attempts


def killed_at_100_and_saved_at_60(tells: bool = True) -> Played:
    """Each attempt needs ten seconds to start; there are 20 between them."""
    played = Played()
    played.begins(0)
    played.steps(1, 100, 10, **({"logged": 0} if tells else {}))
    played.ends(109.5)
    played.begins(129.5)
    played.steps(1, 140, 139.5, **({"logged": 60} if tells else {}))
    played.ends(279.5, "finished")
    return played


def test_every_second_is_counted_once_and_each_attempt_is_told_with_its_steps() -> None:
    played = killed_at_100_and_saved_at_60()
    found = played.seconds

    assert sum(found.values()) == pytest.approx(279.5)
    # The first step of each attempt belongs to its start.
    assert found["start"] == pytest.approx(10 + 10)
    assert found["repeated"] == pytest.approx(39)
    assert found["between_attempts"] == pytest.approx(20)
    assert found["unknown"] == pytest.approx(0.5)
    assert found["data"] == pytest.approx(0.1 * (99 + 100))
    assert found["productive"] == pytest.approx(0.9 * (99 + 100))
    assert found["end"] == pytest.approx(1)
    first, second = played.attempts
    assert (first["first_step"], first["last_step"], first["state"]) == (0, 99, "killed")
    assert (second["first_step"], second["last_step"], second["state"]) == (60, 199, "finished")
    assert (first.get("repeated_steps"), second["repeated_steps"]) == (None, 40)
    # When each began a step that was new.
    assert (first["new_ns"], second["new_ns"]) == (BEGAN + 9 * S, BEGAN + 178.5 * S)


@pytest.mark.parametrize(
    ("launchers", "cause"),
    [
        (("torchrun-1", "torchrun-1"), "between_attempts"),
        (("torchrun-1", "torchrun-2"), "between_launches"),
        (("", ""), "between_launches"),
    ],
)
@pytest.mark.parametrize("by_another_agent", [False, True])
def test_a_gap_is_within_a_launch_only_if_its_launcher_lived_meanwhile(
    launchers: tuple[str, str], cause: str, by_another_agent: bool
) -> None:
    played, (first, second) = Played(), launchers
    played.begins(0, by=first)
    played.steps(1, 10, 1, logged=0)
    played.ends(10)
    if by_another_agent:
        played = Played(json.loads(json.dumps(played.time.to_json())))
    played.begins(200_010, by=second)
    played.steps(1, 1, 200_020)

    gaps = {"between_attempts", "between_launches"} & played.seconds.keys()
    assert {each: played.seconds[each] for each in gaps} == {cause: pytest.approx(200_000)}


@pytest.mark.parametrize(("launcher", "gap_s"), [("torchrun-1", 30), ("torchrun-2", 0)])
def test_a_rank_that_the_run_went_on_without_has_no_gap(launcher: str, gap_s: float) -> None:
    played = Played()
    for began_s, ranks in ((0, "01"), (20, "0"), (40, "01")):
        for rank in ranks:
            # Between the attempts of rank 0 there is no time.
            by = "torchrun-0" if rank == "0" else launcher if began_s else "torchrun-1"
            played.begins(began_s, rank=rank, by=by)
            played.steps(1, 1, began_s + 1, rank)
        for rank in ranks:
            played.ends(began_s + (10 if rank == "1" else 20), rank=rank)

    assert sum(played.seconds.values()) == pytest.approx(3 * 20 + 2 * 10 + gap_s)


def test_an_attempt_that_ends_as_the_next_one_makes_steps_has_all_of_its_own() -> None:
    played = trained(100, logged=0)
    played.ends(101)
    played.begins(110)
    # It dies before it has told which these are.
    played.steps(1, 2, 111)
    died = played.process._replace(ended_ns=BEGAN + 113 * S, state="killed", step=61)
    next_ns = BEGAN + 120 * S
    played.time.learn([died, died._replace(began_ns=next_ns, ended_ns=0, state="running")])
    played.time.begin(ProcessTime("0", next_ns, next_ns, 0, "running"), trains=True)
    released = played.time.note([], (), next_ns)

    second = played.attempts[1]
    assert (second["last_step"], second["state"]) == (61, "killed")
    assert [(*of, len(placed)) for *of, placed in released] == [("0", "host", 2)]
    assert sum(played.seconds.values()) == pytest.approx(120)


def test_an_end_that_was_seen_late_takes_no_time_of_the_next_attempt() -> None:
    played = trained(100, logged=0)
    late = played.process._replace(ended_ns=BEGAN + 150 * S, state="killed")
    next_ns = BEGAN + 120 * S
    played.time.learn([late, late._replace(began_ns=next_ns, ended_ns=0, state="running")])
    played.time.begin(ProcessTime("0", next_ns, next_ns, 0, "running"), trains=True)
    played.steps(1, 20, 121, logged=60)

    assert played.seconds["repeated"] == pytest.approx(19)
    assert played.seconds["unknown"] == pytest.approx(20)
    assert played.attempts[1]["began_ns"] == next_ns


def test_an_attempt_ended_for_its_first_reason_as_far_as_that_is_known_by_now() -> None:
    def death(at_s: float, sentence: str, until_ns: int | None = None) -> dict[str, Any]:
        since_ns = BEGAN + round(at_s * S)
        return {"kind": "death", "since_ns": since_ns, "until_ns": until_ns, "sentence": sentence}

    played = trained(9)
    played.notes(10, death(9.5, "rank 1 left without a word"))
    said = "rank 1 left without a word: exit code 3"
    played.notes(11, death(9.5, said), death(9.6, "rank 0 lost its connection"))
    played.ends(11)
    played.begins(20)
    played.notes(21, death(9.5, "rank 1 is at work again", BEGAN + 20 * S))

    first, second = played.attempts
    assert first["why"] == said
    assert "why" not in second


def test_a_death_that_is_taken_back_is_not_why_an_attempt_ended() -> None:
    first = {"kind": "death", "since_ns": BEGAN + 10 * S, "until_ns": None, "sentence": "rank 0"}
    over = {**first, "until_ns": BEGAN + 12 * S, "evidence": {"taken_back": True}}
    cause = {**first, "since_ns": BEGAN + 11 * S, "sentence": "rank 1: out of memory"}
    played = trained(9)
    played.notes(11, first)
    told = [each.get("why") for each in played.attempts]
    played.notes(12, over, cause)
    told += [each.get("why") for each in played.attempts]

    assert told == ["rank 0", "rank 1: out of memory"]
    # The end was intended after all.
    played.notes(13, over, {**over, "since_ns": cause["since_ns"]})
    assert "why" not in played.attempts[0]


def test_what_a_program_without_numbers_does_twice_is_not_known() -> None:
    found = killed_at_100_and_saved_at_60(tells=False).seconds

    assert "repeated" not in found
    assert found["unknown"] == pytest.approx(0.5 + 99)


def test_a_program_that_goes_on_where_it_was_repeats_nothing() -> None:
    played = trained(100, logged=0)
    played.ends(100)
    played.begins(110)
    # It logs after its first step: that one is told by the second.
    played.time.feed("0", "host", [step(1, 111)])
    played.steps(2, 50, 112, logged=101)

    assert "repeated" not in played.seconds
    assert played.attempts[1]["first_step"] == 100


def test_ranks_that_do_not_log_are_told_by_the_one_that_does() -> None:
    attempts = begun_again(numbered(1, 100, ahead=-1))

    assert attempts.place("1", "host", numbered(1, 50, 300)) == []
    attempts.place("0", "host", numbered(1, 2, 300, ahead=59))
    # From now on it holds no steps, however far that rank has logged.
    placed = attempts.place("1", "host", numbered(51, 51, 300))

    assert [each.number for each in placed] == list(range(61, 112))
    assert [each.is_repeated for each in placed] == [True] * 40 + [False] * 11
    assert attempts.held() == {}


def test_an_attempt_that_ends_before_its_first_number_replaces_no_step_of_earlier_ones() -> None:
    attempts = begun_again(numbered(1, 100, ahead=-1))
    attempts.place("0", "host", numbered(1, 5, 300))

    held = attempts.release("0", "host")
    assert [(each.number, each.is_repeated) for each in held] == [
        (n, None) for n in range(101, 106)
    ]
    assert "last_step" not in attempts.entries[1]
    attempts.begin(BEGAN + 400 * S)
    late = attempts.place_late(2, numbered(1, 3, 300))
    assert [each.number for each in late] == [101, 102, 103]


def test_a_next_attempt_begins_with_the_held_steps_of_a_rank_whose_end_is_unknown() -> None:
    played = trained(100, logged=0)
    played.ends(100)
    played.begins(110)
    played.steps(1, 5, 111)
    # Its node is lost, and the rank begins on another one.
    played.begins(120, node="b")

    assert [each.get("last_place") for each in played.attempts] == [100, 105, None]


def test_the_first_of_very_many_attempts_is_kept() -> None:
    attempts = begun_again(numbered(1, 100, ahead=-1))
    for each in range(200):
        attempts.begin(BEGAN + (400 + each) * S)

    assert len(attempts.entries) == 100
    assert attempts.entries[0]["attempt"] == 1


def test_steps_that_wait_for_a_number_are_told_at_the_end() -> None:
    attempts = begun_again(numbered(1, 100, ahead=-1))
    attempts.place("1", "host", numbered(40, 42, 300))
    attempts.place("0", "host", numbered(1, 40, 300, ahead=59))

    # What no rank has told before its process died may be new.
    held = attempts.release("1", "host")
    assert [(each.number, each.is_repeated) for each in held] == [
        (100, True),
        (101, False),
        (102, False),
    ]


def test_a_program_that_counts_each_part_of_a_step_tells_no_numbers_of_steps() -> None:
    attempts = begun_again([step(n, n, logged=4 * n) for n in range(1, 101)])
    placed = attempts.place("0", "host", [step(n, n, logged=240 + 4 * n) for n in range(1, 61)])

    assert [(each.number, each.is_repeated) for each in placed] == [
        (number, None) for number in range(1, 61)
    ]


def test_steps_stay_in_their_places_where_the_optimizer_counts_from_1_and_the_log_from_0() -> None:
    # Adam's own count is ours in the first attempt.
    attempts = begun_again([step(1, 1), *numbered(2, 100, ahead=-1)])
    placed: dict[str, list[Any]] = {"0": [], "1": []}
    for n in range(1, 141):
        for rank in ("1", "0"):
            # Rank 0 logs after its first step, and the other one does not log.
            ahead = 60 if rank == "1" or n == 1 else 59
            placed[rank] += attempts.place(rank, "host", numbered(n, n, 300, ahead))

    for each in placed.values():
        assert [of.number for of in each][:139] == list(range(61, 200))
        assert [of.is_repeated for of in each][:139] == [True] * 40 + [False] * 99
    second = attempts.entries[1]
    assert (second["first_step"], second["last_step"], second["repeated_steps"]) == (60, 199, 40)


@pytest.mark.parametrize("many", [140, 600])
def test_a_rank_that_is_left_tells_its_numbers_itself(many: int) -> None:
    attempts = begun_again(numbered(1, 100, ahead=-1), ranks="10")
    # Rank 1, which told the numbers, is gone. No number is logged before the second step.
    steps = [step(1, 301, 0.01), *[step(n, 301, 0.01, logged=n + 59) for n in range(2, many + 1)]]

    placed = attempts.place("0", "host", steps) + attempts.release("0", "host")
    assert [each.number for each in placed] == list(range(61, many + 61))
    assert sum(bool(each.is_repeated) for each in placed) == 40
    second = attempts.entries[1]
    assert (second["first_step"], second["last_step"]) == (60, many + 59)


def test_another_agent_goes_on_with_what_was_counted() -> None:
    before = Played()
    before.begins(0)
    before.steps(1, 100, 10, logged=0)
    before.ends(109)
    before.begins(129)
    before.steps(1, 20, 139, logged=60)

    after = Played(before.time.to_json())
    after.processes = before.processes
    after.steps(21, 140, 159, logged=80)
    after.ends(278, "finished")

    assert sum(after.seconds.values()) == pytest.approx(278)
    assert after.seconds["repeated"] == pytest.approx(39)
    assert after.attempts[1]["repeated_steps"] == 40


def test_a_hang_is_counted_while_it_lasts_and_until_the_process_ends() -> None:
    played = trained(10)
    hang = {
        "kind": "stall",
        "since_ns": BEGAN + 10 * S,
        "until_ns": None,
        "who": {},
        "sentence": "",
    }
    played.notes(40, hang)
    assert played.seconds["hang"] == pytest.approx(30)

    # It went on: of this step 5 s are not counted yet.
    played.time.feed("0", "host", [step(11, 45, 35.0)])
    assert played.seconds["hang"] == pytest.approx(30)
    assert sum(played.seconds.values()) == pytest.approx(45)


LATE = {"kind": "straggler", "since_ns": BEGAN, "until_ns": None}


def test_what_a_late_rank_cost_is_what_its_verdict_says_also_of_steps_before_it() -> None:
    played = trained(10)
    before = played.seconds["productive"]
    who = {"rank": "3", "node": "node-1"}
    # Three ranks wait for it, and one of them is here.
    played.notes(10, {**LATE, "who": who, "evidence": {"lost_s": 1.5, "others": 3}})
    named = played.seconds
    played.steps(11, 20, 11)
    over = {**LATE, "until_ns": BEGAN + 20 * S, "who": who}
    played.notes(20, {**over, "evidence": {"lost_s": 6.0, "others": 3}})
    played.notes(21, {**over, "evidence": {"lost_s": 6.0, "others": 3}})

    assert (named["late_rank"], before - named["productive"]) == pytest.approx((0.5, 0.5))
    assert played.seconds["late_rank"] == pytest.approx(2)
    assert played.time.to_json()["time"]["late"] == {"rank 3 (node-1)": pytest.approx(2)}


def test_a_late_node_takes_no_time_of_its_own_ranks_and_none_that_is_counted_otherwise() -> None:
    played = trained(3, data=1000)
    played.notes(3, {**LATE, "who": {"node": "node-0"}, "evidence": {"lost_s": 9, "ranks": ["0"]}})
    assert "late_rank" not in played.seconds

    played.steps(4, 5, 4)
    # The steps that it cost are not counted yet.
    played.notes(5, {**LATE, "who": {"node": "node-2"}, "evidence": {"lost_s": 3, "ranks": ["7"]}})
    counted = played.seconds["late_rank"]
    played.steps(6, 9, 6)
    played.notes(9, {**LATE, "who": {"node": "node-2"}, "evidence": {"lost_s": 3}})

    assert counted == pytest.approx(1.8)
    assert played.seconds["late_rank"] == pytest.approx(3)


def test_an_evaluation_is_also_what_it_does_between_two_batches() -> None:
    played = trained(10)
    words = ("data", "eval", "other", "data", "eval", "other", "forward", "other", "eval")
    parts = Parts(BEGAN + 10 * S, bytes(PHASES[word] for word in words), (S,) * 9)
    whole = step(11, 19, 9)
    played.time.feed("0", "host", [whole._replace(parts=parts)])

    found = played.seconds
    assert (found["evaluation"], found["data"]) == (4, pytest.approx(0.9 + 2))


def test_the_time_before_the_journal_belongs_to_the_start() -> None:
    played = Played()
    played.begins(30, started_s=0)
    played.steps(1, 1, 40)

    assert played.seconds == {"start": pytest.approx(40)}


def test_a_process_that_spawns_the_one_that_trains_is_its_start_and_no_attempt() -> None:
    played = Played()
    played.begins(0)
    parent = played.process
    child_ns = BEGAN + 20 * S
    child = parent._replace(began_ns=child_ns, started_ns=child_ns)
    played.time.note([parent, child], (), BEGAN + 25 * S)
    played.time.begin(child, trains=True)
    played.steps(1, 10, 30)

    assert [each["attempt"] for each in played.attempts] == [1]
    assert played.seconds["start"] == pytest.approx(30)
    assert "between_attempts" not in played.seconds


def test_a_run_that_ended_well_loses_nothing_until_somebody_goes_on_with_it() -> None:
    played = trained(10, logged=0)
    played.ends(10, "finished")
    played.begins(5000)
    assert len(played.attempts) == 1

    played.time.begin(
        ProcessTime("0", BEGAN + 5000 * S, BEGAN + 5000 * S, 0, "running"), trains=True
    )
    played.steps(1, 10, 5001, logged=10)
    assert "between_attempts" not in played.seconds
    assert len(played.attempts) == 2


def test_what_is_beside_the_training_has_no_part_in_it_and_numbers_of_its_own() -> None:
    played = killed_at_100_and_saved_at_60()
    before = played.seconds, played.attempts
    played.time.begin(ProcessTime("critic/0", BEGAN, BEGAN, 0, "running"), trains=True)
    placed = played.time.feed("critic/0", "host", [step(n, n, logged=7 * n) for n in range(1, 300)])

    assert [each.number for each in placed] == list(range(1, 300))
    assert (played.seconds, played.attempts) == before


def test_the_clock_of_the_device_counts_where_there_is_one() -> None:
    played = trained(10)
    played.time.feed("0", "device", [step(n, n, forward=600, data=400) for n in range(9, 15)])
    played.steps(11, 14, 11)

    assert sum(played.seconds.values()) == pytest.approx(14)
    assert played.seconds["data"] == pytest.approx(0.1 * 9 + 0.4 * 4)


def test_an_attempt_ends_with_the_next_one_though_a_node_that_is_gone_tells_no_end() -> None:
    played = Played()
    for rank, node in (("0", ""), ("1", "b")):
        played.begins(0, rank=rank, node=node)
        played.steps(1, 2, 10, rank)
    played.ends(20)
    played.begins(50)

    first, second = played.attempts
    assert (first["state"], first["ended_ns"]) == ("killed", BEGAN + 20 * S)
    assert second["began_ns"] == BEGAN + 50 * S


def test_the_time_of_each_node_is_counted_by_itself_and_goes_on_with_the_next_agent() -> None:
    played = Played()
    for rank, node in (("0", ""), ("1", "b")):
        played.begins(0, rank=rank, node=node)
        played.steps(1, 2, 10 + int(rank), rank)
    kept = played.time.to_json()

    assert sum(kept["time"]["seconds"].values()) == pytest.approx(11)
    assert sum(kept["time"]["nodes"]["b"]["seconds"].values()) == pytest.approx(12)
    assert played.time.snapshot is not None
    assert played.time.snapshot.seconds == kept["time"]["seconds"]
    assert Played(json.loads(json.dumps(kept))).time.to_json()["time"] == kept["time"]
