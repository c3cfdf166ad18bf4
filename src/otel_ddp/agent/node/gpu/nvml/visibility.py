"""Which devices a process sees, by its environment as CUDA reads it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from otel_ddp.agent.node.gpu.driver import Device


def visible(environment: Mapping[str, str], devices: Sequence[Device]) -> list[str] | None:
    """UUIDs in the order in which the process counts; None if that is unknown."""
    chosen = environment.get("CUDA_VISIBLE_DEVICES")
    entries = [] if chosen is None else [each.strip() for each in chosen.split(",")]
    for prefix in ("GPU-", "MIG-"):
        if entries and entries[0].startswith(prefix):
            return _by_uuid(entries, prefix, devices)
    boards = _in_order(environment, devices)
    if chosen is None:
        return boards
    if not _index(entries[0]):
        return []
    return boards and _by_index(entries, boards)


def _index(entry: str) -> re.Match[str] | None:
    # As CUDA does with strtoul: text after the digits is ignored, and "-1" is no index.
    return re.match(r"\+?(\d+)", entry)


def _by_index(entries: Sequence[str], boards: Sequence[str]) -> list[str]:
    found: list[str] = []
    for entry in entries:
        number = _index(entry)
        if number is None or int(number[1]) >= len(boards):
            break
        found.append(boards[int(number[1])])
    return _without_repetition(found)


def _by_uuid(entries: Sequence[str], prefix: str, devices: Sequence[Device]) -> list[str]:
    names = {device.uuid.lower(): device.uuid for device in devices}
    found: list[str] = []
    for entry in entries:
        meant = entry.lower()
        matches = {names[meant]} if meant in names else set()
        if not matches:
            matches = {uuid for name, uuid in names.items() if name.startswith(meant)}
        if not entry.startswith(prefix) or len(matches) != 1:
            break
        found += matches
    return _without_repetition(found)


def _without_repetition(found: list[str]) -> list[str]:
    """CUDA shows no device at all if one is named twice."""
    return found if len(set(found)) == len(found) else []


def _in_order(environment: Mapping[str, str], devices: Sequence[Device]) -> list[str] | None:
    """The boards in CUDA's order in that process, before CUDA_VISIBLE_DEVICES selects any."""
    boards = _in_container(environment, [device for device in devices if not device.parent])
    if boards is None:
        return None
    parents = {device.parent for device in devices}
    if any(board.uuid in parents for board in boards):
        # CUDA then counts instances, and NVML does not know their order.
        return None
    # Otherwise the fastest board comes first, and only equal ones are in the order of NVML.
    in_order = environment.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    if not in_order and len({board.name for board in boards}) > 1:
        return None
    return [board.uuid for board in boards]


def _in_container(
    environment: Mapping[str, str], boards: Sequence[Device]
) -> Sequence[Device] | None:
    """The boards of the process's container, which counts them anew, in the same order.

    An agent in that container sees the same boards as the process. An agent outside can rely on
    UUIDs alone: indices may be counted in another view of the machine.
    """
    given = environment.get("NVIDIA_VISIBLE_DEVICES", "all").strip()
    if given == "all":
        return boards
    if given == "none":
        return ()
    entries = {each.strip() for each in given.split(",")}
    named = [board for board in boards if board.uuid in entries]
    if len(named) == len(entries):
        return named
    if len(boards) == len(entries) and given not in ("", "void"):
        return boards
    return None
