"""What a training process uses, by trees on disk."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from agent.node.node_trees import BOOT_S, NodeTree, rows, values
from otel_ddp.agent.node.processes import ProcessReader
from otel_ddp.agent.node.source import Measurement
from otel_ddp.agent.reading.journals import Rank
from otel_ddp.vocabulary import catalog
from otel_ddp.vocabulary.catalog import Kind, Metric

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")


@pytest.fixture
def node(tmp_path: Path) -> NodeTree:
    tree = NodeTree(tmp_path)
    tree.process(1, parent=0, name="init")
    return tree


def reader_of(node: NodeTree) -> ProcessReader:
    boot_ns = BOOT_S * 1_000_000_000
    return ProcessReader(node.proc, own_pid=0, boot_ns=lambda: boot_ns)


LABELS = (("run", "r"), ("rank", "1"))


def rank(pid: int, start_ticks: int = 5000) -> Rank:
    return Rank(LABELS, pid, start_ticks, {})


def read(reader: ProcessReader) -> list[Measurement]:
    reader.ranks = [rank(77)]
    (use,) = reader.read().uses.values()
    return use.measurements


def children(measurements: list[Measurement]) -> float:
    return values(measurements, catalog.TRAINING_CHILDREN_COUNT)[""]


def test_exact_numbers(node: NodeTree) -> None:
    node.process(77, name="a) R (b", times=(300, 50, 7, 3), pages=1000)
    node.process(78, parent=77, times=(100, 20, 10, 5), pages=200)
    # A zombie is no living child, but its time counts.
    node.process(79, parent=78, state="Z", times=(10, 0, 0, 0))

    measurements = read(reader_of(node))

    assert {each.metric.name for each in measurements} == rows("Process")

    def of(metric: Metric) -> dict[str, float]:
        return values(measurements, metric)

    tick = 1 / TICKS_PER_S
    assert of(catalog.PROCESS_CPU_TIME) == {"user": 300 * tick, "system": 50 * tick}
    assert of(catalog.PROCESS_MEMORY_USAGE) == {"": 1000 * PAGE}
    assert of(catalog.TRAINING_CHILDREN_COUNT) == {"": 1}
    assert of(catalog.TRAINING_CHILDREN_CPU_TIME) == {"user": 127 * tick, "system": 28 * tick}
    assert of(catalog.TRAINING_CHILDREN_MEMORY_USAGE) == {"": 200 * PAGE}
    started_ns = BOOT_S * 1_000_000_000 + 5000 * 1_000_000_000 // TICKS_PER_S
    for each in measurements:
        assert each.start_ns == (started_ns if each.metric.kind is Kind.COUNTER else 0)


def test_other_ranks_and_we_ourselves_are_no_descendants(node: NodeTree) -> None:
    node.process(77)
    for pid, parent in {78: 77, 79: 78, 80: 77, 81: 77}.items():
        node.process(pid, parent=parent)
    reader = ProcessReader(node.proc, own_pid=80)

    alone = children(read(reader))
    reader.pids = (77, 78)

    assert (alone, children(read(reader))) == (3, 1)


def test_of_two_processes_with_the_same_labels_the_last_one_is_read(node: NodeTree) -> None:
    node.process(77, pages=1)
    node.process(78, start=6000, pages=2)
    reader = reader_of(node)
    reader.ranks = [rank(78, 6000), rank(77)]

    (use,) = reader.read().uses.values()

    assert values(use.measurements, catalog.PROCESS_MEMORY_USAGE) == {"": 2 * PAGE}


@pytest.mark.parametrize("content", ["77 (python", f"77 (py) S{' -1' * 30}", ""])
def test_a_zombie_another_one_and_a_line_that_makes_no_sense_are_no_process(
    content: str, node: NodeTree
) -> None:
    node.process(76, state="Z")
    node.process(78, start=5001)
    node.write("proc/77/stat", content)
    reader = reader_of(node)
    for pid in (76, 77, 78, 79):
        reader.ranks = [rank(pid)]
        assert reader.read() == ({}, ["1"])


def test_a_count_never_falls_if_a_worker_ends_between_two_reads(node: NodeTree) -> None:
    node.process(77)
    node.process(78, parent=77, times=(100, 0, 0, 0))
    reader = reader_of(node)

    def told() -> float:
        return values(read(reader), catalog.TRAINING_CHILDREN_CPU_TIME)["user"] * TICKS_PER_S

    before = told()
    # It has ended, but the process's own files were read a moment earlier.
    node.ends(78)
    between = told()
    node.process(77, times=(0, 0, 120, 0))

    assert before == between == 100
    assert told() == 120


def test_a_process_is_read_once_and_a_new_parent_is_seen(node: NodeTree) -> None:
    node.process(77)
    node.process(78, parent=77)
    node.process(79, parent=78)
    node.process(80, parent=1)
    reader = reader_of(node)
    count = children(read(reader))
    # A process that is no descendant is not read again: this change stays unseen.
    node.process(80, parent=77)
    same = children(read(reader))

    # Its parent ends, and the rank takes it over as a reaper of orphans does.
    node.ends(78)
    node.process(79, parent=77)

    assert (count, same, children(read(reader))) == (2, 2, 1)


def test_parents_that_form_a_ring_do_not_block(node: NodeTree) -> None:
    for pid, parent in ((77, 79), (78, 77), (79, 78)):
        node.process(pid, parent=parent)

    assert children(read(reader_of(node))) == 2


# -- waits for a core


S = 1_000_000_000


def core_waits(node: NodeTree, *looks: tuple[str, int]) -> list[float | None]:
    """For how long a process had no core, by what the kernel says of it every two seconds."""
    now_s, found = 0, []
    reader = ProcessReader(node.proc, clock_ns=lambda: now_s * S)
    for schedstat, pid in looks:
        now_s += 2
        node.process(pid)
        node.write(f"proc/{pid}/schedstat", schedstat)
        reader.ranks = [rank(pid)]
        (use,) = reader.read().uses.values()
        found.append(use.core_wait)
    return found


def test_the_rate_is_that_of_the_last_half_minute(node: NodeTree) -> None:
    # Not at all, and then a fifth of the time.
    waited_ns = [max(at - 25, 0) * 2 * S // 5 for at in range(50)]
    rates = core_waits(node, *((f"123456789 {each} 42\n", 77) for each in waited_ns))

    assert rates[:26] == [None, *[0.0] * 25]
    assert rates[-1] == pytest.approx(0.2)


def test_another_process_begins_anew_and_where_the_kernel_does_not_tell_there_is_no_rate(
    node: NodeTree,
) -> None:
    looks = [(f"1 {2 * at * S} 1", 77 + at // 3) for at in range(1, 5)]

    assert core_waits(node, *looks) == [None, 1.0, None, 1.0]
    for text in ("no numbers", "1"):
        assert core_waits(node, *[(text, 77)] * 2) == [None, None]
