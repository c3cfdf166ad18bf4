"""The end of a process, as the agent saw it, and in what manner it came."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from otel_ddp.diagnosis.verdict import Who

# How the loss of a peer sounds to those who were waiting for it. "Peer access" is what two GPUs
# have of one another, or lack.
_LOST_PEER = re.compile(
    r"\bpeer\b(?! access)|connection (was )?(closed|reset|refused|aborted)|broken pipe"
    r"|remote process|socket|ncclremoteerror|heartbeat|store.*(timeout|timed out)"
    r"|timed? ?out.*\d+ ?(ms|milliseconds)",
    re.IGNORECASE,
)
# How it sounds when a person or a scheduler ended it: Ctrl-C, what libraries raise from their
# handlers of signals, and the codes that a shell gives to them: 128 and the signal's number.
_ASKED = re.compile(
    r"(KeyboardInterrupt|SignalException|SIGTERMException)\b|SystemExit: (129|130|143)$"
    r"|.*\b(got|received|caught)( signal:?)? (SIG(TERM|INT|HUP)|Signals\.SIG(TERM|INT|HUP))\b"
)
ASKED_CODES = (129, 130, 143)
# It left by itself, and said no more than a number: `sys.exit(1)`.
_LEFT = re.compile(r"SystemExit: \d+$")
# What a launcher, a scheduler or a terminal sends.
REQUESTS = ("SIGTERM", "SIGINT", "SIGHUP")

Manner = Literal["killed", "asked", "lost", "left", "own"]
"""How it ended: without a word; asked to; as it lost a connection; by an exit code alone;
for a reason of its own."""


class Gone(NamedTuple):
    """A process that is not there any more, as the agent saw it."""

    who: Who
    state: str
    """`killed` for one that went without a word, else `failed` or `finished`."""
    step: int | None
    phase: str
    phase_since_ns: int
    seen_alive_ns: int
    """When it was last seen at work, taken before its lock was looked at. For one that told its
    end, the moment that it told."""
    gone_ns: int
    """When it was first seen to be gone, taken after its lock was looked at: the death lies
    between the two, and nobody is said to be first on less. For one that told, as above."""
    reason: str = ""
    """What it said of its end, if it said anything."""
    cause: Mapping[str, Any] = {}
    """What `agent.causes` found."""
    world_size: int | None = None
    """How many ranks the run has, on all nodes."""
    present_ns: int = 0
    """When its process was last seen to be there after it told its end: Python takes a while to
    leave. 0: it was not seen after that."""
    waited_s: float = 0.0
    """How long ago its end was first seen: by now others have told theirs, and its launcher has
    looked."""


def manner(gone: Gone) -> Manner:
    """In what manner it ended, by what it said and what the kernel and its launcher say."""
    if gone.state == "killed":
        return "killed"
    if gone.state == "finished":
        if "launcher_error" in gone.cause:
            return "own"
        return "asked" if gone.cause.get("exit_code") in ASKED_CODES else "left"
    if _ASKED.match(gone.reason):
        return "asked"
    if _LEFT.match(gone.reason):
        return "left"
    # A run of one has no peers: whatever it lost was something else.
    return "lost" if gone.world_size != 1 and _LOST_PEER.search(gone.reason) else "own"


def cause_word(gone: Gone) -> str:
    """The same, as the evidence has it."""
    if "out_of_memory" in gone.cause:
        return "out_of_memory"
    how = manner(gone)
    if how == "own" or how == "lost":
        return "exception"
    if how == "left":
        return "exit"
    if how == "asked" or "signal" in gone.cause:
        return "signal"
    return "exit" if "exit_code" in gone.cause else "unknown"


def rank_key(who: Who) -> tuple[bool, int, str]:
    """To sort by: numbers in their order, then those without a rank."""
    rank = dict(who).get("rank", "")
    return not rank.isdigit(), int(rank) if rank.isdigit() else 0, rank
