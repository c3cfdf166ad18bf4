"""Watches the ranks of a run on this node, and opens and closes verdicts on late ones.

`rule` decides when a rank is late, `phase_table` in which phase.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from otel_ddp.diagnosis.detector import Detector, Observation, RankState
from otel_ddp.diagnosis.medians import excesses, median
from otel_ddp.diagnosis.regression import Regression
from otel_ddp.diagnosis.say import rank_numbers, rounded
from otel_ddp.diagnosis.step_facts import StepFacts
from otel_ddp.diagnosis.straggler import limits, rule
from otel_ddp.diagnosis.straggler.alignment import Alignment, Row
from otel_ddp.diagnosis.straggler.excess_history import (
    ExcessHistory,
    LostTime,
    latest_s,
    part,
    share_s,
)
from otel_ddp.diagnosis.straggler.finding import Finding, RankReport, Report
from otel_ddp.diagnosis.straggler.host_pace import HostPace
from otel_ddp.diagnosis.straggler.phase_table import PhaseTable
from otel_ddp.diagnosis.straggler.recurring import RecurringStalls
from otel_ddp.diagnosis.verdict import Change, Labels, Verdict, run_labels
from otel_ddp.vocabulary.words import WORK_PHASES, Kind

Hint = Callable[[RankState, str, Mapping[str, Any]], tuple[str, Mapping[str, Any]]]
"""Asked for a late rank, its phase and evidence: better advice, or nothing, and more evidence."""
_Tables = Callable[[int], PhaseTable]


class _Case:
    """An open verdict on one rank."""

    def __init__(self, verdict: Verdict, length: int, lost_before_s: float) -> None:
        # With the figures of the last check that found the rank late enough to be named.
        self.verdict = verdict
        self.length = length
        # What the rank had cost before, in verdicts that are over.
        self.lost_before_s = lost_before_s
        # Another kind and phase, and how many checks in a row have found them.
        self.other_reading: tuple[Kind, str] | None = None
        self.checks = 0
        self.steps_since_check = 0


class Stragglers(Detector):
    """The ranks of one run on this node."""

    def __init__(self, hint: Hint | None = None, *, every_step: bool = True) -> None:
        """*every_step*: all steps are fed, and not samples of them.

        Samples show late ranks alone, and their waits are known by when they were launched, which
        may be in forward for a wait in backward.
        """
        self._every_step = every_step
        self._recurring = RecurringStalls() if every_step else None
        self._hint = hint
        self._ranks: dict[Labels, RankState] = {}
        self._world_size = 0
        self._alignment = Alignment()
        # Indices into WORK_PHASES: in these phases a wait for others looks like work.
        self._not_compared: tuple[int, ...] = ()
        self._waits_known = True
        self._history = ExcessHistory()
        self._pace = HostPace()
        self._unusual_share = 0.0
        self._cases: dict[Labels, _Case] = {}
        self.lost_time = LostTime()
        self._regression: Regression | None = None
        self._changes: list[Change] = []

    # -- what is known of the ranks

    def feed(self, rank: RankState, seen: Observation) -> None:
        if rank.is_beside or seen.ended is not None:
            self.forget(rank.labels)
            return
        if rank != (before := self._ranks.get(rank.labels)):
            self._update(before or RankState(rank.labels), rank)
        if seen.facts:
            self.expect(rank.labels)
            self._feed_steps(rank.labels, seen.facts)

    def _update(self, before: RankState, rank: RankState) -> None:
        labels = rank.labels
        self._ranks[labels] = rank
        self._world_size = rank.world_size
        self._waits_known = all(each.waits_known is not False for each in self._ranks.values())
        if rank.waits_known is False and before.waits_known is not False:
            # What looked like work may have been a wait.
            self._start_again()
            self._close_all()
        if rank.device_clock != before.device_clock:
            # Steps by the one clock cannot be compared with steps by the other.
            self._start_again()
            if not rank.device_clock:
                self._close_all()
        self._update_not_compared()

    def _update_not_compared(self) -> None:
        phases = {phase for each in self._ranks.values() for phase in each.own_collectives}
        not_compared = tuple(at for at, word in enumerate(WORK_PHASES) if word in phases)
        if not_compared != self._not_compared:
            self._not_compared = not_compared
            self._start_again()
            # Some of what was taken for work may have been waiting.
            self._close_all()

    def forget(self, labels: Labels) -> None:
        if self._ranks.pop(labels, None) is None:
            return
        self._waits_known = all(each.waits_known is not False for each in self._ranks.values())
        self._alignment.remove(labels)
        self._pace.forget(labels)
        self._close(labels)
        self._start_again()
        self._update_not_compared()
        if len(self._alignment.ranks) < 2:
            self._close_all()
        if not self._alignment.ranks and self._regression:
            self._changes += self._regression.close()
            self._regression = None

    def expect(self, labels: Labels) -> None:
        """Compare no step any more without this rank."""
        if self._alignment.add(labels):
            self._start_again()

    def _start_again(self) -> None:
        self._history.clear()
        self._pace.start_again(self._alignment.ranks)
        if self._recurring is not None:
            self._recurring.start_again(self._alignment.ranks)

    def _others(self) -> int:
        """How many ranks of the whole job wait for one."""
        return max(self._world_size, len(self._alignment.ranks)) - 1

    # -- steps

    def _feed_steps(self, labels: Labels, steps: Sequence[StepFacts]) -> None:
        if self._every_step and self._regression is None:
            self._regression = Regression(run_labels(labels))
        self._pace.begin(labels, steps)
        for row in self._alignment.feed(labels, steps, limits.FIRST_STEPS):
            self._feed_row(row)

    def _feed_row(self, row: Row) -> None:
        facts = row.facts
        if row.first:
            self._pace.follow(facts)
            return
        if True in [each.unusual for each in facts]:
            self._unusual_share = 0.99 * self._unusual_share + 0.01
            return
        self._unusual_share *= 0.99
        step_ns = median([each.took_ns for each in facts])
        if self._regression is not None:
            self._changes += self._regression.feed(facts, step_ns, bool(self._cases))
        # Of processes that are each a world of one, none waits for another.
        if len(facts) < 2 or not self._waits_known or self._world_size == 1:
            return
        row = self._pace.adjusted(row)
        facts = row.facts
        work_ns = [each.took_ns - each.wait_ns for each in facts]
        for at in self._not_compared:
            work_ns = [ns - each.phases_ns[at] for ns, each in zip(work_ns, facts, strict=True)]
        excesses_ns = excesses(work_ns)
        if self._recurring is not None:
            others = self._others()
            self._recurring.feed(row.number, facts, excesses_ns, self._not_compared, others)
        if self._history.append(row, excesses_ns, step_ns):
            self._judge()

    def poll(self, now_ns: int) -> list[Change]:
        changes, self._changes = self._changes, []
        return changes + (self._recurring.poll() if self._recurring is not None else [])

    def present(self) -> list[Verdict]:
        """The open verdicts with the figures of the last check that found them."""
        recurring = self._recurring.present() if self._recurring is not None else []
        slower = self._regression.present() if self._regression is not None else []
        return [*(case.verdict for case in self._cases.values()), *recurring, *slower]

    # -- verdicts

    def _table(self, rows: Sequence[Row]) -> PhaseTable:
        return PhaseTable(rows, self._not_compared, compute_apart=self._every_step)

    def _judge(self) -> None:
        tables: dict[int, PhaseTable] = {}

        def table(length: int) -> PhaseTable:
            if length not in tables:
                tables[length] = self._table(self._history.rows(length))
            return tables[length]

        opening: dict[int, int] = {}
        ranks = self._alignment.ranks
        for i, labels in enumerate(ranks):
            case = self._cases.get(labels)
            if case is None:
                if (length := rule.late_over(self._history, i, table)) is not None:
                    opening[i] = length
            elif rule.is_over(self._history, i, case.length):
                # It was late no more when the steps began that show it.
                oldest = self._history.rows(case.length)[0]
                self._close(labels, max(each.ended_ns for each in oldest.facts))
        # The cost of each rank depends on the other late ranks: from here on all are known.
        named = [i for i, labels in enumerate(ranks) if labels in self._cases]
        late = [*named, *opening]
        for i in named:
            self._continue(i, late, table)
        for i, length in opening.items():
            self._open(i, length, late, named, table)

    def _open(self, i: int, length: int, late: list[int], named: list[int], table: _Tables) -> None:
        """*named*: the late ranks that have a verdict already, and have been charged."""
        labels = self._alignment.ranks[i]
        lost_before_s = self.lost_time.lost_s.get(labels, 0.0)
        late_s = self._excesses_s(late, length)
        charged_s = max([late_s[j] for j in named], default=0.0)
        left_s = max(latest_s(late_s.values()) - max(charged_s, 0.0), 0.0)
        opening_s = {j: late_s[j] for j in late if j not in named}
        others = self._others()
        self.lost_time.charge(labels, part(i, opening_s) * left_s, length - limits.STRIDE, others)
        self.lost_time.charge(labels, share_s(i, late_s), limits.STRIDE, others)
        reading = table(length).kind_and_phase(i, self._history.excess_s(i, length))
        verdict = self._verdict(i, length, late, table(length), reading)
        self._cases[labels] = _Case(self._with_cost(verdict, lost_before_s), length, lost_before_s)
        self._changes.append(Change(self._cases[labels].verdict, True))

    def _continue(self, i: int, late: list[int], table: _Tables) -> None:
        """Charge a late rank for the last stride, and check its phase now and then."""
        labels = self._alignment.ranks[i]
        case = self._cases[labels]
        if length := min(case.length, len(self._history)):
            wait_s = share_s(i, self._excesses_s(late, length))
            self.lost_time.charge(labels, wait_s, limits.STRIDE, self._others())
        case.steps_since_check += limits.STRIDE
        if case.steps_since_check < limits.CHECK_EVERY or len(self._history) < case.length:
            return
        case.steps_since_check = 0
        excess_s = self._history.excess_s(i, case.length)
        if excess_s < limits.EXCESS * self._history.step_s(case.length):
            # When the verdict is about to end, what is left says nothing of the phase.
            case.other_reading, case.checks = None, 0
            return
        before, phases = case.verdict, table(case.length)
        present = before.kind, before.phase
        reading = phases.kind_and_phase(i, excess_s, present)
        if reading == present:
            case.other_reading, case.checks = None, 0
            verdict = self._verdict(i, case.length, late, phases, present)
            verdict = verdict._replace(since_ns=before.since_ns, step=before.step)
            case.verdict = self._with_cost(verdict, case.lost_before_s)
            return
        case.checks = case.checks + 1 if reading == case.other_reading else 1
        case.other_reading = reading
        if case.checks < limits.CHECKS:
            return
        if reading[0] != before.kind:
            over = self._with_cost(before, case.lost_before_s)
            self._changes.append(Change(over, False))
            case.lost_before_s = self.lost_time.lost_s.get(labels, 0.0)
        verdict = self._verdict(i, case.length, late, phases, reading)
        verdict = verdict._replace(since_ns=before.since_ns)
        case.verdict = self._with_cost(verdict, case.lost_before_s)
        case.other_reading, case.checks = None, 0
        self._changes.append(Change(case.verdict, True))

    def _verdict(
        self, i: int, length: int, late: list[int], table: PhaseTable, reading: tuple[Kind, str]
    ) -> Verdict:
        kind, phase = reading
        labels = self._alignment.ranks[i]
        step_s = self._history.step_s(length)
        others = self._others()
        finding = Finding(
            labels=labels,
            kind=kind,
            phase=phase,
            excess_s=self._history.excess_s(i, length),
            step_s=step_s,
            work_s=table.work_s[i],
            excess_by_phase=table.excess_by_phase(i),
            more_to_do=table.more_to_do(i),
            steps=length,
            share_above=self._history.share_above(i, length),
            lost_per_s=share_s(i, self._excesses_s(late, length)) / step_s * others,
            others=others,
            not_compared=[WORK_PHASES[at] for at in self._not_compared],
            side=table.side(i, phase),
        )
        evidence = finding.evidence()
        advice, more = self._hint(self._ranks[labels], phase, evidence) if self._hint else ("", {})
        rows = self._history.rows(length)
        since_ns = min(each.ended_ns for each in rows[0].facts)
        sentence = finding.sentence(advice if kind == "straggler" else "")
        return Verdict(
            kind, labels, phase, sentence, {**evidence, **more}, rows[-1].number, since_ns
        )

    def _with_cost(self, verdict: Verdict, lost_before_s: float) -> Verdict:
        """With what the others have lost to the rank since this verdict began."""
        lost_s = self.lost_time.lost_s.get(verdict.labels, 0.0) - lost_before_s
        return verdict._replace(evidence={**verdict.evidence, "lost_s": round(lost_s, 3)})

    def _close(self, labels: Labels, until_ns: int = 0) -> None:
        case = self._cases.pop(labels, None)
        if case:
            verdict = self._with_cost(case.verdict, case.lost_before_s)
            self._changes.append(Change(verdict._replace(until_ns=until_ns), False))

    def _close_all(self) -> None:
        for labels in list(self._cases):
            self._close(labels)

    def _excesses_s(self, ranks: list[int], length: int) -> dict[int, float]:
        return {i: self._history.excess_s(i, length) for i in ranks}

    # -- the present state

    def report(self) -> Report:
        """The present state, over the shortest length of the rule at most."""
        ranks = self._alignment.ranks
        # The agent asks every second, and every third step says the same.
        rows = self._history.rows(limits.LENGTHS[0])[::3]
        table = self._table(rows) if rows else None
        step_s = self._history.step_s(limits.LENGTHS[0]) if rows else 0.0
        lost_s = Counter(self.lost_time.lost_s)
        if self._recurring is not None:
            lost_s.update(self._recurring.lost_s)
        found = []
        for i, labels in enumerate(ranks):
            excess: dict[str, float] = {}
            if table:
                all_s = self._history.excess_s(i, limits.LENGTHS[0])
                parts = {"all": all_s, **table.excess_by_phase(i)}
                excess = rounded({word: each / step_s for word, each in parts.items()})
            found.append(RankReport(labels, excess, lost_s.get(labels, 0.0)))
        found += [
            RankReport(labels, {}, each_s)
            for labels, each_s in lost_s.items()
            if labels not in ranks
        ]
        return Report(
            tuple(found),
            max(table.work_s) if table else None,
            median(table.work_s) if table else None,
            self._insufficient(table, step_s),
        )

    def _insufficient(self, table: PhaseTable | None, step_s: float) -> str:
        why = next(self._why_not_compared(table, step_s), "")
        return why and f"insufficient data: {why}"

    def _why_not_compared(self, table: PhaseTable | None, step_s: float) -> Iterator[str]:
        alone = self._world_size == 1
        unclocked = self._named(lambda rank: rank.device_clock is False)
        if unclocked and not alone:
            yield f"the waits are on the device, whose clock is not known on rank {unclocked}"
        if why := self._ranks_without_steps() or self._alignment.why_not_comparable():
            yield why
        if alone:
            yield "each of these processes trains alone, so none waits for another"
        if unknown := self._named(lambda rank: rank.waits_known is False):
            yield f"waiting for other ranks cannot be told from work on rank {unknown}"
        if self._unusual_share > 0.5:
            yield "most steps compile, save, evaluate, are skipped, or collect garbage"
        if len(self._history) < limits.LENGTHS[0]:
            yield f"{len(self._history)} of the first {limits.LENGTHS[0]} steps to compare"
        if self._cases:
            return
        # In these phases a late rank and the ranks that wait for it look the same.
        if table and table.left_out_s > rule.least_excess_ns(step_s * 1e9) / 1e9:
            words = ", ".join(f"`{WORK_PHASES[at]}`" for at in self._not_compared)
            yield f"collectives of your own in {words}: a rank that is late there cannot be named"
        if self._pace.unclear > limits.EXCESS:
            yield (
                "a device waits for its host while other hosts are ahead of theirs: whether these "
                "are faster is not known"
            )

    def _named(self, chosen: Callable[[RankState], object]) -> str:
        return rank_numbers(each.labels for each in self._ranks.values() if chosen(each))

    def _ranks_without_steps(self) -> str:
        """Why a rank is compared with no other, though others are beside it."""
        ranks = self._alignment.ranks
        others = self._named(lambda rank: rank.labels not in ranks)
        if len(ranks) > 1 or not others:
            return ""
        if untimed := self._named(lambda rank: rank.device_clock and rank.labels not in ranks):
            return f"no step yet that the device's clock has timed of rank {untimed}"
        if not ranks:
            return "the ranks on this node make no steps"
        return f"no step yet of rank {others}"
