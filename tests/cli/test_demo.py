"""The demo clears up however it ends, and is not led astray by the settings of real trainings."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from node import Node
from otel_ddp.cli import main


def begin(node: Node, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "otel_ddp", "demo", *arguments],
        env=node.env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Where tests run in the background Ctrl-C is ignored, and that is inherited.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_demo_that_is_ended_leaves_nothing_and_says_little(how: signal.Signals) -> None:
    with Node() as node:
        demo = begin(node, "--seconds", "60")
        assert demo.stdout is not None
        place = next(line for line in demo.stdout if "--dir " in line).partition("--dir ")[2]
        demo.send_signal(how)
        _, errors = demo.communicate(timeout=60)

    assert demo.returncode == 128 + how
    assert errors.strip() == ""
    assert not Path(place.strip()).parent.exists()


def test_a_demo_is_its_own_whatever_trainings_are_told() -> None:
    with Node() as node:
        node.env.update(
            OTEL_DDP_AGENT="external", OTEL_DDP_LINGER_S="0", OTEL_DDP_RUN="mine", OTEL_DDP_RANK="7"
        )
        output, errors = begin(node, "--seconds", "6").communicate(timeout=90)

    assert "rank 0 on" in output, errors
    assert "rank 1 on" in output
    assert "run mine" not in output


@pytest.mark.parametrize("wrong", [("--ranks", "0"), ("--seconds", "nan"), ("--seconds", "-1")])
def test_a_demo_that_cannot_be_is_refused_in_a_line(wrong: tuple[str, str]) -> None:
    with Node() as node:
        demo = begin(node, *wrong)
        _, errors = demo.communicate(timeout=60)

    assert demo.returncode == 2
    assert errors.splitlines()[-1].endswith(f"got {wrong[1]!r}")


def test_without_torch_nothing_is_started_and_it_is_said_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # As Python has it where a module is not to be found.
    monkeypatch.setitem(sys.modules, "torch", None)

    assert main(["demo", "--seconds", "0.1"]) == 2

    told = capsys.readouterr()
    assert told.out == ""
    assert "not installed for this Python: pip install '.[torch]' in the folder" in told.err


def test_who_asks_for_a_rank_that_is_not_there_is_told_which_there_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["demo", "--ranks", "1", "--inject", "hang:1"]) == 2

    assert capsys.readouterr().err == "There is no rank 1 among 1: ranks are 0 to 0.\n"


def test_the_help_of_the_demo_says_what_holds_where_nothing_is_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["demo", "--help"])

    told = " ".join(capsys.readouterr().out.split())
    for sentence in ("how long to train (default: 20)", "how many processes (default: 2)"):
        assert sentence in told
    assert told.endswith("such as hang:1 (default: nothing)")
