"""The public words and their codes: phases, states, kinds of verdicts, causes of time, labels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, get_args


class Phase(NamedTuple):
    """A phase of a process."""

    word: str
    code: int
    """Public: Grafana maps it to the word. Journals store it in the bits of PHASE_CODE."""
    kind: Literal["work", "compute", "wait", "unusual", "unmeasured"]
    """`compute` is work of a device. Steps with an `unusual` phase are not compared."""
    colour: str
    """In Grafana and on the page. Waiting is grey, so if one rank hangs, all others turn grey."""
    shown: str = ""
    """The name in tables and sentences, if the word is not clear."""


_PHASES = (
    Phase("other", 0, "work", "#C0A080", "the time between the phases"),
    Phase("data", 1, "work", "#FF9830", "waiting for data"),
    Phase("forward", 2, "compute", "#5794F2"),
    Phase("backward", 3, "compute", "#B877D9"),
    Phase("comm_wait", 4, "wait", "#8E8E8E", "waiting for other ranks"),
    Phase("optimizer", 5, "compute", "#73BF69", "the optimizer"),
    Phase("checkpoint", 6, "unusual", "#FADE2A"),
    Phase("eval", 7, "unusual", "#37CAD3"),
    Phase("compile", 8, "unusual", "#9AA02C"),
    Phase("unmeasured", 9, "unmeasured", "#D8D8D8", "steps that were not measured"),
    Phase("graph", 10, "compute", "#3D71D9", "replaying a CUDA graph"),
)
# What to look at if a rank is late, by phase.
ADVICE: Mapping[str, str] = {
    "other": "Look at what this rank alone does between the phases: copies, losses, logging.",
    "data": "Look at this rank's data loader and storage.",
    "forward": "Look at what this rank does in forward that the others do not.",
    "backward": "Look at what this rank does in backward that the others do not.",
    "optimizer": "Look at what this rank's optimizer has to do.",
    "graph": "Look at what this rank's graph contains that the others' do not.",
}
PHASE: Mapping[str, Phase] = {each.word: each for each in _PHASES}
PHASES: Mapping[str, int] = {each.word: each.code for each in _PHASES}
# Mask of the phase in a journal's 64-bit word; the bits above it have details of the phase.
PHASE_CODE = 0x3F
_OF_CODE = {each.code: each.word for each in _PHASES}

# The phases in which ranks work, in the order of tables.
WORK_PHASES = ("data", "forward", "backward", "optimizer", "graph", "other")
# Python's garbage collection. It is no phase, because it occurs in any phase.
GARBAGE = "garbage"
COMPUTE_PHASES = tuple(word for word in WORK_PHASES if PHASE[word].kind == "compute")
UNUSUAL_PHASES = tuple(each.word for each in _PHASES if each.kind == "unusual")
# The time of unmeasured steps is estimated from the phases of measured ones.
UNMEASURED = PHASES["unmeasured"]
MEASURED_PHASES = tuple(word for word, code in PHASES.items() if code != UNMEASURED)


def phase_word(code: int) -> str:
    """The phase of a code; `other` for an unknown one."""
    return _OF_CODE.get(code, "other")


def shown_phase(word: str) -> str:
    """A phase as shown to users; other words unchanged."""
    found = PHASE.get(word)
    return found.shown or word if found else word


STATES: Mapping[str, int] = {"starting": 0, "running": 1, "finished": 2, "failed": 3, "killed": 4}
ENDED_STATES = ("finished", "failed", "killed")
# The state shown for a process on a silent node, since the process may have ended.
NOT_HEARD = "not heard"
_STATE_OF_CODE = {code: word for word, code in STATES.items()}


def state_word(code: int) -> str:
    """The state of a code; `running` for an unknown one."""
    return _STATE_OF_CODE.get(code, "running")


# Kinds of verdicts, the worst first. A harmless one is information.
Kind = Literal[
    "death",  # a process was killed or failed
    "silence",  # a node is silent, and the ranks of other nodes wait for it
    "stall",  # no rank moves any more
    "nonfinite",  # a logged value became NaN or infinite
    "straggler",  # one rank keeps the others waiting
    "imbalance",  # one rank has more to do than the others
    "recurring",  # one rank stalls at regular intervals
    "bound",  # what limits the speed of the run
]
VERDICTS: tuple[Kind, ...] = get_args(Kind)
HARMLESS_VERDICTS = frozenset({"bound"})
# The key in a verdict's evidence that marks a verdict on a death as withdrawn.
TAKEN_BACK = "taken_back"


def is_taken_back(evidence: Any) -> bool:
    """Whether this is the evidence of a withdrawn verdict."""
    return isinstance(evidence, Mapping) and bool(evidence.get(TAKEN_BACK))


# What a run's time is spent on: causes in the order of display, with descriptions.
TIME_CAUSES: Mapping[str, str] = {
    "productive": "steps that moved the run on",
    "start": "starting, until the first step has ended; compiling",
    "data": "waiting for data",
    "checkpoint": "saving checkpoints",
    "evaluation": "evaluation",
    "late_rank": "waiting for a late rank or node",
    "hang": "hanging, until it went on or ended",
    "repeated": "steps done twice, after a restart",
    "between_attempts": "no process, until the launcher started it again",
    "between_launches": "no process, between two launches",
    "end": "after the last step",
    "unknown": "not known",
}
# Colours in Grafana and on the page. Causes that are phases have the phase's colour.
TIME_COLOURS: Mapping[str, str] = {
    "productive": "#73BF69",
    "start": "#5794F2",
    "data": PHASE["data"].colour,
    "checkpoint": PHASE["checkpoint"].colour,
    "evaluation": PHASE["eval"].colour,
    "late_rank": "#B877D9",
    "hang": "#F2495C",
    "repeated": "#FF9BBF",
    "between_attempts": "#5F6B7A",
    "between_launches": "#4E7A7A",
    "end": "#C0A080",
    "unknown": "#B5BAC0",
}

# The labels of a process; a verdict on a run or node has fewer.
Labels = tuple[tuple[str, str], ...]
RANK_LABELS = ("group", "run", "job_type", "node", "rank", "local_rank")
# Without `job_type`: the processes of a run may have different roles.
RUN_LABELS = ("group", "run")
NODE_LABELS = (*RUN_LABELS, "node")
