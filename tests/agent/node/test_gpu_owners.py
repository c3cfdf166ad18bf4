"""Which rank uses which device and its memory: declared, selected, seen, or unknown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from otel_ddp.agent.ledger import Labels
from otel_ddp.agent.node.gpu.driver import Device, User
from otel_ddp.agent.node.gpu.polling import DeviceSample
from otel_ddp.agent.node.gpu_owners import Ownership, ProcessDevices, owners

UUIDS = [f"8932f937-d72c-4106-c12f-20bd9faed9f{n}" for n in range(4)]
BOARDS = [Device(f"GPU-{uuid}", str(n), "NVIDIA H100") for n, uuid in enumerate(UUIDS)]
# Board 3, split in two.
PARTS = [
    Device(f"MIG-aaaa000{n}-0000-0000-0000-000000000000", f"3:{n}", "H100 3g.40gb", "", parent)
    for n, parent in enumerate([BOARDS[3].uuid] * 2)
]
FREE: Labels = (("node", "host"),)
SHARED: Labels = (("group", "g"), ("run", "run"), ("node", "n"))
MIB = 1024 * 1024


def rank(
    number: int,
    run: str = "run",
    job_type: str = "train",
    node: str = "n",
    group: str = "g",
) -> Labels:
    return (
        *(("group", group), ("run", run), ("job_type", job_type), ("node", node)),
        *(("rank", str(number)), ("local_rank", str(number))),
    )


def claim(number: int, *devices: str, **known: Any) -> ProcessDevices:
    """Rank 0 has process id 100, rank 1 has 101, and so on, unless given."""
    known = {"labels": rank(number), "pid": 100 + number, **known}
    return ProcessDevices(devices=devices, **known)


def decide(
    claims: Sequence[ProcessDevices],
    users: Mapping[Device, Sequence[tuple[int, int | None]]] | None = None,
    visible: Sequence[str] | None = None,
    devices: Sequence[Device] = tuple(BOARDS),
) -> Ownership:
    samples = [
        DeviceSample(each, (), tuple(User(*user) for user in (users or {}).get(each, ())))
        for each in devices
    ]
    return owners(claims, samples, lambda environment: visible, "host")


def labels(ownership: Ownership, devices: Sequence[Device] = BOARDS) -> list[Labels]:
    return [ownership.labels[each.uuid] for each in devices]


def memory(ownership: Ownership) -> list[tuple[str, str, int]]:
    """Rank, index of the device, MiB."""
    return [
        (dict(each.labels)["rank"], each.device.index, each.used_bytes // MIB)
        for each in ownership.memory
    ]


# ------------------------------------------------------------------------------ labels


def test_an_unused_device_has_the_node_s_label_alone() -> None:
    ownership = decide([])

    assert ownership == Ownership(dict.fromkeys([each.uuid for each in BOARDS], FREE), [], [])


def test_a_device_of_one_rank_has_all_labels_of_that_rank() -> None:
    ownership = decide([claim(0, BOARDS[1].uuid), claim(1, BOARDS[0].uuid)])

    assert labels(ownership) == [rank(1), rank(0), FREE, FREE]


@pytest.mark.parametrize(
    "spelt", [UUIDS[2], UUIDS[2].upper(), f"gpu-{UUIDS[2]}", f"GPU-{UUIDS[2].upper()}"]
)
def test_a_uuid_is_known_however_it_is_spelt(spelt: str) -> None:
    ownership = decide([claim(0, spelt)])

    assert labels(ownership) == [FREE, FREE, rank(0), FREE]


@pytest.mark.parametrize("role", ["train", "worker"])
def test_a_device_that_ranks_of_a_run_share_has_the_labels_of_the_run(role: str) -> None:
    other = claim(1, UUIDS[0], labels=rank(1, job_type=role))

    ownership = decide([claim(0, UUIDS[0]), other])

    assert labels(ownership)[0] == SHARED


@pytest.mark.parametrize(
    "other",
    [{"run": "other"}, {"group": "other"}, {"node": "n-1"}],
    ids=lambda each: next(iter(each)),
)
def test_a_device_that_different_runs_share_has_the_node_s_label_alone(other: Any) -> None:
    ownership = decide([claim(0, UUIDS[0]), claim(1, UUIDS[0], labels=rank(1, **other))])

    assert labels(ownership)[0] == FREE


def test_two_processes_of_one_rank_are_one_user() -> None:
    # An attempt that has not quite ended, and the next.
    ownership = decide(
        [claim(0, UUIDS[0]), claim(0, UUIDS[0], pid=200)],
        {BOARDS[0]: [(100, 3 * MIB), (200, 4 * MIB)]},
    )

    assert labels(ownership)[0] == rank(0)
    assert memory(ownership) == [("0", "0", 7)]


def test_a_rank_may_use_several_devices() -> None:
    ownership = decide([claim(0, UUIDS[0], UUIDS[1])], {BOARDS[1]: [(100, MIB)]})

    assert labels(ownership) == [rank(0), rank(0), FREE, FREE]
    assert ownership.remarks == []


# ---------------------------------------------------------------------------- what is not declared


def test_without_a_declaration_the_driver_decides() -> None:
    ownership = decide(
        [claim(0), claim(1, pid=90101)],
        {BOARDS[0]: [(90101, 2 * MIB)], BOARDS[1]: [(100, 3 * MIB)]},
    )

    assert labels(ownership) == [rank(1), rank(0), FREE, FREE]
    assert memory(ownership) == [("0", "1", 3), ("1", "0", 2)]


def test_what_is_declared_wins_over_what_the_driver_sees() -> None:
    ownership = decide([claim(0, UUIDS[0])], {BOARDS[1]: [(100, MIB)]})

    assert labels(ownership)[:2] == [rank(0), FREE]


@pytest.mark.parametrize("how", ["seen", "chosen"])
def test_a_declared_device_that_is_not_there_counts_for_nothing(how: str) -> None:
    seen = {BOARDS[1]: [(100, MIB)]} if how == "seen" else {}
    known = {"environment": {}, "cuda_index": 0} if how == "chosen" else {}

    # Some virtual machines give a UUID of zeros.
    ownership = decide(
        [claim(0, "00000000-0000-0000-0000-000000000000", **known)], seen, [BOARDS[1].uuid]
    )

    assert labels(ownership)[:2] == [FREE, rank(0)]


def test_the_variables_and_the_index_of_a_process_give_its_device() -> None:
    asked = []

    def visible(environment: Mapping[str, str]) -> Sequence[str]:
        asked.append(environment)
        return [BOARDS[2].uuid, BOARDS[3].uuid]

    environment = {"CUDA_VISIBLE_DEVICES": "2,3"}
    samples = [DeviceSample(each, (), ()) for each in BOARDS]
    ownership = owners([claim(0, environment=environment, cuda_index=1)], samples, visible, "host")

    assert labels(ownership) == [FREE, FREE, FREE, rank(0)]
    assert asked == [environment]


@pytest.mark.parametrize(
    ("known", "visible"),
    [
        ({"environment": {}, "cuda_index": 4}, [BOARDS[0].uuid]),
        ({"environment": {}, "cuda_index": -1}, [BOARDS[0].uuid]),
        ({"environment": {}, "cuda_index": 0}, None),
        ({"environment": {}, "cuda_index": 0}, ["GPU-elsewhere"]),
        ({"environment": {}}, [BOARDS[0].uuid]),
        ({"cuda_index": 0}, [BOARDS[0].uuid]),
    ],
    ids=["beyond", "below", "cannot be told", "unknown", "no index", "no variables"],
)
def test_an_index_without_a_device_is_no_device(known: Any, visible: Any) -> None:
    ownership = decide([claim(0, **known)], visible=visible)

    assert labels(ownership) == [FREE] * 4


def test_an_index_that_the_driver_contradicts_is_that_of_some_container() -> None:
    ownership = decide(
        [claim(0, environment={"CUDA_VISIBLE_DEVICES": "0"}, cuda_index=0)],
        {BOARDS[2]: [(100, MIB)]},
        visible=[BOARDS[0].uuid],
    )

    assert labels(ownership) == [FREE, FREE, rank(0), FREE]
    assert ownership.remarks == []


def test_a_declared_device_wins_over_an_index() -> None:
    ownership = decide([claim(0, UUIDS[1], environment={}, cuda_index=0)], visible=[BOARDS[0].uuid])

    assert labels(ownership)[:2] == [FREE, rank(0)]


def test_of_the_devices_that_the_driver_sees_a_rank_has_those_that_no_other_declares() -> None:
    ownership = decide(
        [claim(0, UUIDS[0]), claim(1)],
        {BOARDS[0]: [(100, MIB), (101, MIB)], BOARDS[1]: [(101, MIB)]},
    )

    assert labels(ownership)[:2] == [rank(0), rank(1)]


def test_a_rank_that_is_seen_only_where_another_declares_shares_it() -> None:
    ownership = decide([claim(0, UUIDS[0]), claim(1)], {BOARDS[0]: [(100, MIB), (101, MIB)]})

    assert labels(ownership)[0] == SHARED


# ------------------------------------------------------------------------------ parts of boards


def test_a_part_is_a_device_of_its_own_and_its_board_belongs_to_the_ranks_on_its_parts() -> None:
    devices = [*BOARDS, *PARTS]

    alone = decide([claim(0, PARTS[0].uuid)], devices=devices)
    both = decide([claim(0, PARTS[0].uuid), claim(1, PARTS[1].uuid)], devices=devices)

    assert labels(alone, [BOARDS[3], *PARTS]) == [rank(0), rank(0), FREE]
    assert labels(both, [BOARDS[3], *PARTS]) == [SHARED, rank(0), rank(1)]


def test_a_part_s_uuid_may_come_without_its_prefix() -> None:
    ownership = decide([claim(0, PARTS[1].uuid[4:])], devices=[*BOARDS, *PARTS])

    assert labels(ownership, PARTS) == [FREE, rank(0)]


def test_a_part_may_have_a_name_of_the_older_kind() -> None:
    older = Device(f"MIG-GPU-{UUIDS[3]}/7/0", "3:0", "A100 3g.20gb", "", BOARDS[3].uuid)

    ownership = decide([claim(0, older.uuid)], devices=[*BOARDS, older])

    assert labels(ownership, [BOARDS[3], older]) == [rank(0), rank(0)]


def test_a_process_that_shows_on_the_board_of_its_part_as_well_is_no_stray() -> None:
    ownership = decide(
        [claim(0, PARTS[0].uuid), claim(1)],
        {
            BOARDS[3]: [(100, MIB), (101, 2 * MIB)],
            PARTS[0]: [(100, MIB)],
            PARTS[1]: [(101, 2 * MIB)],
        },
        devices=[*BOARDS, *PARTS],
    )

    assert labels(ownership, [BOARDS[3], *PARTS]) == [SHARED, rank(0), rank(1)]
    assert memory(ownership) == [("0", "3:0", 1), ("1", "3:1", 2)]
    assert ownership.remarks == []


def test_ranks_share_a_part_that_one_of_them_declares_and_the_other_is_seen_on() -> None:
    both = [(100, MIB), (101, MIB)]

    ownership = decide(
        [claim(0, PARTS[0].uuid), claim(1)],
        {BOARDS[3]: both, PARTS[0]: both},
        devices=[*BOARDS, *PARTS],
    )

    assert labels(ownership, [BOARDS[3], *PARTS]) == [SHARED, SHARED, FREE]


@pytest.mark.parametrize("how", ["seen", "chosen"])
def test_a_rank_that_names_a_board_with_parts_uses_one_of_them(how: str) -> None:
    seen = {PARTS[1]: [(100, MIB)]} if how == "seen" else {}
    known = {"environment": {}, "cuda_index": 0} if how == "chosen" else {}

    ownership = decide(
        [claim(0, UUIDS[3], **known)], seen, [PARTS[1].uuid], devices=[*BOARDS, *PARTS]
    )

    assert labels(ownership, [BOARDS[3], *PARTS]) == [rank(0), FREE, rank(0)]


def test_a_chosen_part_is_not_contradicted_by_a_process_that_shows_on_its_board() -> None:
    ownership = decide(
        [claim(0, environment={}, cuda_index=0)],
        {BOARDS[3]: [(100, MIB)]},
        [PARTS[0].uuid],
        devices=[*BOARDS, *PARTS],
    )

    assert labels(ownership, [BOARDS[3], *PARTS]) == [rank(0), rank(0), FREE]
    assert ownership.remarks == []


# ------------------------------------------------------------------------------ memory


def test_memory_is_that_of_the_process_and_absent_where_the_driver_has_no_number() -> None:
    ownership = decide(
        [claim(0, UUIDS[0]), claim(1, UUIDS[1])],
        {BOARDS[0]: [(100, 5 * MIB), (999, 70 * MIB)], BOARDS[1]: [(101, None)]},
    )

    assert memory(ownership) == [("0", "0", 5)]
    assert ownership.memory[0].labels == rank(0)
    assert ownership.memory[0].device == BOARDS[0]


def test_a_lone_stranger_on_a_declared_device_is_its_rank_in_a_container() -> None:
    ownership = decide(
        [claim(0, UUIDS[0]), claim(1, UUIDS[1])],
        {BOARDS[0]: [(90100, 5 * MIB)], BOARDS[1]: [(90101, 6 * MIB)]},
    )

    assert memory(ownership) == [("0", "0", 5), ("1", "1", 6)]
    assert ownership.remarks == []


@pytest.mark.parametrize(
    ("claims", "users"),
    [
        ([claim(0, UUIDS[0])], {BOARDS[0]: [(900, MIB), (901, MIB)]}),
        ([claim(0, UUIDS[0]), claim(1, UUIDS[0])], {BOARDS[0]: [(900, MIB)]}),
        ([claim(0)], {BOARDS[0]: [(900, MIB)]}),
        ([claim(0, UUIDS[0])], {BOARDS[1]: [(900, MIB)]}),
        ([claim(0, UUIDS[0])], {BOARDS[0]: [(900, None)]}),
        # Its process id is comparable: so it has no context yet, and another process has.
        (
            [claim(0, UUIDS[0]), claim(1, UUIDS[1], pid=901)],
            {BOARDS[0]: [(900, MIB)], BOARDS[1]: [(901, None)]},
        ),
        # One process that has written the journals of two ranks.
        (
            [claim(0, UUIDS[0]), claim(1, UUIDS[1], pid=100)],
            {BOARDS[0]: [(100, MIB)]},
        ),
    ],
    ids=[
        *("two strangers", "two ranks", "not declared", "elsewhere", "no number"),
        *("numbers that match elsewhere", "a number of two ranks"),
    ],
)
def test_the_owner_of_memory_is_never_guessed(claims: Any, users: Any) -> None:
    ownership = decide(claims, users)

    assert memory(ownership) == []
    assert ownership.remarks == []


def test_a_process_without_an_id_is_no_user() -> None:
    ownership = decide([claim(0, pid=0)], {BOARDS[0]: [(0, MIB)]})

    assert labels(ownership)[0] == FREE
    assert memory(ownership) == []


# ------------------------------------------------------------------------------ remarks


def test_memory_on_another_rank_s_device_gives_a_remark_and_changes_no_owner() -> None:
    ownership = decide(
        [claim(0, UUIDS[0]), claim(3, UUIDS[3])],
        {BOARDS[0]: [(100, MIB), (103, 310 * MIB)], BOARDS[3]: [(103, 4 * MIB)]},
    )

    assert labels(ownership) == [rank(0), FREE, FREE, rank(3)]
    assert memory(ownership) == [("0", "0", 1), ("3", "0", 310), ("3", "3", 4)]
    assert ownership.remarks == [
        "rank 3 also holds 310 MiB on GPU 0 (which rank 0 uses): something created a context "
        "there before torch.cuda.set_device"
    ]


@pytest.mark.parametrize(
    ("others", "used_bytes", "said"),
    [
        ([], 310 * MIB, "rank 3 also holds 310 MiB on GPU 0 (which no rank uses)"),
        ([claim(0, UUIDS[0])], None, "rank 3 also holds a context on GPU 0 (which rank 0 uses)"),
        (
            [claim(0, UUIDS[0]), claim(1, UUIDS[0])],
            MIB,
            "rank 3 also holds 1 MiB on GPU 0 (which rank 0 and rank 1 use)",
        ),
        (
            [claim(0, UUIDS[0], labels=rank(0, run="other"))],
            MIB,
            "rank 3 of run run also holds 1 MiB on GPU 0 (which rank 0 of run other uses)",
        ),
    ],
    ids=["nobody's", "no number", "several ranks", "several runs"],
)
def test_a_remark_says_who_uses_the_device(
    others: list[ProcessDevices], used_bytes: int | None, said: str
) -> None:
    ownership = decide([*others, claim(3, UUIDS[3])], {BOARDS[0]: [(103, used_bytes)]})

    assert [each.partition(":")[0] for each in ownership.remarks] == [said]
