"""How the real servers are started: together and once, and they end together."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

import pytest
from tools.stack.build import Binaries
from tools.stack.server import free_port, next_free
from tools.stack.up import Addresses, AlreadyRunning, Ports, up

from node import until


def answer(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60) as said:
        return str(said.read().decode())


def assert_prometheus_scrapes_this_collector(addresses: Addresses) -> None:
    def target() -> str | None:
        found = json.loads(answer(f"{addresses.prometheus}/api/v1/targets"))["data"]
        return next((str(each["scrapeUrl"]) for each in found["activeTargets"]), None)

    assert "otelcol_process_uptime" in answer(until(target, "the collector among the targets"))


def test_the_stack_runs_once_and_ends_with_all_it_started(
    binaries: Binaries, tmp_path: Path
) -> None:
    # Not the usual ports: an agent on this machine would take the collector for its own.
    ports = Ports(*[free_port()] * 7)

    with up(binaries, tmp_path / "room", lambda line: None, ports) as addresses:
        assert "Ready" in answer(f"{addresses.prometheus}/-/ready")
        request = urllib.request.Request(
            f"{addresses.collector}/v1/metrics",
            data=b"",
            headers={"content-type": "application/x-protobuf"},
        )
        with urllib.request.urlopen(request, timeout=60) as taken:
            assert taken.status == 200
        assert_prometheus_scrapes_this_collector(addresses)
        with (
            pytest.raises(AlreadyRunning) as second,
            up(binaries, tmp_path / "room", lambda line: None, ports),
        ):
            pass
        assert second.value.addresses == addresses

    for address in filter(None, addresses):
        port = int(address.rpartition(":")[2])
        assert next_free(port) == port
