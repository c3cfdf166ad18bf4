"""The demo clears up however it ends, and is not led astray by the settings of real trainings."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from node import Node


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
