"""Each row of the catalogue's sections Process, GPU and Host comes from a source."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

import conventions
from agent.node.node_trees import NodeTree
from nvml_boards import Boards, h100, show_here, standin_library
from otel_ddp.agent.node.devices import FileSystems
from otel_ddp.agent.node.gpu import drivers
from otel_ddp.agent.node.gpu.polling import Gpus
from otel_ddp.agent.node.processes import ProcessReader, read_process_stat
from otel_ddp.agent.node.source import KernelFiles, Measurement
from otel_ddp.vocabulary import catalog

# Of a board, under a rank's labels: that needs both, and `test_sampling.py` sees it.
OF_BOTH = {"otel_ddp.gpu.process.memory.usage"}


def rows(section: str) -> set[str]:
    return {metric.name for metric in catalog.METRICS if metric.section == section}


def told(measurements: list[Measurement]) -> set[str]:
    for measurement in measurements:
        named = [name for name, _ in measurement.attributes]
        # In the catalogue's order, and none that it does not know.
        expected = [each for each in measurement.metric.attributes if each in named]
        assert named == expected, measurement.metric.name
        for name, value in measurement.attributes:
            assert value in conventions.values().get(name, {value}), measurement.metric.name
    return {measurement.metric.name for measurement in measurements}


def test_each_row_of_a_board(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    boards = Boards(tmp_path)
    show_here(boards, standin_library(tmp_path_factory), monkeypatch)
    boards.write([h100()])
    gpus = Gpus(drivers.known())

    # Activity of engines is what lies between two samples, and so are faults.
    gpus.read(time.monotonic_ns())
    boards.write([replace(h100(), xids=[79])])
    sample = gpus.read(time.monotonic_ns() + 20_000_000_000)

    (board,) = sample.devices
    assert told(list(board.measurements)) == rows("GPU") - OF_BOTH


def test_each_row_of_the_host(tmp_path: Path) -> None:
    node = NodeTree(tmp_path)
    node.disk("sda", read=1, written=2)
    node.interface("eth0")
    node.port("mlx5_0", 1, received="7", sent="8")
    node.write("proc/pressure/cpu", "some avg10=0.00 avg60=0.00 avg300=0.00 total=5\n")
    host = node.host()

    # Shares of processor time are what lies between two readings.
    host.read()
    node.clock.now += 1
    node.processors(user=50)
    measurements = host.read() + FileSystems(lambda: [tmp_path]).read()

    assert told(measurements) == rows("Host")


def test_each_row_of_a_process() -> None:
    stat = read_process_stat(KernelFiles(), "/proc", os.getpid())
    assert stat is not None
    reader = ProcessReader(own_pid=0)
    reader.begin_round()

    measurements = reader.read(os.getpid(), stat.start)

    assert measurements is not None
    assert told(measurements) == rows("Process")
