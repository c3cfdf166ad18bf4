"""Says when the ranks of a run on this node no longer move, and which of them holds them up."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from otel_ddp.diagnosis.verdict import Change, Verdict, Who

Question = Literal["where", "what", "when"]

# 10 times the step that 99 of 100 are shorter than; 3 times the longest stretch of a phase.
_STEPS, _STRETCHES, _ANNOUNCED = 10.0, 3.0, 1.5
# Before the first step, and in these phases, a rank may be silent for so many times as long.
_LONG_PHASES = frozenset({"checkpoint", "eval", "compile"})
_LONG = 10.0
# As many steps as p99 is taken of, and how often it is.
_REMEMBERED, _COUNT_EVERY = 1000, 50
# A witness that has not answered for so long is kept from it: the interpreter's lock is held.
_SILENT_S, _SHORTEST_SILENCE_S = 5.0, 0.5
# The verdict waits for the last answers, but not longer than this.
_HEARING_NS = 1_500_000_000
# How often they are asked again while nobody moves, in floors.
_AGAIN = 1.0
# What is logged tells of progress where no hook does.
_UNHOOKED = frozenset({"other", "eval", "checkpoint"})
# Where these have another size on one rank than on the others, they do not belong together.
_SAME_SIZES = ("all_reduce", "allreduce", "broadcast")
# Of a core. What sleeps takes nothing; what computes may have to share it with others.
_SHARE_BUSY = 0.1
# Whoever did not look for so long was maybe not the only one who could not run.
_PAUSE_S = 5.0
# A phase that was merely long: what it took is learnt.
_MERELY_LONG = ("not_reached", "long_phase")


class Frame(NamedTuple):
    """A line of Python that a thread is at."""

    file: str
    line: int | None
    function: str

    def __str__(self) -> str:
        return f"{self.file.rpartition('/')[2]}:{self.line} ({self.function})"


class Group(NamedTuple):
    """How far a rank has come with the collectives of a process group."""

    name: str
    size: int
    enqueued: int | None
    completed: int | None = None
    backend: str = ""
    description: str = ""

    @property
    def pending(self) -> bool:
        """Whether it waits in a queue of the device. Gloo does not count what is completed well."""
        behind = self.completed is not None and self.completed < (self.enqueued or 0)
        return behind and self.size > 1 and "nccl" in self.backend


class Collective(NamedTuple):
    """One collective that a rank has put in line."""

    group: str
    number: int
    op: str
    sizes: str

    def __str__(self) -> str:
        return f"{self.op.rpartition(':')[2]} {self.sizes}".strip()


class Kernel(NamedTuple):
    """What the kernel says of a process, without its help."""

    state: str
    """Of its main thread: R runs, S sleeps, D waits for a device, T is stopped, Z is dead."""
    lasting: bool
    """Whether it was the same the last time."""
    busy: float | None
    """The main thread's share of a core since the last time."""
    waits_in: str = ""
    """The kernel's function that it sleeps in, where we may read that."""
    busy_threads: int = 0
    """How many others have used the processor since the last time."""


class Evidence(NamedTuple):
    """What was found out about one rank."""

    silent_s: float | None = None
    """For how long the last question has gone without an answer; None: it has none open."""
    heard: bool = False
    """Whether there is an answer at all, and it is of the last question that was answered."""
    kind: Question = "where"
    answered_ns: int = 0
    groups: tuple[Group, ...] = ()
    collectives: tuple[Collective, ...] = ()
    stack: tuple[Frame, ...] = ()
    """Of the main thread, the innermost first."""
    kernel: Kernel | None = None


class Position(NamedTuple):
    """Where a rank stands, as its journal says."""

    who: Who
    alive: bool
    state: str
    step: int | None
    phase: str
    """A word of the catalogue."""
    since_ns: int
    """When the phase began."""
    name: str = ""
    """The user's own name for the phase."""
    expect_s: float | None = None
    """How long the user says that it takes."""
    written: int = 0
    """How much there is in its journal: grows with everything that it logs."""
    world: int | None = None
    """How many ranks the run has, on all nodes."""

    @property
    def rank(self) -> str:
        """As the labels have it."""
        return dict(self.who).get("rank", "?")


class Findings(NamedTuple):
    """Who holds the others up, and why."""

    cause: str
    culprits: tuple[str, ...]
    phase: str
    step: int | None
    why: str
    look: str


class _Rank:
    """What is remembered of one rank."""

    def __init__(self) -> None:
        self.position: Position | None = None
        # When it was first seen in its phase, last seen to move in it, and last seen there.
        self.entered_ns = self.moved_ns = self.looked_ns = 0
        self.steps: deque[float] = deque(maxlen=_REMEMBERED)
        self.seen_steps = self.counted_steps = 0
        self.longest_step_s = self.p99_s = 0.0
        self.longest_s: dict[str, float] = {}
        self.numbers: tuple[tuple[str, int | None], ...] = ()
        self.not_learnt_before_ns = 0

    def limit_s(self, floor_s: float) -> float:
        """How long it may stand still where it is now."""
        position = self.position
        assert position is not None
        if position.expect_s is not None:
            return max(floor_s, _ANNOUNCED * position.expect_s)
        patience = _LONG if position.phase in _LONG_PHASES or self._at_start() else 1.0
        usual_s = _STEPS * self.longest_step_s
        return max(
            patience * floor_s,
            # Sorting is only worth it where it can make a difference.
            _STEPS * self._p99_s() if usual_s > patience * floor_s else 0.0,
            _STRETCHES * self.longest_s.get(position.phase, 0.0),
        )

    def _at_start(self) -> bool:
        """Models are loaded, kernels are chosen and compiled until the first step is over."""
        return self.position is not None and self.position.step is None and not self.seen_steps

    def move(self, position: Position, now_ns: int) -> None:
        """Take in where it is now."""
        before = self.position
        self.position = position
        if before is None:
            self.entered_ns = self.moved_ns = min(position.since_ns, now_ns)
        elif (before.step, before.phase, before.since_ns) != (
            *(position.step, position.phase, position.since_ns),
        ):
            self.stretch(before.phase, self.entered_ns, self.looked_ns)
            # By the clock of whoever looks: the one of the process may have been set since.
            self.entered_ns = self.moved_ns = now_ns
            self.numbers = ()
        elif position.phase in _UNHOOKED and position.written != before.written:
            self.moved_ns = now_ns
        self.looked_ns = now_ns

    def pause(self, spent_ns: int) -> None:
        """Nobody looked for so long, and maybe nobody could run."""
        self.entered_ns += spent_ns
        self.moved_ns += spent_ns

    def stretch(self, phase: str, began_ns: int, ended_ns: int) -> None:
        """It was in this phase for so long, and went on. A wait is as long as others make it."""
        if phase != "comm_wait" and began_ns >= self.not_learnt_before_ns:
            spent_s = (ended_ns - began_ns) / 1e9
            self.longest_s[phase] = max(spent_s, self.longest_s.get(phase, 0.0))

    def learn(self, steps_s: Sequence[float]) -> None:
        """Steps took so long."""
        self.steps.extend(steps_s)
        self.seen_steps += len(steps_s)
        self.longest_step_s = max(self.longest_step_s, *steps_s)

    def _p99_s(self) -> float:
        fresh = self.seen_steps - self.counted_steps
        if fresh >= _COUNT_EVERY or (fresh and self.counted_steps < 10):
            self.counted_steps = self.seen_steps
            ordered = sorted(self.steps)
            self.p99_s = ordered[int(0.99 * (len(ordered) - 1))]
        return self.p99_s

    def age_s(self, now_ns: int) -> float:
        """For how long it has stood still."""
        return max(0.0, (now_ns - self.moved_ns) / 1e9)


def _fresh(rank: _Rank, known: Evidence) -> Evidence:
    """What was answered before the rank moved is no evidence any more."""
    numbers = tuple((each.name, each.enqueued) for each in known.groups)
    if known.heard and known.answered_ns > rank.moved_ns:
        # Whoever puts further collectives in line moves, though no hook sees it.
        if rank.numbers and rank.numbers != numbers:
            rank.moved_ns = known.answered_ns
        rank.numbers = numbers
    if known.heard and known.answered_ns > rank.moved_ns:
        return known
    return Evidence(silent_s=known.silent_s, kernel=known.kernel)


class Stalls:
    """The ranks of one run on one node. Fed a few times a second.

    Times are nanoseconds since 1970, of a clock that does not jump when the machine's is set.
    """

    def __init__(self, floor_s: float = 60.0) -> None:
        self._floor_s = floor_s
        self._ranks: dict[Who, _Rank] = {}
        self._asked: dict[Who, tuple[Question, int]] = {}
        self._looked_ns = 0
        self._over_since_ns = 0
        self._open: Verdict | None = None
        self._cause = ""
        self.limits: dict[Who, float] = {}
        """How many seconds each rank may stand still, as in force now."""
        self.stalled: dict[Who, bool] = {}
        """Whether each living rank is part of a stall."""
        self.questions: dict[Who, Question] = {}
        """Whom to ask now, and what. Asked once: a later look asks for something else."""

    def learn(
        self, who: Who, began_ns: int, steps_s: Sequence[float], longest_ns: Mapping[str, int]
    ) -> None:
        """Steps of a rank, from when on they were, with the longest stretch of each phase."""
        rank = self._ranks.get(who)
        if rank is None:
            rank = self._ranks[who] = _Rank()
        if began_ns < rank.not_learnt_before_ns:
            return
        rank.learn(steps_s)
        for phase, spent_ns in longest_ns.items():
            if spent_ns > 1e9 * rank.longest_s.get(phase, 0.0):
                rank.stretch(phase, began_ns, began_ns + spent_ns)

    def look(
        self, now_ns: int, positions: Iterable[Position], evidence: Mapping[Who, Evidence]
    ) -> list[Change]:
        """Where everybody is now, and what is known of them: what has changed by that."""
        found = {each.who: each for each in positions}
        floor_s = self._floor_s
        spent_ns = now_ns - (self._looked_ns or now_ns)
        self._looked_ns = now_ns
        evidence = dict(evidence)
        for who, position in found.items():
            rank = self._ranks.setdefault(who, _Rank())
            if spent_ns > max(_PAUSE_S, floor_s / 4) * 1e9:
                rank.pause(spent_ns)
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
        # Who waits for somebody elsewhere cannot know how long that one may take.
        if over and self._open is None and self._elsewhere(living, found, evidence):
            over = all(ages[who] >= _LONG * floor_s for who in living)
        self.stalled = dict.fromkeys(living, over or self._open is not None)
        if not over:
            self._over_since_ns = 0
            return []
        self._over_since_ns = self._over_since_ns or now_ns
        if self._open is None and not self._heard(living, evidence, now_ns):
            return []
        return self._tell(now_ns, living, found, evidence)

    @property
    def suspects(self) -> frozenset[Who]:
        """Who was asked, and has not moved since."""
        return frozenset(self._asked)

    # -- asking

    def _ask(self, living: Mapping[Who, _Rank], question: Question, now_ns: int) -> None:
        again_ns = int(max(2.0, _AGAIN * self._floor_s) * 1e9)
        self.questions = {}
        for who in living:
            kind, asked_ns = self._asked.get(who, ("", 0))
            later = question == "what" and now_ns - asked_ns >= again_ns
            if kind != question or later:
                self.questions[who] = question
                self._asked[who] = question, now_ns

    def _heard(
        self, living: Mapping[Who, _Rank], evidence: Mapping[Who, Evidence], now_ns: int
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

    def _silent(self, known: Evidence) -> bool:
        patience = min(_SILENT_S, max(_SHORTEST_SILENCE_S, self._floor_s / 4))
        return known.silent_s is not None and known.silent_s >= patience

    # -- judging

    def _elsewhere(
        self,
        living: Mapping[Who, _Rank],
        found: Mapping[Who, Position],
        evidence: Mapping[Who, Evidence],
    ) -> bool:
        """Whether all wait for ranks that are not on this node, as far as is known."""
        worlds = [each.world for each in found.values() if each.world]
        if not worlds or max(worlds) <= len(found):
            return False
        return self._judge(living, found, evidence).cause == "elsewhere"

    def _judge(
        self,
        living: Mapping[Who, _Rank],
        found: Mapping[Who, Position],
        evidence: Mapping[Who, Evidence],
    ) -> Findings:
        """The table: the surest sign first."""
        places = {who: found[who] for who in living}
        known = {who: evidence.get(who, Evidence()) for who in living}
        return (
            self._disabled(places, known)
            or _different(places, known)
            or _behind(places, known)
            or _not_waiting(places, known)
            or _left_alone(places, found)
        )

    def _disabled(
        self, places: Mapping[Who, Position], known: Mapping[Who, Evidence]
    ) -> Findings | None:
        """Ranks that cannot go on, whatever the others do."""
        causes: dict[Who, str] = {}
        for who, each in known.items():
            kernel = each.kernel
            if kernel is not None and kernel.state in ("T", "t"):
                causes[who] = "stopped"
            elif kernel is not None and kernel.state == "D" and kernel.lasting:
                causes[who] = "uninterruptible"
            elif self._silent(each):
                causes[who] = "gil"
        if not causes:
            return None
        said = []
        for who, cause in causes.items():
            kernel = known[who].kernel
            if cause == "stopped":
                what = "is stopped by a signal or a debugger"
            elif cause == "uninterruptible":
                inside = f" ({kernel.waits_in})" if kernel and kernel.waits_in else ""
                what = f"is in I/O that cannot be interrupted{inside}"
            else:
                doing = _doing(kernel) or "does not come back"
                what = f"does not answer: C code in it holds the GIL and {doing}"
            said.append(f"rank {places[who].rank}, {_at(places[who])}, {what}")
        look = {
            "stopped": "Look at who stopped it; `kill -CONT` lets it go on.",
            "uninterruptible": "Look at the disk, the network file system, the driver.",
            "gil": "Look at its native stack: `py-spy dump --native`.",
        }[next(iter(causes.values()))]
        return _findings("+".join(dict.fromkeys(causes.values())), causes, places, said, look)

    # -- telling

    def _tell(
        self,
        now_ns: int,
        living: Mapping[Who, _Rank],
        found: Mapping[Who, Position],
        evidence: Mapping[Who, Evidence],
    ) -> list[Change]:
        judged = self._judge(living, found, evidence)
        before = self._open
        said = {"cause": judged.cause, "culprits": list(judged.culprits)}
        if before is not None and (said.items(), judged.phase) == (
            *({key: before.evidence[key] for key in said}.items(), before.phase),
        ):
            return []
        since_ns = max(rank.moved_ns for rank in living.values())
        still_s = (now_ns - since_ns) / 1e9
        limit_s = max(self.limits.values())
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


def _different(places: Mapping[Who, Position], known: Mapping[Who, Evidence]) -> Findings | None:
    """Ranks that entered another collective than the others, under the same number."""
    entered: dict[tuple[str, int], dict[Who, Collective]] = {}
    for who, each in known.items():
        for one in each.collectives:
            entered.setdefault((one.group, one.number), {})[who] = one
    for (_, number), by_rank in sorted(entered.items(), key=lambda each: each[0][1]):
        votes: dict[str, list[Who]] = {}
        for who, one in by_rank.items():
            votes.setdefault(_signature(one), []).append(who)
        if len(votes) < 2:
            continue
        most = max(len(each) for each in votes.values())
        majority = [each for each in votes.values() if len(each) == most]
        # Of two, nobody can say who is right.
        culprits = [
            who for each in votes.values() if len(majority) > 1 or len(each) < most for who in each
        ]
        said = [f"{_ranks(places, each)} entered {by_rank[each[0]]}" for each in votes.values()]
        said[0] = f"as collective number {number}, {said[0]}"
        return _findings(
            "different_collectives",
            culprits,
            places,
            said,
            "Look for a branch that not all ranks take, or a collective that one of them left out.",
        )
    return None


def _signature(one: Collective) -> str:
    op = one.op.rpartition(":")[2]
    return f"{op} {one.sizes}" if op.startswith(_SAME_SIZES) else op


def _behind(places: Mapping[Who, Position], known: Mapping[Who, Evidence]) -> Findings | None:
    """Ranks that have put fewer collectives in line than others wait for."""
    waits_for: dict[Who, set[Who]] = {}
    numbers: dict[str, dict[Who, int]] = {}
    for who, each in known.items():
        for group in each.groups:
            if group.enqueued is not None and group.size > 1:
                numbers.setdefault(group.name, {})[who] = group.enqueued
    gaps: dict[Who, str] = {}
    for by_rank in numbers.values():
        most = max(by_rank.values())
        late = {who for who, number in by_rank.items() if number < most}
        for who in by_rank.keys() - late:
            waits_for.setdefault(who, set()).update(late)
        for who in late:
            gaps[who] = f"{by_rank[who]} collectives where others have entered {most}"
    if not gaps:
        return None
    # Who is late because he waits for somebody who is later is not to blame.
    culprits = [who for who in gaps if not (waits_for.get(who) and _waiting(places[who], known))]
    cause = "not_reached"
    if not culprits:
        cause, culprits = "crossed", list(gaps)
    said = [f"{_where(places[who], known[who])}, {gaps[who]}" for who in culprits]
    said += _who_waits(places, culprits)
    look = (
        "Each waits in a process group for another one: look at the order of their collectives."
        if cause == "crossed"
        else _advice(places[culprits[0]])
    )
    return _findings(cause, culprits, places, said, look)


def _not_waiting(places: Mapping[Who, Position], known: Mapping[Who, Evidence]) -> Findings | None:
    """Ranks that wait for nobody."""
    culprits = [who for who in places if not _waiting(places[who], known)]
    if not culprits:
        return None
    waits = _who_waits(places, culprits)
    said = [_where(places[who], known[who]) for who in culprits] + waits
    cause = "not_reached" if waits else "long_phase"
    return _findings(cause, culprits, places, said, _advice(places[culprits[0]]))


def _who_waits(places: Mapping[Who, Position], culprits: list[Who]) -> list[str]:
    waiting = [who for who in places if who not in culprits]
    if not waiting:
        return []
    whom = "it" if len(culprits) == 1 else "them"
    return [f"{_ranks(places, waiting)} {'waits' if len(waiting) == 1 else 'wait'} for {whom}"]


def _left_alone(places: Mapping[Who, Position], found: Mapping[Who, Position]) -> Findings:
    """Everybody waits, and all have come as far."""
    gone = [who for who, each in found.items() if who not in places and each.state != "finished"]
    left = [who for who, each in found.items() if who not in places and who not in gone]
    wait = "waits" if len(places) == 1 else "wait"
    waiting = f"{_ranks(places, list(places))} {wait} in the same collective"
    for cause, culprits, verb in (("dead", gone, "died"), ("finished", left, "finished")):
        if culprits:
            said = [waiting, f"{_ranks(found, culprits)} {verb} before it"]
            look = "Look at why it is gone; the others will not come back by themselves."
            return _findings(cause, culprits, found, said, look)
    world = max((each.world or 0 for each in places.values()), default=0)
    if world > len(found):
        said = [waiting, "whom they wait for is not on this node, or the network is broken"]
        look = "Look at the verdicts of the other nodes, and at the network between them."
        return _findings("elsewhere", (), places, said, look)
    look = "Look at the network, the backend's log (NCCL_DEBUG=INFO), and the GPUs' errors."
    return _findings("backend", (), places, [waiting, "it does not come to an end"], look)


def _waiting(position: Position, known: Mapping[Who, Evidence]) -> bool:
    """Whether a rank waits for others, by what the journal or its own stack says."""
    if position.phase == "comm_wait":
        return True
    about = known[position.who]
    inside = bool(about.stack) and "torch/distributed/" in about.stack[0].file
    return inside or any(each.pending for each in about.groups)


def _findings(
    cause: str,
    culprits: Iterable[Who],
    places: Mapping[Who, Position],
    said: list[str],
    look: str,
) -> Findings:
    chosen = [places[who] for who in culprits]
    about = chosen or list(places.values())
    phases = {each.name or each.phase for each in about}
    steps = [each.step for each in about if each.step is not None]
    return Findings(
        cause,
        tuple(sorted((each.rank for each in chosen), key=lambda rank: (len(rank), rank))),
        phases.pop() if len(phases) == 1 else "mixed",
        min(steps, default=None),
        "; ".join(said),
        look,
    )


def _where(position: Position, known: Evidence) -> str:
    """What a rank is at, in words."""
    said = f"rank {position.rank} is {_at(position)}"
    if (frame := _own_line(known.stack)) is not None:
        said += f" at {frame}"
    if doing := _doing(known.kernel):
        said += f" and {doing}"
    return said


def _at(position: Position) -> str:
    step = "" if position.step is None else f" after step {position.step}"
    return f"in {position.name or position.phase}{step}"


def _doing(kernel: Kernel | None) -> str:
    if kernel is None or kernel.busy is None:
        return ""
    return "computes" if kernel.busy > _SHARE_BUSY else "sleeps"


def _own_line(stack: tuple[Frame, ...]) -> Frame | None:
    """The innermost line that is neither a package's nor Python's; else the innermost."""
    for frame in stack:
        if not any(part in frame.file for part in ("/site-packages/", "/lib/python", "<frozen")):
            return frame
    return stack[0] if stack else None


_ADVICE = {
    "data": "Look at its data loader and at what that reads from.",
    "checkpoint": 'Look at where it writes to; say phase("checkpoint", expect_s=...) '
    "where it may take longer.",
    "eval": 'Look at its evaluation; say phase("eval", expect_s=...) where it may take longer.',
    "compile": "Compilation takes long: look at its log (TORCH_LOGS=recompiles).",
}


def _advice(position: Position) -> str:
    return _ADVICE.get(position.phase, "Look at its stack: `otel-ddp stacks`.")


def _ranks(places: Mapping[Who, Position], chosen: list[Who]) -> str:
    numbers = sorted((places[who].rank for who in chosen), key=lambda rank: (len(rank), rank))
    shown = ", ".join(numbers[:8]) + (", ..." if len(numbers) > 8 else "")
    return f"rank{'s' * (len(numbers) > 1)} {shown}"


def _common(found: Mapping[Who, Position]) -> Who:
    """The labels of the run, and of the node where all are on one."""
    first = dict(next(iter(found)))
    return tuple(
        (key, first[key])
        for key in ("group", "run", "job_type", "node")
        if key in first and all(dict(who).get(key) == first[key] for who in found)
    )


def _row(rank: _Rank, known: Evidence, now_ns: int) -> dict[str, Any]:
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
