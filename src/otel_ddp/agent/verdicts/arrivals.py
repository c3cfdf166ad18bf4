"""Asks the ranks of a run, now and then, when they arrived at their collectives: who is late?"""

from __future__ import annotations

import base64
import io
import pickle
import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from otel_ddp.agent.reading.journal_feed import JournalFeed
from otel_ddp.agent.reading.steps import Step
from otel_ddp.agent.verdicts.stack_question import StackQuestion
from otel_ddp.diagnosis.arrivals import Arrival, Sample, ToldStep, compare
from otel_ddp.diagnosis.facts import StepFacts, alike, facts_of, middle
from otel_ddp.diagnosis.straggler import Report, Stragglers
from otel_ddp.diagnosis.verdict import Change, Who

# Witnesses themselves see to it that training is not stopped for longer than they promise.
_SHORTEST_PAUSE_NS = 5_000_000_000
_MARGIN = 1.1
_ANSWER_NS = 10_000_000_000
# While all arrive together they are asked ever more rarely, up to so many times.
_MOST_DOUBLINGS = 3
_BALANCED = 0.025
# What was last seen so long ago is not known any more.
_STALE_NS = 20 * 60 * 1_000_000_000
_STEPS_KEPT = 300
# Where there was no answer that could be understood; and the longest that anybody may ask for.
_SILENT_S, _LONGEST_PAUSE_S = 60.0, 3600.0
_NOT_YET = "when they arrive at their collectives has not been asked yet"
_LARGEST_TRACE = 32 * 1024 * 1024
_NO_TRACE = (
    *(ValueError, TypeError, KeyError, IndexError, AttributeError, EOFError, OverflowError),
    *(zlib.error, pickle.UnpicklingError, RecursionError, MemoryError),
)
_SPEED = ("straggler", "imbalance")


class _Answer(NamedTuple):
    """What a witness said: in how long it may be asked again, and what it told, if it did."""

    in_s: float
    sample: Sample | None = None


class _Seat:
    """One rank that can be asked."""

    def __init__(self, journal: JournalFeed) -> None:
        reader = journal.reader
        self.journal = journal
        self.probe = StackQuestion(reader.path, journal.pid, reader.start_ticks)
        # To the clock that all processes of this host count on.
        self.shift_ns = reader.created_monotonic_ns - reader.created_ns
        self.steps: deque[Step] = deque(maxlen=_STEPS_KEPT)
        self.answer: _Answer | None = None

    def told_steps(self) -> list[ToldStep]:
        """The last steps whose parts are all known."""
        whole = [
            step
            for step in self.steps
            if step.number is not None and step.took_ns > 0 and not step.rest
        ]
        facts = [each for run in alike(whole) for each in facts_of(run)]
        return [
            ToldStep(each, step.began_ns + self.shift_ns, step.parts.codes, step.parts.spans_ns)
            for each, step in zip(facts, whole, strict=True)
        ]


class Arrivals:
    """The ranks of one run on this node, where waits cannot be told from work."""

    def __init__(self) -> None:
        self._stragglers = Stragglers(hint=_hint)
        self._seats: dict[Who, _Seat] = {}
        self._waits_unknown: set[Who] = set()
        self._why = _NOT_YET
        self._asked_ns: int | None = None
        self._next_ns: int | None = None
        self._heard_ns: int | None = None
        self._doublings = 0
        # What was lost in the steps that were seen, and with those in between.
        self._seen_lost_s: dict[Who, float] = {}
        self._lost_s: dict[Who, float] = {}
        self._report: Report | None = None

    @property
    def wanted(self) -> bool:
        """Whether it takes arrivals to tell who is late, and there is somebody to compare with."""
        return bool(self._waits_unknown) and len(self._seats) > 1

    def world_size(self, ranks: int) -> None:
        """How many ranks the whole job has, on all its nodes."""
        self._stragglers.world_size(ranks)

    def waits_known(self, who: Who, known: bool) -> None:
        """Whether the rank's waits are told apart from its work without us."""
        (self._waits_unknown.discard if known else self._waits_unknown.add)(who)

    def feed(self, who: Who, journal: JournalFeed, steps: Sequence[Step]) -> None:
        """More steps of a rank, as its journal tells them."""
        seat = self._seats.get(who)
        if seat is None or seat.journal is not journal:
            seat = self._seats[who] = _Seat(journal)
        seat.steps.extend(steps)

    def forget(self, who: Who) -> None:
        """The process is gone."""
        self._seats.pop(who, None)
        self._waits_unknown.discard(who)
        self._stragglers.forget(who)
        self._report = None

    # -- asking

    def poll(self, now_ns: int, quiet: bool) -> list[Change]:
        """What has changed. *quiet*: nobody is asked anything else at the moment."""
        if not self.wanted:
            self._let_go()
        elif self._asked_ns is not None:
            self._listen(now_ns)
        elif self._next_ns is None:
            self._next_ns = now_ns + _SHORTEST_PAUSE_NS
        elif quiet and now_ns >= self._next_ns:
            self._ask(now_ns)
        if self._heard_ns is not None and now_ns - self._heard_ns > _STALE_NS:
            self._let_go()
        changes = self._stragglers.poll()
        return [each for each in changes if each.verdict.kind in _SPEED]

    def _ask(self, now_ns: int) -> None:
        self._asked_ns = now_ns
        for seat in self._seats.values():
            seat.answer = None
            # All at one moment: training stands still once, and not once for each of them.
            if not seat.probe.ask("when", now_ns):
                seat.answer = _Answer(_SILENT_S)
                self._why = "a process cannot be asked when it arrived at its collectives"

    def _listen(self, now_ns: int) -> None:
        assert self._asked_ns is not None
        for seat in self._seats.values():
            if seat.answer is None and seat.probe.poll(now_ns).silent_s is None:
                seat.answer = _understood(seat.probe.answer)
        answers = {who: seat.answer for who, seat in self._seats.items() if seat.answer}
        pause_s = max((each.in_s for each in answers.values()), default=_SILENT_S)
        samples = {who: each.sample for who, each in answers.items() if each.sample}
        if len(samples) == len(self._seats):
            self._compare(samples, now_ns)
        elif len(answers) < len(self._seats) and now_ns - self._asked_ns < _ANSWER_NS:
            return
        self._asked_ns = None
        pause_ns = max(_SHORTEST_PAUSE_NS, int(_MARGIN * pause_s * 1e9))
        self._next_ns = now_ns + pause_ns * (1 << self._doublings)

    def _compare(self, samples: Mapping[Who, Sample], now_ns: int) -> None:
        steps = {who: seat.told_steps() for who, seat in self._seats.items()}
        facts, self._why = compare(samples, steps)
        if not facts:
            return
        for who, each in facts.items():
            self._stragglers.feed(who, each)
        spans_s = [sum(step.took_ns for step in each) / 1e9 for each in facts.values()]
        since_s = 0.0 if self._heard_ns is None else (now_ns - self._heard_ns) / 1e9
        self._heard_ns = now_ns
        self._sum_up(max(since_s / min(spans_s), 1.0))
        self._doublings = (
            min(self._doublings + 1, _MOST_DOUBLINGS)
            if self._report and not self._report.insufficient and _balanced(facts)
            else 0
        )

    def _sum_up(self, share: float) -> None:
        """*share*: how many times as much time has gone by as was seen."""
        self._report = self._stragglers.report()
        for rank in self._report.ranks:
            more_s = rank.lost_s - self._seen_lost_s.get(rank.who, 0.0)
            self._seen_lost_s[rank.who] = rank.lost_s
            self._lost_s[rank.who] = self._lost_s.get(rank.who, 0.0) + share * more_s

    def _let_go(self) -> None:
        """What was known holds no longer."""
        if self._heard_ns is not None:
            for who in self._seats:
                self._stragglers.forget(who)
            self._heard_ns, self._report, self._why = None, None, _NOT_YET
        self._asked_ns = self._next_ns = None
        self._doublings = 0

    # -- standing

    def report(self) -> Report:
        """The present state, as of the last samples."""
        report = self._report or self._stragglers.report()
        ranks = tuple(
            each._replace(lost_s=self._lost_s.get(each.who, 0.0)) for each in report.ranks
        )
        why = report.insufficient
        if why:
            named = ", ".join(sorted(dict(who).get("rank", "?") for who in self._waits_unknown))
            more = self._why or why.partition(": ")[2]
            why = (
                f"insufficient data: waiting for other ranks cannot be told from work on rank "
                f"{named}; {more}"
            )
        return report._replace(ranks=ranks, insufficient=why)


def _hint(who: Who, phase: str) -> tuple[str, Mapping[str, Any]]:
    return "", {"told_by": "arrivals at collectives"}


def _balanced(facts: Mapping[Who, Sequence[StepFacts]]) -> bool:
    """Whether nobody in this sample is late by as much as an open verdict needs to stay."""
    work = [middle([each.work_ns for each in steps]) for steps in facts.values()]
    took = [middle([each.took_ns for each in steps]) for steps in facts.values()]
    return max(work) - middle(work) < _BALANCED * middle(took)


# -- what witnesses say. Anybody with this user's rights may have put anything there.


class _Plain(pickle.Unpickler):
    """Numbers, words, lists and dictionaries, as torch packs them, and nothing that runs."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name}")


def _understood(said: Mapping[str, Any]) -> _Answer:
    told = said.get("arrivals")
    if not isinstance(told, dict):
        return _Answer(_SILENT_S)
    in_s = told.get("in_s")
    pause_s = min(float(in_s), _LONGEST_PAUSE_S) if isinstance(in_s, (int, float)) else _SILENT_S
    if "packed" not in told:
        return _Answer(pause_s)
    try:
        packed = base64.b64decode(told["packed"])
        content = _Plain(io.BytesIO(zlib.decompressobj().decompress(packed, _LARGEST_TRACE))).load()
        shift_ns = said["monotonic_ns"] - said["time_ns"]
        arrivals = [
            Arrival(
                str(each["process_group"][0]),
                int(each["collective_seq_id"]),
                str(each["profiling_name"]),
                int(each["time_created_ns"]) + shift_ns,
            )
            for each in content["entries"]
        ]
        # On nccl it is devices that wait: when their hosts arrived says nothing.
        if any("nccl" in str(each.get("backend")) for each in said["groups"]):
            arrivals = []
        sizes = {str(each["name"]): int(each["size"]) for each in said["groups"]}
    except _NO_TRACE:
        return _Answer(pause_s, Sample((), {}))
    return _Answer(pause_s, Sample(arrivals, sizes))
