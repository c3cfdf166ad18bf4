"""Compares the steps of a run's ranks: excludes unusual steps and waits, and reports the result.

`cases` has the verdicts on late ranks and nodes.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from otel_ddp.diagnosis.bounds import Bounds
from otel_ddp.diagnosis.detector import Detector, Observation, RankState
from otel_ddp.diagnosis.medians import median
from otel_ddp.diagnosis.say import rank_numbers, rounded
from otel_ddp.diagnosis.step_facts import StepFacts, columns_of
from otel_ddp.diagnosis.straggler import limits, rule
from otel_ddp.diagnosis.straggler.cases import Cases
from otel_ddp.diagnosis.straggler.finding import RankReport, Report
from otel_ddp.diagnosis.straggler.host_pace import HostPace
from otel_ddp.diagnosis.straggler.phase_table import PhaseTable
from otel_ddp.diagnosis.straggler.recurring import RecurringStalls
from otel_ddp.diagnosis.straggler.waits import Taken, Waits
from otel_ddp.diagnosis.straggler.window import Alignment, Compared, Row
from otel_ddp.diagnosis.verdict import Change, Labels, Verdict
from otel_ddp.vocabulary.words import WORK_PHASES


class _Present(NamedTuple):
    """The comparison of all ranks, as it was at step *until*."""

    ranks: tuple[RankReport, ...]
    table: PhaseTable | None
    step_s: float
    until: int


class Stragglers(Detector):
    """Detects late ranks and nodes of one run."""

    def __init__(self) -> None:
        self._recurring = RecurringStalls()
        self._recurs = False
        self._waits = Waits()
        self._cases = Cases(self._waits.where)
        self.bounds = Bounds()
        """The detector of bounds. It gets the aligned steps here; its owner polls it separately."""
        self._ranks: dict[Labels, RankState] = {}
        self._world_size = 0
        self._alignment = Alignment()
        # The durations of the steps since the last one in which all ranks measured their phases.
        self._steps_ns: deque[float] = deque(maxlen=limits.MOST_UNMEASURED)
        # Whether to start over, since the compared ranks or phases have changed; and whether any
        # rank's state has changed.
        self._starts_again = self._has_news = False
        # Whether waits are found from the times of calls to process groups, on all ranks.
        self._by_calls = False
        # Phases that are not compared, since they may include waits for other ranks; as indices
        # into WORK_PHASES.
        self._not_compared: tuple[int, ...] = ()
        self._waits_unknown = False
        # The pipeline stage of each rank.
        self._stages: Sequence[int] = ()
        # In how many steps in a row the calls did not show who waits for whom; and, once calls are
        # ignored for that, the reason.
        self._failed, self._useless = 0, ""
        self._pace = HostPace()
        self._unusual_share = 0.0
        self._compared: _Present | None = None

    # -- the ranks

    def feed(self, rank: RankState, seen: Observation) -> None:
        if rank.is_beside or seen.ended is not None:
            self.forget(rank.labels)
            return
        if rank != (before := self._ranks.get(rank.labels)):
            self._update(before or RankState(rank.labels), rank)
        if seen.facts:
            self.expect(rank.labels)
            self._pace.begin(rank.labels, [each for each in seen.facts if each.measured])
            for row in self._alignment.feed(rank.labels, seen.facts):
                self._feed_row(row)

    def _update(self, before: RankState, rank: RankState) -> None:
        self._ranks[rank.labels] = rank
        self._world_size = rank.world_size
        self._has_news = True
        if rank.device_clock != before.device_clock:
            # Earlier steps were timed by another clock and cannot be compared with the new ones.
            self._starts_again = True
            if not rank.device_clock:
                self._cases.close_all()

    def _choose(self) -> None:
        """Choose how to tell waits from work: from calls to process groups, or by excluding
        phases."""
        ranks = self._ranks.values()
        # Calls are timed on the host. So if a rank has a device, they don't show its waits: do not
        # use them.
        by_calls = not self._useless and all(
            each.calls_noted and each.device_clock is None for each in ranks
        )
        own = {word for each in ranks for word in each.own_collectives}
        words = [] if by_calls else [word for word in WORK_PHASES if word in own]
        not_compared = tuple(map(WORK_PHASES.index, words))
        unknown = not by_calls and any(each.waits_known is False for each in ranks)
        known = by_calls, not_compared, unknown
        if known != (self._by_calls, self._not_compared, self._waits_unknown):
            self._by_calls, self._not_compared, self._waits_unknown = known
            self._starts_again = True
            # The open verdicts compared work that may have included waits, so they may be wrong.
            self._cases.close_all()

    def forget(self, labels: Labels) -> None:
        if self._ranks.pop(labels, None) is None:
            return
        self._alignment.remove(labels)
        self._pace.forget(labels)
        self._cases.close(labels)
        self._change_ranks()
        if len(self._alignment) < 2:
            self._cases.close_all()

    def expect(self, labels: Labels) -> None:
        """From now on, compare a step only if this rank has made it too."""
        if self._alignment.add(labels):
            self._change_ranks()

    def _change_ranks(self) -> None:
        # If calls were ignored, try them again: the calls of the new set of ranks may match.
        self._useless, self._failed, self._has_news = "", 0, True
        self._starts_again = True

    def _settle(self) -> None:
        # Starting over takes long if there are thousands of ranks, which are added one by one. So
        # it is done here, once, before the next row of steps or the next report.
        if self._has_news:
            self._has_news = False
            self._choose()
        if not self._starts_again:
            return
        self._starts_again, self._compared = False, None
        ranks = self._alignment.ranks
        if len(self._stages) != len(ranks):
            self._stages = (0,) * len(ranks)
        self._waits.start_again([self._ranks[labels] for labels in ranks if self._by_calls])
        self._cases.start_again(ranks, self._not_compared, self._stages)
        self._pace.start_again(ranks)
        self._recurring.start_again(self._cases.ranks)
        self.bounds.start_again([self._ranks[labels] for labels in ranks], self._stages)

    # -- steps

    def _feed_row(self, row: Row) -> None:
        self._settle()
        facts, columns = row.facts, columns_of(row.facts)
        measured = all(columns.measured)
        # If each rank is a world of its own, none waits for another, so none can be late.
        comparable = len(facts) > 1 and self._world_size != 1
        taken = None
        if comparable and measured and self._by_calls:
            taken = self._take_waits(facts)
        if taken is not None:
            facts, columns = taken.facts, columns_of(taken.facts)
        elif self._waits_unknown or self._by_calls:
            # Do not compare ranks if their work may include waits for other ranks.
            comparable = False
        if measured:
            self.bounds.feed_row(facts, taken and taken.bubble_ns, first=row.first)
        if row.first:
            if measured:
                self._pace.follow(facts)
            return
        unusual = [i for i, each in enumerate(columns.unusual) if each]
        others = max(self._world_size, len(facts)) - 1
        # Recurring stalls are found by comparing all ranks, so not in a pipeline: its stages
        # differ.
        alike = len(set(self._stages[: len(facts)])) == 1
        if len(unusual) > limits.UNUSUAL * len(facts):
            if comparable and measured and alike and not self._steps_ns:
                self._recurring.feed(row.number, facts, None, others)
            self._unusual_share = 0.99 * self._unusual_share + 0.01
            return
        self._unusual_share *= 0.99
        self._steps_ns.append(median(columns.took_ns))
        if not measured:
            if self._recurs:
                # Stalls recur if their distances in steps are regular. Unmeasured steps may hide
                # stalls, so start the search over.
                self._recurs = False
                self._recurring.start_again(self._cases.ranks)
            return
        # A measured step also stands for the unmeasured steps before it. Measuring makes a step
        # longer, so its duration is taken as the median of all these steps.
        steps, step_ns = len(self._steps_ns), median(self._steps_ns)
        self._steps_ns.clear()
        if not comparable:
            return
        if (adjusted := self._pace.adjusted(facts)) is not facts:
            facts, columns = adjusted, columns_of(adjusted)
        step = Compared.of(row.number, columns, self._not_compared, steps, step_ns)
        usual_ns = [*step.works_ns]
        for i in unusual:
            # An unusual rank (one that saves a checkpoint, say) must not look late: use the median
            # work of its pipeline stage instead of its own.
            alike_ns = [
                ns
                for ns, stage in zip(usual_ns, self._stages, strict=True)
                if stage == self._stages[i]
            ]
            usual_ns[i] = round(median(alike_ns))
        excesses_ns = self._cases.feed(step, usual_ns, self._world_size)
        if alike and steps == 1:
            self._recurs = True
            self._recurring.feed(row.number, facts, None if unusual else excesses_ns, others)

    def _take_waits(self, facts: Sequence[StepFacts]) -> Taken | None:
        """The step with the waits in calls removed; None if the calls do not show who waits for
        whom."""
        taken = self._waits.take(facts, self._world_size)
        if taken is None:
            self._failed += 1
            if self._failed == limits.CALLS_FAIL:
                self._useless = self._waits.why
                self._choose()
            return None
        self._failed = 0
        if taken.stages and taken.stages != self._stages:
            self._stages = taken.stages
            self._cases.close_all()
            self._starts_again = True
            self._settle()
        return taken

    def poll(self, now_ns: int) -> list[Change]:
        self._settle()
        return [*self._cases.poll(), *self._recurring.poll()]

    def present(self) -> list[Verdict]:
        self._settle()
        return [*self._cases.present(), *self._recurring.present()]

    # -- the report

    def report(self) -> Report:
        """How the ranks compare now, over the last LENGTHS[0] steps."""
        self._settle()
        compared, last = self._compared, self._cases.window.last(1)
        if (
            compared is None
            or len(self._alignment) < limits.MANY_RANKS
            or not last
            or last[0].number >= compared.until + limits.STRIDE
        ):
            compared = self._compared = self._compare()
        why = next(self._why_not_compared(compared), "")
        return Report(compared.ranks, why and f"insufficient data: {why}")

    def _compare(self) -> _Present:
        ranks, history, window = self._alignment.ranks, self._cases.ranks, self._cases.window
        steps = history.some_steps(limits.LENGTHS[0])
        table = PhaseTable(steps, history.units, window.left_out) if steps else None
        step_s = window.step_s(limits.LENGTHS[0]) if steps else 0.0
        lost_s = Counter(self._cases.lost_s)
        lost_s.update(self._recurring.lost_s)
        found = []
        for i, labels in enumerate(ranks):
            excess: dict[str, float] = {}
            work_s = None
            if table and table.others_work_s(i):
                work_s = table.work_s(i)
                all_s = history.excess_s(i, limits.LENGTHS[0])
                parts = {"all": all_s, **table.excess_by_phase(i)}
                excess = rounded({word: each / step_s for word, each in parts.items()})
            waits_s = self._waits.each_s(i)
            found.append(RankReport(labels, excess, lost_s.get(labels, 0.0), work_s, waits_s))
        found += [
            RankReport(labels, {}, each_s)
            for labels, each_s in lost_s.items()
            if labels not in self._alignment
        ]
        return _Present(tuple(found), table, step_s, steps[0].number if steps else 0)

    def _why_not_compared(self, compared: _Present) -> Iterator[str]:
        table, step_s = compared.table, compared.step_s
        alone = self._world_size == 1
        unclocked = self._named(lambda rank: rank.device_clock is False)
        if unclocked and not alone:
            yield f"the waits are on the device, whose clock is not known on rank {unclocked}"
        if why := self._ranks_without_steps() or self._alignment.why_not_comparable():
            yield why
        if alone:
            yield "each of these processes trains alone, so none waits for another"
        if self._by_calls and len(set(self._stages)) == len(self._stages) > 1:
            yield "each stage of the pipeline has one rank, and none is like another"
        unknown = self._named(lambda rank: rank.waits_known is False)
        if unknown and not self._by_calls:
            why = self._useless and f": {self._useless}"
            yield f"waiting for other ranks cannot be told from work on rank {unknown}{why}"
        if len(self._steps_ns) == limits.MOST_UNMEASURED:
            yield f"none of the last {limits.MOST_UNMEASURED} steps was measured on all ranks"
        if self._unusual_share > 0.5:
            yield "most steps compile, save, evaluate, are skipped, or collect garbage"
        if len(self._cases.ranks) < (first := self._cases.ranks.soon):
            yield f"{len(self._cases.ranks)} of the first {first} steps that a comparison needs"
        if self._cases:
            return
        # In phases left out of the comparison, a late rank takes as long as the ranks that wait for
        # it, so it cannot be told apart. Say so if these phases take long enough for a verdict.
        if table and table.left_out_s() > rule.least_excess_ns(step_s * 1e9) / 1e9:
            words = ", ".join(f"`{WORK_PHASES[at]}`" for at in self._not_compared)
            yield f"collectives of your own in {words}: a rank that is late there cannot be named"
        if self._pace.unclear > limits.EXCESS:
            yield (
                "a device waits for its host while other hosts are ahead of their devices: whether "
                "those hosts are faster is not known"
            )

    def _named(self, chosen: Callable[[RankState], object]) -> str:
        return rank_numbers(each.labels for each in self._ranks.values() if chosen(each))

    def _ranks_without_steps(self) -> str:
        """Why fewer than two ranks can be compared; empty if two or more can."""
        ranks = self._alignment
        if len(ranks) > 1 or not (others := self._named(lambda rank: rank.labels not in ranks)):
            return ""
        if untimed := self._named(lambda rank: rank.device_clock and rank.labels not in ranks):
            return f"the device's clock has not timed a step yet on rank {untimed}"
        if not len(ranks):
            return "the known ranks make no steps"
        return f"no step yet of rank {others}"
