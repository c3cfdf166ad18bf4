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


def test_a_demo_uses_no_variable_of_real_trainings_and_leaves_no_process() -> None:
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
        demo.send_signal(signal.SIGINT)
        _, errors = demo.communicate(timeout=300)

    assert demo.returncode == 128 + signal.SIGINT
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


def test_what_cannot_be_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--seconds", "nan"]) == 2
    assert capsys.readouterr().err == "otel-ddp demo: --seconds must be positive.\n"

    with pytest.raises(SystemExit):
        main(["demo", "--inject", "hang:2"])
    assert "'backward:1:30ms', 'data:1:30ms', 'hang:1', 'kill:1'" in capsys.readouterr().err
