"""Assigns to each rank the GPUs that it reports, or else the GPUs that its process uses."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from otel_ddp import plain
from otel_ddp.agent.ledger import Labels
from otel_ddp.agent.node.nvml import Device, DeviceSample
from otel_ddp.agent.reading.journals import Rank
from otel_ddp.vocabulary.words import NODE_LABELS


class DeviceMemory(NamedTuple):
    """How much memory of a device the process of a rank uses."""

    labels: Labels
    device: Device
    used_bytes: int


class Ownership(NamedTuple):
    """The labels for the metrics of each device, and the memory that ranks use on it."""

    labels: dict[str, Labels]
    """The labels for the metrics of each device; the key is the device's UUID."""
    memory: list[DeviceMemory]


class _Process(NamedTuple):
    """A process with the devices that it uses."""

    labels: Labels
    declared: list[str]
    """UUIDs of the devices that this rank reports, in the driver's spelling."""
    seen: dict[str, int | None]
    """Used bytes by UUID, as reported by the driver; None if unknown."""


def owners(ranks: Sequence[Rank], devices: Sequence[DeviceSample], node: str) -> Ownership:
    """Assign the devices to ranks. *node*: the node's label, given to devices that no run uses."""
    by_uuid = {each.device.uuid: each.device for each in devices}
    by_bare = {_bare(uuid): uuid for uuid in by_uuid}
    found = [
        _Process(each.labels, _declared(each, by_bare), _seen(each.pid, ranks, devices))
        for each in ranks
    ]
    users: dict[str, list[Labels]] = defaultdict(list)
    used: dict[tuple[Labels, str], int] = defaultdict(int)
    for process in found:
        for uuid in process.declared or process.seen:
            # Add a rank only once: it may have two processes, one of an attempt that is ending and
            # one of the next attempt.
            if process.labels not in users[uuid]:
                users[uuid].append(process.labels)
        for uuid, used_bytes in process.seen.items():
            if used_bytes is not None:
                used[process.labels, uuid] += used_bytes
    labels = {
        uuid: users[uuid][0] if len(users[uuid]) == 1 else shared_labels(users[uuid], node)
        for uuid in by_uuid
    }
    # If the driver lists none of our pids, its pids are from another PID namespace. Then ignore
    # pids, and assign a device's memory to the rank that reports this device.
    ours = {each.pid for each in ranks if each.pid}
    if not any(user.pid in ours for each in devices for user in each.users):
        used = _used_by_strangers(found, devices)
    memory = [DeviceMemory(rank, by_uuid[uuid], used[rank, uuid]) for rank, uuid in used]
    return Ownership(labels, memory)


def _declared(rank: Rank, by_bare: Mapping[str, str]) -> list[str]:
    written = plain.list_of(dict, rank.facts.get("boards"))
    found = (by_bare.get(_bare(plain.text(each.get("uuid")))) for each in written)
    return [uuid for uuid in found if uuid is not None]


def _bare(uuid: str) -> str:
    """A UUID without the prefix `GPU-`: the driver writes it, torch omits it."""
    return uuid.strip().lower().removeprefix("gpu-")


def _seen(
    pid: int, ranks: Sequence[Rank], devices: Sequence[DeviceSample]
) -> dict[str, int | None]:
    # The pid is 0 if the agent cannot see the process. With two journals for one pid, it is unknown
    # which of the two ranks uses the memory.
    if not pid or sum(each.pid == pid for each in ranks) > 1:
        return {}
    return {
        each.device.uuid: user.used_bytes
        for each in devices
        for user in each.users
        if user.pid == pid
    }


def shared_labels(ranks: Iterable[Labels], node: str) -> Labels:
    """The labels of the run if all these ranks belong to one run; else the node's label."""
    runs = {tuple(pair for pair in labels if pair[0] in NODE_LABELS) for labels in ranks}
    return runs.pop() if len(runs) == 1 else (("node", node),)


def _used_by_strangers(
    processes: Sequence[_Process], devices: Sequence[DeviceSample]
) -> dict[tuple[Labels, str], int]:
    """Used bytes by rank and device, for devices that one rank reports and one process uses."""
    used = {}
    for device, _, users in devices:
        ranks = {each.labels for each in processes if device.uuid in each.declared}
        used_bytes = users[0].used_bytes if len(users) == 1 else None
        if len(ranks) == 1 and used_bytes is not None:
            used[ranks.pop(), device.uuid] = used_bytes
    return used
