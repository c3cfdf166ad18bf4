"""Deaths and failures of a run: which rank is named, in which words, and when none is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from make import labels_of
from otel_ddp.diagnosis.death.cause import EndedProcess
from otel_ddp.diagnosis.death.incident import Deaths
from otel_ddp.diagnosis.detector import Observation, RankState
from otel_ddp.diagnosis.verdict import Change, Verdict

S = 1_000_000_000
T = 1_700_000_000 * S
PEER = "RuntimeError: [gloo] Connection closed by peer [127.0.0.1]:4711"


def killed(
    rank: int | str, at_s: float = 0.0, /, seen_s: float = 0.25, into_s: float = 1.0, **cause: Any
) -> EndedProcess:
    """Gone without a word at most *seen_s* before *at_s*, *into_s* after its phase began."""
    ended_ns = T + round(at_s * S)
    alive_ns = ended_ns - round(seen_s * S)
    since_ns = alive_ns - round(into_s * S)
    return EndedProcess(
        labels_of(rank), "killed", 1234, "backward", since_ns, alive_ns, ended_ns, "", cause
    )


def failed(
    rank: int, reason: str, at_s: float = 0.0, world: int | None = 2, known_for_s: float = 0.0
) -> EndedProcess:
    """It reported its end, so the moment is known; seen *known_for_s* ago."""
    at_ns = T + round(at_s * S)
    ended_process = EndedProcess(
        labels_of(rank), "failed", 1234, "forward", at_ns - S, at_ns, at_ns, reason
    )
    return ended_process._replace(world_size=world, known_for_s=known_for_s)


def ended(
    rank: int, code: int | None, at_s: float = 0.0, world: int | None = 2, known_for_s: float = 0.0
) -> EndedProcess:
    """It looks finished; *code* is known once its launcher has looked."""
    cause = {} if code is None else {"exit_code": code}
    ended_process = failed(rank, "", at_s, world, known_for_s)
    return ended_process._replace(state="finished", cause=cause)


def fed(
    deaths: Deaths, ended: list[EndedProcess], under_nccl: bool = False, stall: str = ""
) -> list[Change]:
    """All ends that were seen at once; *stall*: how all had stood before."""
    for each in ended:
        state = RankState(each.labels, under_nccl=under_nccl)
        deaths.feed(state, Observation(ended=each))
    return deaths.poll(0, stall)


def seen_at_work(deaths: Deaths, *ranks: int) -> list[Change]:
    """These ranks are at work now."""
    for rank in ranks:
        deaths.feed(RankState(labels_of(rank)), Observation())
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
# What was seen in one look after another; the rank that is named; and some of the words.
DECISIONS: Mapping[str, tuple[list[list[EndedProcess]], str | None, str]] = {
    "it left with a code": (
        [[killed(0, exit_code=3)]],
        "0",
        "left without a word in backward after step 1234, 1 s into it: exit code 3.",
    ),
    "it entered its phase after the last look": (
        [[killed(0, into_s=0.1)]],
        "0",
        ", less than 0.35 s into it",
    ),
    "it has no rank and no step": (
        [[killed("p4711")._replace(step=None)]],
        "p4711",
        "process 4711 (n1) was killed in backward before its first step",
    ),
    "the launcher asked another one to end": (
        [[killed(3, signal="SIGKILL")], [killed(0, 0.5, **ASKED)]],
        "3",
        "The launcher ended rank 0 after it within 0.5 s.",
    ),
    # Rank 0 was seen to have ended at 0; rank 1 was last seen at -0.05: it may have died before.
    "looks overlap": ([[killed(0)], [killed(1, 0.2)]], None, "not known which was first"),
    "one crashed": (
        [[killed(0, **ASKED), killed(1, **ASKED), killed(2, signal="SIGSEGV")]],
        "2",
        "SIGSEGV",
    ),
    "running out of memory took longer": ([[killed(0)], [killed(1, 0.9, **OOM)]], "1", ""),
    "all were asked, and two were gone a look before the others": (
        [[killed(2, **ASKED), killed(3, **ASKED)], [killed(each, 0.6, **ASKED) for each in (0, 1)]],
        None,
        "ranks 0, 1, 2 and 3 ended at the same moment (within 0.85 s), in backward after step "
        "1234: it is not known which was first; each: SIGTERM. A launcher, a scheduler or a "
        "person asked all of them to end.",
    ),
    "all were asked, and two took long to end": (
        [[killed(2, **ASKED), killed(3, **ASKED)], [killed(each, 9.0, **ASKED) for each in (0, 1)]],
        None,
        "asked all of them to end. Ranks 0 and 1 followed within 9 s.",
    ),
    "a connection broke": (
        [[failed(0, PEER, -0.1), killed(1)]],
        "1",
        "Rank 0 lost its connection and failed",
    ),
    "one had left with a code": (
        [[killed(1, exit_code=1)._replace(state="finished")], [killed(0, 1.0)]],
        "1",
        "ended in backward after step 1234, 1 s into it: exit code 1",
    ),
    "nccl's words for a lost peer": ([[failed(0, NCCL)], [failed(1, BAD, 0.1)]], "1", ""),
    "the watchdog's words for it": ([[failed(0, WATCHDOG)], [failed(1, BAD, 0.1)]], "1", ""),
    "peer access is no peer": ([[failed(0, NO_PEER), failed(1, PEER, 0.1)]], "0", ""),
    "a run of one has no peer": ([[failed(0, RESET, world=1)]], "0", f": {RESET}."),
    "a run of one gives no reason": ([[failed(0, "", world=1)]], "0", "it gave no reason"),
    "others finish well": (
        [[ended(0, 0)], [failed(1, BAD, known_for_s=0.5)]],
        "1",
        f": {BAD}.",
    ),
    "many similar exceptions": (
        [[failed(each, f"ValueError: shard {each}", world=5) for each in range(5)]],
        None,
        "rank 2: ValueError: shard 2; and 2 more.",
    ),
    "exceptions differ": (
        [[failed(1, BAD), failed(0, "AssertionError: out of order", 0.2)]],
        "1",
        f"{BAD}. Rank 0 failed too: AssertionError: out of order.",
    ),
    "all lost a peer on one node": (
        [[failed(0, PEER), failed(1, PEER, 0.1)]],
        None,
        "All ranks are known here, and none reports another cause.",
    ),
    "an evaluator beside them had finished": (
        [[ended(7, 0, -1.0, world=1)], [failed(0, PEER, known_for_s=2.0)]],
        None,
        "No rank here reports another cause",
    ),
    "sys.exit": (
        [[failed(1, "SystemExit: 1"), failed(0, PEER, -0.1)]],
        "1",
        "failed in forward after step 1234, 1 s into it: SystemExit: 1. ",
    ),
    "sys.exit on one rank": ([[failed(1, "SystemExit: 1", known_for_s=2.0)]], "1", ""),
    "asked to end after a failure": (
        [[failed(1, BAD), failed(0, "SystemExit: 143", 0.3)]],
        "1",
        f"{BAD}. Rank 0 was asked to end.",
    ),
    "one is killed after an interrupt": (
        [[failed(0, "KeyboardInterrupt")], [killed(1, 30.0, signal="SIGKILL")]],
        "0",
        ": KeyboardInterrupt, a launcher, a scheduler or a person asked it",
    ),
    "the user gives it, and the process leaves with 0": (
        [[failed(1, "loss diverged", known_for_s=2.0)._replace(cause={"exit_code": 0})]],
        "1",
        "",
    ),
    "an exception brought the others down": (
        [[failed(2, "MemoryError: no room")], [killed(0, 0.5), killed(1, 0.5)]],
        "2",
        "rank 2 (n1) failed in forward after step 1234, 1 s into it: MemoryError: no room. "
        "Ranks 0 and 1 ended after it within 0.5 s, as a launcher ends the rest of a run.",
    ),
    "one had left with an exit code before another failed": (
        [[ended(1, None), failed(0, PEER, 0.1)], [ended(1, 1, known_for_s=0.5)]],
        "1",
        "rank 1 (n1) ended in forward after step 1234, 1 s into it: exit code 1. "
        "Rank 0 lost its connection and failed.",
    ),
    "a connection broke long before": (
        [[failed(0, PEER, world=4)], [killed(1, 5.0)]],
        None,
        f"because it lost a connection: {PEER}. No rank here reports another cause: it is on "
        "another node, or in the network. Rank 1 ended after it within 5 s, as a launcher",
    ),
    "the same exception on all": (
        [[failed(1, SHAPES), failed(0, SHAPES, 3.0)]],
        None,
        "ranks 0 and 1 failed within 3 s of each other, in forward after step 1234: "
        f"it is not known which was first; each: {SHAPES}.",
    ),
    "the same exception on some, which the others lost": (
        [
            [
                *(failed(each, PEER, each / 10, world=4) for each in (0, 2)),
                *(failed(1, SHAPES, 0.3, 4), failed(3, SHAPES, 0.4, 4)),
            ]
        ],
        None,
        "each: RuntimeError: mat1 and mat2 shapes cannot be multiplied (32x10 and 11x5). "
        "Ranks 0 and 2 lost their connections and failed.",
    ),
    "one had left by os._exit(0)": (
        [
            [
                # It is seen to be gone a moment after the other reports what it lost.
                failed(0, PEER, 0.1, known_for_s=3.0),
                killed(1, 0.2, exit_code=0)._replace(world_size=2),
            ]
        ],
        None,
        ". Rank 1 has finished before that.",
    ),
}


@pytest.mark.parametrize(("looks", "named", "words"), DECISIONS.values(), ids=[*DECISIONS])
def test_which_rank_is_named(
    looks: list[list[EndedProcess]], named: str | None, words: str
) -> None:
    found = of(*looks)

    assert rank(found) == named
    assert words in found.sentence


@pytest.mark.parametrize(
    ("looks", "told"),
    [
        (
            [[killed(0)], [killed(1, 0.9, **OOM)]],
            "rank 0 (n1) did not cause the end of the run: rank 1 (n1) was killed in ",
        ),
        (
            [[killed(0)], [killed(1, 0.2)]],
            "it is not known whether rank 0 (n1) caused the end of the run: ranks 0 and 1 ended ",
        ),
        (
            [[killed(0), killed(1)], [killed(1, signal="SIGSEGV")]],
            "rank 1 (n1) was killed in backward after step 1234, 1 s into it: SIGSEGV",
        ),
        (
            [[killed(0)], [killed(0)._replace(state="finished", cause={"exit_code": 143})]],
            "the end of rank 0 (n1) was intended",
        ),
    ],
)
def test_a_verdict_that_is_taken_back_says_what_is_known_instead(
    looks: list[list[EndedProcess]], told: str
) -> None:
    deaths = Deaths()
    changes = [change for look in looks for change in fed(deaths, look)]

    (over,) = [each.verdict for each in changes if not each.opened]
    assert over.evidence["taken_back"] is True
    assert over.sentence.startswith(told)


# -- one


def test_a_process_that_died_without_a_word_is_named_with_phase_and_time() -> None:
    found = of([killed(3)])

    assert (found.kind, found.labels, found.phase, found.step) == (
        "death",
        labels_of(3),
        "backward",
        1234,
    )
    assert found.since_ns == T
    assert found.sentence == (
        "rank 3 (n1) was killed in backward after step 1234, 1 s into it: the cause is not known "
        "here."
    )


@pytest.mark.parametrize(
    ("cause", "words"),
    [
        (
            {
                "out_of_memory": "kernel log",
                "out_of_memory_in": "memory cgroup",
                "resident_bytes": 61 << 30,
                "signal": "SIGKILL",
            },
            "the kernel's out-of-memory killer (its memory cgroup was full; it held 61 GiB).",
        ),
        (
            {
                "out_of_memory": "cgroup events",
                "out_of_memory_kills": 1,
                "out_of_memory_within_s": 30.0,
            },
            "most likely the kernel's out-of-memory killer: it killed 1 process of its memory "
            "cgroup within 30 s.",
        ),
        ({"signal": "SIGKILL"}, ": SIGKILL."),
        ({"signal": "SIGSEGV"}, ": SIGSEGV, a crash in native code."),
        ({"signal": "SIGTERM"}, "SIGTERM, a launcher, a scheduler or a person asked it to end"),
        (
            {
                "signal": "SIGKILL",
                "resident_bytes": 61 << 30,
                "memory_limit_bytes": 64 << 30,
                "memory_limit_of": "node",
            },
            ": SIGKILL; it held 61 GiB of the node's 64 GiB a moment before.",
        ),
        (
            {"xid": ["NVRM: Xid (PCI:0000:65:00): 79, GPU has fallen off the bus."]},
            "; the GPU driver reported NVRM: Xid (PCI:0000:65:00): 79, GPU has fallen off",
        ),
    ],
    ids=lambda part: "" if isinstance(part, str) else "-".join(part),
)
def test_the_cause_is_given_as_far_as_it_is_known(cause: dict[str, Any], words: str) -> None:
    assert words in of([killed(0, **cause)]).sentence


def test_memory_that_was_far_from_its_limit_is_no_hint() -> None:
    found = of([killed(0, resident_bytes=10 << 30, memory_limit_bytes=64 << 30)])

    assert "GiB" not in found.sentence
    assert found.evidence["ended"][0]["resident_bytes"] == 10 << 30


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
    "of one": [failed(0, "SystemExit: 1", world=1)],
    "no other rank affected": [ended(0, 1)],
    "a shell's code for a signal": [ended(0, 143), ended(1, 143, 0.1)],
    "a worker ended by the interrupt of all": [
        *(failed(0, LOADER), failed(1, "KeyboardInterrupt", 0.1))
    ],
    **{reason: [failed(0, reason), failed(1, reason, 0.1)] for reason in REQUESTS},
    "asked, and lost a peer": [failed(0, REQUESTS[2]), failed(1, PEER, 0.1)],
    "asked, and left": [failed(0, REQUESTS[1]), failed(1, "SystemExit: 1", 0.1)],
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
    "an exit code is waited for": [
        ([ended(1, None), failed(0, PEER, 0.1)], []),
        ([ended(1, 1, known_for_s=0.5)], [(True, "1")]),
    ],
    "that of a finished rank is waited for longer": [
        ([ended(1, None, -1.0)], []),
        ([failed(0, PEER, known_for_s=2.0)], []),
        ([ended(1, 1, -1.0, known_for_s=6.0)], [(True, "1")]),
    ],
    "an evaluator that died before is no peer": [
        ([killed(7, -1.0)._replace(world_size=1)], [(True, "7")]),
        ([failed(0, PEER, world=2, known_for_s=2.0)], [(True, None)]),
    ],
    "a late reason takes the place of a lost peer": [
        ([failed(0, PEER, world=4, known_for_s=2.0)], [(True, None)]),
        ([failed(1, BAD, 5.0, world=4)], [(False, None), (True, "1")]),
    ],
    "a late clean exit code takes the verdict back": [
        ([killed(0)], [(True, "0")]),
        ([killed(0, exit_code=0)], [(False, "0")]),
    ],
    "an unchanged end": [([killed(0)], [(True, "0")]), ([killed(0)], [])],
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
    # Each of these verdicts begins with what was seen last.
    if changes and len(seen) == 1 and changes[-1].opened:
        assert changes[-1].verdict.since_ns == seen[0].ended_ns


# -- failures alone


@pytest.mark.parametrize("lost_at_s", [0.05, -0.3], ids=["after", "before"])
def test_a_rank_that_raised_is_the_cause_whichever_reported_first(lost_at_s: float) -> None:
    found = of([failed(1, BAD), failed(0, PEER, lost_at_s)])

    assert found.labels == labels_of(1)
    assert found.evidence["cause"] == "exception"
    assert found.evidence["order_known_by"] == ("time" if lost_at_s > 0 else "evidence")
    assert found.sentence == (
        f"rank 1 (n1) failed in forward after step 1234, 1 s into it: {BAD}. "
        "Rank 0 lost its connection and failed."
    )


# -- all lost a peer


def test_where_all_lost_a_peer_no_rank_here_is_the_cause() -> None:
    lost = [failed(each, PEER, each / 10, world=4) for each in (0, 1)]
    deaths = Deaths()

    early = fed(deaths, lost)
    (change,) = fed(deaths, [each._replace(known_for_s=2.0) for each in lost])

    assert early == []
    assert rank(change.verdict) is None
    assert change.verdict.evidence["cause"] == "lost_peer"
    assert change.verdict.sentence == (
        "ranks 0 and 1 failed within 0.1 s, in forward after step 1234, because they lost "
        f"connections: {PEER}. "
        "No rank here reports another cause: it is on another node, or in the network."
    )


@pytest.mark.parametrize(
    ("finished", "world", "left", "words"),
    [
        (
            [],
            4,
            (1,),
            "No rank here reports another cause: it is on another node, or in the network.",
        ),
        ([], 2, (1,), "Rank 1 was there when it was last heard."),
        (
            [ended(1, None, -1.0)],
            2,
            (),
            "Rank 1 has finished before that, with an exit code that is not known.",
        ),
        ([ended(1, 0, -1.0)], 2, (), "Rank 1 has finished before that."),
    ],
    ids=["elsewhere", "still there", "finished", "finished well"],
)
def test_where_the_lost_peer_may_be_is_given_as_far_as_it_is_known(
    finished: list[EndedProcess], world: int, left: tuple[int, ...], words: str
) -> None:
    deaths = Deaths()
    fed(deaths, finished)
    seen_at_work(deaths, *left)

    (change,) = fed(deaths, [failed(0, PEER, world=world, known_for_s=6.0)])

    assert rank(change.verdict) is None
    assert change.verdict.sentence.endswith(f"{PEER}. {words}")


def test_a_rank_that_is_asked_to_end_while_the_others_are_there_is_what_they_lost() -> None:
    asked = killed(1, 0.05, signal="SIGTERM")
    # It reports a lost peer before the end of the other one is seen, and leaves after that.
    others = [failed(each, PEER, world=3, known_for_s=2.0) for each in (0, 2)]

    # The launcher has hurried them.
    hurried = {"signal": "SIGTERM"}
    others = [each._replace(last_present_ns=T + S // 10, cause=hurried) for each in others]
    found = of([*others, asked])

    assert rank(found) == "1"
    assert found.evidence["order_known_by"] == "evidence"
    assert "SIGTERM, a launcher, a scheduler or a person asked it to end" in found.sentence
    assert "Ranks 0 and 2 lost their connections and failed" in found.sentence


@pytest.mark.parametrize("present_s", [0.04, None])
def test_a_rank_that_a_launcher_may_have_ended_is_not_what_the_others_lost(
    present_s: float | None,
) -> None:
    asked = killed(1, 0.05, signal="SIGTERM")
    lost = failed(0, PEER, known_for_s=2.0)._replace(
        last_present_ns=0 if present_s is None else T + round(present_s * S)
    )

    assert rank(of([lost, asked])) != "1"


# -- run.finish("failed", reason=...)


@pytest.mark.parametrize(
    ("reason", "quoted"),
    [
        ("ValueError: no such file", "ValueError: no such file."),
        ("ValueError: no such file\n  in shard 3\n", "ValueError: no such file [...]."),
        (f"ValueError: {'x' * 500}", f"ValueError: {'x' * 188} [...]."),
    ],
    ids=["short", "several lines", "long"],
)
def test_one_bounded_line_of_an_exception_is_quoted_and_the_evidence_has_it_whole(
    reason: str, quoted: str
) -> None:
    found = of([failed(1, reason, known_for_s=0.5)])

    assert found.sentence.endswith(f": {quoted}")
    assert found.evidence["ended"][0]["reason"] == reason


@pytest.mark.parametrize(
    "gone",
    [[ended(2, 0), failed(1, BAD), failed(0, PEER, 0.1)], [killed(1), killed(0, 1.0)]],
    ids=["failed", "killed"],
)
def test_a_run_that_is_started_anew_closes_the_incident(gone: list[EndedProcess]) -> None:
    deaths = Deaths()
    told = fed(deaths, gone)[-1].verdict.sentence

    (change,) = seen_at_work(deaths, 0)

    assert not change.opened
    assert change.verdict.key == ("death", labels_of(1))
    again = "Rank 0 (n1) is at work again: the run was restarted."
    assert change.verdict.sentence == f"{told} {again}"
    assert seen_at_work(deaths, 1) == []


def test_a_rank_that_is_at_work_on_another_node_closes_the_incident() -> None:
    deaths = Deaths()
    fed(deaths, [killed(1)])
    deaths.feed(RankState(labels_of(1, node="n2")), Observation())

    (change,) = deaths.poll(0)

    assert not change.opened
    assert change.verdict.sentence.endswith("Rank 1 (n2) is at work again: the run was restarted.")


# -- a watchdog that ends what stands still

HANGS = "for 88 s: rank 1 is in data after step 7 at train.py:31 (load)"


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_that_gave_up_where_nothing_moved_were_most_likely_ended_by_a_watchdog(
    ranks: int,
) -> None:
    deaths = Deaths()
    gave_up = [killed(rank, signal="SIGABRT") for rank in range(ranks)]
    # The signal comes to be known a moment after the death, and the stall is over by then.
    fed(deaths, [killed(rank) for rank in range(ranks)], under_nccl=True, stall=HANGS)
    (*_, change) = fed(deaths, gave_up)

    assert change.verdict.sentence.endswith(
        "Most likely the watchdog of NCCL, which ends ranks whose collectives do not end. "
        f"Before that, no rank had moved {HANGS}."
    )


@pytest.mark.parametrize(
    ("stall", "signal", "under_nccl"),
    [("", "SIGABRT", True), (HANGS, "SIGKILL", True), (HANGS, "SIGABRT", False)],
)
def test_no_watchdog_is_blamed_for_another_end(stall: str, signal: str, under_nccl: bool) -> None:
    (change,) = fed(Deaths(), [killed(0, signal=signal)], under_nccl, stall)

    assert "watchdog" not in change.verdict.sentence


@pytest.mark.parametrize(
    "gone",
    [
        [killed(0, signal="SIGTERM"), killed(1, 0.1, signal="SIGTERM")],
        [failed(0, "RuntimeError: Connection closed by peer", known_for_s=3.0)],
        [killed(1, signal="SIGKILL")],
    ],
)
def test_deaths_after_a_hang_are_told_as_its_end(gone: list[EndedProcess]) -> None:
    (change,) = fed(Deaths(), gone, stall=HANGS)

    assert change.verdict.sentence.endswith(f". Before that, no rank had moved {HANGS}.")
