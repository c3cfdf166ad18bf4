"""Words that users see, and their codes: phases, states, verdicts, causes of time, labels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, get_args


class Phase(NamedTuple):
    """A phase of the training, such as `forward`: what a process is doing."""

    word: str
    code: int
    """Must not change: Grafana dashboards map it to the word, and journals contain it."""
    kind: Literal["work", "compute", "wait", "unusual", "unmeasured"]
    """`compute`: work of a device. `unusual`: steps with such a phase are not compared."""
    colour: str
    """Used in Grafana and on the page. Waiting is grey: if one rank hangs, the others are grey."""
    shown: str = ""
    """The name in tables and sentences, if the word alone is not clear; else empty."""


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
# Advice for users if a rank is late, by the phase in which it is late.
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
# The bits of the phase in the one-byte code of a journal's word. The bits above are flags: one says
# that a wait is for buffers.
PHASE_CODE = 0x3F
_OF_CODE = {each.code: each.word for each in _PHASES}

# The phases in which a rank works and does not wait for other ranks, in the order of tables.
WORK_PHASES = ("data", "forward", "backward", "optimizer", "graph", "other")
# The word for time in Python's garbage collection. It is no phase, because it occurs in any phase.
GARBAGE = "garbage"
COMPUTE_PHASES = tuple(word for word in WORK_PHASES if PHASE[word].kind == "compute")
UNUSUAL_PHASES = tuple(each.word for each in _PHASES if each.kind == "unusual")
# The code of steps whose phases were not measured. Their time is divided among the phases in the
# proportions of measured steps.
UNMEASURED = PHASES["unmeasured"]
MEASURED_PHASES = tuple(word for word, code in PHASES.items() if code != UNMEASURED)


def phase_word(code: int) -> str:
    """The word for a phase's code; `other` if the code is unknown."""
    return _OF_CODE.get(code, "other")


def shown_phase(word: str) -> str:
    """The name of a phase in tables and sentences. A word that is no phase stays unchanged."""
    found = PHASE.get(word)
    return found.shown or word if found else word


STATES: Mapping[str, int] = {"starting": 0, "running": 1, "finished": 2, "failed": 3, "killed": 4}
ENDED_STATES = ("finished", "failed", "killed")
# Shown as the state of a process whose node no longer reports: it is unknown whether it still runs.
NOT_HEARD = "not heard"
_STATE_OF_CODE = {code: word for word, code in STATES.items()}


def state_word(code: int) -> str:
    """The word for a state's code; `running` if the code is unknown."""
    return _STATE_OF_CODE.get(code, "running")


# The kinds of verdicts, the worst first.
Kind = Literal[
    "death",  # a process was killed or failed
    "silence",  # a node's agent no longer reports, and the ranks on other nodes wait
    "stall",  # the run hangs: no rank makes progress
    "nonfinite",  # a logged value became NaN or infinite
    "straggler",  # one rank or node is slow, and keeps the others waiting
    "imbalance",  # one rank has more to do than the others
    "recurring",  # one rank stalls at regular intervals
    "bound",  # no problem: says what limits the speed of the run
]
VERDICTS: tuple[Kind, ...] = get_args(Kind)
HARMLESS_VERDICTS = frozenset({"bound"})
# A key in the evidence of a verdict on a death. If it is set, the verdict is withdrawn.
TAKEN_BACK = "taken_back"


def is_taken_back(evidence: Any) -> bool:
    """Whether the verdict with this evidence was withdrawn."""
    return isinstance(evidence, Mapping) and bool(evidence.get(TAKEN_BACK))


# What a run spends its time on: the causes in the order of display, each with a description.
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
# The colours of these causes in Grafana and on the page. A cause that is a phase has its colour.
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

# Labels as pairs of a name and a value. A process has all RANK_LABELS, a run or a node fewer.
Labels = tuple[tuple[str, str], ...]
RANK_LABELS = ("group", "run", "job_type", "node", "rank", "local_rank")
# The labels of a run do not include `job_type`, since processes of one run may have different ones.
RUN_LABELS = ("group", "run")
NODE_LABELS = (*RUN_LABELS, "node")
