"""The words that travel, with their codes: phases, states, reasons, kinds of verdicts, labels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, get_args


class Phase(NamedTuple):
    """What a process may be busy with."""

    word: str
    code: int
    """Public: boards map it back to the word. A journal keeps it in the bits of PHASE_CODE."""
    kind: Literal["work", "compute", "wait", "unusual", "unmeasured"]
    """`compute` is work that a device does. Steps with something `unusual` are not compared."""
    colour: str
    """On boards and on the page. Waiting is grey: where one rank hangs, all others turn grey."""
    shown: str = ""
    """In tables and sentences, where the word alone says too little."""
    advice: str = ""
    """Where a rank is late in it."""


_PHASES = (
    Phase(
        *("other", 0, "work", "#C0A080", "the time between the phases"),
        "Look at what this rank alone does between the phases: copies, losses, logging.",
    ),
    Phase(
        *("data", 1, "work", "#FF9830", "waiting for data"),
        "Look at this rank's data loader and storage.",
    ),
    Phase(
        *("forward", 2, "compute", "#5794F2"),
        advice="Look at what this rank does in forward that the others do not.",
    ),
    Phase(
        *("backward", 3, "compute", "#B877D9"),
        advice="Look at what this rank does in backward that the others do not.",
    ),
    Phase("comm_wait", 4, "wait", "#8E8E8E", "waiting for other ranks"),
    Phase(
        *("optimizer", 5, "compute", "#73BF69", "the optimizer"),
        "Look at what this rank's optimizer has to do.",
    ),
    Phase("checkpoint", 6, "unusual", "#FADE2A"),
    Phase("eval", 7, "unusual", "#37CAD3"),
    Phase("compile", 8, "unusual", "#9AA02C"),
    Phase("unmeasured", 9, "unmeasured", "#D8D8D8", "steps that were not measured"),
    Phase(
        *("graph", 10, "compute", "#3D71D9", "replaying a CUDA graph"),
        "Look at what this rank's graph contains that the others' do not.",
    ),
)
PHASE: Mapping[str, Phase] = {each.word: each for each in _PHASES}
PHASES: Mapping[str, int] = {each.word: each.code for each in _PHASES}
# In a word of a journal, the bits above these say more of the same phase.
PHASE_CODE = 0x3F
_OF_CODE = {each.code: each.word for each in _PHASES}

# In the order in which people think of a step: what its tables and sums go by.
WORK_PHASES = ("data", "forward", "backward", "optimizer", "graph", "other")
# Python's collections of garbage: they happen in any phase, and are none themselves.
GARBAGE = "garbage"
COMPUTE_PHASES = tuple(word for word in WORK_PHASES if PHASE[word].kind == "compute")
UNUSUAL_PHASES = tuple(each.word for each in _PHASES if each.kind == "unusual")
# Time of steps that were not measured is shared out among the phases of those that were.
UNMEASURED = PHASES["unmeasured"]
MEASURED_PHASES = tuple(word for word, code in PHASES.items() if code != UNMEASURED)


def phase_word(code: int) -> str:
    """The phase of a code; `other` for an unknown one."""
    return _OF_CODE.get(code, "other")


def shown_phase(word: str) -> str:
    """A phase as people read it; a word of the user's own as it is."""
    found = PHASE.get(word)
    return found.shown or word if found else word


STATES: Mapping[str, int] = {"starting": 0, "running": 1, "finished": 2, "failed": 3, "killed": 4}
ENDED_STATES = ("finished", "failed", "killed")
# For people alone, of a process on another node whose agent is silent: it may have ended by now.
NOT_HEARD = "not heard"
_STATE_OF_CODE = {code: word for word, code in STATES.items()}


def state_word(code: int) -> str:
    """The state of a code; `running` for an unknown one."""
    return _STATE_OF_CODE.get(code, "running")


# Kinds of verdicts, the worst first. A harmless one says where the time goes; nothing is wrong.
Kind = Literal[
    "death",  # a process died without a word, or failed
    "silence",  # a node is no longer heard, and the ranks of others wait for its own
    "stall",  # no rank moves any more
    "nonfinite",  # a logged value became NaN or infinite
    "straggler",  # one rank keeps the others waiting
    "imbalance",  # one rank has more to do than the others
    "recurring",  # one rank stalls again and again
    "bound",  # what most of the step goes to
]
VERDICTS: tuple[Kind, ...] = get_args(Kind)
HARMLESS_VERDICTS = frozenset({"bound"})
# In the evidence of a death that is over: it was none, or that of another rank.
TAKEN_BACK = "taken_back"


def is_taken_back(evidence: Any) -> bool:
    """Whether this is the evidence of such a death."""
    return isinstance(evidence, Mapping) and bool(evidence.get(TAKEN_BACK))


# What the time of a run goes to, in the order in which it is shown; for people, what each is.
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
# On boards and on the page: what is a phase too has its colour, and neighbours differ.
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

# The labels of one process; a verdict about a whole run or node has fewer of them.
Labels = tuple[tuple[str, str], ...]
RANK_LABELS = ("group", "run", "job_type", "node", "rank", "local_rank")
# Which run it is. The roles of its processes may differ, so `job_type` is no part of that.
RUN_LABELS = ("group", "run")
NODE_LABELS = (*RUN_LABELS, "node")
