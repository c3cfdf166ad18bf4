"""Says which rank uses which device: by what ranks declare, and else by what the driver sees."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from otel_ddp.agent.ledger import Labels
from otel_ddp.agent.node.gpu.driver import Device, User
from otel_ddp.agent.node.gpu.gpu import DeviceSample
from otel_ddp.catalog import NODE_LABELS, RUN_LABELS

Visible = Callable[[Mapping[str, str]], Sequence[str] | None]
"""The devices that a process with these variables sees, as `Driver.visible` has it."""


class Claim(NamedTuple):
    """A living process of this node, and what is known of the devices that it uses."""

    labels: Labels
    """All six."""
    pid: int = 0
    """Its number where the agent is, the one that the driver speaks of; 0 if it has none there."""
    devices: tuple[str, ...] = ()
    """The UUIDs that it declared, with or without the maker's prefix."""
    environment: Mapping[str, str] | None = None
    """Where it declared none: the variables that say which devices it sees; None if unknown."""
    cuda_index: int | None = None
    """Where it declared none: which of those it uses."""


class Held(NamedTuple):
    """Memory that a rank's process occupies on a device."""

    labels: Labels
    device: Device
    used_bytes: int


class Ownership(NamedTuple):
    """What stands before the readings of each device, and what ranks hold on it."""

    labels: dict[str, Labels]
    """By UUID."""
    memory: list[Held]
    remarks: list[str]
    """Sentences that a user can act on."""


def owners(
    claims: Sequence[Claim], devices: Sequence[DeviceSample], visible: Visible, node: str
) -> Ownership:
    """Decide it anew. *node*: the label of a device that belongs to no run."""
    seen = _seen(claims, devices)
    boards = _Boards([each.device for each in devices])
    own = _own(claims, seen, boards, visible)
    users: dict[str, list[Labels]] = defaultdict(list)
    for claim, uuids in zip(claims, own, strict=True):
        for uuid in boards.with_parents(uuids):
            # Two processes may be one rank: an attempt that has not quite ended, and the next.
            if claim.labels not in users[uuid]:
                users[uuid].append(claim.labels)
    labels = {each.device.uuid: _common(users[each.device.uuid], node) for each in devices}
    memory = _memory(claims, devices, seen, boards)
    return Ownership(labels, memory, _remarks(claims, seen, own, users, boards))


Seen = list[dict[str, int | None]]
"""For each claim: the devices on which the driver sees it, and the bytes that it has there."""


class _Boards:
    """The devices, and which of them are parts of which."""

    def __init__(self, devices: Sequence[Device]) -> None:
        self.by_uuid = {each.uuid: each for each in devices}
        self._by_bare = {bare(each.uuid): each.uuid for each in devices}
        self._parent = {each.uuid: each.parent for each in devices if each.parent}

    def known(self, uuids: Sequence[str]) -> list[str]:
        """Those of them that there are, spelt as the driver does."""
        found = (self._by_bare.get(bare(uuid)) for uuid in uuids)
        return [uuid for uuid in found if uuid is not None]

    def parts(self, uuid: str) -> list[str]:
        return [part for part, parent in self._parent.items() if parent == uuid]

    def with_parents(self, uuids: Sequence[str]) -> list[str]:
        parents = (self._parent.get(uuid, "") for uuid in uuids)
        return list(dict.fromkeys([*uuids, *filter(None, parents)]))

    def narrowest(self, uuids: Sequence[str]) -> list[str]:
        """Without the boards of which a part is named as well: a part's processes show on both."""
        parents = {self._parent.get(uuid) for uuid in uuids}
        return [uuid for uuid in uuids if uuid not in parents]


def bare(uuid: str) -> str:
    """A UUID without the maker's prefix: torch leaves it out."""
    return uuid.strip().lower().removeprefix("mig-").removeprefix("gpu-")


def _seen(claims: Sequence[Claim], devices: Sequence[DeviceSample]) -> Seen:
    found: Seen = [{} for _ in claims]
    for each in devices:
        for user in each.users:
            holders = [
                number for number, claim in enumerate(claims) if claim.pid and claim.pid == user.pid
            ]
            # One process may have written two journals: then it could be either rank's.
            if len(holders) == 1:
                found[holders[0]][each.device.uuid] = user.used_bytes
    return found


def _own(claims: Sequence[Claim], seen: Seen, boards: _Boards, visible: Visible) -> list[list[str]]:
    told = [_told(*each, boards, visible) for each in zip(claims, seen, strict=True)]
    taken = {uuid for uuids in told for uuid in uuids}
    own = []
    for uuids, found in zip(told, seen, strict=True):
        if not uuids:
            uuids = boards.narrowest(list(found))
            # A process often has a second context, by mistake, where somebody else works.
            uuids = [uuid for uuid in uuids if uuid not in taken] or uuids
        own.append(uuids)
    return own


def _told(
    claim: Claim, found: Mapping[str, int | None], boards: _Boards, visible: Visible
) -> list[str]:
    """What the process itself says, as far as that leads to devices that there are."""
    chosen = boards.known(_chosen(claim, visible))
    declared = boards.known(claim.devices)
    if not declared:
        # Indices of a container with boards of its own lead astray; what the driver sees does not.
        contradicted = found and not any(uuid in found for uuid in boards.with_parents(chosen))
        return [] if contradicted else chosen
    told = []
    for uuid in declared:
        # Before CUDA 12 a process on a part of a board is told the UUID of the board.
        parts = boards.parts(uuid)
        told += (
            [part for part in parts if part in found]
            or [part for part in parts if part in chosen]
            or [uuid]
        )
    return boards.narrowest(told)


def _chosen(claim: Claim, visible: Visible) -> Sequence[str]:
    if claim.environment is None or claim.cuda_index is None:
        return ()
    uuids = visible(claim.environment)
    if uuids is None or not 0 <= claim.cuda_index < len(uuids):
        return ()
    return (uuids[claim.cuda_index],)


def _common(ranks: Sequence[Labels], node: str) -> Labels:
    """The labels of the one rank; those of the run that all of them belong to; or the node's."""
    if len(ranks) == 1:
        return ranks[0]
    runs = {tuple(pair for pair in labels if pair[0] in NODE_LABELS) for labels in ranks}
    return runs.pop() if len(runs) == 1 else (("node", node),)


def _memory(
    claims: Sequence[Claim], devices: Sequence[DeviceSample], seen: Seen, boards: _Boards
) -> list[Held]:
    used: dict[tuple[Labels, str], int] = defaultdict(int)
    for claim, found in zip(claims, seen, strict=True):
        for uuid in boards.narrowest(list(found)):
            if (used_bytes := found[uuid]) is not None:
                used[claim.labels, uuid] += used_bytes
    # Where the driver's numbers are those of none of our processes, they are of another namespace.
    if not any(seen):
        for each in devices:
            rank = _declaring(claims, each.device.uuid, boards)
            stranger = _only_stranger(claims, each.users)
            if rank is not None and stranger is not None and stranger.used_bytes is not None:
                used[rank, each.device.uuid] = stranger.used_bytes
    return [
        Held(labels, boards.by_uuid[uuid], used_bytes)
        for (labels, uuid), used_bytes in used.items()
    ]


def _declaring(claims: Sequence[Claim], uuid: str, boards: _Boards) -> Labels | None:
    """The one rank that declares this device."""
    ranks = {claim.labels for claim in claims if uuid in boards.known(claim.devices)}
    return ranks.pop() if len(ranks) == 1 else None


def _only_stranger(claims: Sequence[Claim], users: Sequence[User]) -> User | None:
    """The one process of the device, if none of ours has its number."""
    if len(users) != 1 or any(users[0].pid == claim.pid for claim in claims):
        return None
    return users[0]


def _remarks(
    claims: Sequence[Claim],
    seen: Seen,
    own: Sequence[Sequence[str]],
    users: Mapping[str, Sequence[Labels]],
    boards: _Boards,
) -> list[str]:
    runs = {tuple(pair for pair in claim.labels if pair[0] in RUN_LABELS) for claim in claims}
    several = len(runs) > 1
    remarks = []
    for claim, found, uuids in zip(claims, seen, own, strict=True):
        expected = {*boards.with_parents(uuids), *(p for u in uuids for p in boards.parts(u))}
        for uuid in boards.narrowest([uuid for uuid in found if uuid not in expected]):
            used_bytes = found[uuid]
            what = "a context" if used_bytes is None else f"{used_bytes >> 20} MiB"
            there = [_who(labels, several) for labels in users.get(uuid, ())]
            by = f"{' and '.join(there) or 'no rank'} use{'' if len(there) > 1 else 's'}"
            remarks.append(
                f"{_who(claim.labels, several)} also holds {what} on GPU "
                f"{boards.by_uuid[uuid].index} (which {by}): something created a context there "
                "before torch.cuda.set_device"
            )
    return remarks


def _who(labels: Labels, several: bool) -> str:
    said = dict(labels)
    return f"rank {said.get('rank')}" + (f" of run {said.get('run')}" if several else "")
