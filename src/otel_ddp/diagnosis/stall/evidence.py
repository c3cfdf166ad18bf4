"""Evidence on a rank that may be stalled: its position, stack, collectives, kernel state."""

from __future__ import annotations

from typing import Literal, NamedTuple

from otel_ddp.diagnosis.say import rank_name
from otel_ddp.diagnosis.verdict import Labels

Question = Literal["where", "what"]


class Frame(NamedTuple):
    """A Python frame on the stack of a thread."""

    file: str
    line: int | None
    function: str

    def __str__(self) -> str:
        return f"{self.file.rpartition('/')[2]}:{self.line} ({self.function})"


# Unmeasured steps record no phases, so the phase is inferred from these torch frames.
_PHASE_OF_FRAME = {
    ("/torch/utils/data/dataloader.py", "__next__"): "data",
    ("/torch/nn/modules/module.py", "_call_impl"): "forward",
    ("/torch/autograd/__init__.py", "backward"): "backward",
    ("/torch/optim/optimizer.py", "wrapper"): "optimizer",
}

# With these backends the host blocks until a collective is complete. With all others, only the
# device does.
_ON_HOST = {"", "gloo", "mpi"}


class Group(NamedTuple):
    """A rank's progress in the collectives of one process group."""

    name: str
    size: int
    enqueued: int | None
    """How many collectives the rank has enqueued; gloo's count includes sends and receives."""
    completed: int | None = None
    backend: str = ""
    description: str = ""
    sends: int | None = None
    """How many of `enqueued` are sends and receives; None if unknown."""

    @property
    def device_completed(self) -> int | None:
        """The number of the last collective that the device has completed."""
        # Only NCCL's counts of completed collectives are reliable.
        return self.completed if "nccl" in self.backend else None

    @property
    def pending(self) -> bool:
        """Whether the rank has enqueued collectives that its device has not completed."""
        done = self.device_completed
        return done is not None and done < (self.enqueued or 0) and self.size > 1

    @property
    def says_who_waits(self) -> bool:
        """Whether the counts of collectives show which rank waits for which.

        If hosts wait, the counts of enqueued collectives show it. If devices wait, only the counts
        of completed collectives do, as hosts run ahead of their devices by different amounts.
        """
        backends = {each.rpartition(":")[2] for each in self.backend.split(",")}
        return self.device_completed is not None or backends <= _ON_HOST


class Collective(NamedTuple):
    """A collective that a rank has enqueued."""

    group: str
    number: int
    op: str
    sizes: str
    state: str = ""
    """With nccl and timing in torch's flight recorder: `scheduled`, then `started`; else empty."""

    def __str__(self) -> str:
        return f"{self.op.rpartition(':')[2]} {self.sizes}".strip()


class Kernel(NamedTuple):
    """The state of a rank's process, as the kernel shows it."""

    state: str
    """The state letter (R, S, D, T, Z) of the training thread if known, else of the main thread."""
    lasting: bool
    """Whether the process was in the same state at the previous reading."""
    busy: float | None
    """The share of a core that the thread used since the previous reading; None if unknown."""
    waits_in: str = ""
    """The kernel function that the thread sleeps in, if readable."""


class Evidence(NamedTuple):
    """What one rank has answered to the agent's requests, and its state in the kernel."""

    silent_s: float | None = None
    """How long the agent's request has been unanswered; None if there is no unanswered request."""
    answered: bool = False
    """Whether the rank has ever answered. The fields below are from its last answer."""
    kind: Question = "where"
    answered_ns: int = 0
    groups: tuple[Group, ...] = ()
    collectives: tuple[Collective, ...] = ()
    stack: tuple[Frame, ...] = ()
    """The frames of the training thread if known, else of the main thread; innermost first."""
    device_phase: str = ""
    """The phase of the rank's device; empty if unknown."""
    device_step: int | None = None
    """The last step that the device completed; None if its host is at the same step."""
    kernel: Kernel | None = None

    @property
    def phase(self) -> str:
        """The phase of the innermost frame that _PHASE_OF_FRAME lists; empty if it lists none."""
        phases = (
            phase
            for frame in self.stack
            for (file, function), phase in _PHASE_OF_FRAME.items()
            if frame.function == function and frame.file.endswith(file)
        )
        return next(phases, "")

    @property
    def has_left(self) -> bool:
        """Whether the program has ended, and Python waits for the remaining threads."""
        outermost = self.stack[-1] if self.stack else Frame("", None, "")
        return outermost.function == "_shutdown" and outermost.file.endswith("/threading.py")


class Position(NamedTuple):
    """The position of a rank in its program, as its journal shows it."""

    labels: Labels
    alive: bool
    state: str
    step: int | None
    phase: str
    since_ns: int
    name: str = ""
    expect_s: float | None = None
    """The duration that the user announced for the phase."""
    written: int = 0
    world: int | None = None
    in_mark: bool = False
    """Whether the rank launches an event or copy of ours; a full launch queue blocks it there."""
    waits_in: frozenset[str] | None = frozenset()
    """The phases of work that may include waits for other ranks; None if unknown."""

    @property
    def place(self) -> tuple[int | None, str, int]:
        """A value that changes when the rank enters another step or phase."""
        return self.step, self.phase, self.since_ns

    @property
    def rank(self) -> str:
        return dict(self.labels).get("rank", "?")


# A thread counts as computing if it uses more than this share of a core. The share is small because
# other threads may take time of the same core.
_BUSY = 0.1
# While a thread is in a torch operator, its innermost Python frame is in this file.
_OPERATORS = "/torch/_ops.py"
# A process that leaves a request unanswered this long has a thread that does not release the GIL: a
# quarter of the shortest stall limit, but at most _SILENT_S and at least _SHORTEST_SILENCE_S.
_SILENT_S, _SHORTEST_SILENCE_S = 5.0, 0.5


class Suspect(NamedTuple):
    """A rank that may hold up the others, with its evidence."""

    position: Position
    known: Evidence = Evidence()
    heard: bool = True
    """False if the rank's node is silent."""

    @property
    def name(self) -> str:
        return rank_name(self.labels)

    @property
    def labels(self) -> Labels:
        return self.position.labels

    @property
    def is_waiting(self) -> bool:
        """Whether the journal, the stack or the device shows that the rank waits for other
        ranks."""
        known = self.known
        if known.has_left:
            return False
        if self.position.phase == "comm_wait" or self.has_full_queue or self.device == "waits":
            return True
        file = known.stack[0].file if known.stack else ""
        # A training thread that sleeps inside a torch operator waits for a collective in it, as in
        # tensor parallelism.
        asleep = file.endswith(_OPERATORS) and self.doing == "sleeps"
        return asleep or "torch/distributed/" in file or any(each.pending for each in known.groups)

    @property
    def doing(self) -> Literal["", "computes", "sleeps"]:
        """Whether the training thread computes or sleeps, from its CPU time; empty if unknown."""
        kernel = self.known.kernel
        if kernel is None or kernel.busy is None:
            return ""
        return "computes" if kernel.busy > _BUSY else "sleeps"

    @property
    def has_full_queue(self) -> bool:
        """Whether the device's launch queue is full, which blocks the host: then the device is
        stuck.

        False if the device's phase is known, because `device` then tells what the device does.
        """
        return self.position.in_mark and not self.known.device_phase

    @property
    def device(self) -> Literal["", "computes", "waits"]:
        """What the device does: `waits` if it may wait for other ranks in its phase, else
        `computes`.

        Empty if its phase is unknown, or if it is at the same step and phase as its host.
        """
        phase, position = self.known.device_phase, self.position
        if not phase or (self.known.device_step is None and phase == position.phase):
            return ""
        may_wait = position.waits_in is None or phase in (*position.waits_in, "comm_wait")
        return "waits" if may_wait else "computes"

    @property
    def on_device(self) -> Suspect:
        """The rank at the phase and step of its device instead of its host, if these are known."""
        phase, step = self.known.device_phase, self.known.device_step
        if not phase:
            return self
        step = self.position.step if step is None else step
        return self._replace(position=self.position._replace(phase=phase, name="", step=step))

    def disabled_by(self, floor_s: float) -> str:
        """The reason why the rank cannot continue, whatever the others do; empty if it can."""
        kernel, silent_s = self.known.kernel, self.known.silent_s or 0.0
        if kernel is not None and kernel.state in ("T", "t"):
            return "stopped"
        if kernel is not None and kernel.state == "D" and kernel.lasting:
            return "uninterruptible"
        patience_s = min(_SILENT_S, max(_SHORTEST_SILENCE_S, floor_s / 4))
        # A rank that records a device event while the launch queue is full may hold the GIL until
        # the device goes on. Then the device is the cause, not the GIL.
        return "gil" if silent_s >= patience_s and not self.position.in_mark else ""
