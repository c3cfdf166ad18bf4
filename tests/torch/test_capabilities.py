"""What is reported as not measured, and its page in the docs."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch

from conftest import Here
from loops import train, watched
from otel_ddp.torch import measure
from otel_ddp.torch.readings import capabilities
from otel_ddp.torch.steps.stream_waits import StreamWaits

PAGE = Path(__file__).parents[2] / "docs" / "training.md"


def test_the_page_tells_of_every_reason_what_to_do() -> None:
    section = PAGE.read_text().partition("## What is not measured in a run\n")[2]
    firsts = "".join(re.findall(r"^- (.+?): ", section.partition("\n## ")[0], re.MULTILINE))

    assert sorted(re.findall("`(.+?)`", firsts)) == sorted(filter(None, capabilities.REASONS))


def test_where_calls_are_noted_a_wait_that_is_not_measured_hides_no_late_rank() -> None:
    waits = {"forward": "", "comm_wait": "fsdp"}

    assert list(capabilities.sentences(waits)) == [
        "comm_wait (FSDP waits inside forward and backward)"
    ]
    assert list(capabilities.sentences({**waits, "calls": ""})) == [
        "comm_wait (FSDP waits inside forward and backward; within a node a late rank is found by "
        "its calls to process groups)"
    ]


def test_waits_that_are_seen_no_more_are_reported(
    place: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = watched()
    train(model, optimizer, steps=30)
    monkeypatch.setattr(capabilities, "world_size", lambda: 2)
    monkeypatch.setattr(capabilities, "shards", lambda model: True)
    assert measure._current is not None
    stepper = measure._current.stepper
    stepper.group_calls.waits = StreamWaits(stepper.progress, torch, None)
    stepper.sampled.readings.report()
    assert place.only().facts["capability"]["comm_wait"] == ""

    stepper.group_calls.give_up()
    stepper.sampled.readings._due_ns = 0
    stepper.sampled.readings.step_ended()

    assert place.only().facts["capability"]["comm_wait"] == "fsdp"


def test_where_replica_groups_of_torchft_wait_is_not_known(place: Here) -> None:
    os.environ["TORCHFT_LIGHTHOUSE"] = "http://localhost:29510"
    # torchft's own DDP is one, and waits in a hook within backward.
    train(*watched(), steps=30)

    assert place.only().facts["capability"]["comm_wait"] == "replica_groups"


def test_what_is_not_measured_is_recorded_and_not_printed(
    place: Here, caplog: pytest.LogCaptureFixture
) -> None:
    train(*watched(), steps=30)

    assert place.only().facts["not_measured"].startswith("data (the thread that trains uses no ")
    assert caplog.messages == []
