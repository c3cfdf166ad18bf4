"""The state of a process: its identity, progress and end, read from its journal.

Used for metrics, `otel-ddp status`, the page, and the summary at the end of a run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import chain
from typing import Any, NamedTuple

from otel_ddp import plain, shown
from otel_ddp.journal.parser import Journal
from otel_ddp.vocabulary import catalog, words

ENDED = tuple(words.STATES[word] for word in words.ENDED_STATES)


def state_of(recorded: int | None, alive: bool, ended_well: bool | None = False) -> int:
    """The state of a process (running, finished, killed ...), from the last state that it recorded.

    *ended_well*: whether a process that died without recording its end had finished its work. As
    long as this is unknown (None), the result is the recorded state.
    """
    state = words.STATES["starting"] if recorded is None else recorded
    if state not in words.STATES.values():
        state = words.STATES["running"]
    if state in ENDED or alive or ended_well is None:
        return state
    return words.STATES["finished" if ended_well else "killed"]


def made_steps(reader: Journal) -> bool:
    """Whether hooks in this process have counted a training step."""
    return any(each.values[0] for each in reader.totals(catalog.TRAINING_STEPS.name))


def last_step(reader: Journal, of_values: int | None) -> int | None:
    """The last training step, as counted by hooks; without hooks, the highest step that was logged
    with a value (*of_values*)."""
    progress = reader.progress()
    counted = None if progress is None else progress.step
    if counted is not None and made_steps(reader):
        # Ignore steps that were logged with values: the program may count something else in them,
        # such as frames.
        return counted
    return max((step for step in (of_values, counted) if step is not None), default=None)


# -- workers that ended without a record: had they finished their work?

_OTHER = words.PHASES["other"]


def parent(reader: Journal) -> int | None:
    """The pid of the process that started this one by multiprocessing; None if none did."""
    return plain.whole(reader.facts.get("parent"))


def in_pool(reader: Journal) -> bool:
    """Whether this is a worker of a process pool, which runs one task after another."""
    return reader.facts.get("pool") is True


def is_idle(reader: Journal) -> bool:
    """Whether this is a multiprocessing child without an open step or phase.

    A pool ends its workers by SIGTERM while they wait for a task, and a parent ends a child like
    this when it has no more work for it. Such a child can't record its end: with a SIGTERM handler
    of ours, a rank that hangs in native code would no longer die of the signal.
    """
    progress = reader.progress()
    if parent(reader) is None or progress is None or progress.phase_name:
        return False
    # After the last step, the phase is `other`, or `unmeasured` if this step was not measured.
    if progress.phase_code not in (_OTHER, words.UNMEASURED):
        return False
    # A child that has trained is a rank, and not idle. Except in a pool, whose worker may have
    # trained in an earlier task.
    return in_pool(reader) or not made_steps(reader)


def ended_by_parent(
    reader: Journal, cause: Mapping[str, Any] | None = None, parent_lives: bool | None = None
) -> bool:
    """Whether a process that has not recorded its end had already finished its work.

    *cause*: how the process died, as reported by the kernel (`signal` or `exit_code`,
    `out_of_memory`). *parent_lives*: whether its parent process is alive; None if unknown.
    """
    known = cause or {}
    if not is_idle(reader) or "out_of_memory" in known:
        return False
    if "exit_code" in known:
        return bool(known["exit_code"] == 0)
    if "signal" in known:
        return bool(known["signal"] == "SIGTERM")
    # If the cause is unknown, a worker of a pool had finished. Another child had finished only if
    # its parent has ended too, and if the run has one rank: with several ranks, the parent may have
    # ended because another rank crashed.
    alone = (reader.identity.get("world_size") or 1) == 1 and parent_lives is False
    return in_pool(reader) or alone


# -- how many steps of a process are measured


def measuring(fact: Any) -> str:
    """A sentence on how many steps of a process are measured; empty if all are.

    *fact*: what the process has recorded on this.
    """
    rate = plain.mapping(fact)
    one_of, share = plain.whole(rate.get("one_of")), plain.number(rate.get("share"), 0, 1)
    if one_of is None or one_of < 2:
        return ""
    cost = "" if share is None else f", for {shown.share(share)} of the training thread's time"
    missed = "recurring stalls are named only if all steps are measured"
    return f"measures 1 of {one_of} steps{cost}; {missed}"


# -- the state


@dataclass(frozen=True)
class ProcessState:
    """The state of a process; unknown fields are empty."""

    run: str = ""
    group: str = ""
    job_type: str = ""
    project: str = ""
    name: str = ""
    tags: str = ""
    node: str = ""
    host: str = ""
    rank: int | None = None
    local_rank: int | None = None
    world_size: int | None = None
    node_rank: int | None = None
    trains: bool = False
    launcher: str = ""
    strategy: str = ""
    exported: bool = False
    settled: bool = False
    """Whether the process's rank and run are final; before, they may still change."""
    pid: int = 0
    state: str = "running"
    reason: str = ""
    step: int | None = None
    phase: str = "other"
    phase_since_ns: int = 0
    seen_alive_ns: int | None = None
    """When the agent last saw a dead process alive; None if no agent has watched it."""
    started_ns: int = 0
    lost: int = 0
    journal: str = ""
    measuring: str = ""
    not_measured: str = ""
    """A sentence on what this process does not measure, and why; else empty."""
    read_ns: int | None = None
    """When step and phase of a running process were read: other nodes report with a delay. Only
    an agent's status sets this field and the following ones."""
    step_s: float | None = None
    """The mean duration of the last steps of the process."""
    wait_ratio: float | None = None
    """The share of time in which the process waited for other ranks, in its last usual steps."""
    description: str | None = None
    config: Mapping[str, Any] | None = None
    summary: Sequence[Mapping[str, Any]] | None = None

    @property
    def ended(self) -> bool:
        return self.state in words.ENDED_STATES

    @property
    def of_run(self) -> tuple[str, str]:
        """Group and name of the process's run. Runs of different groups may have the same name."""
        return self.group, self.run

    def rank_key(self, job_type: str) -> str:
        """The key of the process's rank in a run's history. *job_type*: the job type of the run."""
        rank = f"p{self.pid}" if self.rank is None else str(self.rank)
        return rank_key(rank, self.job_type, job_type)

    @property
    def key(self) -> str:
        """The key of the process in tables, and in updates of these tables."""
        return self.journal or f"{self.group}/{self.run}/{self.rank}/{self.pid}/{self.started_ns}"

    @classmethod
    def read(
        cls,
        reader: Journal,
        state: int,
        *,
        of_values: int | None = None,
        seen_alive_ns: int = 0,
        node: str = "",
    ) -> ProcessState:
        """Read the state from a journal.

        *state*: the result of `state_of`. *of_values*: the highest step logged with a value.
        """
        identity, progress = reader.identity, reader.progress()
        phase, since_ns = "other", reader.created_ns
        if progress is not None:
            phase = words.phase_word(progress.phase_code)
            # A phase that the user has named has the code of `other`. If a phase with its own code
            # is nested in it, show the nested one.
            name = reader.names.get(progress.phase_name)
            if phase == "other" and name is not None:
                phase = name.text
            since_ns = reader.created_ns + progress.phase_after_ns

        texts = {key: str(identity.get(key) or "") for key in _TEXTS}
        texts["node"] = node or texts["node"] or texts["host"]
        return cls(
            **texts,  # type: ignore[arg-type]
            rank=identity.get("global_rank"),
            local_rank=identity.get("local_rank"),
            world_size=identity.get("world_size"),
            node_rank=identity.get("node_rank"),
            launcher=plain.text(identity.get("launcher")),
            strategy=plain.text(identity.get("strategy")),
            trains=bool(identity.get("restarts")) or made_steps(reader),
            exported=bool(identity.get("exported")),
            settled=bool(identity.get("settled")),
            pid=reader.pid,
            state=words.state_word(state),
            reason=reader.reason(),
            step=last_step(reader, of_values),
            phase=phase,
            phase_since_ns=since_ns,
            seen_alive_ns=seen_alive_ns or None,
            started_ns=reader.created_ns,
            lost=reader.lost,
            journal=reader.name,
            measuring="" if state in ENDED else measuring(reader.facts.get("measuring")),
            not_measured=plain.text(reader.facts.get("not_measured")),
        )

    def to_json(self) -> dict[str, Any]:
        """The state as JSON. Leaves out empty fields of those that only an agent's status sets."""
        found = {each.name: getattr(self, each.name) for each in fields(self)}
        return {key: v for key, v in found.items() if v is not None or key not in _IN_STATUS}


_TEXTS = ("run", "group", "job_type", "project", "name", "tags", "node", "host")
_IN_STATUS = ("read_ns", "step_s", "wait_ratio", "description", "config", "summary")


# -- the table of ranks


def rank_key(rank: str, job_type: str, of_run: str) -> str:
    """The key of a rank in a run. If the rank's job type is not the run's, it is part of the key.

    Otherwise rank 0 of an evaluation and rank 0 of the training would have the same key.
    """
    return f"{job_type}/{rank}" if job_type and of_run not in ("", job_type) else rank


def table(*sources: Iterable[ProcessState]) -> list[ProcessState]:
    """The processes of all sources, by start time. If several sources contain the same process, the
    first source counts."""
    found: dict[str, ProcessState] = {}
    for each in chain(*sources):
        found.setdefault(each.key, each)
    return sorted(found.values(), key=lambda each: (each.started_ns, each.node, each.rank or 0))


class World(NamedTuple):
    """The world size that a process reports, and whether this process trains."""

    size: int
    trains: bool
    """Whether it made a step, or a launcher restarted it, which most evaluators never do."""


def training_world(living: Iterable[World], last: World) -> int:
    """How many ranks of a run train together. *last*: the result of the last call.

    Once the training has ended, the result changes only if there is a process that trains; or, if
    no process of the run has ever trained, a process whose world has several ranks.
    """
    living = list(living)
    if trains := [each.size for each in living if each.trains]:
        return max(trains)
    largest = max((each.size for each in living), default=0)
    if not last.size or (largest > 1 and not last.trains):
        return largest
    return last.size


def world_of(processes: Iterable[ProcessState]) -> int | None:
    """How many ranks of a run train together; None if unknown."""
    worlds = [
        (World(each.world_size, each.trains), each)
        for each in processes
        if each.world_size is not None
    ]
    # Of the ended processes, use the world of one that has trained; else of one whose world has
    # several ranks; of several such processes, the newest.
    ended = [
        (world.trains, world.size > 1, each.started_ns, world.size)
        for world, each in worlds
        if each.ended
    ]
    trained, _, _, size = max(ended, default=(False, False, 0, 0))
    living = [world for world, each in worlds if not each.ended]
    return training_world(living, World(size, trained)) or None
