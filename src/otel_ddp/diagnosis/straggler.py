"""Who of a run's ranks on this node keeps the others waiting, in which phase, and what it costs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import islice
from operator import sub
from typing import Any, NamedTuple

from otel_ddp.diagnosis.alignment import Alignment, Row
from otel_ddp.diagnosis.facts import (
    WORK_PHASES,
    StepFacts,
    called,
    middle,
    percent,
    ratios,
    run_of,
    span,
)
from otel_ddp.diagnosis.regression import Regression
from otel_ddp.diagnosis.verdict import Change, Kind, Verdict, Who

# A clear case shows in three windows of 30 steps; what hides in jitter takes longer ones.
LENGTHS = (90, 120, 300)
_WINDOWS = 3
# Windows slide by so many steps.
_STRIDE = 10
_LEFT_OUT = 20
# Shares of the median step: to be named, in each of the three windows, and to be let go.
_EXCESS = 0.05
_EXCESS_IN_EACH = 0.025
_EXCESS_GONE = 0.025
_ALIKE = 0.4
# Below this lie the clocks, the hooks, and the kernel's own moods.
_EXCESS_NS = 500_000
# How far above one half the share of steps must lie in which the rank is above the others: a fair
# coin is 5.3 standard deviations away from it. It is 78 % of 90 steps, and 65 % of 300.
_SIGMAS = 5.3
_OFTEN = [(length, length // _STRIDE, length / 2 + _SIGMAS * length**0.5 / 2) for length in LENGTHS]
_MOST_OF = 0.7
# An open verdict gets another phase when it has shown in so many looks, of so many steps.
_LOOKS = 3
_LOOK_STEPS = 30
_COMPUTE = ("forward", "backward", "optimizer")

Hint = Callable[[Who, str], tuple[str, Mapping[str, Any]]]
"""What else is known of a rank in a phase: a sentence, or nothing, and evidence."""

_LOOK_AT = {
    "data": "Look at this rank's data loader and storage.",
    "forward": "Look at what this rank does in forward that the others do not.",
    "backward": "Look at what this rank does in backward that the others do not.",
    "optimizer": "Look at what this rank's optimizer has to do.",
    "other": "Look at what this rank alone does between the phases: copies, losses, logging.",
    "compute": "Look at this rank's device: clocks, heat, power, other users of it.",
    "mixed": "Look at what else runs on this rank's cores and device.",
    "imbalance": "Look at how batches are divided among the ranks.",
}
_WORDED = {
    "data": "waiting for data",
    "other": "what lies between the phases",
    "compute": "forward, backward and the optimizer together",
    "optimizer": "the optimizer",
}


class RankNow(NamedTuple):
    """How one rank compares with the others."""

    who: Who
    kind: Kind | None
    """`straggler` or `imbalance` while there is a verdict on it."""
    phase: str
    excess: Mapping[str, float]
    """More time than the others need, as shares of the median step, by phase, and `all`.

    Phases with collectives of the user's own are not in it.
    """
    lost_s: float
    """What the other ranks of the job have waited for it while there were verdicts on it."""


class Report(NamedTuple):
    """The present state of the ranks of a run on this node."""

    ranks: tuple[RankNow, ...]
    """Also those that are gone and have cost something."""
    work_max_s: float | None
    """Of the rank that needs the most."""
    work_median_s: float | None
    insufficient: str
    """`insufficient data: ...` where nothing can be said; then no verdict means nothing."""


class _Case:
    """A verdict on one rank."""

    def __init__(self, verdict: Verdict, length: int) -> None:
        self.verdict = verdict
        self.length = length
        self.other_reading: tuple[Kind, str] | None = None
        self.looks = 0
        self.steps = 0


class Stragglers:
    """The ranks of one run on this node."""

    def __init__(self, world_size: int = 0, hint: Hint | None = None) -> None:
        self._world_size = world_size
        self._hint = hint
        self._alignment = Alignment()
        self._waits_unknown: set[Who] = set()
        self._own_of: dict[Who, Collection[str]] = {}
        # Places in WORK_PHASES: what is waited there for others cannot be told from work.
        self._own: tuple[int, ...] = ()
        self._rows: deque[Row] = deque(maxlen=LENGTHS[-1])
        # Per row and rank: local work less the median of the others'; the row's median step.
        self._excesses_ns: deque[list[float]] = deque(maxlen=LENGTHS[-1])
        self._columns: list[tuple[float, ...]] = []
        self._steps_ns: deque[float] = deque(maxlen=LENGTHS[-1])
        # Of the rows since the last look; and per rank and look, how many were above the others.
        self._fresh: list[list[float]] = []
        self._above: list[list[int]] = []
        self._left_out = 0.0
        self._cases: dict[Who, _Case] = {}
        self._lost: dict[Who, float] = {}
        self._here: set[Who] = set()
        self._regression: Regression | None = None
        self._changes: list[Change] = []

    def world_size(self, ranks: int) -> None:
        """How many ranks the whole job has, on all its nodes."""
        self._world_size = ranks

    def is_here(self, who: Who) -> None:
        """A rank of this run is on this node, whether or not it has made a step."""
        self._here.add(who)

    def waits_known(self, who: Who, known: bool) -> None:
        """Whether the rank's waiting for others is told apart from its work."""
        if known:
            self._waits_unknown.discard(who)
        else:
            self._waits_unknown.add(who)
            # Their work was not measured, whatever it seemed to say.
            self._close_all()

    def own_collectives(self, who: Who, phases: Collection[str]) -> None:
        """In which phases the rank has collectives of the user's own: where one has, all have."""
        self._own_of[who] = phases
        self._find_own()

    def _find_own(self) -> None:
        phases = set().union(*self._own_of.values())
        own = tuple(at for at, word in enumerate(WORK_PHASES) if word in phases)
        if own != self._own:
            self._own = own
            self._start_again()
            # Some of what was taken for work may have been waiting.
            self._close_all()

    def feed(self, who: Who, steps: Sequence[StepFacts]) -> None:
        """More steps of a rank, in the order in which it made them."""
        if self._alignment.join(who):
            self._start_again()
        if self._regression is None:
            self._regression = Regression(run_of(who))
        for row in self._alignment.feed(who, steps, _LEFT_OUT):
            self._take(row, self._regression)

    def _take(self, row: Row, regression: Regression) -> None:
        facts = row.facts
        if True in [each.tagged for each in facts]:
            self._left_out = 0.99 * self._left_out + 0.01
            return
        self._left_out *= 0.99
        step_ns = middle([each.took_ns for each in facts])
        self._changes += regression.feed(facts, step_ns, bool(self._cases))
        # Of processes that are each a world of one, none waits for another.
        if len(facts) < 2 or self._waits_unknown or self._world_size == 1:
            return
        work_ns = [each.took_ns - each.wait_ns for each in facts]
        for at in self._own:
            work_ns = [ns - each.phases_ns[at] for ns, each in zip(work_ns, facts, strict=True)]
        excesses = _excesses(work_ns)
        self._rows.append(row)
        self._excesses_ns.append(excesses)
        self._columns.clear()
        self._steps_ns.append(step_ns)
        self._fresh.append(excesses)
        if len(self._fresh) >= _STRIDE:
            self._count()
            self._judge()

    def _count(self) -> None:
        """In how many of the latest rows each rank was above the others."""
        self._above = self._above or [[] for _ in self._fresh[0]]
        for counts, excesses in zip(self._above, zip(*self._fresh, strict=True), strict=True):
            counts.append(_above(excesses))
            del counts[: -LENGTHS[-1] // _STRIDE]
        self._fresh.clear()

    def forget(self, who: Who) -> None:
        """The process is gone."""
        self._here.discard(who)
        self._alignment.leave(who)
        self._waits_unknown.discard(who)
        self._close(who)
        self._start_again()
        self._own_of.pop(who, None)
        self._find_own()
        if len(self._alignment.ranks) < 2:
            self._close_all()
        if not self._alignment.ranks and self._regression:
            self._changes += self._regression.close()
            self._regression = None

    def poll(self) -> list[Change]:
        """What has changed since the last look."""
        changes, self._changes = self._changes, []
        return changes

    def report(self) -> Report:
        """The present state, over the last windows at most."""
        ranks = self._alignment.ranks
        # Asked for every second, and a third of the steps says the same.
        rows = _last(self._rows, LENGTHS[0])[::3]
        table = _Table(rows, self._own) if rows else None
        step_s = self._step_s(LENGTHS[0]) if rows else 0.0
        told = []
        for i, who in enumerate(ranks):
            excess: dict[str, float] = {}
            if table:
                all_s = self._excess_s(i, LENGTHS[0])
                parts = {"all": all_s, **table.excess_by_phase(i)}
                excess = ratios({word: each / step_s for word, each in parts.items()})
            case = self._cases.get(who)
            kind, phase = (case.verdict.kind, case.verdict.phase) if case else (None, "")
            told.append(RankNow(who, kind, phase, excess, self._lost.get(who, 0.0)))
        told += [
            RankNow(who, None, "", {}, lost_s)
            for who, lost_s in self._lost.items()
            if who not in ranks
        ]
        return Report(
            tuple(told),
            max(table.work_s) if table else None,
            middle(table.work_s) if table else None,
            self._insufficient(table, step_s),
        )

    def _stepless(self) -> str:
        """Why a rank is compared with no other, though it has others beside it."""
        ranks = self._alignment.ranks
        others = sorted(dict(who).get("rank", "?") for who in self._here.difference(ranks))
        if len(ranks) != 1 or not others:
            return ""
        return f"no step yet of rank {', '.join(others)}"

    def _insufficient(self, table: _Table | None, step_s: float) -> str:
        why = self._stepless() or self._alignment.trouble()
        if not why and self._world_size == 1:
            why = "each of these processes trains alone, none waits for another"
        if not why and self._waits_unknown:
            named = ", ".join(dict(who).get("rank", "?") for who in sorted(self._waits_unknown))
            why = f"waiting for other ranks cannot be told from work on rank {named}"
        if not why and self._left_out > 0.5:
            why = "most steps compile, save, evaluate, are skipped, or collect garbage"
        if not why and len(self._rows) < LENGTHS[0]:
            why = f"{len(self._rows)} of the first {LENGTHS[0]} steps to compare"
        # Whoever is late there by so much has so much there, and so have those who wait for it.
        if not why and table and not self._cases and table.own_s > _least(step_s * 1e9) / 1e9:
            words = ", ".join(f"`{WORK_PHASES[at]}`" for at in self._own)
            why = f"collectives of your own in {words}: whoever is late there cannot be told"
        return why and f"insufficient data: {why}"

    def _start_again(self) -> None:
        self._rows.clear()
        self._excesses_ns.clear()
        self._columns.clear()
        self._steps_ns.clear()
        self._fresh.clear()
        self._above.clear()

    def _close(self, who: Who) -> None:
        case = self._cases.pop(who, None)
        if case:
            self._changes.append(Change(case.verdict, False))

    def _close_all(self) -> None:
        for who in list(self._cases):
            self._close(who)

    def _judge(self) -> None:
        tables: dict[int, _Table] = {}

        def table(length: int) -> _Table:
            if length not in tables:
                tables[length] = _Table(_last(self._rows, length), self._own)
            return tables[length]

        opening: dict[int, int] = {}
        ranks = self._alignment.ranks
        for i, who in enumerate(ranks):
            case = self._cases.get(who)
            if case is None:
                for length in self._often_above(i):
                    if self._stands_out(i, length) and table(length).is_among_the_last(i):
                        opening[i] = length
                        break
            elif self._is_gone(i, case.length):
                self._close(who)
        # What each of them costs depends on who else is late: all are found by now.
        named = [i for i, who in enumerate(ranks) if who in self._cases]
        late = [*named, *opening]
        for i in named:
            self._go_on(i, ranks[i], self._cases[ranks[i]], late, table)
        for i, length in opening.items():
            self._open(i, ranks[i], length, late, named, table(length))

    def _often_above(self, i: int) -> list[int]:
        """Over which lengths it may stand out: nearly always none, and this is cheap to see."""
        counts = self._above[i]
        return [
            length
            for length, looks, enough in _OFTEN
            if sum(counts[-looks:]) >= enough and len(counts) >= looks
        ]

    def _stands_out(self, i: int, length: int) -> bool:
        excess = self._column(i, length)
        step_ns = middle(_last(self._steps_ns, length))
        if middle(excess) <= _least(step_ns):
            return False
        window = length // _WINDOWS
        each = [middle(excess[start : start + window]) for start in range(0, length, window)]
        # Where one is far below another, it began within these steps: its phase would be blurred.
        return min(each) > max(_EXCESS_IN_EACH * step_ns, _ALIKE * max(each))

    def _is_gone(self, i: int, length: int) -> bool:
        if len(self._rows) < length:
            return False
        excess = self._column(i, length)
        step_ns = middle(_last(self._steps_ns, length))
        window = length // _WINDOWS
        return all(
            middle(excess[start : start + window]) < max(_EXCESS_GONE * step_ns, _EXCESS_NS / 2)
            for start in range(0, length, window)
        )

    def _open(
        self, i: int, who: Who, length: int, late: list[int], named: list[int], table: _Table
    ) -> None:
        """*named*: those of the late ones who were named before, and have been charged."""
        reading = table.reading(i, self._excess_s(i, length))
        verdict = self._verdict(i, who, length, late, table, reading)
        self._cases[who] = _Case(verdict, length)
        self._changes.append(Change(verdict, True))
        charged_s = max([self._excess_s(j, length) for j in named], default=0.0)
        left_s = max(self._latest_s(late, length) - max(charged_s, 0.0), 0.0)
        opening = [j for j in late if j not in named]
        before = length - _STRIDE
        self._lose(who, self._part(i, opening, length) * left_s, before)
        self._lose(who, self._share_s(i, late, length), _STRIDE)

    def _go_on(
        self, i: int, who: Who, case: _Case, late: list[int], table: Callable[[int], _Table]
    ) -> None:
        if length := min(case.length, len(self._rows)):
            self._lose(who, self._share_s(i, late, length), _STRIDE)
        case.steps += _STRIDE
        if case.steps < _LOOK_STEPS or len(self._rows) < case.length:
            return
        case.steps = 0
        seen = table(case.length)
        excess_s = self._excess_s(i, case.length)
        if excess_s < _EXCESS * self._step_s(case.length):
            # On its way out it has no phase to speak of.
            return
        reading = seen.reading(i, excess_s)
        if reading == (case.verdict.kind, case.verdict.phase):
            case.other_reading, case.looks = None, 0
            return
        case.looks = case.looks + 1 if reading == case.other_reading else 1
        case.other_reading = reading
        if case.looks < _LOOKS:
            return
        since_ns = case.verdict.since_ns
        if reading[0] != case.verdict.kind:
            self._changes.append(Change(case.verdict, False))
        verdict = self._verdict(i, who, case.length, late, seen, reading)
        case.verdict = verdict._replace(since_ns=since_ns)
        case.other_reading, case.looks = None, 0
        self._changes.append(Change(case.verdict, True))

    def _column(self, i: int, length: int) -> tuple[float, ...]:
        """The last excesses of a rank, in nanoseconds."""
        if not self._columns:
            self._columns = list(zip(*self._excesses_ns, strict=True))
        return self._columns[i][-length:]

    def _excess_s(self, i: int, length: int) -> float:
        return middle(self._column(i, length)) / 1e9

    def _step_s(self, length: int) -> float:
        return middle(_last(self._steps_ns, length)) / 1e9

    def _share_s(self, i: int, late: list[int], length: int) -> float:
        """Its part in the waiting, where several are late: the others wait for the latest only."""
        return self._part(i, late, length) * self._latest_s(late, length)

    def _part(self, i: int, late: list[int], length: int) -> float:
        total = sum(max(self._excess_s(j, length), 0.0) for j in late)
        return max(self._excess_s(i, length), 0.0) / total if total else 0.0

    def _latest_s(self, late: list[int], length: int) -> float:
        return max([0.0, *(self._excess_s(j, length) for j in late)])

    def _lose(self, who: Who, each_s: float, steps: int) -> None:
        lost_s = each_s * steps * (self._ranks_of_job() - 1)
        self._lost[who] = self._lost.get(who, 0.0) + lost_s

    def _ranks_of_job(self) -> int:
        return max(self._world_size, len(self._alignment.ranks))

    def _verdict(
        self,
        i: int,
        who: Who,
        length: int,
        late: list[int],
        table: _Table,
        reading: tuple[Kind, str],
    ) -> Verdict:
        kind, phase = reading
        excess_s = self._excess_s(i, length)
        step_s = self._step_s(length)
        rate = self._share_s(i, late, length) / step_s * (self._ranks_of_job() - 1)
        above = _above(self._column(i, length)) / length
        by_phase = table.excess_by_phase(i)
        evidence: dict[str, Any] = {
            "excess_s": round(excess_s, 6),
            "excess": round(excess_s / step_s, 4),
            "step_s": round(step_s, 6),
            "work_s": round(table.work_s[i], 6),
            "excess_by_phase": ratios({word: each / step_s for word, each in by_phase.items()}),
            "steps": length,
            "steps_above_others": round(above, 3),
            "lost_per_s": round(rate, 4),
        }
        if self._own:
            evidence["not_compared"] = [WORK_PHASES[at] for at in self._own]
        size = f"{percent(excess_s / step_s)} of a step of {span(step_s)}"
        if kind == "imbalance":
            more = table.more_to_do(i)
            evidence["more_to_do"] = round(more, 4)
            what = (
                f"work is unequal: {called(who)} has {percent(more)} more tokens or samples than "
                f"the others and needs {span(excess_s)} longer, {size}"
            )
        else:
            inner = by_phase.get(phase, excess_s)
            if phase == "mixed":
                what = (
                    f"its work takes {span(excess_s)} longer than on the others, in no phase alone"
                )
            elif phase == "compute":
                inner = sum(by_phase.get(word, 0.0) for word in _COMPUTE)
                what = f"{_WORDED[phase]} take {span(inner)} longer than on the others"
            else:
                what = f"{_WORDED.get(phase, phase)} takes {span(inner)} longer than on the others"
            what = f"{called(who)} keeps the others waiting: {what}; in all it is late by {size}"
        others = "the other ranks together lose" if self._ranks_of_job() > 2 else "the other loses"
        sentence = f"{what}; {others} {rate:.2g} s each second."
        said = ""
        if self._hint:
            said, more_evidence = self._hint(who, phase)
            evidence.update(more_evidence)
        sentence = f"{sentence} {said or _LOOK_AT[phase if kind == 'straggler' else kind]}"
        rows = _last(self._rows, length)
        since_ns = min(each.ended_ns for each in rows[0].facts)
        return Verdict(kind, who, phase, sentence, evidence, rows[-1].number, since_ns)


class _Table:
    """What the ranks needed over some steps, as medians, in seconds."""

    def __init__(self, rows: Sequence[Row], own: tuple[int, ...]) -> None:
        """*own*: places of the phases that are left out."""
        by_rank = list(zip(*[row.facts for row in rows], strict=True))
        self.work_s: list[float] = []
        self.own_s = 0.0
        """In the phases that are left out, of the rank that has the most there."""
        self._phases_s: dict[str, list[float]] = {word: [] for word in WORK_PHASES}
        for steps in by_rank:
            work_ns = [each.work_ns for each in steps]
            columns = list(zip(*[each.phases_ns for each in steps], strict=True))
            for needed_s, column in zip(self._phases_s.values(), columns, strict=True):
                needed_s.append(middle(column) / 1e9)
            if own:
                own_ns = list(map(sum, zip(*[columns[at] for at in own], strict=True)))
                self.own_s = max(self.own_s, middle(own_ns) / 1e9)
                work_ns = list(map(sub, work_ns, own_ns))
            self.work_s.append(middle(work_ns) / 1e9)
        for at in own:
            del self._phases_s[WORK_PHASES[at]]
        self._excesses_s = {word: _excesses(each) for word, each in self._phases_s.items()}
        self._amount = [sum([each.work for each in steps]) for steps in by_rank]
        self._took_s = middle([each.took_ns for each in by_rank[0]]) / 1e9

    def is_among_the_last(self, i: int) -> bool:
        """Also against the slower others: of three, one is fast rather than two slow."""
        others = sorted(_others(self.work_s, i))
        return self.work_s[i] - others[len(others) // 2] > _EXCESS_IN_EACH * self._took_s

    def excess_by_phase(self, i: int) -> dict[str, float]:
        """Seconds more than the others, in each phase of work that is compared."""
        return {word: excesses_s[i] for word, excesses_s in self._excesses_s.items()}

    def more_to_do(self, i: int) -> float:
        """How many more tokens or samples than the others, as a share of theirs."""
        others = middle(_others(self._amount, i))
        return self._amount[i] / others - 1 if others > 0 else 0.0

    def reading(self, i: int, excess_s: float) -> tuple[Kind, str]:
        """What it is, and the phase that it is in."""
        excess = self.excess_by_phase(i)
        others = {word: middle(_others(needed, i)) for word, needed in self._phases_s.items()}
        phase = max(excess, key=lambda word: excess[word])
        if excess[phase] < _MOST_OF * excess_s:
            together = sum(excess.get(word, 0.0) for word in _COMPUTE)
            phase = "compute" if together >= _MOST_OF * excess_s else "mixed"
        elif phase in ("forward", "backward"):
            # A slow device is slow in both, and backward is most of it.
            its, rest = ("forward", "backward") if phase == "forward" else ("backward", "forward")
            if others[its] and others.get(rest):
                here, there = excess[its] / others[its], excess[rest] / others[rest]
                if there >= here / 2:
                    phase = "compute"
        compute_s = sum(others.get(word, 0.0) for word in ("forward", "backward"))
        if phase in ("forward", "backward", "compute"):
            explained_s = self.more_to_do(i) * compute_s
            if explained_s >= _MOST_OF * excess_s:
                return "imbalance", phase
        return "straggler", phase


def _least(step_ns: float) -> float:
    """The excess that somebody is named for, in nanoseconds."""
    return max(_EXCESS * step_ns, _EXCESS_NS)


def _above(excesses: Sequence[float]) -> int:
    """In how many steps the rank needed more than the others."""
    return [each > 0 for each in excesses].count(True)


def _others(values: Sequence[float], i: int) -> list[float]:
    return [*values[:i], *values[i + 1 :]]


def _excesses(work: Sequence[float]) -> list[float]:
    """Of each rank: how much more than the median of the others; sorted once for all of them."""
    ordered = sorted(work)
    half = len(work) // 2
    if len(work) % 2 == 0:
        low, high = ordered[half - 1], ordered[half]
        return [each - low if each > low else each - high for each in work]
    low, middle_one, high = ordered[half - 1 : half + 2]
    of_less, of_more = (middle_one + high) / 2, (low + middle_one) / 2
    of_itself = (low + high) / 2
    return [
        each - (of_more if each > middle_one else of_less if each < middle_one else of_itself)
        for each in work
    ]


def _last(values: deque[Any], count: int) -> list[Any]:
    return list(islice(values, max(len(values) - count, 0), None))
