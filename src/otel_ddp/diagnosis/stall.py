"""Says when the ranks of a run on this node no longer move, and which of them holds them up."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from otel_ddp.catalog import NODE_LABELS
from otel_ddp.diagnosis.culprits import judge, reason
from otel_ddp.diagnosis.evidence import Evidence, Position, Question
from otel_ddp.diagnosis.patience import LONG, UNHOOKED, Rank
from otel_ddp.diagnosis.verdict import Change, Verdict, Who

# The verdict waits for the last answers, but not longer than this.
_HEARING_NS = 1_500_000_000
# How often they are asked again while nobody moves, in floors.
_AGAIN = 1.0
# Where no hook tells of progress the place in the program may: so many times until the limit.
_WHERE_AGAIN = 1 / 8
# Whoever did not look for so long was maybe not the only one who could not run.
_PAUSE_S = 5.0
# A phase that was merely long: what it took is learnt.
_MERELY_LONG = ("not_reached", "long_phase")


class Stalls:
    """The ranks of one run on one node. Fed a few times a second.

    Times are nanoseconds since 1970, of a clock that does not jump when the machine's is set.
    """

    def __init__(self, floor_s: float = 60.0) -> None:
        self._floor_s = floor_s
        self._ranks: dict[Who, Rank] = {}
        self._asked: dict[Who, tuple[Question, int]] = {}
        self._looked_ns = 0
        self._over_since_ns = 0
        # What is waited for before it is told, where that is longer than all limits.
        self._patience_s = 0.0
        self._open: Verdict | None = None
        self._cause = ""
        self.limits: dict[Who, float] = {}
        """How many seconds each rank may stand still, as in force now."""
        self.stalled: dict[Who, bool] = {}
        """Whether each living rank is part of a stall."""
        self.reasons: dict[Who, str] = {}
        """Why each of those that may stand still does not move: words of the catalogue."""
        self.questions: dict[Who, Question] = {}
        """Whom to ask now, and what. Asked once: a later look asks for something else."""

    def learn(
        self,
        now_ns: int,
        who: Who,
        began_ns: int,
        steps_s: Sequence[float],
        longest_ns: Mapping[str, int],
    ) -> None:
        """Steps of a rank, from when on they were, with the longest stretch of each phase."""
        rank = self._ranks.get(who)
        if rank is None:
            rank = self._ranks[who] = Rank()
        if self._paused(now_ns):
            # What is told first after a pause is of it, and comes before the next look.
            rank.not_learnt_before_ns = now_ns
        if began_ns < rank.not_learnt_before_ns:
            return
        rank.learn(steps_s)
        for phase, spent_ns in longest_ns.items():
            if spent_ns > 1e9 * rank.longest_s.get(phase, 0.0):
                rank.stretch(phase, began_ns, began_ns + spent_ns)

    def poll(
        self, now_ns: int, positions: Iterable[Position], evidence: Mapping[Who, Evidence]
    ) -> list[Change]:
        """Where everybody is now, and what is known of them: what has changed by that."""
        found = {each.who: each for each in positions}
        floor_s = self._floor_s
        paused, spent_ns = self._paused(now_ns), now_ns - self._looked_ns
        self._looked_ns = now_ns
        evidence = dict(evidence)
        for who, position in found.items():
            rank = self._ranks.get(who)
            if rank is None or rank.succeeded_by(position):
                rank = self._ranks[who] = Rank()
            if paused:
                rank.pause(spent_ns)
                rank.not_learnt_before_ns = now_ns
            # A phase that was merely long is learnt; what was stopped says nothing about it.
            if self._open is not None and self._cause not in _MERELY_LONG:
                rank.not_learnt_before_ns = now_ns
            rank.move(position, now_ns)
            if who in evidence:
                evidence[who] = _fresh(rank, evidence[who])
        self._ranks = {who: each for who, each in self._ranks.items() if who in found}
        living = {
            who: self._ranks[who]
            for who, each in found.items()
            if each.alive and each.state in ("starting", "running")
        }
        self.limits = {who: rank.limit_s(floor_s) for who, rank in living.items()}
        self.reasons = {}
        if not living:
            return self._end()
        ages = {who: rank.age_s(now_ns) for who, rank in living.items()}
        if any(ages[who] < 0.5 * self.limits[who] for who in living):
            self._asked.clear()
            self.questions = {}
            self._over_since_ns = 0
            self.stalled = dict.fromkeys(living, False)
            return self._end()
        over = all(ages[who] >= self.limits[who] for who in living)
        self._ask(living, "what" if over else "where", now_ns)
        self.reasons = {
            who: reason(found[who], evidence.get(who, Evidence()), floor_s) for who in living
        }
        if over and self._open is None:
            patient = self._has_patience(living, found, evidence)
            self._patience_s = LONG * floor_s if patient else 0.0
            over = all(age_s >= self._patience_s for age_s in ages.values())
        self.stalled = dict.fromkeys(living, over or self._open is not None)
        if not over:
            self._over_since_ns = 0
            return []
        self._over_since_ns = self._over_since_ns or now_ns
        if self._open is None and not self._heard(living, evidence, now_ns):
            return []
        return self._tell(now_ns, living, found, evidence)

    def _paused(self, now_ns: int) -> bool:
        """Whether nobody has looked for so long that maybe nobody could run."""
        spent_ns = now_ns - (self._looked_ns or now_ns)
        return spent_ns > max(_PAUSE_S, self._floor_s / 4) * 1e9

    @property
    def suspects(self) -> frozenset[Who]:
        """Who was asked, and has not moved since."""
        return frozenset(self._asked)

    # -- asking

    def _ask(self, living: Mapping[Who, Rank], question: Question, now_ns: int) -> None:
        share, least_s = (_WHERE_AGAIN, 0.5) if question == "where" else (_AGAIN, 2.0)
        again_ns = int(max(least_s, share * self._floor_s) * 1e9)
        self.questions = {}
        for who in living:
            kind, asked_ns = self._asked.get(who, ("", 0))
            later = now_ns - asked_ns >= again_ns
            if question == "where":
                place = living[who].position
                later &= place is not None and place.phase in UNHOOKED
            if kind != question or later:
                self.questions[who] = question
                self._asked[who] = question, now_ns

    def _heard(
        self, living: Mapping[Who, Rank], evidence: Mapping[Who, Evidence], now_ns: int
    ) -> bool:
        """Whether everybody has said what there is to say, or has had the time to."""
        if now_ns - self._over_since_ns >= _HEARING_NS:
            return True
        if self.questions:
            return False
        return all(
            known.kind == "what" and known.answered_ns >= self._over_since_ns
            for who in living
            for known in [evidence.get(who, Evidence())]
        )

    # -- judging

    def _has_patience(
        self,
        living: Mapping[Who, Rank],
        found: Mapping[Who, Position],
        evidence: Mapping[Who, Evidence],
    ) -> bool:
        """Whether this may well take longer, and nobody here can know how long.

        All wait for ranks on other nodes; or all others have finished, and this is what comes
        after a training; or whom they wait for goes on in his program.
        """
        ended = [each for who, each in found.items() if who not in living]
        finished = bool(ended) and all(each.state == "finished" for each in ended)
        world = max((each.world or 0 for each in found.values()), default=0)
        wandering = {found[who].rank for who, rank in living.items() if rank.wanders}
        if world <= len(found) and not finished and not wandering:
            return False
        judged = judge(living, found, evidence, self._floor_s)
        if judged.cause in _MERELY_LONG and wandering.issuperset(judged.culprits):
            return True
        return judged.cause == "elsewhere" or (finished and judged.cause == "long_phase")

    # -- telling

    def _tell(
        self,
        now_ns: int,
        living: Mapping[Who, Rank],
        found: Mapping[Who, Position],
        evidence: Mapping[Who, Evidence],
    ) -> list[Change]:
        judged = judge(living, found, evidence, self._floor_s)
        before = self._open
        said = {"cause": judged.cause, "culprits": list(judged.culprits)}
        if before is not None and (said.items(), judged.phase) == (
            *({key: before.evidence[key] for key in said}.items(), before.phase),
        ):
            return []
        since_ns = max(rank.moved_ns for rank in living.values())
        still_s = (now_ns - since_ns) / 1e9
        limit_s = max(*self.limits.values(), self._patience_s)
        sentence = (
            f"nobody moves since {still_s:.0f} s (limit {limit_s:.0f} s): {judged.why}. "
            f"{judged.look}"
        )
        verdict = Verdict(
            "stall",
            _common(found),
            judged.phase,
            sentence,
            {
                **said,
                "limit_s": limit_s,
                "ranks": [
                    _row(self._ranks[who], evidence.get(who, Evidence()), now_ns) for who in found
                ],
            },
            judged.step,
            since_ns,
        )
        self._open, self._cause = verdict, judged.cause
        return [Change(verdict, opened=True)]

    def _end(self) -> list[Change]:
        """Somebody moves, or nobody is left."""
        if self._open is None:
            return []
        verdict, self._open = self._open, None
        return [Change(verdict, opened=False)]


def _fresh(rank: Rank, known: Evidence) -> Evidence:
    """What was answered before the rank moved is no evidence any more."""
    numbers = tuple((each.name, each.enqueued) for each in known.groups)
    if known.heard and known.answered_ns > rank.moved_ns:
        # Whoever puts further collectives in line moves, though no hook sees it.
        if rank.numbers and rank.numbers != numbers:
            rank.moved_ns = known.answered_ns
        rank.numbers = numbers
    if known.heard and known.answered_ns > rank.moved_ns:
        rank.stands_at(known.stack)
        return known
    return Evidence(silent_s=known.silent_s, kernel=known.kernel)


def _common(found: Mapping[Who, Position]) -> Who:
    """The labels of the run, and of the node where all are on one."""
    first = dict(next(iter(found)))
    return tuple(
        (key, first[key])
        for key in NODE_LABELS
        if key in first and all(dict(who).get(key) == first[key] for who in found)
    )


def _row(rank: Rank, known: Evidence, now_ns: int) -> dict[str, Any]:
    """One rank of the table that stands behind a verdict."""
    position = rank.position
    assert position is not None
    row: dict[str, Any] = {
        "rank": position.rank,
        "state": position.state if position.alive else "gone",
        "step": position.step,
        "phase": position.name or position.phase,
        "still_s": round(rank.age_s(now_ns), 1),
        "answers": known.heard and known.silent_s is None,
    }
    if known.kernel is not None:
        row["process"] = known.kernel.state
        row["busy"] = None if known.kernel.busy is None else round(known.kernel.busy, 2)
    if known.groups:
        row["collectives"] = {
            each.description or each.name: [each.enqueued, each.completed]
            for each in known.groups
            if each.enqueued
        }
    if known.stack:
        row["stack"] = [str(each) for each in known.stack[:10]]
    return row
