"""What is known of a rank that may stand still: where it is, its stack, its collectives."""

from __future__ import annotations

from typing import Literal, NamedTuple

from otel_ddp.diagnosis.verdict import Who

Question = Literal["where", "what", "when"]


class Frame(NamedTuple):
    """A line of Python that a thread is at."""

    file: str
    line: int | None
    function: str

    def __str__(self) -> str:
        return f"{self.file.rpartition('/')[2]}:{self.line} ({self.function})"


class Thread(NamedTuple):
    """A thread of Python's, the innermost frame first."""

    name: str
    stack: tuple[Frame, ...]


class Group(NamedTuple):
    """How far a rank has come with the collectives of a process group."""

    name: str
    size: int
    enqueued: int | None
    completed: int | None = None
    backend: str = ""
    description: str = ""

    @property
    def pending(self) -> bool:
        """Whether it waits in a queue of the device. Gloo does not count what is completed well."""
        behind = self.completed is not None and self.completed < (self.enqueued or 0)
        return behind and self.size > 1 and "nccl" in self.backend


class Collective(NamedTuple):
    """One collective that a rank has put in line."""

    group: str
    number: int
    op: str
    sizes: str

    def __str__(self) -> str:
        return f"{self.op.rpartition(':')[2]} {self.sizes}".strip()


class Kernel(NamedTuple):
    """What the kernel says of a process, without its help."""

    state: str
    """Of the thread that trains, where it is known, else the main one.

    R runs, S sleeps, D waits for a device, T is stopped, Z is dead.
    """
    lasting: bool
    """Whether it was the same the last time."""
    busy: float | None
    """That thread's share of a core since the last time."""
    waits_in: str = ""
    """The kernel's function that it sleeps in, where we may read that."""
    busy_threads: int = 0
    """How many others have used the processor since the last time."""


class Evidence(NamedTuple):
    """What was found out about one rank."""

    silent_s: float | None = None
    """For how long the last question has gone without an answer; None: it has none open."""
    heard: bool = False
    """Whether there is an answer at all, and it is of the last question that was answered."""
    kind: Question = "where"
    answered_ns: int = 0
    groups: tuple[Group, ...] = ()
    collectives: tuple[Collective, ...] = ()
    stack: tuple[Frame, ...] = ()
    """Of the thread that trains, where it is known, else the main one; the innermost first."""
    helpers: tuple[Thread, ...] = ()
    """Other threads that the end of the program waits for."""
    package: str = ""
    """The folder of our own package, as the process has it."""
    kernel: Kernel | None = None


class Position(NamedTuple):
    """Where a rank stands, as its journal says."""

    who: Who
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
    """How long the user says that it takes."""
    written: int = 0
    """How much there is in its journal: grows with everything that it logs."""
    world: int | None = None
    """How many ranks the run has, on all nodes."""

    @property
    def rank(self) -> str:
        """As the labels have it."""
        return dict(self.who).get("rank", "?")
