"""Which rank uses which device: the rank's own declaration, or else what the driver sees."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from otel_ddp.agent.ledger import Labels
from otel_ddp.agent.node.gpu.driver import Device, User
from otel_ddp.agent.node.gpu.polling import DeviceSample
from otel_ddp.vocabulary.words import NODE_LABELS, RUN_LABELS

VisibleDevices = Callable[[Mapping[str, str]], Sequence[str] | None]
"""The devices that a process with these variables sees; as `Driver.visible`."""


class ProcessDevices(NamedTuple):
    """A living process of this node, and what it declared of the devices that it uses."""

    labels: Labels
    """All six labels of a rank."""
    pid: int = 0
    """Its process id as the agent and the driver see it; 0 if they see none."""
    devices: tuple[str, ...] = ()
    """The UUIDs that it declared, with or without the vendor's prefix."""
    environment: Mapping[str, str] | None = None
    """If it declared none: the variables that select the devices it sees; None if unknown."""
    cuda_index: int | None = None
    """If it declared none: which of those devices it uses."""


class DeviceMemory(NamedTuple):
    """The memory that a rank's process uses on a device."""

    labels: Labels
    device: Device
    used_bytes: int


class Ownership(NamedTuple):
    """The labels of each device's numbers, and the memory that ranks use on it."""

    labels: dict[str, Labels]
    """By UUID."""
    memory: list[DeviceMemory]
    remarks: list[str]
    """Sentences that a user can act on."""


def owners(
    processes: Sequence[ProcessDevices],
    devices: Sequence[DeviceSample],
    visible: VisibleDevices,
    node: str,
) -> Ownership:
    """Assign the devices to the ranks. *node*: the label of a device that no run uses."""
    seen = _seen(processes, devices)
    boards = _Boards([each.device for each in devices])
    assigned = _assigned(processes, seen, boards, visible)
    users: dict[str, list[Labels]] = defaultdict(list)
    for process, uuids in zip(processes, assigned, strict=True):
        for uuid in boards.with_parents(uuids):
            # Two processes may be one rank: an attempt that has not quite ended, and the next one.
            if process.labels not in users[uuid]:
                users[uuid].append(process.labels)
    labels = {each.device.uuid: _common(users[each.device.uuid], node) for each in devices}
    memory = _memory(processes, devices, seen, boards)
    return Ownership(labels, memory, _remarks(processes, seen, assigned, users, boards))


Seen = list[dict[str, int | None]]
"""For each process: the devices on which the driver sees it, and the bytes it uses there."""


class _Boards:
    """The devices: boards, and the parts (MIG instances) of boards."""

    def __init__(self, devices: Sequence[Device]) -> None:
        self.by_uuid = {each.uuid: each for each in devices}
        self._by_bare = {bare_uuid(each.uuid): each.uuid for each in devices}
        self._parent = {each.uuid: each.parent for each in devices if each.parent}

    def known(self, uuids: Sequence[str]) -> list[str]:
        """Those UUIDs that exist, spelt as the driver spells them."""
        found = (self._by_bare.get(bare_uuid(uuid)) for uuid in uuids)
        return [uuid for uuid in found if uuid is not None]

    def parts(self, uuid: str) -> list[str]:
        return [part for part, parent in self._parent.items() if parent == uuid]

    def with_parents(self, uuids: Sequence[str]) -> list[str]:
        parents = (self._parent.get(uuid, "") for uuid in uuids)
        return list(dict.fromkeys([*uuids, *filter(None, parents)]))

    def narrowest(self, uuids: Sequence[str]) -> list[str]:
        """Without boards that have a part in the list: the driver shows a process on both."""
        parents = {self._parent.get(uuid) for uuid in uuids}
        return [uuid for uuid in uuids if uuid not in parents]


def bare_uuid(uuid: str) -> str:
    """A UUID without the vendor's prefix, which torch leaves out."""
    return uuid.strip().lower().removeprefix("mig-").removeprefix("gpu-")


def _seen(processes: Sequence[ProcessDevices], devices: Sequence[DeviceSample]) -> Seen:
    found: Seen = [{} for _ in processes]
    for each in devices:
        for user in each.users:
            holders = [
                number
                for number, process in enumerate(processes)
                if process.pid and process.pid == user.pid
            ]
            # A process with two journals could be either rank.
            if len(holders) == 1:
                found[holders[0]][each.device.uuid] = user.used_bytes
    return found


def _assigned(
    processes: Sequence[ProcessDevices], seen: Seen, boards: _Boards, visible: VisibleDevices
) -> list[list[str]]:
    declared_by_process = [
        _declared(*each, boards, visible) for each in zip(processes, seen, strict=True)
    ]
    declared_by_any = {uuid for uuids in declared_by_process for uuid in uuids}
    assigned = []
    for uuids, found in zip(declared_by_process, seen, strict=True):
        if not uuids:
            uuids = boards.narrowest(list(found))
            # A process often has a second context, by mistake, on a device of another rank.
            uuids = [uuid for uuid in uuids if uuid not in declared_by_any] or uuids
        assigned.append(uuids)
    return assigned


def _declared(
    process: ProcessDevices,
    found: Mapping[str, int | None],
    boards: _Boards,
    visible: VisibleDevices,
) -> list[str]:
    """The devices that the process itself declared, if they exist."""
    chosen = boards.known(_chosen(process, visible))
    declared = boards.known(process.devices)
    if not declared:
        # Indices mislead in a container with boards of its own; what the driver sees does not.
        contradicted = found and not any(uuid in found for uuid in boards.with_parents(chosen))
        return [] if contradicted else chosen
    uuids = []
    for uuid in declared:
        # Before CUDA 12 a process on a part of a board gets the UUID of the board.
        parts = boards.parts(uuid)
        uuids += (
            [part for part in parts if part in found]
            or [part for part in parts if part in chosen]
            or [uuid]
        )
    return boards.narrowest(uuids)


def _chosen(process: ProcessDevices, visible: VisibleDevices) -> Sequence[str]:
    if process.environment is None or process.cuda_index is None:
        return ()
    uuids = visible(process.environment)
    if uuids is None or not 0 <= process.cuda_index < len(uuids):
        return ()
    return (uuids[process.cuda_index],)


def _common(ranks: Sequence[Labels], node: str) -> Labels:
    """The labels of the only rank; or those of the run that all ranks share; or the node's."""
    if len(ranks) == 1:
        return ranks[0]
    runs = {tuple(pair for pair in labels if pair[0] in NODE_LABELS) for labels in ranks}
    return runs.pop() if len(runs) == 1 else (("node", node),)


def _memory(
    processes: Sequence[ProcessDevices],
    devices: Sequence[DeviceSample],
    seen: Seen,
    boards: _Boards,
) -> list[DeviceMemory]:
    used: dict[tuple[Labels, str], int] = defaultdict(int)
    for process, found in zip(processes, seen, strict=True):
        for uuid in boards.narrowest(list(found)):
            if (used_bytes := found[uuid]) is not None:
                used[process.labels, uuid] += used_bytes
    # If the driver knows none of our process ids, it counts in another PID namespace.
    if not any(seen):
        for each in devices:
            rank = _only_rank_declaring(processes, each.device.uuid, boards)
            stranger = _only_stranger(processes, each.users)
            if rank is not None and stranger is not None and stranger.used_bytes is not None:
                used[rank, each.device.uuid] = stranger.used_bytes
    return [
        DeviceMemory(labels, boards.by_uuid[uuid], used_bytes)
        for (labels, uuid), used_bytes in used.items()
    ]


def _only_rank_declaring(
    processes: Sequence[ProcessDevices], uuid: str, boards: _Boards
) -> Labels | None:
    """The only rank that declares this device; None if there are several or none."""
    ranks = {process.labels for process in processes if uuid in boards.known(process.devices)}
    return ranks.pop() if len(ranks) == 1 else None


def _only_stranger(processes: Sequence[ProcessDevices], users: Sequence[User]) -> User | None:
    """The only process on the device, if it is none of ours."""
    if len(users) != 1 or any(users[0].pid == process.pid for process in processes):
        return None
    return users[0]


def _remarks(
    processes: Sequence[ProcessDevices],
    seen: Seen,
    assigned: Sequence[Sequence[str]],
    users: Mapping[str, Sequence[Labels]],
    boards: _Boards,
) -> list[str]:
    runs = {
        tuple(pair for pair in process.labels if pair[0] in RUN_LABELS) for process in processes
    }
    several = len(runs) > 1
    remarks = []
    for process, found, uuids in zip(processes, seen, assigned, strict=True):
        expected = {*boards.with_parents(uuids), *(p for u in uuids for p in boards.parts(u))}
        for uuid in boards.narrowest([uuid for uuid in found if uuid not in expected]):
            used_bytes = found[uuid]
            what = "a context" if used_bytes is None else f"{used_bytes >> 20} MiB"
            there = [_rank_name(labels, several) for labels in users.get(uuid, ())]
            by = f"{' and '.join(there) or 'no rank'} use{'' if len(there) > 1 else 's'}"
            remarks.append(
                f"{_rank_name(process.labels, several)} also holds {what} on GPU "
                f"{boards.by_uuid[uuid].index} (which {by}): something created a context there "
                "before torch.cuda.set_device"
            )
    return remarks


def _rank_name(labels: Labels, several: bool) -> str:
    by_name = dict(labels)
    return f"rank {by_name.get('rank')}" + (f" of run {by_name.get('run')}" if several else "")
