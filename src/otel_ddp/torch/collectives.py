"""Reads which collectives each process group has started and finished, from torch's own records.

These records are private to torch and looked up by name; fields that a version lacks are omitted.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from otel_ddp import errors
from otel_ddp.torch import inspection
from otel_ddp.torch.hooks.called import Called
from otel_ddp.torch.process_group import is_up

_MOST_GROUPS = 256
# Most collectives reported per process group. In a hang, two ranks of a group are fewer collectives
# apart than this, so their lists overlap and can be compared.
_MOST_COLLECTIVES = 20
_LONGEST_TEXT = 300

Recorded = tuple[str, dict[str, Any]]
"""A backend, and the content of its flight recorder."""


def world() -> Any:
    """Torch's table of process groups; None without a default process group."""
    if not is_up():
        return None
    c10d = getattr(sys.modules["torch.distributed"], "distributed_c10d", None)
    return getattr(c10d, "_world", None)


def started(group: Any) -> int | None:
    """How many collectives a process group has started; None if this process is no member."""
    count = getattr(group, "_get_sequence_number_for_group", None)
    return None if count is None else errors.attempt(count, None)


def groups(recorded: Sequence[Recorded]) -> list[dict[str, Any]]:
    """The process groups, and how many collectives each has started and completed.

    Names and counts come from the groups themselves: a group has the same name on all ranks. The
    flight recorder numbers groups differently on each rank, and not all backends have one.
    """
    found: list[dict[str, Any]] = []
    table = world()
    configs = getattr(table, "pg_backend_config", {})
    members = getattr(table, "pg_group_ranks", {})
    for group, name in list(getattr(table, "pg_names", {}).items())[:_MOST_GROUPS]:
        description = getattr(group, "group_desc", "")
        found.append(
            {
                "name": str(name),
                "description": "" if description == "undefined" else str(description),
                "backend": str(configs.get(group, "")),
                "size": len(members.get(group, ())),
                "enqueued": started(group),
                "completed": None,
                "sends": None,
            }
        )
    for backend, dump in recorded:
        statuses = dump.get("pg_status")
        if isinstance(statuses, dict):
            _add_statuses(backend, statuses, found)
            # An empty `pg_config`: the recorder is off, so it can't tell sends from collectives.
            if backend == "gloo" and dump.get("pg_config"):
                _add_sends(dump, statuses, found)
    return found


def _add_statuses(backend: str, statuses: dict[str, Any], found: list[dict[str, Any]]) -> None:
    """Add each group's number of completed collectives, from the statuses in a flight recorder.

    A recorder numbers the groups of its backend in the order of their creation.
    """
    mine = [each for each in found if backend in each["backend"]]
    for number, status in statuses.items():
        if not number.isdigit() or int(number) >= len(mine) or not isinstance(status, dict):
            continue
        group = mine[int(number)]
        # After a group is destroyed, these numbers no longer fit the list: ignore a status whose
        # number of started collectives differs from the group's own.
        if _number(status.get("last_enqueued_collective")) == group["enqueued"]:
            group["completed"] = _number(status.get("last_completed_collective"))


def _add_sends(dump: dict[str, Any], statuses: dict[str, Any], found: list[dict[str, Any]]) -> None:
    """Count a Gloo group's sends and receives.

    The group's own count includes them, the collectives in the flight recorder do not: the
    difference is the number of sends and receives.
    """
    collectives: dict[str, int] = {}
    for entry in _collectives_of(dump):
        name, number = str(entry["process_group"][0]), _number(entry.get("collective_seq_id"))
        collectives[name] = max(collectives.get(name, 0), number or 0)
    mine = [each for each in found if "gloo" in each["backend"]]
    for at, group in enumerate(mine):
        backends = {each.rpartition(":")[2] for each in group["backend"].split(",")}
        if backends != {"gloo"} or group["enqueued"] is None:
            continue
        if group["name"] in collectives:
            group["sends"] = group["enqueued"] - collectives[group["name"]]
        elif str(at) not in statuses:
            # A group without a status has had no collective: it has started only sends.
            group["sends"] = group["enqueued"]


def _collectives_of(dump: dict[str, Any]) -> Iterator[dict[str, Any]]:
    entries = dump.get("entries")
    for entry in entries if isinstance(entries, list) else ():
        name = entry.get("process_group")
        if not entry.get("is_p2p") and isinstance(name, list) and name:
            yield entry


def latest(recorded: Sequence[Recorded]) -> list[dict[str, Any]]:
    """Collectives of each process group: the last ones on Gloo, the first pending ones on NCCL.

    With NCCL, hosts enqueue hundreds of collectives ahead, and the first pending one hangs.
    """
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for backend, dump in recorded:
        for entry in _collectives_of(dump):
            name = str(entry["process_group"][0])
            mine = found.setdefault((backend, name), [])
            if backend == "nccl" and len(mine) == _MOST_COLLECTIVES:
                continue
            mine.append(
                {
                    "group": name,
                    "number": entry.get("collective_seq_id"),
                    "op": str(entry.get("profiling_name"))[:_LONGEST_TEXT],
                    "sizes": str(entry.get("input_sizes"))[:_LONGEST_TEXT],
                    "state": str(entry.get("state"))[:_LONGEST_TEXT],
                }
            )
            del mine[:-_MOST_COLLECTIVES]
    return [each for mine in found.values() for each in mine]


def flight_recorders(*, with_collectives: bool) -> list[Recorded]:
    """The content of torch's flight recorders. *with_collectives*: include all entries (slow)."""
    wanted = {"includeCollectives": with_collectives, "onlyActive": with_collectives}
    found = []
    c10d = getattr(torch._C, "_distributed_c10d", None)
    for backend, name in (("gloo", "_dump_fr_trace_json"), ("nccl", "_dump_nccl_trace_json")):
        dump = getattr(c10d, name, None)
        if dump is None or world() is None:
            continue
        text = errors.attempt(lambda read=dump: read(**wanted), None)  # type: ignore[misc]
        with contextlib.suppress(TypeError, ValueError):
            content = json.loads(text or "null")
            if isinstance(content, dict):
                found.append((backend, content))
    return found


def _number(text: Any) -> int | None:
    """A count of the recorder, in which -1 means unknown."""
    try:
        number = int(text)
    except (TypeError, ValueError):
        return None
    return None if number < 0 else number


# The phases in which DDP starts collectives: for gradients in backward, for buffers in comm_wait.
_GRADIENTS = "backward"
_OF_DDP = (_GRADIENTS, "comm_wait")
# The name by which sends and receives are reported, as if it were a phase. NCCL's groups do not
# count them, so torch's `send` and `recv` are wrapped.
SENDS = "sends"


class OwnCollectives:
    """Finds the phases in which the program has collectives besides DDP's.

    Compares the process groups' counts at each change of phase, on the training thread and in few
    steps. This starts no collective and needs no flight recorder.
    """

    def __init__(self) -> None:
        self.counts = False
        """Whether collectives are counted in the current step."""
        self._steps = 0
        self._steps_with: Counter[str] = Counter()
        self._phases: set[str] = set()
        self._own: set[str] = set()
        # Id of a process group -> how many collectives DDP starts in it for the gradients of one
        # step, at most; None if unknown.
        self._of_ddp: dict[int, int | None] = {}
        # Id of a process group -> collectives in this step's backward.
        self._in_backward: Counter[int] = Counter()
        # Ids of process groups that had other collectives than DDP's in this step.
        self._shared: set[int] = set()
        self._counts: dict[int, int] = {}
        self._numbered = True
        self._sends: list[Called] = []
        self._thread = 0

    def begin(self, models: list[nn.Module], numbered: bool = True) -> None:
        """Begin a step in which collectives are counted.

        *numbered*: whether to compare the groups' counts at changes of phase; if not, only sends
        and receives are noticed here.
        """
        self._of_ddp = {}
        self._numbered = numbered
        for each in {
            id(ddp): ddp for model in models for ddp in inspection.ddps_in(model)
        }.values():
            group, more = id(getattr(each, "process_group", None)), _of_gradients(each)
            known = self._of_ddp.get(group, 0)
            self._of_ddp[group] = None if more is None or known is None else known + more
        self._phases = set()
        self._thread = threading.get_ident()
        owner = sys.modules["torch.distributed"].ProcessGroup
        self._sends = [Called(owner, name, self._sent) for name in ("send", "recv")]
        self._in_backward.clear()
        self._shared.clear()
        self._counts = _counts()

    def phase_ended(self, phase: str) -> None:
        """Count the collectives started since the previous call as those of this phase."""
        if not self._numbered:
            return
        before, self._counts = self._counts, _counts()
        for group, count in self._counts.items():
            more = count - before.get(group, 0)
            if more <= 0:
                continue
            if group not in self._of_ddp or phase not in _OF_DDP:
                self._phases.add(phase)
                self._shared.add(group)
            elif phase == _GRADIENTS:
                self._in_backward[group] += more

    def _sent(self, *_: Any, **__: Any) -> None:
        # Ignore other threads: one may send a checkpoint to another rank, but no step waits for it.
        if threading.get_ident() == self._thread:
            self._phases.add(SENDS)

    def take_off(self) -> None:
        """Restore torch's `send` and `recv`."""
        for each in self._sends:
            each.take_off()
        self._sends = []

    def end(self, unseen: Collection[str] = ()) -> list[str]:
        """The phases in which most counted steps had collectives besides DDP's, and SENDS if most
        steps had sends.

        Hysteresis: a phase is added above half of the steps and removed below a quarter, as each
        change restarts the agent's comparison of ranks. *unseen*: phases of this step with waits
        for collectives, found without the groups' counts.
        """
        self.take_off()
        self._phases.update(unseen)
        # A layer with collectives in forward often has some in backward, too. If they use DDP's
        # group, this group has more collectives in backward than DDP starts for gradients.
        for group in self._shared & self._in_backward.keys():
            of_ddp = self._of_ddp[group]
            if of_ddp is None or self._in_backward[group] > of_ddp:
                self._phases.add(_GRADIENTS)
        self._steps += 1
        self._steps_with.update(self._phases)
        for phase, times in self._steps_with.items():
            if 2 * times > self._steps:
                self._own.add(phase)
            elif 4 * times < self._steps:
                self._own.discard(phase)
        return sorted(self._own)


def _of_gradients(model: Any) -> int | None:
    """How many collectives this DDP starts per backward: one per bucket, and one for unused
    parameters."""
    ask = getattr(model, "_get_ddp_logging_data", None)
    known = None if ask is None else errors.attempt(ask, None)
    if not isinstance(known, dict):
        return None
    sizes = str(known.get("rebuilt_bucket_sizes") or known.get("bucket_sizes") or "")
    if not sizes:
        return None
    return len(sizes.split(",")) + bool(known.get("find_unused_parameters"))


def _counts() -> dict[int, int]:
    """Id of a process group -> how many collectives it has started so far."""
    counts = {id(group): started(group) for group in list(getattr(world(), "pg_names", ()))}
    return {group: int(count) for group, count in counts.items() if count is not None}
