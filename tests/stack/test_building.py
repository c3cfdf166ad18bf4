"""How the real servers are started: together and once, and they end together."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

import pytest
from tools.stack.build import Binaries
from tools.stack.server import NotUp, free_port, next_free
from tools.stack.up import Ports, up

from node import until


def answer(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60) as said:
        return str(said.read().decode())


def test_the_stack_runs_once_and_ends_with_all_it_started(
    binaries: Binaries, tmp_path: Path
) -> None:
    # Not the usual ones, which others on this machine may have.
    ports = Ports(*[free_port()] * 7)

    with up(binaries, tmp_path, lambda line: None, ports) as addresses:

        def scraped() -> str | None:
            targets = json.loads(answer(f"{addresses.prometheus}/api/v1/targets"))["data"]
            return next((str(each["scrapeUrl"]) for each in targets["activeTargets"]), None)

        own = until(scraped, "the collector among the targets of Prometheus")
        assert "otelcol_process_uptime" in answer(own)
        with pytest.raises(NotUp), up(binaries, tmp_path, lambda line: None, ports):
            pass

    for address in filter(None, addresses):
        port = int(address.rpartition(":")[2])
        assert next_free(port) == port
