"""Groups the ends of a run's processes into incidents, and decides when each is reported."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from otel_ddp.diagnosis.death import wording
from otel_ddp.diagnosis.death.ended_process import EndedProcess, manner
from otel_ddp.diagnosis.death.incident import FOLLOWS_S, Surroundings, verdict_of
from otel_ddp.diagnosis.verdict import Change, Labels, Verdict

_MOST_INCIDENTS = 8
# A rank that raises may report it after the rank that lost it, and all may raise the same. So where
# no process was killed, a verdict waits for further reports; longer where none gives a cause.
_OTHERS_REPORT_S = 0.5
_CAUSE_COMES_S = 2.0
# Python may take seconds to leave after its last report, and the exit code comes after that.
_CODE_COMES_S = 6.0


class _Incident:
    """Processes of a run that ended because of each other, as far as that is known."""

    def __init__(self) -> None:
        self.members: dict[Labels, EndedProcess] = {}
        self.verdict: Verdict | None = None
        # For how long no rank had moved before, and why; and what may end ranks that stand.
        self.stall, self.under_nccl = "", False

    def includes(self, process: EndedProcess) -> bool:
        """Whether this end belongs to the incident."""
        known = self.members.get(process.labels)
        if known is not None:
            return known.ended_ns == process.ended_ns
        worlds = {member.world_size for member in self.members.values()} - {None}
        if worlds and process.world_size is not None and process.world_size not in worlds:
            # An evaluator beside the training: neither loses a peer with the other.
            return False
        times = [member.ended_ns for member in self.members.values()]
        span_ns = max(*times, process.ended_ns) - min(*times, process.ended_ns)
        return span_ns <= FOLLOWS_S * 1e9

    def update(self, around: Surroundings) -> list[Change]:
        """Judge the incident again; what has changed by that."""
        members = list(self.members.values())
        around = around._replace(stall=self.stall, under_nccl=self.under_nccl)
        before = self.verdict
        if before is None and not _is_ready(members, around):
            return []
        after = verdict_of(members, around)
        if before == after:
            return []
        self.verdict = after
        changes = []
        if before is not None and (after is None or before.key != after.key):
            sentence = "the end was intended" if after is None else _told_anew(before)
            changes.append(Change(before._replace(sentence=sentence), False))
        if after is not None:
            changes.append(Change(after, True))
        return changes


class Deaths:
    """The ends of one run on this node. An incident is one verdict, however many ranks it took."""

    def __init__(self) -> None:
        self._incidents: list[_Incident] = []
        self._finished: dict[Labels, EndedProcess] = {}

    def feed(
        self,
        ended: Sequence[EndedProcess],
        at_work: Collection[Labels] | None = None,
        stall: str = "",
        under_nccl: bool = False,
    ) -> list[Change]:
        """All ends that were seen at once; *at_work*: the ranks of the run that are left.

        *stall*: for how long no rank had moved before, and why.
        The same end may come again, with the same `ended_ns` and more in `cause`: what the kernel
        knows may come a moment after the death. The incident is then judged again.
        """
        touched: list[_Incident] = []
        for each in ended:
            if each.state == "finished" and not each.cause.get("exit_code"):
                self._finished[each.labels] = each
                continue
            self._finished.pop(each.labels, None)
            incident = next((known for known in self._incidents if known.includes(each)), None)
            if incident is None:
                incident = _Incident()
                incident.stall, incident.under_nccl = stall, under_nccl
                self._incidents = [incident, *self._incidents][:_MOST_INCIDENTS]
            incident.members[each.labels] = each
            if incident not in touched:
                touched.append(incident)
        around = Surroundings(list(self._finished.values()), at_work)
        return [change for incident in touched for change in incident.update(around)]

    def feed_restarted(self, labels: Labels) -> list[Change]:
        """A new process with these labels is at work, so the incident of the old one is over."""
        changes = []
        self._finished.pop(labels, None)
        for incident in [each for each in self._incidents if labels in each.members]:
            self._incidents.remove(incident)
            if incident.verdict is not None:
                name = wording.name_and_node(labels)
                sentence = f"{name} is at work again: the run was restarted"
                changes.append(Change(incident.verdict._replace(sentence=sentence), False))
        return changes


def _told_anew(before: Verdict) -> str:
    """What is said of a verdict in whose place comes one about another rank, or about the run."""
    about = wording.name_and_node(before.labels) if "rank" in dict(before.labels) else "the run"
    return f"{about}: more is known of this end by now"


def _is_ready(members: list[EndedProcess], around: Surroundings) -> bool:
    """Whether it is time for a verdict, or the next reports may turn it over."""
    manners = set(map(manner, members))
    if "killed" in manners:
        return True  # the kernel may say more later; no report is waited for
    if any(each.world_size and each.world_size <= len(members) for each in members):
        return True  # no rank is left that could report anything
    patience_s = _CAUSE_COMES_S
    if "own_cause" in manners or manners == {"exit_code", "lost_peer"}:
        patience_s = _OTHERS_REPORT_S
    elif any("exit_code" not in each.cause for each in around.finished):
        patience_s = _CODE_COMES_S
    return max(each.known_for_s for each in members) >= patience_s
