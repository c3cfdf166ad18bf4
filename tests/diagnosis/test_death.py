"""Deaths of a run: who is named, in which words, and when nothing is said."""

from __future__ import annotations

from typing import Any

import pytest

from otel_ddp.diagnosis.death import Deaths, Gone
from otel_ddp.diagnosis.verdict import Verdict, Who

S = 1_000_000_000
T = 1_700_000_000 * S
PEER = "RuntimeError: [gloo] Connection closed by peer [127.0.0.1]:4711"


def who(rank: int | str) -> Who:
    return (
        ("group", "g"),
        ("run", "r"),
        ("job_type", "train"),
        ("node", "node-1"),
        ("rank", str(rank)),
        ("local_rank", str(rank)),
    )


def killed(
    rank: int | str, at_s: float = 0.0, /, seen_s: float = 0.25, into_s: float = 1.0, **cause: Any
) -> Gone:
    """Gone without a word at most *seen_s* before *at_s*, *into_s* after its phase began."""
    gone_ns = T + round(at_s * S)
    alive_ns = gone_ns - round(seen_s * S)
    since_ns = alive_ns - round(into_s * S)
    return Gone(who(rank), "killed", 1234, "backward", since_ns, alive_ns, gone_ns, "", cause)


def failed(rank: int, reason: str, at_s: float = 0.0) -> Gone:
    """It said so itself, so the moment is known."""
    at_ns = T + round(at_s * S)
    return Gone(who(rank), "failed", 1234, "forward", at_ns - S, at_ns, at_ns, reason)


def verdict(*looks: list[Gone]) -> Verdict | None:
    """What is open in the end."""
    deaths, standing = Deaths(), {}
    for found in looks:
        for change in deaths.gone(found):
            if change.opened:
                standing[change.verdict.key] = change.verdict
            else:
                del standing[change.verdict.key]
    assert len(standing) < 2, standing
    return next(iter(standing.values()), None)


def of(*looks: list[Gone]) -> Verdict:
    found = verdict(*looks)
    assert found is not None
    return found


def rank(found: Verdict) -> str | None:
    return dict(found.who).get("rank")


# -- one


def test_a_process_gone_without_a_word_is_named_with_place_and_time() -> None:
    found = of([killed(3)])

    assert (found.kind, found.who, found.phase, found.step) == ("death", who(3), "backward", 1234)
    assert found.since_ns == T
    assert found.sentence == (
        "rank 3 (node-1) was killed in backward at step 1234, 1 s into it: "
        "by whom or what is not known here."
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
        ({"signal": "SIGTERM"}, "SIGTERM, somebody asked it to end: a launcher, a scheduler, or"),
        ({"launcher_error": "ValueError: odd"}, ": ValueError: odd."),
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
def test_why_is_said_as_far_as_it_is_known(cause: dict[str, Any], words: str) -> None:
    assert words in of([killed(0, **cause)]).sentence


def test_memory_that_was_far_from_its_limit_is_no_hint() -> None:
    found = of([killed(0, resident_bytes=10 << 30, memory_limit_bytes=64 << 30)])

    assert "GiB" not in found.sentence
    assert found.evidence["ended"][0]["resident_bytes"] == 10 << 30


def test_a_process_that_left_with_an_exit_code_was_not_killed() -> None:
    found = of([killed(0, exit_code=3)])

    assert "left without a word in backward at step 1234" in found.sentence
    assert "exit code 3" in found.sentence


def test_a_phase_younger_than_the_last_look_has_no_exact_length() -> None:
    assert ", less than 0.35 s into it" in of([killed(0, into_s=0.1)]).sentence


def test_a_process_that_has_no_rank_and_no_step_is_named_by_its_number() -> None:
    found = of([killed("p4711")._replace(step=None)])

    assert found.sentence.startswith("process 4711 (node-1) was killed in backward before its")


# -- no deaths


@pytest.mark.parametrize(
    "gone",
    [
        killed(1)._replace(state="finished"),
        failed(1, "ValueError: no more data"),
        killed(1, exit_code=0),
    ],
    ids=["finished", "failed", "os._exit(0)"],
)
def test_who_finished_or_told_its_failure_did_not_die(gone: Gone) -> None:
    assert verdict([gone]) is None


def test_early_finishers_have_no_part_in_a_death_that_comes_after_them() -> None:
    found = of([killed(1)._replace(state="finished")], [killed(0, 5.0)])

    assert rank(found) == "0"
    assert len(found.evidence["ended"]) == 1


# -- several


def test_the_first_is_the_cause_and_the_others_follow() -> None:
    found = of(
        [killed(3)],
        [killed(0, 0.5, seen_s=0.25), killed(1, 0.5, seen_s=0.25)],
        [killed(2, 30.0)],
    )

    assert rank(found) == "3"
    assert found.evidence["order_known_by"] == "time"
    assert [each["rank"] for each in found.evidence["ended"]] == ["3", "0", "1", "2"]
    assert found.sentence.endswith(
        "Ranks 0, 1 and 2 went after it within 30 s, as a launcher ends the rest of a run."
    )


def test_who_was_asked_to_end_was_ended_by_the_launcher() -> None:
    found = of([killed(3, signal="SIGKILL")], [killed(0, 0.5, signal="SIGTERM")])

    assert "The launcher ended rank 0 after it within 0.5 s." in found.sentence


def test_a_death_long_after_is_an_incident_of_its_own() -> None:
    deaths = Deaths()
    deaths.gone([killed(3)])

    (change,) = deaths.gone([killed(0, 60.0)])

    assert change.opened
    assert rank(change.verdict) == "0"
    assert len(change.verdict.evidence["ended"]) == 1


def test_nobody_is_named_where_the_order_cannot_be_told() -> None:
    found = of([killed(0), killed(1), killed(2, 0.1)])

    assert found.who == (("group", "g"), ("run", "r"), ("job_type", "train"))
    assert found.evidence["order_known_by"] == "unknown"
    assert found.sentence.startswith(
        "ranks 0, 1 and 2 ended at the same moment (within 0.35 s), in backward at step 1234: "
        "which was first cannot be told"
    )


def test_overlapping_looks_do_not_tell_an_order() -> None:
    # Rank 0 was seen gone at 0; rank 1 was last seen at -0.05, so it may have died before.
    found = of([killed(0)], [killed(1, 0.2, seen_s=0.25)])

    assert found.evidence["order_known_by"] == "unknown"


@pytest.mark.parametrize(
    "cause",
    [
        {"signal": "SIGKILL"},
        {"signal": "SIGSEGV"},
        {"out_of_memory": "kernel log", "out_of_memory_in": "node"},
    ],
    ids=lambda cause: next(iter(cause.values())),
)
def test_what_the_kernel_says_decides_within_one_look(cause: dict[str, Any]) -> None:
    others = [killed(each, signal="SIGTERM") for each in (0, 1)]

    found = of([*others, killed(2, **cause)])

    assert rank(found) == "2"
    assert found.evidence["order_known_by"] == "evidence"


def test_what_the_kernel_says_a_moment_later_changes_the_verdict() -> None:
    deaths = Deaths()
    first = deaths.gone([killed(0), killed(1)])

    changes = deaths.gone([killed(0, signal="SIGTERM"), killed(1, signal="SIGKILL")])

    assert [change.opened for change in (*first, *changes)] == [True, False, True]
    assert changes[0].verdict.key == first[0].verdict.key
    assert rank(changes[1].verdict) == "1"


def test_an_out_of_memory_kill_is_the_cause_even_where_the_dying_took_longer() -> None:
    oom = killed(1, 0.9, out_of_memory="kernel log", signal="SIGKILL")

    assert rank(of([killed(0)], [oom])) == "1"


def test_one_signal_for_all_is_one_blow_although_some_die_slower() -> None:
    found = of([killed(0, signal="SIGKILL")], [killed(1, 1.0, signal="SIGKILL")])

    assert found.evidence["order_known_by"] == "unknown"
    assert "; each: SIGKILL" in found.sentence


def test_all_asked_to_end_is_said() -> None:
    found = of([killed(0, signal="SIGTERM"), killed(1, signal="SIGTERM")])

    assert "Somebody asked all of them to end" in found.sentence


# -- deaths and failures


def test_an_exception_that_brought_the_others_down_is_the_cause() -> None:
    found = of([failed(2, "MemoryError: no room")], [killed(0, 0.5), killed(1, 0.5)])

    assert rank(found) == "2"
    assert found.phase == "forward"
    assert found.evidence["cause"] == "exception"
    assert found.sentence == (
        "rank 2 (node-1) failed in forward at step 1234, 1 s into it: MemoryError: no room. "
        "Ranks 0 and 1 went after it within 0.5 s, as a launcher ends the rest of a run."
    )


def test_a_connection_that_broke_is_a_consequence() -> None:
    found = of([failed(0, PEER, at_s=-0.1), killed(1)])

    assert rank(found) == "1"
    assert "Rank 0 failed after it" in found.sentence


def test_a_connection_that_broke_long_before_points_to_another_node() -> None:
    found = of([failed(0, PEER)], [killed(1, 5.0)])

    assert rank(found) == "0"
    assert "the peer that it lost may be on another node" in found.sentence


def test_who_ended_with_an_exit_code_and_took_the_others_along_is_the_cause() -> None:
    ended = killed(1, exit_code=1)._replace(state="finished")

    found = of([ended], [killed(0, 1.0)])

    assert rank(found) == "1"
    assert "ended in backward" in found.sentence
    assert "exit code 1" in found.sentence


# -- one incident, told once


def test_nothing_new_is_not_told_again() -> None:
    deaths = Deaths()
    assert len(deaths.gone([killed(0)])) == 1

    assert deaths.gone([killed(0)]) == []


def test_a_clean_exit_code_that_comes_late_takes_the_verdict_back() -> None:
    deaths = Deaths()
    deaths.gone([killed(0)])

    (change,) = deaths.gone([killed(0, exit_code=0)])

    assert not change.opened
    assert change.verdict.key == ("death", who(0))


def test_a_new_attempt_closes_what_ended_the_one_before() -> None:
    deaths = Deaths()
    deaths.gone([killed(3), killed(0, 1.0)])

    (change,) = deaths.alive(who(0))

    assert not change.opened
    assert "rank 0 (node-1) is at work again" in change.verdict.sentence
    assert deaths.alive(who(3)) == []


def test_the_same_rank_may_die_again_in_the_next_attempt() -> None:
    deaths = Deaths()
    deaths.gone([killed(0), killed(1, 1.0)])

    (change,) = deaths.gone([killed(0, 10.0)])

    assert change.opened
    assert change.verdict.since_ns == T + 10 * S
    assert len(change.verdict.evidence["ended"]) == 1
