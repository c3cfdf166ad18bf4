"""The demo cleans up however it ends, and does not use the settings of real trainings."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

import warm
from node import Node, until
from otel_ddp.cli import main
from otel_ddp.cli.demo import Injection, parse
from otel_ddp.journal.place import Place
from otel_ddp.journal.survey import survey


def _as_from_a_shell() -> None:
    # Where tests run in the background these are ignored, and that is inherited.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def begin(node: Node, *arguments: str) -> subprocess.Popen[str]:
    """Its ranks have torch imported already."""
    executable, more = warm.python()
    return subprocess.Popen(
        [executable, "-m", "otel_ddp", "demo", *arguments],
        env={**node.env, **more},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=_as_from_a_shell,
    )


STRESS = pytest.mark.stress
# Of real trainings: with any of them the demo would record nothing here, or under another name.
FOREIGN = {
    "OTEL_DDP_AGENT": "external",
    "OTEL_DDP_LINGER_S": "0",
    "OTEL_DDP_RUN": "mine",
    "OTEL_DDP_RANK": "7",
}


def recorded(directory: Path) -> list[tuple[str, str, int | None]]:
    """Group, run without its time, and rank."""
    return sorted(
        (each.group, each.run.partition("-")[0], each.rank)
        for each in survey([Place(directory)]).processes
    )


@pytest.mark.parametrize(
    "how",
    [
        signal.SIGINT,
        pytest.param(signal.SIGTERM, marks=STRESS),
        pytest.param(signal.SIGHUP, marks=STRESS),
    ],
)
def test_a_demo_uses_no_variable_of_real_trainings_and_leaves_no_process(
    how: signal.Signals,
) -> None:
    with Node() as node:
        node.env.update(FOREIGN)
        # It does not end by itself before the signal, however long the ranks take to start.
        demo = begin(node, "--seconds", "600")
        assert demo.stdout is not None
        place = next(line for line in demo.stdout if "--dir " in line).partition("--dir ")[2]
        directory = Path(place.strip())
        ranks = [("demo", "demo", 0), ("demo", "demo", 1)]
        until(lambda: recorded(directory) == ranks, "the ranks")
        until(Place(directory).agent_is_alive, "the agent")
        demo.send_signal(how)
        _, errors = demo.communicate(timeout=300)

    assert demo.returncode == 128 + how
    assert errors.strip() == ""
    assert not directory.parent.exists()


def test_without_torch_nothing_is_started_and_the_error_names_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # As Python has it where a module is not to be found.
    monkeypatch.setitem(sys.modules, "torch", None)

    assert main(["demo", "--seconds", "0.1"]) == 2

    printed = capsys.readouterr()
    assert printed.out == ""
    assert "not installed for this Python: pip install 'torch>=2.4'. " in printed.err
    assert "`--with torch`" in printed.err


def test_an_injection_into_what_is_missing_is_refused_with_what_there_is(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["demo", "--ranks", "1", "--inject", "hang:1"]) == 2

    assert capsys.readouterr().err == (
        "otel-ddp demo: There is no rank 1 among 1: ranks are 0 to 0.\n"
    )


@pytest.mark.parametrize("wrong", [("--ranks", "0"), ("--seconds", "-1"), ("--seconds", "nan")])
def test_numbers_without_sense_are_refused(
    wrong: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", *wrong]) == 2

    assert capsys.readouterr().err == "otel-ddp demo: --ranks and --seconds must be positive.\n"


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("backward:1:30ms", Injection("backward", 1, 0.03)),
        ("data:3:0.5s", Injection("data", 3, 0.5)),
        ("hang:2", Injection("hang", 2)),
    ],
)
def test_what_is_asked_for_is_understood(text: str, meant: Injection) -> None:
    assert parse(text) == meant


@pytest.mark.parametrize("text", ["sideways:1:30ms", "backward:1:30", "hang:1:3s", "backward:1"])
def test_what_means_nothing_is_answered_with_what_does(text: str) -> None:
    with pytest.raises(ValueError, match=r"30ms|hang:1"):
        parse(text)
