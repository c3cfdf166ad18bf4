"""A process of another node as the judge of the lead sees it: by what the agent there reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from otel_ddp.agent.link import link_pb2 as wire
from otel_ddp.agent.link.runs import pack
from otel_ddp.agent.reading.steps import Step
from otel_ddp.agent.verdicts.source import Source
from otel_ddp.diagnosis.death.cause import EndedProcess
from otel_ddp.diagnosis.detector import Memory, NonfiniteValue, RankState
from otel_ddp.diagnosis.stall.evidence import Evidence, Position, Question
from otel_ddp.journal.process_state import ProcessState
from otel_ddp.vocabulary.words import NOT_HEARD

# An offset between two clocks is measured again and again. Below this it is the same one: else the
# moments at which a rank entered its phase would move, and the rank with them.
_SAME_OFFSET_NS = 50_000_000
# A process can be asked only while its agent is heard.
_HEARD_NS = 6_000_000_000
# The lead keeps one of each process, and shows it.
_LONGEST_DESCRIPTION = 16 * 1024


class _Clock:
    """How far the lead's clock is ahead of that of the process."""

    def __init__(self, offset_ns: int) -> None:
        self.offset_ns = offset_ns
        # When the present phase began, by either clock.
        self._since_ns = (0, 0)

    def update(self, offset_ns: int) -> int:
        """It is measured anew; what to add to the times of the process from now on."""
        if abs(offset_ns - self.offset_ns) > _SAME_OFFSET_NS:
            # The clock of its node was set.
            self.offset_ns, self._since_ns = offset_ns, (0, 0)
        return self.offset_ns

    def enter(self, since_ns: int) -> None:
        """The present phase began at this moment."""
        if since_ns != self._since_ns[0]:
            self._since_ns = since_ns, since_ns + self.offset_ns

    @property
    def since_ns(self) -> int:
        """When the present phase began, by the lead's clock."""
        return self._since_ns[1]


class NodeSource(Source):
    """One process, from when its agent first describes it. Fed with each report of that agent."""

    is_here = False

    def __init__(self, state: wire.State, clock_offset_ns: int) -> None:
        self._clock = _Clock(clock_offset_ns)
        self.labels = pack.unpack_labels(state)
        self._state = pack.unpack_state(state, self.labels, clock_offset_ns)
        self._told = state
        self._described = _described(state, clock_offset_ns)
        self._process = wire.Process()
        self._steps: tuple[Sequence[Step], Sequence[Step]] = ((), ())
        self._evidence = Evidence()
        self._arrivals: Mapping[str, Any] | None = None
        self._end: EndedProcess | None = None
        self.heard_ns = 0
        """When it was last reported, by the clock of the lead's judge."""
        self.questions: list[Question] = []
        """Those that its agent has not been asked yet."""
        self.has_news = self.is_left_out = False
        self.silent_since_ns = 0
        """When its node was last heard, where that is too long ago; 0: it is heard."""

    def is_described_by(self, state: wire.State) -> bool:
        """Whether this is the state of the same process."""
        told = self._told
        return bool(told.began_ns == state.began_ns and told.labels == state.labels)

    def feed(self, process: wire.Process, clock_offset_ns: int, now_ns: int) -> None:
        """What was reported of it. Raises Senseless, and is as before then.

        *clock_offset_ns*: what its agent believes the lead's clock is ahead. *now_ns*: on the
        clock of the judge.
        """
        offset_ns = self._clock.update(clock_offset_ns)
        steps = pack.unpack_steps(process.steps, offset_ns)
        device_steps = pack.unpack_steps(process.device_steps, offset_ns)
        if process.HasField("state"):
            described = _described(process.state, offset_ns)
            state = pack.unpack_state(process.state, self.labels, offset_ns)
            # When it began is one moment, also where the clock was set since.
            self._state = state._replace(began_ns=self.began_ns)
            self._told, self._described = process.state, described
        if process.HasField("end"):
            # Not by the offset that its phases keep: ends on several nodes are put in order.
            self._note_end(pack.unpack_end(process.end, self.labels, clock_offset_ns))
        if process.HasField("arrivals"):
            self._arrivals = pack.unpack_json(process.arrivals)
        if process.HasField("evidence"):
            self._evidence = pack.unpack_evidence(process.evidence, offset_ns)
        self._clock.enter(process.position.since_ns)
        before, before_on_device = self._steps
        self._steps = [*before, *steps], [*before_on_device, *device_steps]
        self._process, self.heard_ns, self.has_news = process, now_ns, True

    def _note_end(self, ended: EndedProcess) -> None:
        # The same end comes again, with more of its cause, and may be measured less precisely then.
        self._end = ended if self._end is None else self._end._replace(cause=ended.cause)

    def forget_news(self) -> None:
        """The judge has been fed."""
        self._steps, self.has_news = ((), ()), False

    # -- as the judge sees it

    @property
    def began_ns(self) -> int:
        return self._state.began_ns

    @property
    def is_at_work(self) -> bool:
        return self._end is None

    @property
    def trains(self) -> bool:
        return bool(self._told.trains)

    @property
    def project(self) -> str:
        return str(self._told.project)

    def state(self) -> RankState:
        return self._state

    def steps(self) -> tuple[Sequence[Step], Sequence[Step]]:
        return self._steps

    def position(self, origin_ns: int) -> Position | None:
        if not self._process.HasField("position"):
            return None
        return pack.unpack_position(self._process.position, self._state, self._clock.since_ns)

    def watch(self) -> None:
        # Its own agent does.
        return

    def memory(self) -> Memory | None:
        memory = self._process.memory
        return pack.unpack_memory(memory) if self._process.HasField("memory") else None

    def device_memory(self) -> Memory | None:
        memory = self._process.device_memory
        return pack.unpack_memory(memory) if self._process.HasField("device_memory") else None

    def nonfinite(self, now_ns: int) -> Sequence[NonfiniteValue]:
        if not self._process.nonfinite:
            return ()
        return pack.unpack_nonfinite(self._process, self._clock.offset_ns)

    def ask(self, question: Question, now_ns: int) -> bool:
        if question == "when":
            self._arrivals = None
        if now_ns - self.heard_ns > _HEARD_NS:
            return False
        if question not in self.questions:
            self.questions.append(question)
        return True

    def evidence(self, now_ns: int) -> Evidence:
        if now_ns - self.heard_ns > _HEARD_NS:
            # What was true then says nothing of now.
            return self._evidence._replace(silent_s=None, kernel=None)
        return self._evidence

    def arrivals(self, now_ns: int) -> Mapping[str, Any] | None:
        return self._arrivals

    # -- its end

    def end(self) -> EndedProcess:
        assert self._end is not None
        return self._end

    def cause(self) -> Mapping[str, Any]:
        return {} if self._end is None else self._end.cause

    def present_ns(self) -> int:
        present_ns = self._process.present_ns
        return present_ns + self._clock.offset_ns if present_ns else 0

    def close(self) -> None:
        # Its own agent asks the kernel.
        return

    def describe(self) -> ProcessState:
        position = self.position(0)
        if self._end is not None:
            return replace(
                self._described,
                state=self._end.state,
                reason=self._end.reason,
                step=self._end.step,
                phase=self._end.phase,
                phase_since_ns=self._end.phase_since_ns,
                seen_alive_ns=self._end.seen_alive_ns,
            )
        found = self._described
        if position is not None:
            found = replace(
                found,
                state=position.state,
                step=position.step,
                phase=position.name or position.phase,
                phase_since_ns=position.since_ns,
            )
        if self.silent_since_ns:
            # The step and phase are those of then.
            found = replace(found, state=NOT_HEARD, phase_since_ns=self.silent_since_ns)
        return found


def _described(state: wire.State, clock_offset_ns: int) -> ProcessState:
    if len(state.description) > _LONGEST_DESCRIPTION:
        raise pack.Senseless("description")
    described = ProcessState.from_json(pack.unpack_json(state.description))
    if described is None:
        raise pack.Senseless("description")
    return replace(described, started_ns=described.started_ns + clock_offset_ns)
