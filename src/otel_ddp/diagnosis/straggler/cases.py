"""Opens, updates and closes verdicts on late ranks and nodes, and charges their cost.

`rule` decides whether a rank or node is late, `phase_table` in which phase.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache

from otel_ddp.diagnosis.straggler import limits, rule
from otel_ddp.diagnosis.straggler.finding import evidence_of, sentence_of
from otel_ddp.diagnosis.straggler.phase_table import PhaseTable
from otel_ddp.diagnosis.straggler.window import (
    Compared,
    ExcessHistory,
    Late,
    Window,
    nodes_of,
    ranks_of,
)
from otel_ddp.diagnosis.verdict import Change, Labels, Verdict
from otel_ddp.vocabulary.words import Kind

Where = Callable[[Sequence[int]], str]
"""Names the calls in which others wait for the ranks at these indices; empty if unknown."""


class _Case:
    """An open verdict, and the sums from which its cost and its final figures are computed."""

    def __init__(self, length: int, verdict: Verdict) -> None:
        self.length = length
        # Its figures are those of the last check that found the rank or node late.
        self.verdict = verdict
        self.lost_s = 0.0
        # When the last late step ended, and whether the rank or node was late when last looked at.
        self.late_until_ns = 0
        self.is_late = True
        # EWMA of the excess, i.e. of the time per step by which the rank or node is later than the
        # others.
        self.usual_s = 0.0
        # The number of late steps, and the sums of their excess and duration.
        self._late_steps, self._excess_s, self._step_s = 0, 0.0, 0.0
        # The last checks found this kind and phase instead of the verdict's. `checks` counts how
        # many in a row did.
        self.other_reading: tuple[Kind, str] | None = None
        self.checks = 0
        self.steps_since_check = 0

    def add(self, late: Late, steps: int, lost_s: float) -> None:
        """Add the last *steps* steps to the sums; the rank or node was late in them."""
        window = late.history.window
        excess_s, step_s = late.excess_s(steps), window.step_s(steps)
        self.late_until_ns = window.last(1)[0].last_ended_ns
        self._late_steps += steps
        self._excess_s += steps * excess_s
        self._step_s += steps * step_s
        self.lost_s += lost_s

    def with_cost(self) -> Verdict:
        """The verdict with the time that the others have lost."""
        evidence = {**self.verdict.evidence, "lost_s": round(self.lost_s, 3)}
        return self.verdict._replace(evidence=evidence)

    def over(self, until_ns: int = 0) -> Verdict:
        """The closed verdict, with figures over its whole duration."""
        verdict, steps = self.with_cost()._replace(until_ns=until_ns), self._late_steps
        if not steps:
            return verdict
        whole = {
            "excess_s": round(self._excess_s / steps, 6),
            "excess": round(self._excess_s / self._step_s, 4),
            "step_s": round(self._step_s / steps, 6),
            "steps": steps,
        }
        return verdict._replace(evidence={**verdict.evidence, **whole})


class _Look:
    """Caches figures of the last steps that several verdicts use, for one round of `_judge`."""

    def __init__(self) -> None:
        self.late: list[Late] = []
        self.table = cache(_table)
        self.excesses_s = cache(self._excesses_s)
        self.step_without_s = cache(self._step_without_s)

    def _excesses_s(self, length: int) -> Mapping[Labels, float]:
        """The excesses of all late units."""
        return {each.labels: each.excess_s(length) for each in self.late}

    def _step_without_s(self, length: int) -> float:
        """The duration of a step if no unit were late."""
        ranks = {rank for each in self.late for rank in each.members}
        return self.late[0].history.step_without_s(ranks, length)


def _table(history: ExcessHistory, length: int) -> PhaseTable:
    return PhaseTable(history.window.last(length), history.units, history.window.left_out)


class Cases:
    """The verdicts on late ranks and nodes of one run."""

    def __init__(self, where: Where) -> None:
        self._where = where
        self.window = Window()
        self.ranks = ExcessHistory(self.window)
        # The excesses of nodes. Has no units, so finds no late node, if nodes cannot be compared.
        self._nodes = ExcessHistory(self.window)
        self._open: dict[Labels, _Case] = {}
        # Late ranks without a verdict yet, since their whole node may turn out to be late; and for
        # how many steps they have waited.
        self._waiting: dict[Labels, int] = {}
        self.lost_s: dict[Labels, float] = {}
        """Seconds that the others have lost to each rank, including past verdicts."""
        # The number of steps so far; and by rank, that number when the rank was last charged.
        self._steps, self._charged = 0, dict[Labels, int]()
        self._world_size = 0
        self._steps_since_look, self._ns_since_look = 0, 0.0
        self._changes: list[Change] = []

    def __len__(self) -> int:
        return len(self._open)

    def start_again(
        self, ranks: Sequence[Labels], left_out: tuple[int, ...], stages: Sequence[int]
    ) -> None:
        """Start over with these ranks and their pipeline stages.

        *left_out*: the phases that are not compared, as indices into WORK_PHASES.
        """
        self.window = Window(left_out, stages)
        ranked = ranks_of(ranks, stages)
        self.ranks = ExcessHistory(self.window, ranked)
        of_nodes = nodes_of(ranks, stages)
        self._nodes = ExcessHistory(self.window, of_nodes)
        self._waiting.clear()
        self._steps_since_look, self._ns_since_look = 0, 0.0
        compared = {unit.labels for unit in (*self.ranks.units, *self._nodes.units)}
        for labels in self._open.keys() - compared:
            self.close(labels)

    def feed(self, step: Compared, works_ns: Sequence[int], world_size: int) -> list[float]:
        """Add a step of all ranks; returns the excess of each rank.

        *works_ns*: how long each rank worked. For a rank with an unusual step, such as a
        checkpoint, this is the usual time instead. *world_size*: the number of ranks of the whole
        job.
        """
        self._world_size = world_size
        self.window.append(step)
        excesses_ns = self.ranks.append(works_ns, step.step_ns)
        if self._nodes.units:
            self._nodes.append(works_ns, step.step_ns)
        self._steps += 1
        self._steps_since_look += 1
        self._ns_since_look += step.steps * step.step_ns
        is_due = self.ranks.is_at_stride and self._ns_since_look >= limits.LOOK_NS
        if is_due or self.ranks.is_any_far_above or self._nodes.is_any_far_above:
            self._judge()
            self._steps_since_look, self._ns_since_look = 0, 0.0
        return excesses_ns

    def poll(self) -> list[Change]:
        """The changes since the last poll."""
        changes, self._changes = self._changes, []
        return changes

    def present(self) -> list[Verdict]:
        """The open verdicts with the figures of the last check that confirmed them."""
        return [case.verdict for case in self._open.values()]

    # -- who is late

    def _judge(self) -> None:
        look = _Look()
        opening = self._late_nodes(look)
        opening += self._late_ranks(look, opening)
        # Late units (ranks or nodes) share the cost, so find all of them before charging any.
        named = [
            Late(history, i, self._open[unit.labels].length)
            for history in (self._nodes, self.ranks)
            for i, unit in enumerate(history.units)
            if unit.labels in self._open
        ]
        look.late = [*named, *opening]
        for each in named:
            self._continue(each, look)
        for each in opening:
            self._begin(each, look)

    def _late_nodes(self, look: _Look) -> list[Late]:
        """Close the verdicts on recovered nodes; returns late nodes without a verdict."""
        nodes, opening = self._nodes, {}
        for i, unit in enumerate(nodes.units):
            case = self._open.get(unit.labels)
            if case is not None:
                if rule.is_over(nodes, i, case.length) or rule.is_alike_no_more(nodes, i):
                    self.close(unit.labels, is_over=True)
            elif len(unit.members) > 1:
                length = rule.late_over(nodes, i, lambda length: look.table(nodes, length))
                if length is not None:
                    opening[i] = length
        late = {i for i, unit in enumerate(nodes.units) if unit.labels in self._open} | {*opening}
        return [
            Late(nodes, i, length)
            for i, length in opening.items()
            if rule.is_alike(nodes, i, length) and rule.is_apart(nodes, i, length, late)
        ]

    def _late_ranks(self, look: _Look, late_nodes: Sequence[Late]) -> list[Late]:
        """Close the verdicts on recovered ranks; returns late ranks without a verdict."""
        ranks, nodes = self.ranks, self._nodes.units
        in_late_node = {rank for each in late_nodes for rank in each.members} | {
            rank for unit in nodes if unit.labels in self._open for rank in unit.members
        }
        node = {rank: i for i, unit in enumerate(nodes) for rank in unit.members}

        def table(length: int) -> PhaseTable:
            return look.table(ranks, length)

        found, waiting = [], {}
        for i, unit in enumerate(ranks.units):
            case = self._open.get(unit.labels)
            if i in in_late_node:
                # The verdict on the node replaces those on its ranks.
                self.close(unit.labels)
            elif case is not None:
                if rule.is_over(ranks, i, case.length):
                    self.close(unit.labels, is_over=True)
            elif (length := rule.late_over(ranks, i, table)) is not None:
                waited = self._waiting.get(unit.labels, 0)
                may_be_its_node = node and rule.may_be_its_node(self._nodes, node[i], length)
                if may_be_its_node and waited < limits.NODE_WAITS:
                    waiting[unit.labels] = waited + self._steps_since_look
                else:
                    found.append(Late(ranks, i, length))
        self._waiting = waiting
        return found

    # -- verdicts

    def _others(self, late: Late) -> int:
        """How many ranks the whole job has besides those of the late unit."""
        return max(self._world_size, len(self.ranks.units)) - len(late.members)

    def _charge(self, late: Late, wait_s: float, steps: int) -> float:
        """Charge this rank or node, for which all others waited *wait_s* in each of the last
        *steps* steps.

        The ranks of a node share the cost equally.
        """
        more_s = wait_s * self.window.stand_for(steps) * self._others(late)
        for at in late.members:
            labels = self.ranks.units[at].labels
            self.lost_s[labels] = self.lost_s.get(labels, 0.0) + more_s / len(late.members)
            self._charged[labels] = self._steps
        return more_s

    def _begin(self, late: Late, look: _Look) -> None:
        labels, length = late.labels, late.length
        reading = look.table(late.history, length).kind_and_phase(late.i, late.excess_s())
        case = _Case(length, self._verdict(late, look, reading))
        late_for = late.history.late_for(late.i, length)
        # The last step charged to one of these ranks. Its cost may already be part of another
        # verdict, on the rank or its node, and must not count twice.
        charged = max([self._charged.get(self.ranks.units[at].labels, 0) for at in late.members])
        wait_s = _share_s(labels, look.excesses_s(length))
        lost_s = self._charge(late, wait_s, min(late_for, self._steps - charged))
        case.add(late, late_for, lost_s)
        case.usual_s = late.excess_s()
        case.verdict = case.with_cost()
        self._open[labels] = case
        self._changes.append(Change(case.verdict, True))

    def _continue(self, late: Late, look: _Look) -> None:
        """Charge a rank or node with an open verdict for the newest steps, and sometimes check its
        phase."""
        case = self._open[late.labels]
        steps = min(self._steps_since_look, len(late.history))
        # Use only the steps since the last look. A median over the whole length would show the unit
        # as late long after it has recovered.
        excess_s = late.excess_s(steps)
        is_much = excess_s >= limits.STILL * case.usual_s
        case.is_late = is_much and late.is_late(steps, limits.EXCESS_OVER)
        case.usual_s += limits.STILL_FOLLOWS * (excess_s - case.usual_s)
        if case.is_late:
            wait_s = _share_s(late.labels, look.excesses_s(steps))
            case.add(late, steps, self._charge(late, wait_s, steps))
        case.steps_since_check += self._steps_since_look
        if case.steps_since_check < limits.CHECK_EVERY or len(late.history) < case.length:
            return
        newest = min(case.steps_since_check, len(late.history))
        case.steps_since_check = 0
        if not all(late.is_late(each, limits.EXCESS) for each in (newest, case.length)):
            # Do not change the verdict's phase now: from a small excess, the phase is not reliable.
            case.other_reading, case.checks = None, 0
            return
        before = case.verdict
        present = before.kind, before.phase
        table = look.table(late.history, case.length)
        reading = table.kind_and_phase(late.i, late.excess_s(), present)
        if reading == present:
            case.other_reading, case.checks = None, 0
            verdict = self._verdict(late, look, present)
            case.verdict = verdict._replace(since_ns=before.since_ns, step=before.step)
            case.verdict = case.with_cost()
            return
        case.checks = case.checks + 1 if reading == case.other_reading else 1
        case.other_reading = reading
        if case.checks < limits.CHECKS:
            return
        if reading[0] != before.kind:
            self._changes.append(Change(case.over(), False))
            until_ns, usual_s = case.late_until_ns, case.usual_s
            case = self._open[late.labels] = _Case(case.length, before)
            case.late_until_ns, case.usual_s = until_ns, usual_s
        case.verdict = self._verdict(late, look, reading)._replace(since_ns=before.since_ns)
        case.verdict = case.with_cost()
        case.other_reading, case.checks = None, 0
        self._changes.append(Change(case.verdict, True))

    def _verdict(self, late: Late, look: _Look, reading: tuple[Kind, str]) -> Verdict:
        kind, phase = reading
        length, ranks = late.length, [self.ranks.units[at].labels for at in late.members]
        wait_s = _share_s(late.labels, look.excesses_s(length))
        table = look.table(late.history, length)
        evidence = evidence_of(late, reading, table, ranks, self._others(late), wait_s)
        evidence["step_without_s"] = round(look.step_without_s(length), 6)
        if waits_in := self._where(late.members):
            evidence["waits_in"] = waits_in
        step = self.window.last(1)[0].number
        since_ns = self.window.last(late.history.late_for(late.i, length))[0].first_ended_ns
        verdict = Verdict(kind, late.labels, phase, "", evidence, step, since_ns)
        return verdict._replace(sentence=sentence_of(verdict))

    def close(self, labels: Labels, *, is_over: bool = False) -> None:
        """Close the verdict on this rank or node, if there is one.

        *is_over*: the rank or node has recovered. Otherwise it may have been late until now.
        """
        if case := self._open.pop(labels, None):
            until_ns = case.late_until_ns if is_over or not case.is_late else 0
            self._changes.append(Change(case.over(until_ns), False))

    def close_all(self) -> None:
        for labels in list(self._open):
            self.close(labels)


def _share_s(one: Labels, late_s: Mapping[Labels, float]) -> float:
    """How long the others wait for this late rank or node, per step.

    The others wait only until the latest of them arrives. Several late ranks or nodes share that
    wait in proportion to their excesses, *late_s*.
    """
    excesses_s = [max(each_s, 0.0) for each_s in late_s.values()]
    return max(late_s[one], 0.0) * max(excesses_s) / (sum(excesses_s) or 1.0)
