"""The demo cleans up however it ends, and does not use the settings of real trainings."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

import warm
from node import Node
from otel_ddp.cli import main


def begin(node: Node, *arguments: str) -> subprocess.Popen[str]:
    """Its ranks have torch imported already."""
    executable, more = warm.python()
    return subprocess.Popen(
        [executable, "-m", "otel_ddp", "demo", *arguments],
        env={**node.env, **more},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Where tests run in the background Ctrl-C is ignored, and that is inherited.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


STRESS = pytest.mark.stress


@pytest.mark.parametrize(
    "how",
    [
        signal.SIGINT,
        pytest.param(signal.SIGTERM, marks=STRESS),
        pytest.param(signal.SIGHUP, marks=STRESS),
    ],
)
def test_a_demo_that_is_ended_leaves_nothing_and_prints_no_error(how: signal.Signals) -> None:
    with Node() as node:
        demo = begin(node, "--seconds", "60")
        assert demo.stdout is not None
        place = next(line for line in demo.stdout if "--dir " in line).partition("--dir ")[2]
        demo.send_signal(how)
        _, errors = demo.communicate(timeout=300)

    assert demo.returncode == 128 + how
    assert errors.strip() == ""
    assert not Path(place.strip()).parent.exists()


def test_a_demo_does_not_use_the_variables_of_real_trainings() -> None:
    with Node() as node:
        node.env.update(
            OTEL_DDP_AGENT="external", OTEL_DDP_LINGER_S="0", OTEL_DDP_RUN="mine", OTEL_DDP_RANK="7"
        )
        output, errors = begin(node, "--seconds", "6").communicate(timeout=300)

    assert "run demo, group demo, train, world 2" in output, errors
    assert output.count(" finished ") == 2
    assert "run mine" not in output


@pytest.mark.parametrize("wrong", [("--ranks", "0"), ("--seconds", "nan"), ("--seconds", "-1")])
def test_a_demo_with_impossible_options_is_refused_in_a_line(wrong: tuple[str, str]) -> None:
    with Node() as node:
        demo = begin(node, *wrong)
        _, errors = demo.communicate(timeout=300)

    assert demo.returncode == 2
    assert errors.splitlines()[-1].endswith(f"got {wrong[1]!r}")


def test_without_torch_nothing_is_started_and_the_error_names_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # As Python has it where a module is not to be found.
    monkeypatch.setitem(sys.modules, "torch", None)

    assert main(["demo", "--seconds", "0.1"]) == 2

    printed = capsys.readouterr()
    assert printed.out == ""
    assert "not installed for this Python: pip install '.[torch]' in the folder" in printed.err


def test_an_injection_into_a_missing_rank_is_refused_with_the_ranks_that_exist(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["demo", "--ranks", "1", "--inject", "hang:1"]) == 2

    assert capsys.readouterr().err == "There is no rank 1 among 1: ranks are 0 to 0.\n"
