"""Profiles that the lead asks for: what the agent of the process starts, and what it answers."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest

from otel_ddp.agent.link import limits
from otel_ddp.agent.link.runs.profiles import ProfilesHere

SOURCE: Any = SimpleNamespace(
    labels=(("run", "--a run"),), journal=Path("/place/a.journal"), global_rank=3
)


class Started:
    """A command that has printed this, and ends once the test says so."""

    def __init__(self, out: bytes, error: bytes, returncode: int) -> None:
        self.returncode = returncode
        self.has_ended = self.was_killed = False
        self._out, self._error = out, error

    def begin(self, arguments: Any, out: IO[bytes], error: IO[bytes]) -> Started:
        self.arguments = list(arguments)
        self.files = out, error
        for file, content in ((out, self._out), (error, self._error)):
            file.write(content)
            file.flush()
        return self

    def poll(self) -> int | None:
        return self.returncode if self.has_ended else None

    def kill(self) -> None:
        self.was_killed = True

    def wait(self) -> None:
        assert self.was_killed


class Commands:
    """Starts nothing, and remembers what was to be started."""

    def __init__(self, out: bytes = b"", error: bytes = b"", returncode: int = 0) -> None:
        self._how = out, error, returncode
        self.started: list[Started] = []

    def __call__(self, *arguments: Any) -> Started:
        self.started.append(Started(*self._how).begin(*arguments))
        return self.started[-1]


def answers(profiles: ProfilesHere) -> Iterator[tuple[int, Any]]:
    for told in profiles.take():
        yield told.number, json.loads(told.content)


def test_what_the_command_prints_is_the_answer_once_it_has_ended() -> None:
    commands = Commands(b'{"table": []}', b"a warning\n")
    profiles = ProfilesHere(commands)
    profiles.ask(7, SOURCE, 5)
    (command,) = commands.started

    assert not profiles.poll()
    command.has_ended = True
    assert profiles.poll()

    assert list(answers(profiles)) == [(7, {"table": []})]
    assert list(answers(profiles)) == []
    assert command.arguments == [
        *("profile", "--dir=/place", "--run=--a run", "--rank=3", "--steps=5"),
        *("--alone", "--json"),
    ]
    assert all(file.closed for file in command.files)


@pytest.mark.parametrize(
    ("out", "error", "why"),
    [
        (b"", b"a warning\nit ended\n", "it ended"),
        (b"", b"\x1b[31mred", "\\x1b[31mred"),
        (b"", b"", "it ended with -9"),
        (b"x" * (limits.MOST_TOLD_BYTES + 1), b"", "its table is too large to be sent here"),
    ],
)
def test_without_a_table_the_answer_is_why(out: bytes, error: bytes, why: str) -> None:
    commands = Commands(out, error, -9)
    profiles = ProfilesHere(commands)
    profiles.ask(7, SOURCE, 5)
    commands.started[0].has_ended = True

    assert profiles.poll()

    ((number, answer),) = answers(profiles)
    assert number == 7
    assert answer["why"].startswith(why)


def test_a_lead_has_two_profiles_at_once_and_64_of_an_attempt() -> None:
    commands = Commands(b"{}")
    profiles = ProfilesHere(commands)
    for number in range(3):
        profiles.ask(number, SOURCE, 1)
    refused = list(answers(profiles))
    for number in range(3, 65):
        for command in commands.started:
            command.has_ended = True
        profiles.poll()
        profiles.ask(number, SOURCE, 1)
    profiles.take()
    for number in (65, 66):
        profiles.ask(number, SOURCE, 1)
    profiles.stop()

    assert [number for number, _ in refused] == [2]
    assert "two profiles" in refused[0][1]["why"]
    assert len(commands.started) == 64
    assert all("64 profiles" in answer["why"] for _, answer in answers(profiles))


def test_an_agent_that_ends_ends_its_profiles() -> None:
    commands = Commands()
    profiles = ProfilesHere(commands)
    profiles.ask(7, SOURCE, 1)

    profiles.stop()

    (command,) = commands.started
    assert command.was_killed
    assert all(file.closed for file in command.files)


def test_a_node_that_can_start_nothing_says_so() -> None:
    def start(*_: Any) -> Any:
        raise OSError(12, "")

    profiles = ProfilesHere(start)
    profiles.ask(7, SOURCE, 1)

    ((_, answer),) = answers(profiles)
    assert answer["why"] == "its node cannot start a profile: Cannot allocate memory"


def test_the_command_is_that_of_this_package(tmp_path: Path) -> None:
    """With a place that does not exist: the last line of what it says is the answer."""
    profiles = ProfilesHere()
    source: Any = SimpleNamespace(
        labels=SOURCE.labels, journal=tmp_path / "none" / "a.journal", global_rank=3
    )
    profiles.ask(7, source, 1)
    process = profiles._open[0].process
    process.wait(60)

    assert profiles.poll()

    assert list(answers(profiles)) == [(7, {"why": f"{tmp_path}/none does not exist."})]
    assert process.args[0] == sys.executable
