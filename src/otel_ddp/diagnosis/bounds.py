"""Finds what limits the speed of a run: data, computation, communication, launches, ..."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median_low
from typing import Any

from otel_ddp.diagnosis.detector import Detector, RankState
from otel_ddp.diagnosis.medians import median
from otel_ddp.diagnosis.say import COLLECT_TOGETHER, percent, rounded
from otel_ddp.diagnosis.step_facts import StepFacts, columns_of
from otel_ddp.diagnosis.straggler.host_pace import LaunchNeed
from otel_ddp.diagnosis.straggler.window import by_stage
from otel_ddp.diagnosis.verdict import Change, Labels, Verdict, run_labels
from otel_ddp.vocabulary.words import COMPUTE_PHASES, GARBAGE, WORK_PHASES

_STEPS = 100
_CHECK_EVERY = 50
# At most this many ranks are evaluated, to limit the agent's CPU time.
_MOST_RANKS = 256
# A verdict opens or changes after this many consecutive checks with the same result.
_CHECKS = 4
# A bound is reported if its share of the time is above its limit.
_LIMITS = {
    "data": 0.20,
    "comm_wait": 0.30,
    "late_in_turn": 0.20,
    GARBAGE: 0.20,
    "saving": 0.20,
    "other": 0.30,
    "compile": 0.20,
    "launch": 0.40,
    "bubble": 0.30,
    # The work of the slowest pipeline stage beyond the mean of all stages, as a share of that mean.
    "stage": 0.10,
}
_DATA = WORK_PHASES.index("data")
# Bounds that are computed from the times of each rank alone. All other bounds are found by
# comparing ranks.
_OWN = ("compute", "saving", "data", "other", "compile", "launch")
_COMPUTE = [WORK_PHASES.index(word) for word in COMPUTE_PHASES]
# Hysteresis: an open verdict closes only when the share of its bound is below _STAYS times the
# limit.
_STAYS = 0.8

_SENTENCES = {
    "data": "input-bound: {share} of the step is waiting for batches. More loader workers, "
    "prefetching, or faster storage would help.",
    "comm_wait": "communication-bound: {share} of the step is waiting for other ranks, on "
    "every rank at once. Larger batches, gradient accumulation or a faster network "
    "would help.",
    "late_in_turn": "{share} of the step is waiting for ranks that are late in turn: another rank "
    "in each step, as happens where batches differ in length. Sort or bucket them by length.",
    GARBAGE: "in {share} of the step a rank collects Python's garbage, and all wait for it. "
    f"{COLLECT_TOGETHER}",
    "saving": "{share} of the time goes to checkpoints and evaluation. Do them less often, or "
    "save in the background.",
    "other": "{share} of the step lies between the phases: moving batches, losses, logging, "
    "collectives of your own. On a GPU a loop also waits for the device here: .item(), .cpu(), "
    "printing a tensor.",
    "compile": "{share} of the time goes to repeated compilation by torch.compile. Look for shapes "
    "that change.",
    "launch": "launch-bound: in {share} of the step, in forward, backward and the optimizer, the "
    "device has no more to do than the host launches at the moment. Larger batches, torch.compile "
    "or graphs (torch.compile's `reduce-overhead`) would help.",
    "bubble": "pipeline-bound: {share} of the step a rank waits for the stage before it or behind "
    "it (the bubble). More micro-batches or an interleaved schedule would help.",
    "stage": "bound by stage {stage} of the pipeline, which works up to {share} more than the mean "
    "of all stages. Moving layers from there to other stages would help.",
    "compute": "compute-bound: {share} of the step is forward, backward and the optimizer.",
}


def _spent_ns(steps: Sequence[StepFacts]) -> Counter[str]:
    """The time that one rank spent in these steps, by phase and by bound."""
    columns = columns_of(steps)
    phases_ns = map(sum, zip(*columns.phases_ns, strict=True))
    found = Counter(dict(zip(WORK_PHASES, phases_ns, strict=True)))
    for each in filter(None, columns.unusual_ns):
        found.update(each)
    found["compute"] = sum(found[word] for word in COMPUTE_PHASES)
    found["saving"] = found["checkpoint"] + found["eval"]
    paced_ns = [sum(map(each.__getitem__, _COMPUTE)) for each in columns.paced_ns if each]
    found["launch"] = sum(paced_ns)
    found["data on host"] = sum([each[_DATA] for each in columns.host_ns if each])
    found["took"], found["wait"] = sum(columns.took_ns), sum(columns.wait_ns)
    found[GARBAGE] = sum(columns.garbage_ns)
    return found


class Bounds(Detector):
    """Finds what limits the speed of one run.

    `Stragglers` feeds it all steps, also those with compilation, checkpoints or evaluation.
    """

    def __init__(self) -> None:
        self._ranks: Sequence[RankState] = ()
        # By pipeline stage: the indices of its ranks in `_ranks`.
        self._stages: Mapping[int, Sequence[int]] = {}
        # Whether the last step had measured waits for other ranks, from its calls to process
        # groups.
        self._waits_show = False
        self._slow_stages = ""
        # By rank: the time that its host needs to launch kernels. `start_again` keeps these,
        # because a host may show this time only in its first steps.
        self._launches: dict[Labels, LaunchNeed] = {}
        # The last `_STEPS` steps of all ranks, oldest first.
        self._steps: list[Sequence[StepFacts]] = []
        self._bubbles_ns: list[Sequence[int]] = []
        # The number of steps since the last check.
        self._fresh = 0
        self._open: Verdict | None = None
        # Sums of the shares over all checks that confirmed the open verdict, and the number of
        # these checks.
        self._sums: Mapping[str, float] = {}
        self._found = 0
        self._candidate = ""
        self._checks = 0
        self._changes: list[Change] = []

    def start_again(self, ranks: Sequence[RankState], stages: Sequence[int]) -> None:
        """Start over with these ranks. *stages*: the pipeline stage of each rank.

        `feed_row` must get the steps of the ranks in the same order.
        """
        if not ranks:
            self._close()
        self._ranks = ranks[:_MOST_RANKS]
        self._stages = by_stage(stages[:_MOST_RANKS])
        if len(self._stages) != len(set(stages)):
            self._stages = {}
        before = self._launches
        self._launches = {
            each.labels: before.get(each.labels, LaunchNeed()) for each in self._ranks
        }
        self._steps.clear()
        self._bubbles_ns.clear()
        self._fresh = 0

    def feed_row(
        self, facts: Sequence[StepFacts], bubble_ns: Sequence[int] | None, *, first: bool
    ) -> None:
        """Add a step that all ranks have measured.

        *bubble_ns*: by rank, the time it waited for other pipeline stages (the bubble); None if
        waits were not measured, so the phases may include them. *first*: this is one of the run's
        first steps, which allocate memory and start workers.
        """
        facts, self._waits_show = facts[:_MOST_RANKS], bubble_ns is not None
        bubble_ns = bubble_ns[:_MOST_RANKS] if bubble_ns else (0,) * len(facts)
        if any(bubble_ns):
            facts = [
                each._replace(wait_ns=each.wait_ns - ns)
                for each, ns in zip(facts, bubble_ns, strict=True)
            ]
        if facts[0].paced_ns is not None:
            for launches, each in zip(self._launches.values(), facts, strict=True):
                launches.follow(each)
        if first:
            return
        self._steps.append(facts)
        self._bubbles_ns.append(bubble_ns)
        del self._steps[:-_STEPS], self._bubbles_ns[:-_STEPS]
        self._fresh += 1

    def poll(self, now_ns: int) -> list[Change]:
        if self._fresh >= _CHECK_EVERY and len(self._steps) == _STEPS:
            self._fresh = 0
            self._judge(self._steps[-1][-1], self._shares())
        changes, self._changes = self._changes, []
        return changes

    def present(self) -> list[Verdict]:
        """The open verdict, with the shares of the last check that confirmed it."""
        return [self._open] if self._open else []

    def _shares(self) -> Mapping[str, float]:
        """For each possible bound: its share of the step time, as the median of the ranks."""
        ranks = list(map(_spent_ns, zip(*self._steps, strict=True)))
        by_rank = [{word: each[word] / each["took"] for word in _OWN} for each in ranks]
        # The lower median: if only one of two ranks waits for data, that rank is a straggler, and
        # the run is not input-bound.
        shares = {word: median_low([each[word] for each in by_rank]) for word in _OWN}
        # A device whose host runs ahead of it never idles, even if the loader or the launches of
        # the host are slow. So the device's clock alone would hide a slow host: use the times on
        # the hosts too.
        steps_ns = [each["took"] / _STEPS for each in ranks]
        launches = [
            each.usual_ns(step_ns) / step_ns
            for each, step_ns in zip(self._launches.values(), steps_ns, strict=True)
        ]
        loads = [each["data on host"] / each["took"] for each in ranks]
        for word, on_host in (("data", loads), ("launch", launches)):
            most = max(each[word] for each in by_rank)
            shares[word] = max(shares[word], min(median_low(on_host), most))
        own = {word for each in self._ranks for word in each.own_collectives}
        for word in own & shares.keys() if not self._waits_show else ():
            # The phase includes waits in the user's own collectives. The rank that waits least in
            # them has the shortest phase, so the minimum over all ranks is closest to the real
            # work.
            shares[word] = min([each[word] for each in by_rank])
        return {**shares, **self._waits(ranks), **self._of_pipeline(ranks)}

    def _of_pipeline(self, ranks: Sequence[Mapping[str, int]]) -> dict[str, float]:
        """The shares of two bounds of a pipeline: the bubble, and the extra work of the slowest
        stage."""
        if len(self._stages) < 2 or -1 in self._stages:
            return {}
        bubbles_ns = list(map(sum, zip(*self._bubbles_ns, strict=True)))
        works_ns = [
            each["took"] - each["wait"] - ns for each, ns in zip(ranks, bubbles_ns, strict=True)
        ]
        by_stage_ns = {
            stage: median([works_ns[at] for at in places]) for stage, places in self._stages.items()
        }
        mean_ns = sum(by_stage_ns.values()) / len(by_stage_ns)
        more = {stage: ns / mean_ns - 1 for stage, ns in by_stage_ns.items()}
        slow = [stage for stage, each in more.items() if each >= _LIMITS["stage"]]
        self._slow_stages = " and ".join(map(str, sorted(slow))) or self._slow_stages
        return {
            "bubble": median_low(
                [ns / each["took"] for each, ns in zip(ranks, bubbles_ns, strict=True)]
            ),
            "stage": max(more.values()),
        }

    def _waits(self, ranks: Sequence[Mapping[str, int]]) -> dict[str, float]:
        """The shares of waits for other ranks, by cause."""
        took_ns = sum([each["took"] for each in ranks]) / len(ranks)
        summed_ns = [each["wait"] for each in ranks]
        # In each step, the rank that waits least has no other known rank to wait for: its wait is
        # communication. The rest of the waits is for late ranks: always for the same one, or in
        # each step for another one ("late in turn").
        for_all_ns = sum([min([each.wait_ns for each in step]) for step in self._steps])
        # While one rank collects garbage, the others wait for it. So each step loses the longest
        # garbage collection of any rank.
        in_turn_ns = sum([max([each.garbage_ns for each in step]) for step in self._steps])
        typical_ns = median_low([each[GARBAGE] for each in ranks])
        return {
            "comm_wait": for_all_ns / took_ns,
            "late_in_turn": (min(summed_ns) - for_all_ns) / took_ns,
            "late_ranks": max(median(summed_ns) - min(summed_ns), 0.0) / took_ns,
            GARBAGE: float(min(in_turn_ns, len(ranks) * typical_ns) / took_ns),
        }

    def _leading(self, shares: Mapping[str, float]) -> str:
        present = self._open.phase if self._open else ""
        over = {
            word: shares[word] / limit
            for word, limit in _LIMITS.items()
            if shares.get(word, 0.0) > (_STAYS * limit if word == present else limit)
        }
        if present in over:
            # Hysteresis: another bound must exceed its limit by more to replace the present one.
            over[present] *= 1 / _STAYS
        if over:
            return max(over, key=lambda word: over[word])
        return "compute" if shares["compute"] > 0.5 else ""

    def _judge(self, facts: StepFacts, shares: Mapping[str, float]) -> None:
        """Open, update or close the verdict. *facts*: the last step of any rank, for number and
        time."""
        leading = self._leading(shares)
        self._checks = self._checks + 1 if leading == self._candidate else 1
        self._candidate = leading
        if leading == (self._open.phase if self._open else ""):
            if self._open:
                self._add(shares)
                self._open = self._open._replace(**self._figures(leading, shares))
            return
        if self._checks < _CHECKS:
            return
        self._close()
        if not leading:
            return
        self._add(shares)
        self._open = Verdict(
            "bound",
            run_labels(self._ranks[0].labels),
            leading,
            **self._figures(leading, shares),
            step=facts.number,
            since_ns=facts.ended_ns,
        )
        self._changes.append(Change(self._open, True))

    def _close(self) -> None:
        """Close the open verdict. Its figures become the means of all checks, because the last
        steps may already belong to another bound."""
        if self._open:
            shares = {word: each / self._found for word, each in self._sums.items()}
            over = self._open._replace(**self._figures(self._open.phase, shares))
            self._changes.append(Change(over, False))
        self._open, self._sums, self._found = None, {}, 0

    def _add(self, shares: Mapping[str, float]) -> None:
        self._sums = {word: self._sums.get(word, 0.0) + share for word, share in shares.items()}
        self._found += 1

    def _figures(self, leading: str, shares: Mapping[str, float]) -> dict[str, Any]:
        """The sentence and evidence of a verdict, as fields of `Verdict`."""
        share, stage = percent(shares[leading]), self._slow_stages
        sentence = _SENTENCES[leading].format(share=share, stage=stage)
        world_size = max(each.world_size for each in self._ranks)
        if leading == "comm_wait" and len(self._ranks) < min(world_size, _MOST_RANKS):
            known = len(self._ranks)
            sentence += f" Of {world_size} ranks {known} are compared: another may be late."
        own = {word for each in self._ranks for word in each.own_collectives}
        # If the user's own collectives (as in a mixture of experts) run in forward or backward, the
        # time of these phases includes waits, so the share of computation is uncertain.
        in_compute = leading == "compute" and not own.isdisjoint(COMPUTE_PHASES)
        unknown = in_compute or any(each.waits_known is False for each in self._ranks)
        if unknown and not self._waits_show:
            sentence += " A phase may hold waits for other ranks, which cannot be told apart here."
        evidence = {"shares": rounded(shares), "steps": _STEPS}
        return {"sentence": sentence, "evidence": evidence}
