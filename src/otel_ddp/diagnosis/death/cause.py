"""The end of one process: its manner, its cause, and their wording."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from otel_ddp.diagnosis.say import duration, in_phase
from otel_ddp.diagnosis.verdict import Labels

# Matches exception messages about a lost peer process; not "peer access", which concerns two GPUs.
_LOST_PEER = re.compile(
    r"\bpeer\b(?! access)|connection (was )?(closed|reset|refused|aborted)|broken pipe"
    r"|remote process|socket|ncclremoteerror|heartbeat|store.*(timeout|timed out)"
    r"|timed? ?out.*\d+ ?(ms|milliseconds)",
    re.IGNORECASE,
)
# Matches exceptions of a process that a person or scheduler asked to end: Ctrl-C, exceptions that
# libraries raise in signal handlers, and exit codes of 128 plus the signal, as in a shell.
_REQUESTED = re.compile(
    r"(KeyboardInterrupt|SignalException|SIGTERMException)\b|SystemExit: (129|130|143)$"
    r"|.*\b(got|received|caught)( signal:?)? (SIG(TERM|INT|HUP)|Signals\.SIG(TERM|INT|HUP))\b"
)
REQUESTED_CODES = (129, 130, 143)
# Matches the exception of `sys.exit(1)`.
_EXIT_CODE = re.compile(r"SystemExit: \d+$")
# The signals by which a launcher, a scheduler or a terminal asks a process to end.
REQUESTS = ("SIGTERM", "SIGINT", "SIGHUP")
# A launcher ends the other ranks within this time after the first end: torchrun polls every 0.1 to
# 5 s, sends SIGTERM, and SIGKILL 30 s later.
FOLLOWS_S = 40.0
_LONGEST_REASON = 200
_CRASHES = {
    "SIGSEGV": "a crash in native code",
    "SIGBUS": "a crash in native code, or a full /dev/shm",
    "SIGILL": "a crash in native code",
    "SIGFPE": "a crash in native code",
    "SIGABRT": "native code gave up: look at the last lines that it printed",
}
_REQUESTED_BY = "a launcher, a scheduler or a person asked it to end"

Manner = Literal["killed", "requested", "lost_peer", "exit_code", "own_cause"]
"""How a process ended: killed (so it could not report its end); on request; by a lost connection to
a peer; with an exit code as the only known reason; or by a cause of its own."""


class EndedProcess(NamedTuple):
    """A process that has ended."""

    labels: Labels
    state: str
    """`killed` if it ended without a report, else `failed` or `finished`."""
    step: int | None
    phase: str
    seen_alive_ns: int
    ended_ns: int
    """The end lies between `seen_alive_ns` and this, which are equal if the process reported it."""
    reason: str = ""
    cause: Mapping[str, Any] = {}
    """Facts from the kernel and the launcher."""
    world_size: int | None = None
    last_present_ns: int = 0
    """When the process was last seen to exist. It may exist for a while after reporting its end."""
    known_for_s: float = 0.0


def manner(process: EndedProcess) -> Manner:
    """How a process ended, from its report and the facts of the kernel and the launcher."""
    if process.state == "killed":
        return "killed"
    if process.state == "finished":
        requested = process.cause.get("exit_code") in REQUESTED_CODES
        return "requested" if requested else "exit_code"
    if _REQUESTED.match(process.reason):
        return "requested"
    if _EXIT_CODE.match(process.reason):
        return "exit_code"
    # Messages that look like a lost peer mean something else if the run has one rank: it has no
    # peers.
    lost_peer = process.world_size != 1 and _LOST_PEER.search(process.reason)
    return "lost_peer" if lost_peer else "own_cause"


def cause_word(process: EndedProcess) -> str:
    """The word for the cause in a verdict's evidence."""
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


def guilt(process: EndedProcess) -> int:
    """How likely this end is the cause of the ends of other ranks: a higher number is likelier."""
    if process.cause.get("out_of_memory") == "kernel log":
        return 4
    signal = process.cause.get("signal")
    if process.state == "killed" and signal is not None:
        return 0 if signal in REQUESTS else 3
    if process.state != "killed":
        return 2 if manner(process) in ("own_cause", "exit_code") else 0
    return 2 if process.cause.get("exit_code") else 1


# -- in words


def how_it_ended(process: EndedProcess) -> str:
    """A clause on the manner, phase and step of the end."""
    if process.state == "failed":
        verb = "failed"
    elif process.state == "finished":
        verb = "ended"
    elif "exit_code" in process.cause:
        verb = "left without a word"
    else:
        verb = "was killed"
    at = "before its first step" if process.step is None else f"after step {process.step}"
    return f"{verb} {in_phase(process.phase)} {at}"


def why_it_ended(process: EndedProcess) -> str:
    """A clause on the cause of the end."""
    cause = process.cause
    if cause.get("out_of_memory") == "kernel log":
        scopes = {"node": "the node was out of memory", "memory cgroup": "its cgroup was full"}
        scope = scopes.get(str(cause.get("out_of_memory_in")), "")
        return "the kernel's out-of-memory killer" + (f" ({scope})" if scope else "")
    if cause.get("out_of_memory") == "cgroup events":
        kills, within = cause.get("out_of_memory_kills", 1), cause.get("out_of_memory_within_s", 0)
        return (
            f"most likely the kernel's out-of-memory killer: it killed {kills} "
            f"process{'es' * (kills != 1)} of its memory cgroup within {duration(within)}"
        )
    if process.state == "failed":
        reason = process.reason or "it gave no reason"
        return f"{reason}, {_REQUESTED_BY}" if manner(process) == "requested" else reason
    signal = cause.get("signal")
    if signal is not None:
        why = _REQUESTED_BY if signal in REQUESTS else _CRASHES.get(signal, "")
        return f"{signal}, {why}" if why else str(signal)
    if code := cause.get("exit_code"):
        return f"exit code {code}"
    return "the cause is not known here"


def short_cause(process: EndedProcess) -> str:
    """The first line of `why_it_ended`, truncated; the verdict's evidence has the whole reason."""
    line, _, rest = why_it_ended(process).strip().partition("\n")
    cut = line[:_LONGEST_REASON].rstrip()
    return f"{cut} [...]" if rest or len(cut) < len(line.rstrip()) else cut
