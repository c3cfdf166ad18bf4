"""Who of a run has ended and why, and when that is to be thought of once more."""

from __future__ import annotations

from otel_ddp.agent.causes import Causes
from otel_ddp.agent.intake import Intake
from otel_ddp.catalog import STATES
from otel_ddp.diagnosis.ends import Gone
from otel_ddp.diagnosis.verdict import Who
from otel_ddp.survey import ENDED

# What others have to say of it comes soon after; what the kernel has, when the process has left,
# which takes Python seconds, and its launcher has looked, every 5 s perhaps.
_AFTERTHOUGHTS_NS = (500_000_000, 2_000_000_000, 6_000_000_000, 20_000_000_000)
_STATES = {code: word for word, code in STATES.items()}


class Endings:
    """The processes of one run on this node that are no more."""

    def __init__(self, causes: Causes) -> None:
        self._causes = causes
        self._ended: set[Who] = set()
        # Whose end is to be thought of once more: process id and start, and when.
        self._afterthoughts: list[tuple[Gone, tuple[int, int], int]] = []

    def take(self, intake: Intake, who: Who, now_ns: int) -> Gone:
        """How this process ended, as far as that is known at once."""
        self._ended.add(who)
        gone = self._gone(intake, who)
        pid = intake.pid, intake.reader.start_ticks
        self._afterthoughts += [
            (gone._replace(waited_s=after / 1e9), pid, now_ns + after)
            for after in _AFTERTHOUGHTS_NS
        ]
        return gone

    def take_back(self, who: Who) -> bool:
        """Somebody at work bears this name; whether one of that name had ended."""
        if who not in self._ended:
            return False
        self._ended.remove(who)
        # The run was started anew: what ended it before is not thought of again.
        self.think_no_more()
        return True

    def reconsidered(self, now_ns: int) -> list[Gone]:
        """Those of whom more may be known by now."""
        found = []
        for thought in [each for each in self._afterthoughts if now_ns >= each[2]]:
            self._afterthoughts.remove(thought)
            gone, pid, _ = thought
            found.append(gone._replace(cause=self._causes.why(*pid)))
            if not any(each[1] == pid for each in self._afterthoughts):
                self._causes.forget(*pid)
        return found

    def think_no_more(self) -> None:
        """Nobody wants to know any more."""
        for _, pid, _ in self._afterthoughts:
            self._causes.forget(*pid)
        self._afterthoughts.clear()

    def _gone(self, intake: Intake, who: Who) -> Gone:
        progress = intake.reader.progress()
        described = intake.describe()
        told_ns = 0 if progress is None else progress.state_since_ns
        spoke = progress is not None and progress.state in ENDED
        return Gone(
            who=who,
            state=_STATES.get(intake.state, "killed"),
            step=intake.step(),
            phase=described["phase"],
            phase_since_ns=described["phase_since_ns"],
            seen_alive_ns=told_ns if spoke else intake.seen_alive_ns,
            gone_ns=told_ns if spoke else intake.gone_ns,
            reason=described["reason"],
            cause=self._causes.why(intake.pid, intake.reader.start_ticks),
            world_size=intake.world_size,
        )
