"""What is known of a rank that may stand still: its position, its stack, its collectives."""

from __future__ import annotations

from typing import Literal, NamedTuple

from otel_ddp.diagnosis.say import rank_name
from otel_ddp.diagnosis.verdict import Labels

Question = Literal["where", "what"]


class Frame(NamedTuple):
    """A line of Python on the stack of a thread."""

    file: str
    line: int | None
    function: str

    def __str__(self) -> str:
        return f"{self.file.rpartition('/')[2]}:{self.line} ({self.function})"


# What torch's own frames say of a step that was not measured.
_PHASE_OF_FRAME = {
    ("/torch/utils/data/dataloader.py", "__next__"): "data",
    ("/torch/nn/modules/module.py", "_call_impl"): "forward",
    ("/torch/autograd/__init__.py", "backward"): "backward",
    ("/torch/optim/optimizer.py", "wrapper"): "optimizer",
}

# With these, the host itself waits for a collective. With all others its device does.
_ON_HOST = {"", "gloo", "mpi"}


class Group(NamedTuple):
    """How far a rank has come in the collectives of one process group."""

    name: str
    size: int
    enqueued: int | None
    """Gloo counts sends and receives, too."""
    completed: int | None = None
    backend: str = ""
    description: str = ""
    sends: int | None = None
    """How many of them are sends and receives; None: that is not known."""

    @property
    def device_completed(self) -> int | None:
        """The number of the last one that the device has done. Gloo's counts are not reliable."""
        return self.completed if "nccl" in self.backend else None

    @property
    def pending(self) -> bool:
        """Whether a collective waits in the device's queue."""
        done = self.device_completed
        return done is not None and done < (self.enqueued or 0) and self.size > 1

    @property
    def says_who_waits(self) -> bool:
        """Whether its numbers, beside those of another rank, say that this rank waits for that.

        Hosts run ahead of their devices by as much as each likes: there it takes what is done.
        """
        backends = {each.rpartition(":")[2] for each in self.backend.split(",")}
        return self.device_completed is not None or backends <= _ON_HOST


class Collective(NamedTuple):
    """One collective that a rank has put in line."""

    group: str
    number: int
    op: str
    sizes: str
    state: str = ""
    """On nccl: `scheduled`, then `started` by the device, where torch was told to time them."""

    def __str__(self) -> str:
        return f"{self.op.rpartition(':')[2]} {self.sizes}".strip()


class Kernel(NamedTuple):
    """What the kernel says of a process, without the process's help."""

    state: str
    """Of the thread that trains if it is known, else of the main one: R runs, S sleeps, D waits for
    a device, T is stopped, Z is dead."""
    lasting: bool
    """Whether the state was the same the last time."""
    busy: float | None
    """That thread's share of a core since the last time."""
    waits_in: str = ""
    """The kernel function that the thread sleeps in, where we may read that."""


class Evidence(NamedTuple):
    """What has been found out about one rank."""

    silent_s: float | None = None
    """How long the open question has waited for an answer; None: no question is open."""
    answered: bool = False
    """Whether the rank has ever answered. What follows is from its last answer."""
    kind: Question = "where"
    answered_ns: int = 0
    groups: tuple[Group, ...] = ()
    collectives: tuple[Collective, ...] = ()
    stack: tuple[Frame, ...] = ()
    """Of the thread that trains, where that is known, else of the main one."""
    device_phase: str = ""
    """The phase that the device of the rank is in; empty where that is not known."""
    device_step: int | None = None
    """The last step that it has done; None: the same as its host, as far as that is known."""
    package: str = ""
    """The folder of our own package, as the process sees it."""
    kernel: Kernel | None = None

    @property
    def phase(self) -> str:
        """The phase that the innermost of torch's frames is of; empty where that is not known."""
        phases = (
            phase
            for frame in self.stack
            for (file, function), phase in _PHASE_OF_FRAME.items()
            if frame.function == function and frame.file.endswith(file)
        )
        return next(phases, "")

    @property
    def has_left(self) -> bool:
        """Whether the program has ended but for threads that Python waits for."""
        outermost = self.stack[-1] if self.stack else Frame("", None, "")
        return outermost.function == "_shutdown" and outermost.file.endswith("/threading.py")


class Position(NamedTuple):
    """Where a rank is in its training, by its journal."""

    labels: Labels
    alive: bool
    state: str
    step: int | None
    phase: str
    """A word of the catalogue."""
    since_ns: int
    """When the phase began."""
    name: str = ""
    """The user's own name for the phase."""
    expect_s: float | None = None
    """How long the user said that the phase takes."""
    written: int = 0
    """How much has been written to its journal: it grows with everything that the rank logs."""
    world: int | None = None
    """How many ranks the run has, on all nodes."""
    in_mark: bool = False
    """It records an event of ours on its device. That waits where the launch queue is full."""
    waits_in: frozenset[str] | None = frozenset()
    """The phases of work in which it may wait for other ranks, too; None: that is not known."""

    @property
    def place(self) -> tuple[int | None, str, int]:
        """It has moved where this is another one."""
        return self.step, self.phase, self.since_ns

    @property
    def rank(self) -> str:
        """As the labels have it."""
        return dict(self.labels).get("rank", "?")


# Share of a core. A sleeping thread takes none; a busy one may have to share the core.
_BUSY = 0.1
# The innermost file of Python's where one of torch's operators is called by its name.
_OPERATORS = "/torch/_ops.py"
# A thread for questions that is silent for so long cannot run: something holds the GIL.
_SILENT_S, _SHORTEST_SILENCE_S = 5.0, 0.5


class Suspect(NamedTuple):
    """A rank that may hold up the others: where it is, and what has been found out about it."""

    position: Position
    known: Evidence = Evidence()
    on_nodes: bool = False
    """Whether the ranks are on several nodes, so that a name says on which."""

    heard: bool = True
    """Whether its node is heard, so that this is how it is now."""

    @property
    def name(self) -> str:
        """For sentences."""
        return rank_name(self.labels) if self.on_nodes else f"rank {self.position.rank}"

    @property
    def labels(self) -> Labels:
        return self.position.labels

    @property
    def is_waiting(self) -> bool:
        """Whether it waits for others, by its journal, its own stack, or its device."""
        known = self.known
        if known.has_left:
            return False
        if self.position.phase == "comm_wait" or self.has_full_queue or self.device == "waits":
            return True
        file = known.stack[0].file if known.stack else ""
        # An operator computes, unless it waits for a collective: those of tensor parallelism do.
        asleep = file.endswith(_OPERATORS) and self.doing == "sleeps"
        return asleep or "torch/distributed/" in file or any(each.pending for each in known.groups)

    @property
    def doing(self) -> Literal["", "computes", "sleeps"]:
        """What the thread that trains does, by the kernel's account."""
        kernel = self.known.kernel
        if kernel is None or kernel.busy is None:
            return ""
        return "computes" if kernel.busy > _BUSY else "sleeps"

    @property
    def has_full_queue(self) -> bool:
        """Whether its host waits in our mark for its device, of which nothing can be known then."""
        return self.position.in_mark and not self.known.device_phase

    @property
    def device(self) -> Literal["", "computes", "waits"]:
        """What its device does that is behind its host; "waits": at least it may."""
        phase, position = self.known.device_phase, self.position
        if not phase or (self.known.device_step is None and phase == position.phase):
            return ""
        may_wait = position.waits_in is None or phase in (*position.waits_in, "comm_wait")
        return "waits" if may_wait else "computes"

    @property
    def on_device(self) -> Suspect:
        """The same rank at the position of its device, as far as that is known."""
        phase, step = self.known.device_phase, self.known.device_step
        if not phase:
            return self
        step = self.position.step if step is None else step
        return self._replace(position=self.position._replace(phase=phase, name="", step=step))

    def disabled_by(self, floor_s: float) -> str:
        """What keeps it from going on, whatever the others do; empty: nothing."""
        kernel, silent_s = self.known.kernel, self.known.silent_s or 0.0
        if kernel is not None and kernel.state in ("T", "t"):
            return "stopped"
        if kernel is not None and kernel.state == "D" and kernel.lasting:
            return "uninterruptible"
        patience_s = min(_SILENT_S, max(_SHORTEST_SILENCE_S, floor_s / 4))
        # Our own mark may hold the GIL. It waits for the device.
        return "gil" if silent_s >= patience_s and not self.position.in_mark else ""
