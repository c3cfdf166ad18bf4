"""Which side of a late rank is late, by what its device had left at the ends of phases."""

from __future__ import annotations

import pytest

from make import labels_of, step_facts
from otel_ddp.diagnosis.step_facts import StepFacts, columns_of
from otel_ddp.diagnosis.straggler.phase_table import PhaseTable
from otel_ddp.diagnosis.straggler.window import Compared, ranks_of
from otel_ddp.vocabulary.words import WORK_PHASES

MS = 1_000_000


def step(
    host_ms: float,
    device_ms: float,
    behind_ms: float = 0.0,
    phase: str = "forward",
    waits_ms: float = 0.0,
) -> StepFacts:
    """A step of one phase alone, in which the device never keeps up with the host.

    *waits_ms*: before it, the host waits for the device.
    """
    host_ns = [round(host_ms * MS) * (each == phase) for each in WORK_PHASES]
    host_ns[WORK_PHASES.index("other")] += round(waits_ms * MS)
    on_device = {"paced_ns": (0,) * len(WORK_PHASES), "behind_ns": round(behind_ms * MS)}
    return step_facts(1, 0, {phase: device_ms}, 100, host_ns=tuple(host_ns), **on_device)


USUAL = step(4, 32)
RANKS = ranks_of([labels_of(rank) for rank in range(3)], (0, 0, 0))


def table_of(*ranks: StepFacts) -> PhaseTable:
    """Of five such steps of three ranks."""
    return PhaseTable([Compared.of(1, columns_of(ranks), (), 1, 0.0)] * 5, RANKS, ())


@pytest.mark.parametrize(
    ("late", "side"),
    [
        # The host sleeps for 14 ms before each of four blocks; or for 56 ms before the first one.
        (step(60, 64 + 4), "host"),
        (step(60, 88), "host"),
        # The queue was not empty before, and is much shorter than that of the others.
        (step(100, 60, behind_ms=50), "host"),
        # The device takes twice as long, and its host launches as the others' do.
        (step(4, 64), "device"),
        # The host was held up by its full queue: what is left takes longer as well.
        (step(46, 88), "device"),
    ],
)
def test_the_side_of_a_rank_that_is_late_in_forward(late: StepFacts, side: str) -> None:
    table = table_of(USUAL, late, USUAL)

    assert table.side(1, "forward") == side


@pytest.mark.parametrize(
    ("behind_ms", "side"),
    # Next to nothing was in line, unlike on the others, whose queues hold up their hosts; as much.
    [(12, "host"), (390, "device")],
)
def test_a_host_that_is_late_by_a_third_of_it_is_the_side_where_its_queue_is_nearly_empty(
    behind_ms: float, side: str
) -> None:
    others, late = step(52, 27, behind_ms=390), step(60, 50, behind_ms=behind_ms)
    table = table_of(others, late, others)

    assert table.side(1, "forward") == side


@pytest.mark.parametrize(("others_ask", "side"), [(False, "host"), (True, "device")])
def test_a_host_that_waits_for_its_device_is_the_side_if_the_others_do_not(
    others_ask: bool, side: str
) -> None:
    late, usual = (step(4, ms, behind_ms=40, waits_ms=40) for ms in (35, 32))
    others = usual if others_ask else step(4, 32, behind_ms=300)
    table = table_of(others, late, others)

    assert table.side(1, "forward") == side
    assert table.side(1, "mixed") == side


def test_a_loader_that_moves_its_batches_to_the_device_is_the_hosts_side() -> None:
    usual, late = step(3, 8, phase="data"), step(33, 42, phase="data")
    table = table_of(usual, late, usual)

    assert table.side(1, "data") == "host"


def test_a_copy_that_takes_longer_is_the_devices_side() -> None:
    usual, late = step(3, 8, phase="data"), step(3, 38, phase="data")
    table = table_of(usual, late, usual)

    assert table.side(1, "data") == "device"
