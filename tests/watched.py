"""Scenarios on real ranks through the real agent, and what was to be seen of each."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from node import Labels, Node, finished, until
from otlp_receiver import Point, Receiver, attributes_of


class Seen(NamedTuple):
    """What was to be seen of one scenario, in the moment in which the test had seen enough."""

    verdicts: list[dict[str, Any]]
    straggler: list[tuple[Labels, float]]
    insufficient: str


class Watched:
    """Two ranks of a program; the agent is the one that they start."""

    def __init__(self, program: Path, **env: str) -> None:
        self.node, self._receiver, self.program = Node(**env), Receiver(), program
        self.seen: dict[str, Seen] = {}

    def __enter__(self) -> Watched:
        self.node.__enter__()
        self._receiver.__enter__()
        self.node.export_to(self._receiver.start_http())
        return self

    def __exit__(self, *how: Any) -> None:
        self._receiver.__exit__(*how)
        self.node.__exit__(*how)

    def play(self, scenarios: Sequence[dict[str, Any]], enough: Callable[[str], Any]) -> None:
        """One after the other, each until there was *enough* to see."""
        where = str(self.program), str(self.node.root)
        process = self.node.torchrun(2, *where, json.dumps(scenarios))
        for name in (each["name"] for each in scenarios):
            until(lambda name=name: enough(name), f"{name} to be seen")
            self.seen[name] = self.look(name)
            (self.node.root / f"{name}.enough").touch()
        finished(process)

    def steps(self, name: str) -> int:
        """How many both ranks have made."""
        found = [each["step"] or 0 for each in self.node.processes() if each["run"] == name]
        return min(found) if len(found) == 2 else 0

    def verdicts(self, name: str, *kinds: str) -> list[dict[str, Any]]:
        """Those that stand, by the file that the status reads: the ranks need the cores."""
        return [
            each
            for each in self.node.told().verdicts
            if each["who"]["run"] == name and (not kinds or each["kind"] in kinds)
        ]

    def was_compared(self, name: str, steps: int) -> bool:
        """After so many steps the agent has compared them, or says why it does not."""
        if self.steps(name) < steps:
            return False
        if insufficient := self.node.insufficient(name):
            return "of the first" not in insufficient
        return bool(self.node.series("training_straggler", run=name))

    def look(self, name: str) -> Seen:
        if self.verdicts(name, "straggler"):
            # A scrape is of the moment before; the verdict stands while the ranks go on like that.
            metric = "training_straggler"
            until(lambda: self.node.series(metric, run=name, phase=""), "the series of the verdict")
        return Seen(
            self.verdicts(name),
            self.node.series("training_straggler", run=name),
            self.node.insufficient(name),
        )

    def verdicts_of(self, name: str, *kinds: str) -> list[dict[str, Any]]:
        """Those that stood when there was enough to see."""
        return [each for each in self.seen[name].verdicts if each["kind"] in kinds]

    def points(self) -> list[Point]:
        """Every point of a metric that the agent has sent."""
        return self._receiver.points()

    def records(self) -> list[tuple[Any, dict[str, str]]]:
        """Every log record that the agent has sent by its end, with its attributes."""
        self.node.stop_agent()
        return [(each, attributes_of(each.attributes)) for each in self._receiver.logs()]


def opened(
    records: Iterable[tuple[Any, dict[str, str]]], run: str, *kinds: str
) -> list[tuple[Any, dict[str, str]]]:
    """The records of verdicts of these kinds that were reached on a run."""
    return [
        (record, said)
        for record, said in records
        if (said.get("run"), said.get("verdict.state")) == (run, "opened")
        and said["verdict"] in kinds
    ]


def assert_nobody_named(watched: Watched, name: str) -> None:
    """And not because there was nothing to go by."""
    seen = watched.seen[name]
    assert seen.insufficient == ""
    told = {(labels["rank"], value) for labels, value in seen.straggler}
    assert told == {("0", 0.0), ("1", 0.0)}
