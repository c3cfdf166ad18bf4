"""What the lead of a run is told of one process of this node."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from otel_ddp import errors
from otel_ddp.agent.link import link_pb2 as wire
from otel_ddp.agent.link.runs import pack
from otel_ddp.agent.verdicts.source import Source
from otel_ddp.diagnosis.death.cause import EndedProcess
from otel_ddp.diagnosis.stall.evidence import Evidence, Question
from otel_ddp.diagnosis.step_facts import DeviceStep, TimedStep

# What seldom changes is told again so often, and where the lead has begun anew.
_TELL_AGAIN_NS = 60_000_000_000
# So many steps wait until they are sent; then the oldest are dropped.
_MOST_STEPS = 2000
# For so long after a question the lead is told what the kernel says of the process.
_ASKED_NS = 30_000_000_000
# More is known of an end for so long after it.
_ENDED_NS = 30_000_000_000
_MEMORY_EVERY_NS = 2_000_000_000
# What a flight recorder remembers is less. A report has several of them, and a limit.
_LARGEST_ARRIVALS = 400_000
# What the lead makes of an answer to `when`.
_OF_ARRIVALS = ("arrivals", "groups", "monotonic_ns", "time_ns")
# What the position and the end say.
_MOVING = (*("state", "reason", "step", "phase", "phase_since_ns", "seen_alive_ns", "lost"),)


class _NewSteps:
    """The steps of one process that the lead has not been told."""

    def __init__(self) -> None:
        self._host: deque[TimedStep] = deque(maxlen=_MOST_STEPS)
        self._device: deque[DeviceStep] = deque(maxlen=_MOST_STEPS)
        self._last: object = None
        self.dropped = 0

    def add(self, steps: Sequence[TimedStep], device_steps: Sequence[DeviceStep]) -> None:
        """Those that its journal has shown in this round."""
        # A journal that is closed shows what it has shown last.
        if steps is not self._last:
            self._last = steps
            for kept, new in ((self._host, steps), (self._device, device_steps)):
                self.dropped += max(len(kept) + len(new) - _MOST_STEPS, 0)
            self._host.extend(steps)
            self._device.extend(device_steps)

    def write(self, message: wire.Process, ahead_ns: int) -> int:
        """All of them; how many they are. *ahead_ns*: what to add to their times."""
        count = len(self._host)
        pack.pack_steps(message.steps, list(self._host))
        pack.pack_device_steps(message.device_steps, list(self._device))
        for each in (*message.steps, *message.device_steps):
            each.began_ns += ahead_ns
        self._host.clear()
        self._device.clear()
        return count


class ProcessReport:
    """One process: gathered in each round of the agent's loop, and written now and then."""

    def __init__(self, number: int, source: Source) -> None:
        """*number*: its own, as long as this agent lives."""
        self.number = number
        self._source = source
        self._steps = _NewSteps()
        self._told: tuple[int, bytes] = (0, b"")
        self._origin_ns = 0
        self._memory_at_ns = 0
        self._asked_ns = 0
        self._waits_for_arrivals = False
        self._arrivals: Mapping[str, Any] | None = None
        self._evidence = Evidence()
        self._ended: EndedProcess | None = None
        # Who it is and where it was, once it has ended: its journal may be closed soon.
        self._final: wire.Process | None = None
        self._ended_at_ns = 0
        self.is_urgent = False
        """Whether there is something that the lead waits for."""

    def is_over(self, now_ns: int) -> bool:
        """Whether it has ended, and no more will be known of that."""
        return self._ended is not None and now_ns - self._ended_at_ns > _ENDED_NS

    @property
    def dropped_steps(self) -> int:
        """Of those that had to wait for too long."""
        return self._steps.dropped

    @property
    def has_ended(self) -> bool:
        return self._ended is not None

    @errors.contained()
    def gather(self, now_ns: int) -> None:
        """What is new of it. *now_ns*: on the clock of its position."""
        self._steps.add(*self._source.steps())
        if self._is_asked(now_ns):
            before, self._evidence = self._evidence, self._source.evidence(now_ns)
            self.is_urgent |= self._evidence.answered_ns != before.answered_ns
        if self._waits_for_arrivals:
            self._arrivals = self._source.arrivals(now_ns)
            self._waits_for_arrivals = self._arrivals is None
            self.is_urgent |= self._arrivals is not None
        if self._ended is None and not self._source.is_at_work:
            self._ended, self._ended_at_ns = self._source.end(), now_ns
            self.is_urgent = True

    def ask(self, question: Question, now_ns: int) -> None:
        """The lead asks the process."""
        if self._source.ask(question, now_ns):
            self._waits_for_arrivals |= question == "when"
        self._asked_ns = now_ns if question != "when" else self._asked_ns

    def _is_asked(self, now_ns: int) -> bool:
        return bool(self._asked_ns) and now_ns - self._asked_ns < _ASKED_NS

    def tell_all_again(self) -> None:
        """The lead may lack what was told before."""
        self._told = (0, b"")

    @errors.contained(default=0)
    def write(self, message: wire.Process, now_ns: int, origin_ns: int, uncertainty_ns: int) -> int:
        """All that is new since the last call; how many steps that is.

        *origin_ns*: when the monotonic clock was 0, by the wall clock as it is set now.
        *uncertainty_ns*: how far the lead's clock may be from what is believed of it.
        """
        source, self.is_urgent = self._source, False
        self._origin_ns = origin_ns
        message.id = self.number
        # A process goes on with the time that it began with, also where the clock is set later.
        steps = self._steps.write(message, origin_ns + source.state().clock_shift_ns)
        if self._final is not None and self._ended is not None:
            message.MergeFrom(self._final)
            self._write_end(message, self._ended, uncertainty_ns)
            return steps
        self._write_state(message, now_ns)
        if (position := source.position(origin_ns)) is not None:
            pack.pack_position(message.position, position)
        pack.pack_nonfinite(message, source.nonfinite(now_ns))
        if self._is_asked(now_ns):
            message.evidence.SetInParent()
            pack.pack_evidence(message.evidence, self._evidence)
        if self._arrivals is not None:
            message.arrivals = _packed_arrivals(self._arrivals)
            self._arrivals = None
        if self._ended is not None:
            self._final = wire.Process(state=self._state(), position=message.position)
            self._final.nonfinite.extend(message.nonfinite)
            self._write_end(message, self._ended, uncertainty_ns)
        elif now_ns - self._memory_at_ns >= _MEMORY_EVERY_NS:
            self._memory_at_ns = now_ns
            if (memory := source.memory()) is not None:
                pack.pack_memory(message.memory, memory)
            if (memory := source.device_memory()) is not None:
                pack.pack_memory(message.device_memory, memory)
        return steps

    def _write_state(self, message: wire.Process, now_ns: int) -> None:
        state = self._state()
        content = state.SerializeToString(deterministic=True)
        told_ns, told = self._told
        if content != told or now_ns - told_ns >= _TELL_AGAIN_NS:
            self._told = now_ns, content
            message.state.CopyFrom(state)

    def _state(self) -> Any:
        source, state = self._source, wire.State()
        rank = source.state()._replace(clock_shift_ns=-self._origin_ns)
        pack.pack_state(state, source.labels, rank, source.project, source.trains)
        described = source.describe().to_json()
        constant = {word: each for word, each in described.items() if word not in _MOVING}
        state.description = json.dumps(constant).encode()
        return state

    def _write_end(self, message: wire.Process, ended: EndedProcess, uncertainty_ns: int) -> None:
        # What is known of it grows, until the kernel is asked no more.
        cause = self._source.cause()
        if len(cause) >= len(ended.cause):
            self._ended = ended = ended._replace(cause=cause)
        message.present_ns = self._source.present_ns()
        # Ends on several nodes are put in order.
        told = ended._replace(
            seen_alive_ns=ended.seen_alive_ns - uncertainty_ns,
            ended_ns=ended.ended_ns + uncertainty_ns,
        )
        pack.pack_end(message.end, told)


def _packed_arrivals(content: Mapping[str, Any]) -> bytes:
    part = {word: content[word] for word in _OF_ARRIVALS if word in content}
    packed = json.dumps(part).encode()
    if len(packed) > _LARGEST_ARRIVALS:
        found = content.get("arrivals")
        again_s = found.get("in_s") if isinstance(found, dict) else None
        packed = json.dumps({"arrivals": {"in_s": again_s}}).encode()
    return packed
