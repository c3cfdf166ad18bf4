"""Finds nodes that have become silent while the ranks of other nodes wait."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from otel_ddp.diagnosis.detector import Detector, Observation, RankState
from otel_ddp.diagnosis.say import UNHEARD, duration, rank_list, rank_numbers
from otel_ddp.diagnosis.stall.evidence import Position
from otel_ddp.diagnosis.verdict import Change, Labels, Verdict, node_of
from otel_ddp.vocabulary.words import UNUSUAL_PHASES

# A node reports every second, in very large runs every three. A node that has been silent for
# _UNHEARD_NS is mentioned in verdicts on deaths. After _MISSED_NS it gets its own verdict.
_UNHEARD_NS, _MISSED_NS = 5_000_000_000, 12_000_000_000
# A rank is taken to wait if it has not moved for at least _STANDS_NS, nor for _STEPS times the
# longest of its last _STEPS_KEPT steps.
_STANDS_NS, _STEPS = 5_000_000_000, 2.0
_STEPS_KEPT = 20
# If this agent did not run for this long, the nodes were not silent: nobody listened. Their times
# are then moved on by the length of the pause.
_PAUSED_NS = 4_000_000_000
# In these phases a rank does not wait for other ranks, so standing still in them is no sign of a
# silent node.
_WITHOUT_WAITS = frozenset({"data", *UNUSUAL_PHASES})


class _Rank:
    """One training rank."""

    def __init__(self, labels: Labels) -> None:
        self.node = node_of(labels)
        self.position: Position | None = None
        self.heard_ns = self.moved_ns = 0
        self.has_device = False
        self.steps_ns: deque[int] = deque(maxlen=_STEPS_KEPT)

    def waits(self, now_ns: int) -> bool:
        """Whether the rank probably waits for another one."""
        position = self.position
        if position is None or not self.steps_ns or position.phase in _WITHOUT_WAITS:
            return False
        # In the phase `other`, a rank may wait in the user's own collectives, or for its device,
        # which may wait for other ranks. Without own collectives and device, or if the user has
        # named the phase, the rank does work of its own, such as uploading files.
        may_wait = self.has_device or position.waits_in is None or "other" in position.waits_in
        if position.phase == "other" and (position.name or not may_wait):
            return False
        stands_ns = max(_STANDS_NS, int(_STEPS * max(self.steps_ns)))
        return now_ns - self.moved_ns >= stands_ns


class Silence(Detector):
    """Watches the nodes of one run. A node is silent if none of its ranks has sent data for
    long."""

    def __init__(self) -> None:
        self._ranks: dict[Labels, _Rank] = {}
        self._polled_ns = 0
        self._open: dict[Labels, Verdict] = {}
        self.unheard: Mapping[Labels, int] = {}

    def feed(self, rank: RankState, seen: Observation) -> None:
        if rank.is_beside or seen.ended is not None:
            self.forget(rank.labels)
            return
        known = self._ranks.get(rank.labels)
        if known is None:
            known = self._ranks[rank.labels] = _Rank(rank.labels)
        known.heard_ns, known.has_device = seen.now_ns, rank.device_clock is not None
        known.steps_ns.extend([each.ended_ns - each.began_ns for each in seen.steps])
        position, before = seen.position, known.position
        if position is not None:
            known.position = position
            if before is None or before.place != position.place:
                known.moved_ns = seen.now_ns

    def forget(self, labels: Labels) -> None:
        self._ranks.pop(labels, None)

    def leave_out(self, labels: Labels) -> None:
        # Keep the rank, although its own agent judges it now: if its node fails later, the other
        # ranks wait for it.
        return

    def poll(self, now_ns: int) -> list[Change]:
        spent_ns, self._polled_ns = now_ns - (self._polled_ns or now_ns), now_ns
        if spent_ns > _PAUSED_NS:
            for each in self._ranks.values():
                each.heard_ns += spent_ns
                each.moved_ns += spent_ns
        nodes: dict[Labels, list[Labels]] = {}
        heard_ns: dict[Labels, int] = {}
        for labels, each in self._ranks.items():
            nodes.setdefault(each.node, []).append(labels)
            heard_ns[each.node] = max(each.heard_ns, heard_ns.get(each.node, 0))
        self.unheard = {
            node: at_ns for node, at_ns in heard_ns.items() if now_ns - at_ns > _UNHEARD_NS
        }
        silent = {
            node: nodes[node] for node, at in self.unheard.items() if now_ns - at > _MISSED_NS
        }
        return self._update(silent, now_ns) if silent or self._open else []

    def _update(self, silent: Mapping[Labels, Sequence[Labels]], now_ns: int) -> list[Change]:
        of_silent = {labels for ranks in silent.values() for labels in ranks}
        others = [each for labels, each in self._ranks.items() if labels not in of_silent]
        wait = bool(others) and all(each.waits(now_ns) for each in others)
        over = [node for node in self._open if node not in silent or not wait]
        changes = [Change(self._open.pop(node), False) for node in over]
        for node, ranks in silent.items() if wait else ():
            known, verdict = self._open.get(node), self._verdict(node, ranks, now_ns)
            if known is None:
                changes.append(Change(verdict, True))
            # Update the figures of an open verdict at most once a second.
            unheard_s = -1.0 if known is None else known.evidence["unheard_s"]
            if verdict.evidence["unheard_s"] - unheard_s >= 1.0:
                self._open[node] = verdict
        return changes

    def _verdict(self, node: Labels, ranks: Sequence[Labels], now_ns: int) -> Verdict:
        since_ns = self.unheard[node]
        unheard_s = (now_ns - since_ns) / 1e9
        positions = [self._ranks[labels].position for labels in ranks]
        known = [each for each in positions if each is not None]
        phases = {each.phase for each in known}
        steps = [each.step for each in known if each.step is not None]
        return Verdict(
            "silence",
            node,
            phases.pop() if len(phases) == 1 else "mixed",
            f"{dict(node).get('node', '?')}, with {rank_list(ranks)}, has not been heard for "
            f"{duration(unheard_s)}, and the other ranks wait. {UNHEARD}",
            {"unheard_s": round(unheard_s, 1), "ranks": rank_numbers(ranks).split(", ")},
            max(steps, default=None),
            since_ns,
        )

    def present(self) -> list[Verdict]:
        return [*self._open.values()]
