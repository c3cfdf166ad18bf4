"""Asks the ranks of a run how long their collectives took, to find late ranks by that.

They answer with their flight recorders, packed by torch. Any program with this user's rights may
have written the answer, so nothing in it is trusted.
"""

from __future__ import annotations

import base64
import io
import pickle
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from otel_ddp.agent.reading.process import Process
from otel_ddp.diagnosis.arrivals import Arrival, Sample, compare
from otel_ddp.diagnosis.detector import Detector, Observation, RankState
from otel_ddp.diagnosis.say import rank_numbers
from otel_ddp.diagnosis.step_facts import StepFacts, TimedStep
from otel_ddp.diagnosis.straggler.cases import Hint
from otel_ddp.diagnosis.straggler.detector import Stragglers
from otel_ddp.diagnosis.straggler.finding import Report
from otel_ddp.diagnosis.verdict import Change, Labels, Verdict

# The process itself limits how much of the time its answers may stop the training.
_SHORTEST_PAUSE_NS = 5_000_000_000
_MARGIN = 1.1
_ANSWER_NS = 10_000_000_000
# A comparison that is older than this says nothing any more.
_STALE_NS = 20 * 60 * 1_000_000_000
_STEPS_KEPT = 300
# The answers of more ranks would be too much for one agent, such as the lead of a run.
MOST_RANKS = 1024
_NOT_YET = "the ranks have not been asked yet when they arrive at their collectives"
# The pause where an answer made no sense; and the longest pause that a process may ask for.
_NO_ANSWER_PAUSE_S, _LONGEST_PAUSE_S = 60.0, 3600.0
_LARGEST_TRACE = 32 * 1024 * 1024
_BROKEN = (
    *(ValueError, TypeError, KeyError, IndexError, AttributeError, EOFError, OverflowError),
    *(zlib.error, pickle.UnpicklingError, RecursionError, MemoryError),
)


class _Rank:
    """One rank that makes steps, and can be asked."""

    def __init__(self, state: RankState) -> None:
        self.state = state
        self.steps: deque[TimedStep] = deque(maxlen=_STEPS_KEPT)
        # The same by the clock of its device.
        self.on_device: deque[StepFacts] = deque(maxlen=_STEPS_KEPT)
        self.answer: _Answer | None = None


class Arrivals(Detector):
    """The ranks of one run, where journals do not tell waits from work."""

    def __init__(
        self,
        source: Callable[[Labels], Process | None],
        hint: Hint | None = None,
    ) -> None:
        """*source*: the process of a rank."""
        self._source = source
        self._hint = hint
        self._stragglers = Stragglers(self._with_source, every_step=False)
        self._states: dict[Labels, RankState] = {}
        self._ranks: dict[Labels, _Rank] = {}
        # Whether steps are kept to be compared. Most runs never need them.
        self._keeps = True
        self._why = _NOT_YET
        self._asked_ns: int | None = None
        self._next_ns = 0
        self._compared_ns: int | None = None
        self._last_step = -1
        self._report: Report | None = None

    def _waits_unknown(self) -> list[Labels]:
        return [each.labels for each in self._states.values() if each.waits_known is False]

    @property
    def wanted(self) -> bool:
        """Whether this is needed to find late ranks, and there are ranks that can tell it."""
        return (
            bool(self._waits_unknown())
            and 1 < len(self._ranks) <= MOST_RANKS
            and all(each.under_nccl for each in self._states.values())
        )

    def feed(self, rank: RankState, seen: Observation) -> None:
        labels = rank.labels
        if rank.is_beside or seen.ended is not None:
            self.forget(labels)
            return
        self._states[labels] = rank
        known = self._ranks.get(labels)
        if seen.batches and (known is None or known.state.began_ns != rank.began_ns):
            known = self._ranks[labels] = _Rank(rank)
        if known is None:
            return
        known.state = rank
        if not self._keeps:
            known.steps.clear()
            known.on_device.clear()
            return
        for batch in seen.batches:
            known.steps.extend(batch.steps)
        if rank.device_clock:
            known.on_device.extend(each for each in seen.facts if each.measured)

    def forget(self, labels: Labels) -> None:
        self._states.pop(labels, None)
        if self._ranks.pop(labels, None) is not None:
            self._stragglers.forget(labels)
            self._report = None
            # The next process with these labels may count its steps anew.
            self._last_step = -1

    def _with_source(
        self, ranks: Sequence[RankState], phase: str, evidence: Mapping[str, Any]
    ) -> tuple[str, Mapping[str, Any]]:
        states = [self._states[each.labels] for each in ranks]
        advice, more = self._hint(states, phase, evidence) if self._hint else ("", {})
        return advice, {**more, "told_by": "arrivals at collectives"}

    # -- asking

    def poll(self, now_ns: int, quiet: bool = True) -> list[Change]:
        """*quiet*: no rank is asked anything else now."""
        are_known = all(each.waits_known for each in self._states.values())
        self._keeps = len(self._ranks) <= MOST_RANKS and not are_known
        if not self.wanted:
            self._start_again()
        elif self._asked_ns is not None:
            self._read_answers(now_ns)
        # At once: the sooner they are asked, the less there is to write down, and the sooner it is
        # known what an answer costs. After that as soon as the ranks allow it.
        elif quiet and now_ns >= self._next_ns:
            self._ask(now_ns)
        if self._compared_ns is not None and now_ns - self._compared_ns > _STALE_NS:
            self._start_again()
        return self._stragglers.poll(now_ns)

    def present(self) -> list[Verdict]:
        return self._stragglers.present()

    def _ask(self, now_ns: int) -> None:
        self._asked_ns = now_ns
        for labels, rank in self._ranks.items():
            rank.answer, source = None, self._source(labels)
            # All at one moment: then training stops once, and not once for each rank.
            if source is None or not source.host.ask("when", now_ns):
                rank.answer = _Answer(_NO_ANSWER_PAUSE_S)
                self._why = "a process cannot be asked when it arrived at its collectives"

    def _read_answers(self, now_ns: int) -> None:
        assert self._asked_ns is not None
        for labels, rank in self._ranks.items():
            source = self._source(labels) if rank.answer is None else None
            if source is not None and (said := source.host.arrivals(now_ns)) is not None:
                rank.answer = parse_answer(said, rank.state.clock_shift_ns)
        answers = {labels: rank.answer for labels, rank in self._ranks.items() if rank.answer}
        pause_s = max((each.in_s for each in answers.values()), default=_NO_ANSWER_PAUSE_S)
        samples = {labels: each.sample for labels, each in answers.items() if each.sample}
        if len(samples) == len(self._ranks):
            self._compare(samples, now_ns)
        elif len(answers) < len(self._ranks) and now_ns - self._asked_ns < _ANSWER_NS:
            return
        self._asked_ns = None
        self._next_ns = now_ns + max(_SHORTEST_PAUSE_NS, int(_MARGIN * pause_s * 1e9))

    def _compare(self, samples: Mapping[Labels, Sample], now_ns: int) -> None:
        steps = {labels: rank.steps for labels, rank in self._ranks.items()}
        on_device = {labels: rank.on_device for labels, rank in self._ranks.items()}
        facts, self._why = compare(samples, steps, on_device, self._last_step)
        if not facts:
            return
        self._last_step = max(each[-1].number for each in facts.values())
        spans_s = [sum(step.took_ns for step in each) / 1e9 for each in facts.values()]
        since_s = 0.0 if self._compared_ns is None else (now_ns - self._compared_ns) / 1e9
        self._compared_ns = now_ns
        # Time is lost in the steps between two samples as well.
        self._stragglers.lost_time.steps_each = max(since_s / min(spans_s), 1.0)
        for labels in facts:
            # All are known before the first step: a rank that comes later begins a new comparison.
            self._stragglers.expect(labels)
        for labels, each in facts.items():
            # Its waits are known now, and taken out of its work.
            rank = RankState(labels, self._states[labels].world_size)
            self._stragglers.feed(rank, Observation(facts=each))
        self._report = self._stragglers.report()

    def _start_again(self) -> None:
        """Forget the comparison: it is out of date."""
        if self._compared_ns is not None:
            for labels in self._ranks:
                self._stragglers.forget(labels)
            self._compared_ns, self._report, self._why = None, None, _NOT_YET
            self._last_step = -1
        self._asked_ns, self._next_ns = None, 0

    # -- the present state

    def report(self) -> Report:
        """The present state, by the last comparison."""
        report = self._report or self._stragglers.report()
        why = report.insufficient
        if why:
            named = rank_numbers(self._waits_unknown())
            more = self._why or why.partition(": ")[2]
            why = (
                f"insufficient data: waiting for other ranks cannot be told from work on rank "
                f"{named}; {more}"
            )
        return report._replace(insufficient=why)


# -- the answer of a process


class _Answer(NamedTuple):
    """The answer of a process: when it may be asked again, and its sample, if it has one."""

    in_s: float
    sample: Sample | None = None


class _PlainUnpickler(pickle.Unpickler):
    """Loads numbers, words, lists and dictionaries, as torch packs them, and nothing that runs."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name}")


def parse_answer(content: Mapping[str, Any], clock_shift_ns: int = 0) -> _Answer:
    """The answer, as far as it makes sense; with times on the clock of the rank's steps."""
    part = content.get("arrivals")
    if not isinstance(part, dict):
        return _Answer(_NO_ANSWER_PAUSE_S)
    in_s = part.get("in_s")
    pause_s = (
        min(float(in_s), _LONGEST_PAUSE_S) if isinstance(in_s, (int, float)) else _NO_ANSWER_PAUSE_S
    )
    if "packed" not in part:
        return _Answer(pause_s)
    try:
        packed = base64.b64decode(part["packed"])
        unpacked = zlib.decompressobj().decompress(packed, _LARGEST_TRACE)
        trace = _PlainUnpickler(io.BytesIO(unpacked)).load()
        shift_ns = content["monotonic_ns"] - content["time_ns"] - clock_shift_ns
        arrivals = [
            Arrival(
                str(each["process_group"][0]),
                int(each["collective_seq_id"]),
                str(each["profiling_name"]),
                int(each["time_created_ns"]) + shift_ns,
                None if (took_ms := each.get("duration_ms")) is None else round(took_ms * 1e6),
            )
            for each in trace["entries"]
        ]
        sizes = {str(each["name"]): int(each["size"]) for each in content["groups"]}
    except _BROKEN:
        return _Answer(pause_s, Sample((), {}))
    return _Answer(pause_s, Sample(arrivals, sizes))
