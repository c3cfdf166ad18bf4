"""Which rank uses which device and its memory: declared, selected, seen, or unknown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from otel_ddp.agent.ledger import Labels
from otel_ddp.agent.node.gpu_owners import Ownership, owners
from otel_ddp.agent.node.nvml import Device, DeviceSample, User
from otel_ddp.agent.reading.journals import Rank

UUIDS = [f"8932f937-d72c-4106-c12f-20bd9faed9f{n}" for n in range(4)]
BOARDS = [Device(f"GPU-{uuid}", str(n), "NVIDIA H100") for n, uuid in enumerate(UUIDS)]
FREE: Labels = (("node", "host"),)
SHARED: Labels = (("group", "g"), ("run", "run"), ("node", "n"))
MIB = 1024 * 1024


def rank(number: int, run: str = "run", job_type: str = "train") -> Labels:
    return (
        *(("group", "g"), ("run", run), ("job_type", job_type), ("node", "n")),
        *(("rank", str(number)), ("local_rank", str(number))),
    )


def claim(number: int, *devices: str, pid: int | None = None, labels: Labels = ()) -> Rank:
    """Rank 0 has process id 100, rank 1 has 101, and so on, unless given."""
    facts = {"boards": [{"index": 0, "uuid": uuid} for uuid in devices]}
    return Rank(labels or rank(number), 100 + number if pid is None else pid, 0, facts)


def decide(
    claims: Sequence[Rank],
    users: Mapping[Device, Sequence[tuple[int, int | None]]] | None = None,
) -> Ownership:
    samples = [
        DeviceSample(each, (), tuple(User(*user) for user in (users or {}).get(each, ())))
        for each in BOARDS
    ]
    return owners(claims, samples, "host")


def shown(ownership: Ownership) -> str:
    """The rank of each board: `run` of several, `-` of none."""
    words: list[str] = []
    for each in BOARDS:
        found = ownership.labels[each.uuid]
        word = "run" if found == SHARED else "-" if found == FREE else dict(found)["rank"]
        assert found in (SHARED, FREE, rank(int(word) if word.isdecimal() else 0))
        words.append(word)
    return " ".join(words)


def memory(ownership: Ownership) -> list[tuple[str, str, int]]:
    """Rank, index of the device, MiB."""
    return [
        (dict(each.labels)["rank"], each.device.index, each.used_bytes // MIB)
        for each in ownership.memory
    ]


# ------------------------------------------------------------------------------ labels

ALONE, BOTH = [(100, MIB)], [(100, MIB), (101, MIB)]
B = [each.uuid for each in BOARDS]
R0 = claim(0, B[0])


def also(**known: str) -> Rank:
    """Rank 1 on the device of rank 0."""
    return claim(1, B[0], labels=rank(1, **known))


# Some virtual machines give it.
ZEROS = "00000000-0000-0000-0000-000000000000"


@pytest.mark.parametrize(
    ("claims", "users", "expected"),
    [
        # Declared, however it is spelt.
        ([claim(0, B[1]), claim(1, B[0])], {}, "1 0 - -"),
        ([claim(0, UUIDS[2].upper())], {}, "- - 0 -"),
        ([claim(0, B[0])], {BOARDS[1]: ALONE}, "0 - - -"),
        # Shared by ranks of one run, and by others.
        ([claim(0, B[0]), claim(1, B[0])], {}, "run - - -"),
        ([R0, also(job_type="worker")], {}, "run - - -"),
        ([R0, also(run="other")], {}, "- - - -"),
        # Not declared: what the driver sees.
        ([claim(0), claim(1)], {BOARDS[0]: [(101, 1)], BOARDS[1]: ALONE}, "1 0 - -"),
        ([claim(0, ZEROS)], {BOARDS[1]: ALONE}, "- 0 - -"),
        ([claim(0, B[0]), claim(1)], {BOARDS[0]: BOTH}, "run - - -"),
        ([claim(0, pid=0)], {BOARDS[0]: [(0, 1)]}, "- - - -"),
    ],
)
def test_a_device_has_the_labels_of_the_ranks_that_use_it(
    claims: Sequence[Rank], users: Mapping[Device, Sequence[tuple[int, int | None]]], expected: str
) -> None:
    ownership = decide(claims, users)

    assert shown(ownership) == expected


# ------------------------------------------------------------------------------ memory


@pytest.mark.parametrize(
    ("claims", "users", "expected"),
    [
        (
            [claim(0, B[0]), claim(1, B[1])],
            {BOARDS[0]: [(100, 5 * MIB), (999, 70 * MIB)], BOARDS[1]: [(101, None)]},
            [("0", "0", 5)],
        ),
        # Two processes of one rank: an attempt that has not quite ended, and the next.
        (
            [claim(0, B[0]), claim(0, B[0], pid=200)],
            {BOARDS[0]: [(100, 3 * MIB), (200, 4 * MIB)]},
            [("0", "0", 7)],
        ),
        # A lone stranger on a declared device is its rank in a container.
        (
            [claim(0, B[0]), claim(1, B[1])],
            {BOARDS[0]: [(90100, 5 * MIB)], BOARDS[1]: [(90101, 6 * MIB)]},
            [("0", "0", 5), ("1", "1", 6)],
        ),
        # The owner is never guessed: two strangers; two ranks; a device that is not declared.
        ([claim(0, B[0])], {BOARDS[0]: [(900, MIB), (901, MIB)]}, []),
        ([claim(0, B[0]), claim(1, B[0])], {BOARDS[0]: [(900, MIB)]}, []),
        ([claim(0)], {BOARDS[0]: [(900, MIB)]}, []),
        # One process that has written the journals of two ranks.
        ([claim(0, B[0]), claim(1, B[1], pid=100)], {BOARDS[0]: [(100, MIB)]}, []),
    ],
)
def test_memory_is_that_of_the_process(claims: Any, users: Any, expected: Any) -> None:
    assert memory(decide(claims, users)) == expected
