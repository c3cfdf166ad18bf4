"""Deaths and failures of a run: which rank is named, in which words, and when none is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from golden import Golden
from make import labels_of
from otel_ddp.diagnosis.death.cause import EndedProcess
from otel_ddp.diagnosis.death.incident import Deaths
from otel_ddp.diagnosis.detector import Observation, RankState
from otel_ddp.diagnosis.verdict import Change, Verdict

S = 1_000_000_000
T = 1_700_000_000 * S
PEER = "RuntimeError: [gloo] Connection closed by peer [127.0.0.1]:4711"


def killed(rank: int | str, at_s: float = 0.0, /, **cause: Any) -> EndedProcess:
    """Gone without a word at most 0.25 s before *at_s*."""
    ended_ns = T + round(at_s * S)
    alive_ns = ended_ns - S // 4
    return EndedProcess(labels_of(rank), "killed", 1234, "backward", alive_ns, ended_ns, "", cause)


def failed(
    rank: int, reason: str, at_s: float = 0.0, world: int | None = 2, known_for_s: float = 0.0
) -> EndedProcess:
    """It reported its end, so the moment is known; seen *known_for_s* ago."""
    at_ns = T + round(at_s * S)
    ended_process = EndedProcess(labels_of(rank), "failed", 1234, "forward", at_ns, at_ns, reason)
    return ended_process._replace(world_size=world, known_for_s=known_for_s)


def ended(rank: int, code: int | None, at_s: float = 0.0, known_for_s: float = 0.0) -> EndedProcess:
    """It looks finished; *code* is known once its launcher has looked."""
    cause = {} if code is None else {"exit_code": code}
    ended_process = failed(rank, "", at_s, 2, known_for_s)
    return ended_process._replace(state="finished", cause=cause)


def fed(deaths: Deaths, ended: list[EndedProcess], stall: str = "") -> list[Change]:
    """All ends that were seen at once; *stall*: how all had stood before."""
    for each in ended:
        deaths.feed(RankState(each.labels), Observation(ended=each))
    return deaths.poll(0, stall)


def seen_at_work(deaths: Deaths, rank: int, node: str = "n1") -> list[Change]:
    """It has begun a second after the ends, and is at work now."""
    deaths.feed(RankState(labels_of(rank, node=node), began_ns=T + S), Observation())
    return deaths.poll(0)


def verdict(*looks: list[EndedProcess]) -> Verdict | None:
    """What is open in the end."""
    deaths, standing = Deaths(), {}
    for found in looks:
        for change in fed(deaths, found):
            if change.opened:
                standing[change.verdict.key] = change.verdict
            else:
                del standing[change.verdict.key]
    assert len(standing) < 2, standing
    return next(iter(standing.values()), None)


def of(*looks: list[EndedProcess]) -> Verdict:
    found = verdict(*looks)
    assert found is not None
    return found


def rank(found: Verdict) -> str | None:
    return dict(found.labels).get("rank")


BAD = "RuntimeError: bad batch in shard 7"
SHAPES = "RuntimeError: mat1 and mat2 shapes cannot be multiplied (32x10 and 11x5)"
WATCHDOG = (
    "DistBackendError: [Rank 0] Watchdog caught collective operation timeout: WorkNCCL("
    "SeqNum=9, Timeout(ms)=600000) ran for 600014 milliseconds before timing out."
)
NCCL = "DistBackendError: NCCL error: remote process exited or there was a network error"
RESET = "ConnectionError: dataset server: Connection reset by peer"
NO_PEER = "RuntimeError: peer access is not supported between these two devices"
ASKED = {"signal": "SIGTERM"}
OOM = {"out_of_memory": "kernel log", "out_of_memory_in": "node"}
# What was seen in one look after another.
DECISIONS: Mapping[str, list[list[EndedProcess]]] = {
    "nothing is known": [[killed(3)]],
    "in a step that was not measured": [[killed(3)._replace(phase="unmeasured")]],
    "it left with a code": [[killed(0, exit_code=3)]],
    "the launcher asked another one to end": [
        [killed(3, signal="SIGKILL")],
        [killed(0, 0.5, **ASKED)],
    ],
    # Rank 0 was seen to have ended at 0; rank 1 was last seen at -0.05: it may have died before.
    "looks overlap": [[killed(0)], [killed(1, 0.2)]],
    "one crashed": [[killed(0, **ASKED), killed(1, **ASKED), killed(2, signal="SIGSEGV")]],
    "running out of memory took longer": [[killed(0)], [killed(1, 0.9, **OOM)]],
    "all were asked, and two took long to end": [
        [killed(2, **ASKED), killed(3, **ASKED)],
        [killed(each, 9.0, **ASKED) for each in (0, 1)],
    ],
    "a connection broke": [[failed(0, PEER, -0.1), killed(1)]],
    "one had left with a code": [
        [killed(1, exit_code=1)._replace(state="finished")],
        [killed(0, 1.0)],
    ],
    "nccl's words for a lost peer": [[failed(0, NCCL)], [failed(1, BAD, 0.1)]],
    "the watchdog's words for it": [[failed(0, WATCHDOG)], [failed(1, BAD, 0.1)]],
    "peer access is no peer": [[failed(0, NO_PEER), failed(1, PEER, 0.1)]],
    "a run of one has no peer": [[failed(0, RESET, world=1)]],
    "many similar exceptions": [
        [failed(each, f"ValueError: shard {each}", world=5) for each in range(5)]
    ],
    "exceptions differ": [[failed(1, BAD), failed(0, "AssertionError: out of order", 0.2)]],
    "one raised, and the other lost its peer": [[failed(1, BAD), failed(0, PEER, 0.05)]],
    "its peer is elsewhere": [[failed(0, PEER, known_for_s=6.0)]],
    "its peer had finished": [[ended(1, None, -1.0)], [failed(0, PEER, known_for_s=6.0)]],
    "all lost a peer on one node": [[failed(0, PEER), failed(1, PEER, 0.1)]],
    "sys.exit": [[failed(1, "SystemExit: 1"), failed(0, PEER, -0.1)]],
    "sys.exit on one rank": [[failed(1, "SystemExit: 1", known_for_s=2.0)]],
    "asked to end after a failure": [[failed(1, BAD), failed(0, "SystemExit: 143", 0.3)]],
    "an exception of several lines": [[failed(1, "ValueError: no\n  in 3\n", known_for_s=0.5)]],
    "an exception brought the others down": [
        [failed(2, "MemoryError: no room")],
        [killed(0, 0.5), killed(1, 0.5)],
    ],
    "a connection broke long before": [[failed(0, PEER, world=4)], [killed(1, 5.0)]],
    "the same exception on all": [[failed(1, SHAPES), failed(0, SHAPES, 3.0)]],
    "the kernel's log": [[killed(0, signal="SIGKILL", resident_bytes=61 << 30, **OOM)]],
    "what the cgroup counts": [
        [
            killed(
                0,
                out_of_memory="cgroup events",
                out_of_memory_kills=1,
                out_of_memory_within_s=30.0,
            )
        ]
    ],
    "SIGTERM": [[killed(0, signal="SIGTERM")]],
}


@pytest.mark.parametrize("looks", DECISIONS.values(), ids=[*DECISIONS])
def test_which_rank_is_named(looks: list[list[EndedProcess]], golden: Golden) -> None:
    found = of(*looks)

    golden.check(f"rank: {rank(found)}", found.sentence)


@pytest.mark.parametrize(
    "looks",
    [
        [[killed(0)], [killed(1, 0.9, **OOM)]],
        [[killed(0)], [killed(0)._replace(state="finished", cause={"exit_code": 143})]],
    ],
    ids=["another did", "intended"],
)
def test_a_verdict_that_is_taken_back_says_what_is_known_instead(
    looks: list[list[EndedProcess]], golden: Golden
) -> None:
    deaths = Deaths()
    changes = [change for look in looks for change in fed(deaths, look)]

    (over,) = [each.verdict for each in changes if not each.opened]
    assert over.evidence["taken_back"] is True
    golden.check(over.sentence)


# -- one


def test_a_verdict_has_the_phase_the_moment_and_all_that_is_known_of_the_end() -> None:
    found = of([failed(3, "ValueError: no such file\n  in shard 3\n", known_for_s=0.5)])

    assert (found.kind, found.labels, found.phase) == ("death", labels_of(3), "forward")
    assert (found.step, found.since_ns) == (1234, T)
    assert found.evidence["ended"][0]["reason"] == "ValueError: no such file\n  in shard 3\n"


# -- no deaths

LOADER = "RuntimeError: DataLoader worker (pid(s) 4711) exited unexpectedly"
REQUESTS = (
    "KeyboardInterrupt",
    "SystemExit: 143",
    "SignalException: Process 7 got signal: 15",
    "SIGTERMException",
    "RuntimeError: caught SIGTERM",
)
# Where all leave by themselves, or were asked to end, the program or its user meant it.
INTENDED: Mapping[str, list[EndedProcess]] = {
    "finished": [killed(1)._replace(state="finished")],
    "os._exit(0)": [killed(1, exit_code=0)],
    "SystemExit": [failed(0, "SystemExit: 1"), failed(1, "SystemExit: 1", 0.1)],
    "codes": [ended(0, 1), ended(1, 1, 0.1)],
    "no other rank affected": [ended(0, 1)],
    "a shell's code for a signal": [ended(0, 143), ended(1, 143, 0.1)],
    "a worker ended by the interrupt of all": [
        *(failed(0, LOADER), failed(1, "KeyboardInterrupt", 0.1))
    ],
    **{reason: [failed(0, reason), failed(1, reason, 0.1)] for reason in REQUESTS},
    "asked, and lost a peer": [failed(0, REQUESTS[2]), failed(1, PEER, 0.1)],
}


@pytest.mark.parametrize("left", INTENDED.values(), ids=[*INTENDED])
def test_an_end_that_was_meant_is_no_death(left: list[EndedProcess]) -> None:
    assert verdict(left, [each._replace(known_for_s=6.0) for each in left]) is None


# -- several


# What is seen in one look after another, and what each opens or closes, with the rank it names.
LOOKS: Mapping[str, list[tuple[list[EndedProcess], list[tuple[bool, str | None]]]]] = {
    "a death long after is an incident of its own": [
        ([killed(3)], [(True, "3")]),
        ([killed(0, 60.0)], [(True, "0")]),
    ],
    "the kernel says more a moment later": [
        ([killed(0), killed(1)], [(True, None)]),
        ([killed(0, **ASKED), killed(1, signal="SIGKILL")], [(False, None), (True, "1")]),
    ],
    "the others have time to report": [
        ([failed(1, BAD, world=4)], []),
        ([failed(1, BAD, world=4, known_for_s=0.5)], [(True, "1")]),
    ],
    "an exit code is waited for longer": [
        ([ended(1, None, -1.0)], []),
        ([failed(0, PEER, known_for_s=2.0)], []),
        ([ended(1, 1, -1.0, known_for_s=6.0)], [(True, "1")]),
    ],
    "an evaluator that died before is no peer": [
        ([killed(7, -1.0)._replace(world_size=1)], [(True, "7")]),
        ([failed(0, PEER, known_for_s=2.0)], [(True, None)]),
    ],
    "a late reason takes the place of a lost peer": [
        ([failed(0, PEER, world=4, known_for_s=2.0)], [(True, None)]),
        ([failed(1, BAD, 5.0, world=4)], [(False, None), (True, "1")]),
    ],
    "a late clean exit code takes the verdict back": [
        ([killed(0)], [(True, "0")]),
        ([killed(0, exit_code=0)], [(False, "0")]),
    ],
    "the same rank dies again in the next attempt": [
        ([killed(0), killed(1, 1.0)], [(True, "0")]),
        ([killed(0, 10.0)], [(True, "0")]),
    ],
}


@pytest.mark.parametrize("looks", LOOKS.values(), ids=[*LOOKS])
def test_what_is_known_later_opens_and_closes_verdicts(
    looks: list[tuple[list[EndedProcess], list[tuple[bool, str | None]]]],
) -> None:
    deaths = Deaths()
    for seen, told in looks:
        changes = fed(deaths, seen)
        assert [(each.opened, rank(each.verdict)) for each in changes] == told


def test_a_rank_that_is_asked_to_end_while_the_others_are_there_is_what_they_lost() -> None:
    asked = killed(1, 0.05, signal="SIGTERM")
    # It reports a lost peer before the end of the other one is seen, and leaves after that.
    others = [failed(each, PEER, world=3, known_for_s=2.0) for each in (0, 2)]

    # The launcher has hurried them.
    hurried = {"signal": "SIGTERM"}
    others = [each._replace(last_present_ns=T + S // 10, cause=hurried) for each in others]
    found = of([*others, asked])

    assert rank(found) == "1"
    assert "Ranks 0, 2 lost their connections and failed" in found.sentence


def test_a_rank_that_a_launcher_may_have_ended_is_not_what_the_others_lost() -> None:
    asked = killed(1, 0.05, signal="SIGTERM")
    lost = failed(0, PEER, known_for_s=2.0)._replace(last_present_ns=T + S // 25)

    assert rank(of([lost, asked])) != "1"


# -- started again


@pytest.mark.parametrize(
    ("gone", "back", "node"),
    [
        ([ended(2, 0), failed(1, BAD), failed(0, PEER, 0.1)], 0, "n1"),
        ([killed(1)], 1, "n2"),
    ],
    ids=["failed", "on another node"],
)
def test_a_run_that_is_started_anew_closes_the_incident(
    gone: list[EndedProcess], back: int, node: str
) -> None:
    deaths = Deaths()
    told = fed(deaths, gone)[-1].verdict.sentence

    (change,) = seen_at_work(deaths, back, node)

    assert not change.opened
    assert change.verdict.key == ("death", labels_of(1))
    again = f"Rank {back} ({node}) is at work again: the run was restarted."
    assert change.verdict.sentence == f"{told} {again}"
    assert seen_at_work(deaths, 1) == []
    # An end that its node reports late, or again, is no new incident; a later end is one.
    assert fed(deaths, [killed(3, 0.5), *gone]) == []
    assert [each.opened for each in fed(deaths, [killed(4, 2)])] == [True]


def test_an_end_that_is_reported_again_joins_no_newer_incident() -> None:
    deaths = Deaths()
    first = killed(0)._replace(labels=labels_of(0, node="n1"))
    fed(deaths, [first])
    seen_at_work(deaths, 0, "n2")
    newer = killed(0, 15)._replace(labels=labels_of(0, node="n2"))
    fed(deaths, [newer])

    assert fed(deaths, [first]) == []


def test_an_end_joins_the_newer_of_two_incidents_that_may_include_it() -> None:
    deaths = Deaths()
    fed(deaths, [killed(0)])
    fed(deaths, [killed(1, 41)])

    newest = fed(deaths, [killed(2, 38)])[-1].verdict
    assert [each["rank"] for each in newest.evidence["ended"]] == ["2", "1"]


def test_an_open_incident_is_kept_longer_than_closed_ones() -> None:
    deaths = Deaths()
    evaluator = killed("eval", 0)
    fed(deaths, [evaluator])
    for restart in range(1, 12):
        fed(deaths, [killed(1, 100 * restart)])
        deaths.feed(RankState(labels_of(1), began_ns=T + (100 * restart + 1) * S), Observation())
        deaths.poll(0)

    assert [each.opened for each in seen_at_work(deaths, "eval")] == [False]


# -- after a hang


def test_a_death_after_a_hang_is_told_as_its_end() -> None:
    hangs = "for 88 s: rank 1 is in data after step 7 at train.py:31 (load)"

    (change,) = fed(Deaths(), [killed(1, signal="SIGKILL")], stall=hangs)

    assert change.verdict.sentence.endswith(f". Before that, no rank had moved {hangs}.")
