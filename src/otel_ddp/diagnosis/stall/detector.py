"""Opens a verdict when no rank of a run moves, and closes it when a rank moves again.

How long a rank may stand still is learnt from its own steps and phases.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from otel_ddp.diagnosis.detector import Detector, Observation, RankState
from otel_ddp.diagnosis.stall.culprits import Findings, find_culprits
from otel_ddp.diagnosis.stall.evidence import Evidence, Frame, Position, Question, Suspect
from otel_ddp.diagnosis.steps import Step
from otel_ddp.diagnosis.verdict import Change, Labels, Verdict, node_of
from otel_ddp.vocabulary.words import NODE_LABELS, PHASE_CODE, UNUSUAL_PHASES, phase_word

# How long a new verdict waits for the ranks to report their stacks and collectives: the first if
# all ranks are on one node, the second if on several.
_ANSWERS_TAKE_NS = 1_500_000_000
_FROM_NODES_NS = 3_000_000_000
# While no rank moves, the agent asks the ranks for their evidence again at this interval, as a
# multiple of `floor_s` (the shortest limit).
_ASK_AGAIN = 1.0
# In phases without hooks, the agent asks for the stacks more often, at this interval, as a multiple
# of `floor_s`: a changed stack shows progress.
_ASK_WHERE_AGAIN = 1 / 8
# If the agent did not run for this long, the ranks may have been suspended together with it.
_PAUSE_S = 5.0
# An open verdict and its post-mortem are updated when the stall has lasted longer than at the last
# update by both this many seconds and this share.
_SAY_AGAIN_S, _SAY_AGAIN = 1.0, 0.02
# A stall with one of these causes may have been just a long phase. So its length is learnt like
# that of any phase, and raises the limit for the next time.
_JUST_LONG = ("not_reached", "long_phase")

# -- limits

# A rank stalls if it has not moved for longer than its limit: the longest of _STEPS times its p99
# step, _STRETCHES times its longest time in this phase so far, and the shortest limit (`floor_s`).
# If the user announced a duration for the phase, the limit is _ANNOUNCED times that.
_STEPS, _STRETCHES, _ANNOUNCED = 10.0, 3.0, 1.5
# In unusual phases (compilation, checkpoint, evaluation) and before the end of the first step, the
# shortest limit is multiplied by _LONG.
_LONG = 10.0
# p99 is computed over the last _REMEMBERED steps, and again after each _UPDATE_EVERY new steps.
_REMEMBERED, _UPDATE_EVERY = 1000, 50
# No hook runs during these phases. So in them, a rank also counts as moving when it logs values.
_UNHOOKED = frozenset({"other", "eval", "checkpoint", "unmeasured"})


class _Movement:
    """One rank: when it last moved, and how long its steps and phases took."""

    def __init__(self) -> None:
        self.position: Position | None = None
        # When the rank entered its phase, when it last moved, and when `update` was last called.
        self.entered_ns = self.moved_ns = self.polled_ns = 0
        self.steps = array("d")
        self.seen_steps = self.counted_steps = 0
        self.longest_step_s = self.p99_s = 0.0
        self.longest_s: dict[str, float] = {}
        self.numbers: tuple[tuple[str, int | None], ...] = ()
        self.stack: tuple[Frame, ...] = ()
        # Whether the stack has changed in a phase without hooks, such as an evaluation.
        self.moves_unhooked = False
        self.not_learnt_before_ns = 0

    def limit_s(self, floor_s: float) -> float:
        """How long the rank may stay at its present step and phase before it counts as stalled."""
        position = self.position
        assert position is not None
        if position.expect_s is not None:
            return max(floor_s, _ANNOUNCED * position.expect_s)
        # The first step takes longer: models are loaded and kernels compiled.
        starts = position.step is None and not self.seen_steps
        patience = _LONG if position.phase in UNUSUAL_PHASES or starts else 1.0
        usual_s = _STEPS * self.longest_step_s
        return max(
            patience * floor_s,
            # Computing p99 means sorting, so do it only if p99 could exceed the shortest limit.
            _STEPS * self._p99_s() if usual_s > patience * floor_s else 0.0,
            _STRETCHES * self.longest_s.get(position.phase, 0.0),
        )

    def update(self, position: Position, now_ns: int) -> None:
        """Set the rank's position."""
        before = self.position
        self.position = position
        if before is None:
            self.entered_ns = self.moved_ns = min(position.since_ns, now_ns)
        elif before.place != position.place:
            self.learn_stretch(before.phase, self.entered_ns, self.polled_ns)
            # Use the agent's clock: the clock of the process may have been set in the meantime.
            self.entered_ns = self.moved_ns = now_ns
            self.numbers, self.stack, self.moves_unhooked = (), (), False
        elif position.phase in _UNHOOKED and position.written != before.written:
            self.moved_ns = now_ns
        self.polled_ns = now_ns

    def pause(self, spent_ns: int) -> None:
        """Do not count a pause of the agent as time in which the rank has not moved."""
        self.entered_ns += spent_ns
        self.moved_ns += spent_ns

    def learn_stretch(self, phase: str, began_ns: int, ended_ns: int) -> None:
        """Learn the length of a phase that the rank has left.

        Waits are not learnt: their lengths depend on other ranks.
        """
        if phase != "comm_wait" and began_ns >= self.not_learnt_before_ns:
            spent_s = (ended_ns - began_ns) / 1e9
            self.longest_s[phase] = max(spent_s, self.longest_s.get(phase, 0.0))

    def learn_steps(self, steps_s: Sequence[float]) -> None:
        self.steps.extend(steps_s)
        del self.steps[:-_REMEMBERED]
        self.seen_steps += len(steps_s)
        self.longest_step_s = max(self.longest_step_s, *steps_s)

    def _p99_s(self) -> float:
        fresh = self.seen_steps - self.counted_steps
        if fresh >= _UPDATE_EVERY or (fresh and self.counted_steps < 10):
            self.counted_steps = self.seen_steps
            ordered = sorted(self.steps)
            self.p99_s = ordered[int(0.99 * (len(ordered) - 1))]
        return self.p99_s

    def answered(self, known: Evidence) -> Evidence:
        """Update the movement from the rank's answers. Returns the evidence; answers from before
        the rank last moved are removed."""
        if known.answered and known.answered_ns > self.moved_ns:
            # A rank that has enqueued more collectives since its last answer has moved, even if no
            # hook ran.
            numbers = tuple((each.name, each.enqueued) for each in known.groups)
            if self.numbers and self.numbers != numbers:
                self.moved_ns = known.answered_ns
            self.numbers = numbers
        if not known.answered or known.answered_ns <= self.moved_ns:
            return Evidence(silent_s=known.silent_s, kernel=known.kernel)
        # In phases without hooks, a changed stack shows progress.
        if known.stack and self.position is not None and self.position.phase in _UNHOOKED:
            self.moves_unhooked |= bool(self.stack) and self.stack != known.stack
            self.stack = known.stack
        return known

    def still_s(self, now_ns: int) -> float:
        """How long the rank has not moved."""
        return max(0.0, (now_ns - self.moved_ns) / 1e9)


# -- the detector


class _Open(NamedTuple):
    """An open verdict."""

    verdict: Verdict
    findings: Findings
    # Which ranks were stalled, and for how long, when the verdict's sentence was written.
    stalled: frozenset[Labels]
    stalled_s: float


class Stalls(Detector):
    """Detects stalls of one run.

    Times are nanoseconds since 1970. Setting the system clock during the run does not shift them.
    """

    def __init__(self, floor_s: float = 60.0) -> None:
        """*floor_s*: no rank's limit, i.e. its longest time without movement, is shorter than
        this."""
        self._floor_s = floor_s
        self._unheard: Collection[Labels] = ()
        self._ranks: dict[Labels, _Movement] = {}
        self._living: dict[Labels, Suspect] = {}
        # The last position of each ended process, and when it ended. Living ranks may wait for
        # them.
        self._ended: dict[Labels, tuple[Position, int]] = {}
        self._world_size = 0
        self._asked: dict[Labels, tuple[Question, int]] = {}
        self._polled_ns = 0
        self._over_since_ns = 0
        # A stall that may end by itself gets this longer limit; 0 for other stalls.
        self._patience_s = 0.0
        self._open: _Open | None = None
        self.remark = ""
        """A remark from the caller, which the verdict's sentence appends to the cause."""
        self.ended: frozenset[Labels] = frozenset()
        self.limits_s: dict[Labels, float] = {}
        self.questions: dict[Labels, Question] = {}
        """By rank: what the caller is to ask it now. Each poll replaces the requests."""

    def feed(self, rank: RankState, seen: Observation) -> None:
        # This rank's newest step (or process) began after these processes had ended, so the rank
        # does not wait for them: forget them.
        since_ns = max([rank.began_ns, *(step.began_ns for step in seen.steps[-1:])])
        if self._ended:
            self._ended = {key: each for key, each in self._ended.items() if each[1] >= since_ns}
        self._world_size = rank.world_size
        if rank.is_beside or seen.ended is not None:
            self.forget(rank.labels)
            if seen.ended is not None and seen.position is not None:
                self._ended[rank.labels] = seen.position, seen.ended.ended_ns
            return
        if seen.steps:
            self._learn(rank.labels, seen.steps, seen.now_ns)
        if seen.position is not None:
            self._living[rank.labels] = Suspect(seen.position, seen.evidence)

    def forget(self, labels: Labels) -> None:
        self._living.pop(labels, None)

    def _learn(self, labels: Labels, steps: Sequence[Step], now_ns: int) -> None:
        rank = self._ranks.get(labels)
        if rank is None:
            rank = self._ranks[labels] = _Movement()
        if self._was_paused(now_ns):
            # A step that spans a pause of the agent is too long to learn from. `poll` would notice
            # the pause only after these steps are learnt, so check for it here too.
            rank.not_learnt_before_ns = now_ns
        began_ns = steps[0].began_ns
        if began_ns < rank.not_learnt_before_ns:
            return
        rank.learn_steps([(step.ended_ns - step.began_ns) / 1e9 for step in steps])
        # A step with very many parts stores only a sum per phase for its last parts. The sum is
        # learnt like one long stretch of that phase; this can only raise the limit.
        longest_ns: dict[int, int] = {}
        for parts in [step.parts for step in steps]:
            for code, spent_ns in zip(parts.codes, parts.spans_ns, strict=True):
                if spent_ns > longest_ns.get(code, 0):
                    longest_ns[code] = spent_ns
        for code, spent_ns in longest_ns.items():
            rank.learn_stretch(phase_word(code & PHASE_CODE), began_ns, began_ns + spent_ns)

    def poll(self, now_ns: int, unheard: Collection[Labels] = ()) -> list[Change]:
        """Judge the ranks at this moment. *unheard*: the nodes whose data no longer arrives."""
        self._unheard = unheard
        # Living ranks may wait for ended ones too, but not for ended evaluators, which have a
        # smaller world size. A living process replaces an ended one with the same labels.
        found = {
            labels: Suspect(position)
            for labels, (position, _) in self._ended.items()
            if position.world is None or position.world >= self._world_size
        }
        found = self._update_ranks(now_ns, {**found, **self._living})
        living = {
            labels: each
            for labels, each in found.items()
            if each.position.alive and each.position.state in ("starting", "running")
        }
        limits_s = {labels: self._ranks[labels].limit_s(self._floor_s) for labels in living}
        self.limits_s = limits_s
        still_s = {labels: self._ranks[labels].still_s(now_ns) for labels in living}
        if not living or any(still_s[labels] < 0.5 * limits_s[labels] for labels in living):
            self._asked.clear()
            self.questions = {}
            self._over_since_ns = 0
            return self._close()
        over = all(still_s[labels] >= limits_s[labels] for labels in living)
        self._choose_questions(living, "what" if over else "where", now_ns)
        if over and self._open is None:
            patient = self._may_take_longer(living, found)
            self._patience_s = _LONG * self._floor_s if patient else 0.0
            over = min(still_s.values()) >= self._patience_s
        if not over:
            self._over_since_ns = 0
            return []
        self.ended = self._open.stalled - living.keys() if self._open is not None else frozenset()
        if self.ended:
            # If ranks died during the stall, the remaining ranks alone would show a wrong cause, so
            # the verdict stays as it is. If one of them finished, the stall is over.
            states = [found[each].position.state for each in self.ended & found.keys()]
            return self._close() if "finished" in states else []
        self._over_since_ns = self._over_since_ns or now_ns
        if self._open is None and not self._answers_are_in(living.values(), now_ns):
            return []
        return self._update_verdict(now_ns, living, found)

    def _update_ranks(self, now_ns: int, found: Mapping[Labels, Suspect]) -> dict[Labels, Suspect]:
        """Update positions and evidence of the ranks; returns them without outdated evidence."""
        paused, spent_ns = self._was_paused(now_ns), now_ns - self._polled_ns
        self._polled_ns = now_ns
        fresh = {}
        for labels, (position, known, *_) in found.items():
            rank = self._ranks.get(labels)
            before = rank.position if rank is not None else None
            # A new process has taken over the labels of an ended one: start with an empty history.
            if rank is None or (before is not None and position.alive and not before.alive):
                rank = self._ranks[labels] = _Movement()
            if paused:
                rank.pause(spent_ns)
                rank.not_learnt_before_ns = now_ns
            # During a stall, learn no durations from the rank, unless the stall may be just a long
            # phase.
            if self._open is not None and self._open.findings.cause not in _JUST_LONG:
                rank.not_learnt_before_ns = now_ns
            rank.update(position, now_ns)
            known = rank.answered(known)
            if position.phase == "unmeasured" and known.phase:
                position = position._replace(phase=known.phase)
            fresh[labels] = Suspect(position, known)
        self._ranks = {labels: each for labels, each in self._ranks.items() if labels in found}
        return fresh

    def _was_paused(self, now_ns: int) -> bool:
        """Whether so much time has passed since the last poll that the whole machine may have been
        suspended."""
        spent_ns = now_ns - (self._polled_ns or now_ns)
        return spent_ns > max(_PAUSE_S, self._floor_s / 4) * 1e9

    def present(self) -> list[Verdict]:
        return [] if self._open is None else [self._open.verdict]

    @property
    def summary(self) -> str:
        """Duration and cause of the open stall; empty if there is none."""
        if self._open is None:
            return ""
        return f"for {self._open.stalled_s:.0f} s: {self._open.findings.why}"

    @property
    def suspects(self) -> frozenset[Labels]:
        """The ranks that have not moved since the agent last asked them for evidence."""
        return frozenset(self._asked)

    # -- questions

    def _choose_questions(
        self, living: Mapping[Labels, Suspect], question: Question, now_ns: int
    ) -> None:
        share, least_s = (_ASK_WHERE_AGAIN, 0.5) if question == "where" else (_ASK_AGAIN, 2.0)
        again_ns = int(max(least_s, share * self._floor_s) * 1e9)
        self.questions = {}
        for labels, each in living.items():
            kind, asked_ns = self._asked.get(labels, ("", 0))
            again = now_ns - asked_ns >= again_ns
            if question == "where":
                again &= each.position.phase in _UNHOOKED
            if kind != question or again:
                self.questions[labels] = question
                self._asked[labels] = question, now_ns

    def _answers_are_in(self, living: Collection[Suspect], now_ns: int) -> bool:
        """Whether all ranks have answered, or the time to answer is over."""
        nodes = {dict(each.labels).get("node") for each in living}
        take_ns = _ANSWERS_TAKE_NS if len(nodes) == 1 else _FROM_NODES_NS
        if now_ns - self._over_since_ns >= take_ns:
            return True
        return not self.questions and all(
            each.known.kind == "what" and each.known.answered_ns >= self._over_since_ns
            for each in living
        )

    # -- the verdict

    def _find(self, living: Mapping[Labels, Suspect], found: Mapping[Labels, Suspect]) -> Findings:
        ended = [each for labels, each in found.items() if labels not in living]
        suspects = [
            each._replace(heard=node_of(labels) not in self._unheard)
            for labels, each in living.items()
        ]
        return find_culprits(suspects, ended, self._floor_s)

    def _may_take_longer(
        self, living: Mapping[Labels, Suspect], found: Mapping[Labels, Suspect]
    ) -> bool:
        """Whether the stall may well end by itself, later than the limits allow for.

        True if all ranks wait for a rank on another node; if all other ranks have finished, and the
        last one still works after the training; or if the culprits are in a phase without hooks and
        their stacks change.
        """
        ended = {each.position.state for labels, each in found.items() if labels not in living}
        finished = ended == {"finished"}
        world = max(each.position.world or 0 for each in found.values())
        moving = {
            each.position.rank
            for labels, each in living.items()
            if self._ranks[labels].moves_unhooked
        }
        if world <= len(found) and not finished and not moving:
            return False
        findings = self._find(living, found)
        if findings.cause in _JUST_LONG and moving.issuperset(findings.culprits):
            return True
        return findings.cause == "elsewhere" or (finished and findings.cause == "long_phase")

    def _update_verdict(
        self, now_ns: int, living: Mapping[Labels, Suspect], found: Mapping[Labels, Suspect]
    ) -> list[Change]:
        """Open the verdict; open it anew if cause, culprits or phase have changed; else update
        it."""
        since_ns = max(self._ranks[labels].moved_ns for labels in living)
        still_s = (now_ns - since_ns) / 1e9
        findings = self._find(living, found)
        before = self._open
        # Compare the first three fields of Findings: cause, culprits and phase.
        is_same = before is not None and before.findings[:3] == findings[:3]
        if before is not None and is_same:
            longer_s = max(_SAY_AGAIN_S, _SAY_AGAIN * before.stalled_s)
            if still_s < before.stalled_s + longer_s:
                return []
        limit_s = max(*self.limits_s.values(), self._patience_s)
        why = f"{findings.why}; {self.remark}" if self.remark else findings.why
        verdict = Verdict(
            "stall",
            _common_labels(found),
            findings.phase,
            f"no rank has moved for {still_s:.0f} s (limit {limit_s:.0f} s): {why}. "
            f"{findings.advice}",
            {
                "cause": findings.cause,
                "culprits": list(findings.culprits),
                # The history keeps no lists (such as `culprits`) of closed verdicts, so name the
                # culprits' node.
                "node": findings.node,
                "limit_s": limit_s,
                "ranks": [
                    _row(each, self._ranks[labels].still_s(now_ns))
                    for labels, each in found.items()
                ],
            },
            findings.step,
            since_ns,
        )
        self._open = _Open(verdict, findings, frozenset(living), still_s)
        return [] if is_same else [Change(verdict, opened=True)]

    def _close(self) -> list[Change]:
        before, self._open, self.remark = self._open, None, ""
        return [] if before is None else [Change(before.verdict, opened=False)]


def _common_labels(found: Iterable[Labels]) -> Labels:
    """The labels of the run, and the `node` label if all ranks are on one node."""
    first = dict(next(iter(found)))
    return tuple(
        (key, first[key])
        for key in NODE_LABELS
        if key in first and all(dict(labels).get(key) == first[key] for labels in found)
    )


def _row(each: Suspect, still_s: float) -> dict[str, Any]:
    """One rank's entry in the evidence of a verdict."""
    position, known, *_ = each
    row: dict[str, Any] = {
        "rank": position.rank,
        "state": position.state if position.alive else "gone",
        "step": position.step,
        "phase": position.name or position.phase,
        "still_s": round(still_s, 1),
        "answers": known.answered and known.silent_s is None,
    }
    if known.kernel is not None:
        row["process"] = known.kernel.state
        row["busy"] = None if known.kernel.busy is None else round(known.kernel.busy, 2)
    if known.groups:
        row["collectives"] = {
            group.description or group.name: [group.enqueued, group.completed]
            for group in known.groups
            if group.enqueued
        }
    if known.stack:
        row["stack"] = [str(frame) for frame in known.stack[:10]]
    return row
