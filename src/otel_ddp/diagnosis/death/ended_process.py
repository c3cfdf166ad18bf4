"""One process that has ended: what is known of its end, and the manner of it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from otel_ddp.diagnosis.verdict import Labels

# What an exception says when a peer was lost. "Peer access" is between two GPUs, and no peer.
_LOST_PEER = re.compile(
    r"\bpeer\b(?! access)|connection (was )?(closed|reset|refused|aborted)|broken pipe"
    r"|remote process|socket|ncclremoteerror|heartbeat|store.*(timeout|timed out)"
    r"|timed? ?out.*\d+ ?(ms|milliseconds)",
    re.IGNORECASE,
)
# What an exception says when a person or a scheduler ended the process: Ctrl-C, what libraries
# raise from signal handlers, and the codes that a shell gives: 128 and the signal's number.
_REQUESTED = re.compile(
    r"(KeyboardInterrupt|SignalException|SIGTERMException)\b|SystemExit: (129|130|143)$"
    r"|.*\b(got|received|caught)( signal:?)? (SIG(TERM|INT|HUP)|Signals\.SIG(TERM|INT|HUP))\b"
)
REQUESTED_CODES = (129, 130, 143)
# It left by itself with nothing but a number: `sys.exit(1)`.
_EXIT_CODE = re.compile(r"SystemExit: \d+$")
# The signals that a launcher, a scheduler or a terminal sends.
REQUESTS = ("SIGTERM", "SIGINT", "SIGHUP")

Manner = Literal["killed", "requested", "lost_peer", "exit_code", "own_cause"]
"""How a process ended: without a word; because it was asked to; because it lost a connection;
by an exit code alone; or for a cause of its own."""


class EndedProcess(NamedTuple):
    """A process that has ended, as the agent saw it."""

    labels: Labels
    state: str
    """`killed` if it ended without a word, else `failed` or `finished`."""
    step: int | None
    phase: str
    phase_since_ns: int
    seen_alive_ns: int
    """When it was last seen alive, taken before its lock was looked at.

    If it reported its end, the moment of that report.
    """
    ended_ns: int
    """When it was first seen to have ended, taken after its lock was looked at.

    The death lies between the two moments; no process counts as the first on less. If it
    reported its end, the moment of that report.
    """
    reason: str = ""
    """What it reported of its end, if anything."""
    cause: Mapping[str, Any] = {}
    """What the agent found out about its end, from the kernel and the launcher."""
    world_size: int | None = None
    """How many ranks the run has, on all nodes."""
    last_present_ns: int = 0
    """When the process was last seen to exist after it reported its end; 0: never.

    Python takes a while to leave.
    """
    known_for_s: float = 0.0
    """How long ago its end was first seen.

    In that time the others report their ends, and the launcher looks.
    """


def manner(process: EndedProcess) -> Manner:
    """How it ended, by what it reported and what the kernel and its launcher say."""
    if process.state == "killed":
        return "killed"
    if process.state == "finished":
        if "launcher_error" in process.cause:
            return "own_cause"
        requested = process.cause.get("exit_code") in REQUESTED_CODES
        return "requested" if requested else "exit_code"
    if _REQUESTED.match(process.reason):
        return "requested"
    if _EXIT_CODE.match(process.reason):
        return "exit_code"
    # A run of one has no peers: what it lost was something else.
    lost_peer = process.world_size != 1 and _LOST_PEER.search(process.reason)
    return "lost_peer" if lost_peer else "own_cause"


def cause_word(process: EndedProcess) -> str:
    """The same, as a word of the evidence."""
    if "out_of_memory" in process.cause:
        return "out_of_memory"
    how = manner(process)
    if how in ("own_cause", "lost_peer"):
        return "exception"
    if how == "exit_code":
        return "exit"
    if how == "requested" or "signal" in process.cause:
        return "signal"
    return "exit" if "exit_code" in process.cause else "unknown"


def rank_key(labels: Labels) -> tuple[bool, int, str]:
    """Sorts ranks by number; processes without a rank come last."""
    rank = dict(labels).get("rank", "")
    return not rank.isdigit(), int(rank) if rank.isdigit() else 0, rank
