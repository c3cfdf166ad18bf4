"""One process: its records, state, position and end."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

from otel_ddp import errors, files, plain
from otel_ddp.agent.ledger import Labels
from otel_ddp.agent.reading.documents import Devices, RunDescription, checkpoint_event
from otel_ddp.agent.reading.nonfinite import NonfiniteValues
from otel_ddp.agent.reading.pace import Pace
from otel_ddp.agent.reading.phase_shares import PhaseShares
from otel_ddp.agent.reading.steps import StepStream
from otel_ddp.diagnosis.death.cause import EndedProcess
from otel_ddp.diagnosis.detector import NonfiniteValue, RankState
from otel_ddp.diagnosis.stall.evidence import Evidence, Position, Question
from otel_ddp.diagnosis.steps import Step
from otel_ddp.journal.layout import END, EVENT
from otel_ddp.journal.parser import Document, Journal, Name, Record, Scalars, Steps
from otel_ddp.journal.process_state import ENDED, ProcessState, ended_by_parent, last_step, state_of
from otel_ddp.journal.reader import JournalReader
from otel_ddp.journal.values import Extremes, described
from otel_ddp.vocabulary.words import NOT_HEARD, PHASES, STATES, phase_word, state_word

# How long the export of a process waits for its final identity, such as its rank.
_UNSETTLED_S = 60.0
# If no agent polled the process for longer than this, the time of its death is unknown.
_PAUSED_NS = 5_000_000_000


class News(NamedTuple):
    """The records of the last poll."""

    scalars: list[Scalars]
    steps: list[Step]
    device_steps: list[Step]
    """Steps timed on the device's clock. They arrive later than on the host's clock."""
    estimated: list[Step]
    device_estimated: list[Step]
    """`estimated`, `device_estimated`: both kinds of steps, with estimates of unmeasured phases."""
    events: list[Document]
    spans: list[Document]
    """`events` and `spans` are empty if the process is not exported."""
    overwritten: list[tuple[int, int]]
    """Intervals in which records were overwritten before they were read."""

    @property
    def size(self) -> int:
        """The number of records and steps."""
        steps = len(self.steps) + len(self.device_steps)
        return steps + len(self.scalars) + len(self.events)


def _nothing() -> News:
    return News([], [], [], [], [], [], [], [])


class Host:
    """Facts about a process that only an agent on its node can find. Subclasses find more of
    them."""

    is_here = True
    """Whether the process is on this node."""
    is_kept = True
    """Whether this agent writes the history of the process."""
    heard_ns = 0
    """When the last report of the process's node arrived; 0 if it is this node."""
    silent_since_ns = 0
    """When the last report of the process's node arrived, if the node is silent now; else 0."""
    clock_uncertainty_ns = 0
    """The largest possible error of the measured clock offset of the process's node."""
    logged_step: int | None = None
    """The step of the last logged value, as the process's node has reported it, or None."""
    reader: Journal

    def __init__(self, reader: JournalReader) -> None:
        self.reader = reader
        # The pid in the agent's pid namespace. It differs from the process's own pid if only the
        # process is in a container. If it is unknown, use 0: outside of the container, the
        # process's own pid may belong to another process.
        holder = files.lock_holder(reader.path)
        self.pid = reader.pid if holder is None else holder

    def started_ns(self) -> int:
        """The start of the process; 0 if unknown."""
        ticks = self.reader.start_ticks
        booted_ns = time.time_ns() - time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        return booted_ns + ticks * 10**9 // os.sysconf("SC_CLK_TCK") if ticks else 0

    def ended_well(self) -> bool | None:
        """For a process that recorded no end: whether it had finished its work; None if not known
        yet."""
        return ended_by_parent(self.reader)

    def update(self, life: Life, now_ns: int, alive: bool) -> None:
        """Update the state of the process."""
        life.update(self, now_ns, alive)

    def nonfinite(self) -> Sequence[NonfiniteValue] | None:
        """The non-finite values that the agent on the process's node has found; None if this agent
        has to look for them."""
        return None

    def watch(self) -> None:
        """Sample facts that cannot be read after the process has ended."""

    def ask(self, question: Question, now_ns: int) -> None:
        """Ask the process, for example for its stack. Without effect if it cannot be asked."""

    def evidence(self, now_ns: int) -> Evidence:
        """The process's last answer to a question, and its current kernel state."""
        return Evidence()

    def cause(self) -> Mapping[str, Any]:
        """Evidence from kernel and launcher about the end of the process, as far as known."""
        return {}

    def present_ns(self) -> int:
        """When the process was last seen to exist, also after it had reported its end; 0 if
        unknown."""
        return 0

    def forget(self) -> None:
        """Stop looking for the cause of the process's end."""


class Life:
    """Whether a process lives, and how it ended."""

    def __init__(self, created_ns: int) -> None:
        self.state = STATES["starting"]
        self.ended_at: float | None = None
        self.seen_alive_ns = created_ns
        self.gone_ns = 0
        """When the process was first found dead; 0 while it lives."""
        self.ended_ns = 0
        """When the process ended: the recorded end, or else the time at which it was found dead, or
        its last write if no agent ran for a while. 0 while it lives."""
        self._has_ended_well: bool | None = None

    def update(self, host: Host, now_ns: int, alive: bool) -> None:
        """Update the state from the recorded progress, the journal's lock, and the node's facts."""
        reader = host.reader
        if alive:
            self.seen_alive_ns = now_ns
        elif not self.gone_ns:
            # The process died since the last poll.
            self.gone_ns = time.time_ns()
        progress = reader.progress()
        recorded = None if progress is None else progress.state
        self.state = state_of(recorded, alive)
        if self.state == STATES["killed"]:
            if self._has_ended_well is None:
                self._has_ended_well = host.ended_well()
            self.state = state_of(recorded, alive, self._has_ended_well)
        if self.state in ENDED and self.ended_at is None:
            self.ended_at = time.monotonic()
            if progress is not None and progress.state in ENDED:
                self.ended_ns = progress.state_since_ns
                # The process lived until its recorded end, even if no agent saw it at that time.
                self.seen_alive_ns = max(self.seen_alive_ns, self.ended_ns)
            elif progress is not None and self._was_unseen(reader):
                written_ns = [each.time_ns for each in reader.latest()]
                phase_ns = reader.created_ns + progress.phase_after_ns
                last_ns = max([self.seen_alive_ns, phase_ns, *written_ns])
                self.ended_ns = self.seen_alive_ns = min(self.gone_ns, last_ns)
            else:
                self.ended_ns = self.gone_ns

    def _was_unseen(self, reader: Journal) -> bool:
        """Whether the time of death is unknown: no agent saw the process alive shortly before."""
        unseen_ns = self.gone_ns - self.seen_alive_ns
        return self.seen_alive_ns == reader.created_ns or unseen_ns > _PAUSED_NS


class Process:
    """A process of any node, read from its journal.

    If the labels of the process change, a new object replaces this one.
    """

    has_news = True
    """Whether the last poll may have read records."""
    is_left_out = False
    """Whether rank comparisons exclude the process: its node is silent while others report."""

    def __init__(
        self,
        host: Host,
        name_node: Callable[[Mapping[str, Any]], str],
        devices: Devices = dict,
    ) -> None:
        """*devices*: describes the devices of the process's node."""
        self.reader = host.reader
        self.pid = host.pid
        self.labels: Labels = ()
        self.life = Life(self.reader.created_ns)
        self.new = _nothing()
        self.extremes: Mapping[Name, Extremes] = {}
        """The lowest and highest logged values; empty if only another node has them."""
        self.mark_first = self.mark_before = self.reader.bookmark()
        """The read offsets in the journal: when this agent started, and before the last poll."""
        self._devices = devices
        self.host = host
        """The facts about the process that only its node has."""
        self._name_node = name_node
        self._labelled: Mapping[str, Any] = {}
        self._logged_step: int | None = None
        # Two streams of steps: timed on the host's clock, and on the device's clock.
        created_ns = self.reader.created_ns
        self._streams = StepStream(created_ns, self.reader.names), StepStream(created_ns)
        self._shares = (PhaseShares(), PhaseShares(on_device=True)) if host.is_kept else ()
        self._nonfinite = NonfiniteValues()
        self.pace = Pace()
        """Mean step time and share of waits. The judge feeds it, since it computes the waits."""
        # The time of the last poll that returned records.
        self._read_ns = created_ns

    @cached_property
    def description(self) -> RunDescription:
        """The description of the process's run."""
        return RunDescription(self.reader, self._devices)

    # -- its identity

    @property
    def is_here(self) -> bool:
        """Whether the process is on this node."""
        return self.host.is_here

    @property
    def identity(self) -> Mapping[str, Any]:
        return self.reader.identity

    @property
    def journal(self) -> str:
        """The name of the process's journal, unique among the processes of a run."""
        node = "" if self.is_here else f"{dict(self.labels).get('node', '')}/"
        return f"{node}{self.reader.name}"

    @property
    def began_ns(self) -> int:
        """When the journal was created. If several processes have equal labels, the newest one
        counts."""
        return self.reader.created_ns

    @property
    def is_kept(self) -> bool:
        """Whether this agent writes the history of the process."""
        return self.host.is_kept

    @property
    def started_ns(self) -> int:
        """When the process started if a launcher started it for this run, else `began_ns`.

        Notebooks, pool workers and processes that had an earlier run started long before this run.
        """
        launched = self.identity.get("launcher") not in ("", None, "lone", "pool", "spawn")
        launched = launched and not self.fact("had_run")
        started_ns = self.host.started_ns() if launched else 0
        return min(started_ns, self.began_ns) if started_ns else self.began_ns

    @property
    def global_rank(self) -> int | None:
        return plain.whole(self.identity.get("global_rank"))

    @property
    def world_size(self) -> int | None:
        """The number of ranks that train together; None if unknown."""
        return plain.whole(self.identity.get("world_size"))

    @property
    def trains(self) -> bool:
        """Whether the process counts as training before its first step, as a launcher restarted
        it."""
        return bool(self.identity.get("restarts"))

    @property
    def exported(self) -> bool:
        """Whether the series of the process are exported."""
        return bool(self.identity.get("exported"))

    @property
    def project(self) -> str:
        return str(self.identity.get("project") or "")

    def fact(self, name: str) -> Any:
        """A fact that the process recorded; None if it did not."""
        return self.reader.facts.get(name)

    def settled(self) -> bool:
        """Whether to use the process's identity: it is final, or will probably never be."""
        if self.identity.get("settled") or not self.is_here:
            return True
        age_s = (time.time_ns() - self.reader.created_ns) / 1e9
        return not self.is_at_work or age_s > _UNSETTLED_S

    # -- its life

    @property
    def ended_at(self) -> float | None:
        return self.life.ended_at

    @property
    def is_at_work(self) -> bool:
        """Whether the process has not ended yet."""
        return self.life.ended_at is None

    def step(self) -> int | None:
        """The last step that the process recorded."""
        return last_step(self.reader, self.logged_step)

    @property
    def logged_step(self) -> int | None:
        """The last step of the process's logged values."""
        return self.host.logged_step if self._logged_step is None else self._logged_step

    def describe(self) -> ProcessState:
        """The current state of the process."""
        found = ProcessState.read(
            self.reader,
            self.life.state,
            of_values=self.logged_step,
            seen_alive_ns=self.life.seen_alive_ns,
            node=dict(self.labels).get("node", ""),
        )
        silent_since_ns = self.host.silent_since_ns
        if not silent_since_ns or not self.is_at_work:
            return found
        # The node is silent: show the step and phase of its last report.
        return replace(found, state=NOT_HEARD, phase_since_ns=silent_since_ns)

    def summary(self) -> list[dict[str, Any]]:
        """The last, lowest and highest value of each name."""
        return described(self.reader, self.extremes)

    def describe_now(self) -> ProcessState:
        """The current state, with the step time and share of waits, which only `status` shows."""
        found, pace = self.describe(), self.pace
        if found.ended:
            return found
        # Omit the share of waits if the waits are part of the phases forward and backward: then the
        # phase `comm_wait` does not contain them.
        known = self.state().waits_known is not False
        return replace(
            found,
            read_ns=self.host.heard_ns or time.time_ns(),
            step_s=pace.step_s,
            wait_ratio=pace.wait_ratio if known else None,
        )

    def describe_in_full(self) -> ProcessState:
        """Like `describe_now`, with the long texts and the summary of logged values."""
        return replace(
            self.describe_now(),
            description=str(self.identity.get("description") or ""),
            config=self.reader.config,
            summary=self.summary(),
        )

    # -- its records

    def poll(self, now_ns: int, alive: bool) -> Process:
        """Read new records. Returns the object to use from now on: a new one if the labels
        changed."""
        self.new = _nothing()
        self.reader.read_definitions()
        self.host.update(self.life, now_ns, alive)
        if not self.settled():
            return self
        process = self._named()
        process._read(now_ns, alive)
        return process

    def forget_news(self) -> None:
        """Drop the records of the last poll, once they are processed."""
        self.new, self.has_news = _nothing(), False

    def _named(self) -> Process:
        if self._labelled is self.identity:
            return self
        self._labelled = self.identity
        node = self._name_node(self.identity)
        labels = rank_labels(self.identity, node, self.reader.pid)
        if labels == self.labels:
            return self
        process = copy.copy(self) if self.labels else self
        process.labels = labels
        process._begin()
        return process

    def _begin(self) -> None:
        """Restore the state from the latest values, as far as an earlier agent has read them."""
        reader = self.reader
        before = [each for each in reader.latest() if each.position < reader.position]
        for record in before:
            if record.step is not None:
                self._logged_step = record.step
        self._nonfinite = NonfiniteValues()
        # The detector reports names whose values were finite before, so tell it the latest values.
        self._nonfinite.feed(before, 0)
        if self.is_at_work:
            self.host.watch()

    def _read(self, now_ns: int, alive: bool) -> None:
        new, self.mark_before = self.new, self.reader.bookmark()
        for record in self._new_records(now_ns):
            if isinstance(record, Scalars):
                new.scalars.append(record)
                if record.step is not None:
                    self._logged_step = record.step
            elif isinstance(record, Steps):
                self._read_steps(record)
            elif record.kind == END:
                # The process may have recorded its end after this poll has updated its state.
                self.host.update(self.life, now_ns, alive)
            elif self.exported:
                (new.events if record.kind == EVENT else new.spans).append(record)
                if (saved := checkpoint_event(record)) is not None:
                    new.events.append(saved)
        if self.is_here:
            self._nonfinite.feed(new.scalars, now_ns)

    def _new_records(self, now_ns: int) -> list[Record]:
        """Read new records. If some were overwritten, take their copies among the latest values,
        and count the records without a copy as lost."""
        reader = self.reader
        before, lost = reader.position, reader.lost
        records = reader.read()
        if reader.lost > lost:
            records = self._rescued(before, records) + records
        if reader.lost > lost:
            self.new.overwritten.append((self._read_ns, now_ns))
            errors.warn_once(
                f"overwritten {self.journal}",
                "Records of rank %s of run %s were overwritten before they were read: values come "
                "faster than the agent reads, or it could not read for a while. The last value of "
                "each name is there, and otel_ddp.records.lost counts the others. A larger "
                "OTEL_DDP_JOURNAL_BYTES bridges more.",
                dict(self.labels).get("rank"),
                dict(self.labels).get("run"),
            )
        if records:
            self._read_ns = now_ns
        return records

    def _rescued(self, before: int, records: list[Record]) -> list[Record]:
        """The overwritten records that still exist as the latest values of some names."""
        reader = self.reader
        first = records[0].position if records else reader.position
        found: list[Record] = [
            record for record in reader.latest() if before <= record.position < first
        ]
        reader.ring.lost -= len(found)
        return found

    @errors.contained()
    def _read_steps(self, record: Steps) -> None:
        new, on_device = self.new, record.on_device
        stream = self._streams[on_device]
        stream.created_ns = self.began_ns
        steps = stream.feed(record)
        (new.device_steps if on_device else new.steps).extend(steps)
        if not self._shares:
            return
        estimated = self._shares[on_device].fill(steps)
        (new.device_estimated if on_device else new.estimated).extend(estimated)

    # -- for the judge

    def state(self) -> RankState:
        """The state of the process's rank, without the world size, which the judge sets."""
        reader = self.reader
        # For each capability, why it is missing; empty if it is there.
        missing = plain.mapping(reader.facts.get("capability"))
        own = plain.list_of(str, reader.facts.get("own_collectives"))
        return RankState(
            self.labels,
            own_world_size=self.world_size,
            waits_known=not missing["comm_wait"] if "comm_wait" in missing else None,
            own_collectives=tuple(each for each in own if each in PHASES),
            # False with replica groups of torchft: the groups wait for each other in calls that we
            # cannot hook, so the recorded calls are incomplete.
            calls_noted=missing.get("calls") == "" and missing.get("comm_wait") != "replica_groups",
            device_clock=not missing["device_clock"] if "device_clock" in missing else None,
            under_nccl="nccl" in str(reader.facts.get("backend")),
            began_ns=self.began_ns,
            clock_shift_ns=reader.created_monotonic_ns - reader.created_ns,
        )

    def position(self, origin_ns: int) -> Position | None:
        """Where in the training the process is. *origin_ns*: the wall-clock time of monotonic time
        0."""
        reader = self.reader
        progress = reader.progress()
        if progress is None:
            return None
        phase = phase_word(progress.phase_code)
        name = reader.names.get(progress.phase_name) if phase == "other" else None
        return Position(
            labels=self.labels,
            alive=self.is_at_work,
            state=state_word(self.life.state),
            step=self.step(),
            phase=phase,
            in_mark=reader.in_mark(),
            waits_in=self.state().waits_in,
            # A process of this node has the same monotonic clock as the agent. Use it, since the
            # wall clock may be set while the program runs.
            since_ns=(origin_ns + reader.created_monotonic_ns if self.is_here else self.began_ns)
            + progress.phase_after_ns,
            name="" if name is None else name.text,
            expect_s=progress.expect_ms / 1000 if progress.expect_ms else None,
            written=reader.position,
            world=self.world_size,
        )

    def nonfinite(self, now_ns: int) -> Sequence[NonfiniteValue]:
        """The process's logged values that were finite, and no longer are."""
        reported = self.host.nonfinite()
        if reported is not None:
            return reported
        return self._nonfinite.find(self.reader.names, now_ns, ended=not self.is_at_work)

    # -- its end

    def end(self) -> EndedProcess:
        """What is known about the end of the process without waiting for more evidence."""
        described = self.describe()
        alive_ns, ended_ns = self.life.seen_alive_ns, self.life.gone_ns
        progress = self.reader.progress()
        if progress is not None and progress.state in ENDED:
            alive_ns = ended_ns = progress.state_since_ns
        # The judge orders the ends of several nodes by time. Clock offsets are only estimates, so
        # their uncertainty widens the interval in which the process ended.
        uncertain_ns = self.host.clock_uncertainty_ns
        return EndedProcess(
            labels=self.labels,
            state=described.state,
            step=described.step,
            phase=described.phase,
            seen_alive_ns=alive_ns - uncertain_ns,
            ended_ns=ended_ns + uncertain_ns,
            reason=described.reason,
            cause=self.host.cause(),
            world_size=self.world_size,
        )


def rank_labels(identity: Mapping[str, Any], node: str, pid: int) -> Labels:
    """The six labels of a process's series."""
    rank, local_rank = identity.get("global_rank"), identity.get("local_rank")
    return (
        ("group", str(identity.get("group") or "")),
        ("run", str(identity.get("run") or "")),
        ("job_type", str(identity.get("job_type") or "")),
        ("node", node),
        # If the rank is unknown, the pid distinguishes the processes.
        ("rank", f"p{pid}" if rank is None else str(rank)),
        ("local_rank", "" if local_rank is None else str(local_rank)),
    )
