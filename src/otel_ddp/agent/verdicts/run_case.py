"""What is known of one run on this node: its detectors, what they found, what is shown of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from otel_ddp import catalog, containment
from otel_ddp.agent.ledger import Labels
from otel_ddp.agent.reading.journal_feed import JournalFeed
from otel_ddp.agent.reading.world_size import World, training_world
from otel_ddp.agent.verdicts import postmortem
from otel_ddp.agent.verdicts.arrivals import Arrivals
from otel_ddp.agent.verdicts.exit_causes import ExitCauses
from otel_ddp.agent.verdicts.exits import Exits
from otel_ddp.diagnosis.bounds import Bounds
from otel_ddp.diagnosis.creep import Creep
from otel_ddp.diagnosis.death import Deaths
from otel_ddp.diagnosis.evidence import Group, Position
from otel_ddp.diagnosis.hardware import Gpu
from otel_ddp.diagnosis.nonfinite import Nonfinite
from otel_ddp.diagnosis.stall import Stalls
from otel_ddp.diagnosis.straggler import Report, Stragglers
from otel_ddp.diagnosis.verdict import Kind, Verdict, Who

Said = tuple[dict[str, Any], list[dict[str, Any]]]
"""What a process says of itself, and its last values."""


class RunCase:
    """Filled by the desk, and read by what tells and shows."""

    def __init__(self, run: Who, floor_s: float, causes: ExitCauses) -> None:
        self.run = run
        # How many ranks train together. Evaluators and actors tell another world.
        self.world_size = 0
        self._worlds: dict[Who, World] = {}
        # Whether a process of this run was ever found to train.
        self._trained = False
        self.stragglers = Stragglers()
        self.arrivals = Arrivals()
        self.bounds = Bounds()
        self.stalls = Stalls(floor_s)
        self.deaths = Deaths()
        self.creep = Creep()
        self.nonfinite = Nonfinite()
        self.endings = Exits(causes)
        self.verdicts: dict[tuple[str, Who], Verdict] = {}
        # Phases that a rank was ever named for: their series go on, at 0.
        self.named: set[tuple[Who, str]] = set()
        # Of processes whose journals may be gone by now.
        self.last: dict[Who, Said] = {}
        # Where they stood, and when they ended: others may wait for them.
        self.ended: dict[Who, tuple[Position, int]] = {}
        # Who was found to have ended in this look.
        self.leaving: list[Who] = []
        self.node: Labels = ()
        self.postmortem: dict[tuple[str, Who], Path | None] = {}
        self.gpus: dict[tuple[str, Who], Sequence[Gpu]] = {}
        self.moved: tuple[Kind, Path | None] | None = None
        # Ranks whose waits are known or not, as they were told.
        self.waits: dict[Who, bool] = {}
        # In which phases a rank has collectives of the user's own, where that was told.
        self.own: dict[Who, tuple[str, ...]] = {}
        # How the ranks compare, as last worked out, and whether there were steps since.
        self.report: Report | None = None
        self.report_is_old = True
        # How far the collectives are, of those who were asked and have not moved since.
        self.heard: dict[Who, tuple[Group, ...]] = {}
        # Series that are true now; those that were and are no longer are taken away.
        self.shown: set[tuple[catalog.Metric, Labels]] = set()
        self.showing: set[tuple[catalog.Metric, Labels]] = set()

    def hear_of_world(self, who: Who, journal: JournalFeed, trains: bool) -> None:
        """How many ranks this living process trains with; *trains*: it makes a step, or will."""
        size, known = journal.world_size, self._worlds.get(who)
        if size is None:
            return
        told = World(size, trains or (known is not None and known.trains))
        if told != known:
            self._trained |= told.trains
            self._regroup({**self._worlds, who: told})

    def _regroup(self, worlds: dict[Who, World]) -> None:
        before = [who for who, each in self._worlds.items() if each.size == self.world_size]
        self._worlds = worlds
        self.world_size = training_world(worlds.values(), World(self.world_size, self._trained))
        for detector in (self.stragglers, self.arrivals, self.bounds):
            detector.world_size(self.world_size)
        for who in before:
            if who in worlds and self.is_beside(worlds[who].size):
                self._forget_speed(who)

    def is_beside(self, world_size: int | None) -> bool:
        """Whether a process with such a world is not one of those that train together.

        No rank waits for it, so it is not compared, and neither stalls the run nor keeps it going.
        """
        return world_size is not None and world_size != self.world_size

    def hear_of_waits(self, who: Who, journal: JournalFeed) -> None:
        """Whether this process can tell its waits from its work."""
        said = journal.reader.facts.get("capability")
        if not isinstance(said, dict) or "comm_wait" not in said:
            return
        known = not said["comm_wait"]
        if self.waits.get(who) != known:
            self.waits[who] = known
            self.report_is_old = True
            self.stragglers.waits_known(who, known)
            self.arrivals.waits_known(who, known)
            self.bounds.waits_known(who, known)

    def goes_on(self, since_ns: int) -> None:
        """A process, or a step, has begun at this time: without those who had ended by then."""
        self.ended = {who: each for who, each in self.ended.items() if each[1] >= since_ns}

    def hear_of_own_collectives(self, who: Who, journal: JournalFeed) -> None:
        """In which phases this process waits for others by what the user has written."""
        said = journal.reader.facts.get("own_collectives")
        if not isinstance(said, list):
            return
        phases = tuple(e for e in said if isinstance(e, str) and e in catalog.PHASES)
        if self.own.get(who) != phases:
            self.own[who] = phases
            self.report_is_old = True
            self.stragglers.own_collectives(who, phases)
            self.bounds.own_collectives(who, phases)

    def leave(self, who: Who) -> None:
        """This process is gone, or has another name by now."""
        self._forget_speed(who)
        _forget(self.creep.forget, who)
        self._regroup({other: each for other, each in self._worlds.items() if other != who})

    def _forget_speed(self, who: Who) -> None:
        self.report_is_old = True
        # Whoever comes under this name after it may be of another kind, or has to say it again.
        self.waits.pop(who, None)
        self.own.pop(who, None)
        for detector in (self.stragglers, self.arrivals, self.bounds):
            _forget(detector.forget, who)


@containment.contained()
def _forget(forget: Callable[[Who], None], who: Who) -> None:
    forget(who)


def said(journal: JournalFeed) -> Said:
    """What a post-mortem has to have of a process."""
    described = journal.describe()
    values = postmortem.last_values(journal.reader, described["rank"], described["node"])
    return described, values
