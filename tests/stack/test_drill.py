"""otel-ddp drill against the real collector and Prometheus, with our rules, faster ones."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml
from tools.stack.build import Binaries

import leftovers
import warm
from node import Node, until
from otel_ddp.catalog import RANK_LABELS
from otel_ddp.journal.place import Place
from stack.faster import deployed
from stack.servers import CONFIGURATIONS, Collector, Prometheus

# A drill ends when it has seen all; on a machine that is many times too busy, after this.
PATIENCE_S = 240
TAKEN_OUT = "run:training_stalled:age"


class Servers:
    """Collector and Prometheus, and a node that sends there."""

    def __init__(self, binaries: Binaries, folder: Path, life: ExitStack, without: str) -> None:
        config = deployed(folder / "rules")
        for path in (folder / "rules").glob("*.yml"):
            take_out(path, without)
        self.prometheus = life.enter_context(
            Prometheus(binaries, folder / "prometheus", config=yaml.safe_dump(config))
        )
        collector = life.enter_context(
            Collector(
                *(binaries, folder / "collector", CONFIGURATIONS / "all-in-one.yaml"),
                METRICS_URL=self.prometheus.otlp_metrics,
            )
        )
        self.node = life.enter_context(Node())
        self.node.export_to(collector.http)

    def drill(self, *options: str, as_users: bool = False) -> subprocess.Popen[str]:
        """Its ranks have torch imported already, unless it is started as users start it."""
        executable, more = (sys.executable, {}) if as_users else warm.python()
        return subprocess.Popen(
            [executable, "-m", "otel_ddp", "drill", *options],
            env={**self.node.env, **more, "PROMETHEUS_URL": self.prometheus.url},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # Where tests run in the background Ctrl-C is ignored, and that is inherited.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )

    def ranks(self) -> Iterator[Path]:
        """The folder of each rank that lives."""
        for command in leftovers.living(leftovers.NODE, self.node.root.name).values():
            if "drill.training" in command:
                yield Path(command.split()[-1])


def take_out(path: Path, name: str) -> None:
    """Remove one rule from a file."""
    rules = yaml.safe_load(path.read_text())
    for group in rules["groups"]:
        group["rules"] = [each for each in group["rules"] if each.get("record") != name]
    path.write_text(yaml.safe_dump(rules))


def told(drill: subprocess.Popen[str]) -> dict[str, Any]:
    """What a drill found, which has ended and left no process."""
    output, errors = drill.communicate(timeout=600)
    assert errors == ""
    return dict(json.loads(output))


@pytest.fixture
def life() -> Iterator[ExitStack]:
    with ExitStack() as found:
        yield found


def test_a_drill_is_green_where_all_is_deployed_and_its_runs_end_well(
    binaries: Binaries, tmp_path: Path, life: ExitStack
) -> None:
    here = Servers(binaries, tmp_path, life, without="")

    drill = here.drill("--json", "--seconds", str(PATIENCE_S))
    found = told(drill)

    assert [each for each in found["checks"] if not each["ok"]] == []
    assert len(found["checks"]) == 18
    assert drill.returncode == 0
    assert leftovers.wait(leftovers.NODE, here.node.root.name) == {}
    states = here.prometheus.query('training_state{group="drill"}')
    assert all(set(RANK_LABELS) <= set(each.labels) for each in states)
    by_run = {each.labels["run"].split("-")[1]: each.value for each in states}
    # Finished, finished, killed (or failed for want of the killed one).
    assert (by_run["late"], by_run["hang"]) == (2, 2)
    assert by_run["death"] > 2


@pytest.mark.stress
def test_a_drill_is_red_where_one_rule_is_taken_out(
    binaries: Binaries, tmp_path: Path, life: ExitStack
) -> None:
    here = Servers(binaries, tmp_path, life, without=TAKEN_OUT)

    drill = here.drill("--json", "--seconds", "20")
    found = told(drill)

    red = {each["what"]: each["sentence"] for each in found["checks"] if not each["ok"]}
    assert drill.returncode == 1
    assert f"not loaded: {TAKEN_OUT} (rules/stall.yml)" in red["rules"]
    assert f"asks for what no rule records: {TAKEN_OUT}" in red["alert TrainingStalled"]


def test_a_drill_that_is_ended_by_ctrl_c_leaves_nothing_and_prints_no_error(
    binaries: Binaries, tmp_path: Path, life: ExitStack
) -> None:
    here = Servers(binaries, tmp_path, life, without="")
    drill = here.drill()
    assert drill.stdout is not None
    # Its trainings and its agent are there then.
    next(line for line in drill.stdout if "series drill-" in line)
    folders = list(here.ranks())

    drill.send_signal(signal.SIGINT)
    _, errors = drill.communicate(timeout=300)

    assert drill.returncode == 128 + signal.SIGINT
    assert errors.strip() == ""
    assert leftovers.wait(leftovers.NODE, here.node.root.name) == {}
    assert len(folders) >= 4
    assert not any(each.parent.exists() for each in folders)


@pytest.mark.stress
def test_the_ranks_of_a_drill_that_is_killed_end_by_themselves(
    binaries: Binaries, tmp_path: Path, life: ExitStack
) -> None:
    here = Servers(binaries, tmp_path, life, without="")
    # The parent of a rank is the drill itself.
    drill = here.drill(as_users=True)
    assert drill.stdout is not None
    next(line for line in drill.stdout if "verdict drill-hang-" in line)
    folders = list(here.ranks())

    drill.kill()
    drill.communicate()

    # The one that hangs, too.
    until(lambda: not list(here.ranks()), "the end of all ranks")
    assert {each.name for each in folders} == {"late", "hang"}
    # Its agent would wait for another training.
    here.node.place = Place(folders[0].parent / "place")
    here.node.stop_agent()
    shutil.rmtree(folders[0].parent)
