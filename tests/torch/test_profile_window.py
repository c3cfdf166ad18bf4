"""A window of torch's profiler that a person asks for: whole steps, at no cost to the run."""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import profiler as torch_profiler
from torch.profiler import ProfilerActivity

import otel_ddp
from conftest import Here, Journal
from loops import train
from node import Node, finished, until
from otel_ddp.diagnosis.step_facts import facts_of
from otel_ddp.diagnosis.steps import Step
from otel_ddp.torch.profile_window import activities

UNTIL_NS = 2**62
# Steps that a window lets pass before it begins, and the one that makes the profiler ready.
BEFORE, READY = 3, 1


class Training:
    """A model that is trained here, and the files beside its journal."""

    def __init__(self, place: Here, traces: Path) -> None:
        self.model = nn.Linear(4, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.run = otel_ddp.instrument(self.model, run="one")
        self.place = place
        self.traces = traces
        (self.journal,) = place.journals()

    def step(self, count: int = 1) -> None:
        train(self.model, self.optimizer, count)

    def ask(self, number: int = 1, **more: Any) -> Path:
        """Ask for a window, and wait until the question is read; where the trace is to lie."""
        trace = self.traces / f"{number}.json"
        question = {
            "number": number,
            "steps": 2,
            "trace": str(trace),
            "until_ns": UNTIL_NS,
            **more,
        }
        self.write(f"profile {json.dumps(question)}\n")
        return trace

    def write(self, text: str) -> None:
        fd = os.open(self.journal.with_suffix(".ask"), os.O_WRONLY | os.O_NONBLOCK)
        try:
            # A question for stacks after it is answered once both are read.
            number = time.time_ns()
            os.write(fd, f"{text}{number} where\n".encode())
        finally:
            os.close(fd)
        path = self.journal.with_suffix(".answer")
        until(
            lambda: path.exists() and json.loads(path.read_text())["question"] >= number,
            "the question to be read",
        )

    def answer(self) -> dict[str, Any]:
        path = self.journal.with_suffix(".profile")
        return dict(json.loads(path.read_text())) if path.exists() else {}

    def steps(self) -> list[Step]:
        """All steps that the journal has."""
        assert self.run._records is not None
        self.run._records.progress.flush()
        return Journal(self.journal).steps


@pytest.fixture
def training(place: Here, tmp_path: Path) -> Iterator[Training]:
    tmp_path.chmod(0o700)
    found = Training(place, tmp_path)
    yield found
    otel_ddp.finish()
    otel_ddp.uninstrument()


def names_in(trace: Path) -> list[str]:
    content = json.loads(trace.read_text())
    return [str(each.get("name")) for each in content["traceEvents"]]


def test_a_window_holds_the_steps_that_were_asked_for_and_begins_and_ends_with_one(
    training: Training,
) -> None:
    training.step(5)
    trace = training.ask(number=7, steps=3)
    training.step(BEFORE)
    assert training.answer()["state"] == "recording"
    training.step(READY + 2)
    assert training.answer()["state"] == "recording"
    training.step()

    said = training.answer()
    first = 5 + BEFORE + READY + 1
    assert (said["number"], said["state"], said["why"]) == (7, "written", "")
    assert (said["first_step"], said["steps"]) == (first, 3)
    names = names_in(trace)
    marks = [name for name in names if name.startswith("ProfilerStep#")]
    assert sorted(set(marks)) == [f"ProfilerStep#{first + n}" for n in range(3)]
    # The first step is in it as well, and what the optimizer did at its end.
    assert names.count("aten::addmm") == 3 + READY
    assert not torch_profiler._is_profiler_enabled
    assert stat.S_IMODE(trace.stat().st_mode) == 0o600


class DeviceModule:
    """What `torch.cuda` and its like offer."""

    def __init__(self, is_used: bool) -> None:
        self.is_initialized = lambda: is_used


ALL = set(ProfilerActivity.__members__.values())
PRIVATE = ProfilerActivity.__members__["PrivateUse1"]


@pytest.mark.parametrize(
    ("used", "supported", "recorded"),
    [
        # ROCm's devices are called `cuda` too.
        (["cuda"], ALL, [ProfilerActivity.CUDA]),
        (["privateuseone"], ALL, [PRIVATE]),
        (["cpu"], ALL, []),
        # A torch without CUPTI knows no kernels.
        (["cuda"], {ProfilerActivity.CPU}, []),
    ],
)
def test_a_window_records_the_cpu_and_the_devices_in_use_that_torch_can_record(
    used: list[str], supported: set[Any], recorded: list[Any]
) -> None:
    def module(device: torch.device) -> DeviceModule:
        return DeviceModule(device.type in used)

    found = activities(module, lambda: supported)

    assert found == {ProfilerActivity.CPU, *recorded}


@pytest.mark.parametrize("module", [None, DeviceModule(False), object()])
def test_a_window_starts_no_device_and_does_not_even_ask_for_one(module: Any) -> None:
    def asked() -> set[Any]:
        raise AssertionError("torch would count devices here")

    assert activities(lambda _: module, asked) == {ProfilerActivity.CPU}
    assert not torch.cuda.is_initialized()


def test_the_steps_of_a_window_are_unusual_and_no_other_is(training: Training) -> None:
    training.step(5)
    training.ask(steps=2)
    training.step(10)

    steps = training.steps()

    # The one in which the profiler starts, those of the window, and the one that writes the trace.
    profiled = [step.number for step in steps if step.profiled]
    assert profiled == [9, 10, 11, 12]
    unusual = [each.number for each in facts_of(steps) if each.unusual]
    assert set(profiled) <= set(unusual)


def test_a_second_question_is_not_heard_before_the_first_is_answered(training: Training) -> None:
    training.ask(number=1, steps=2)
    training.ask(number=2)
    training.step(BEFORE)
    training.ask(number=3)
    training.step(READY + 2)

    assert (training.answer()["number"], training.answer()["state"]) == (1, "written")
    assert [each.name for each in training.traces.iterdir()] == ["1.json"]
    training.ask(number=4, steps=1)
    # Ten steps after the first window.
    training.step(9)
    assert training.answer()["number"] == 1
    training.step(1 + READY + 1)
    assert (training.answer()["number"], training.answer()["state"]) == (4, "written")


def test_a_question_that_nobody_waits_for_any_more_is_not_answered_by_a_window(
    training: Training,
) -> None:
    trace = training.ask(until_ns=time.time_ns() - 1)
    training.step(10)

    assert (training.answer()["state"], training.answer()["why"]) == (
        "refused",
        "no step ended in time",
    )
    assert not trace.exists()


def test_a_program_that_profiles_itself_is_left_alone(training: Training) -> None:
    with torch.profiler.profile() as theirs:
        training.step(2)
        trace = training.ask()
        training.step(2)

    assert training.answer()["why"] == "the program profiles itself at this moment"
    assert not trace.exists()
    assert any(each.name == "aten::addmm" for each in theirs.events() or ())


@pytest.mark.parametrize(
    "begin",
    [torch.profiler.profile, torch_profiler.emit_itt],
    ids=["profile", "emit_itt"],
)
def test_a_profiler_of_the_program_that_begins_in_a_window_takes_its_place(
    training: Training, begin: Callable[[], Any]
) -> None:
    before = torch_profiler._prepare_profiler, torch_profiler._enable_profiler
    trace = training.ask(steps=20)
    training.step(BEFORE + READY + 1)

    with begin():
        assert torch_profiler._is_profiler_enabled
        training.step(2)

    assert training.answer()["why"] == "the program began to profile itself"
    assert not trace.exists()
    assert before == (torch_profiler._prepare_profiler, torch_profiler._enable_profiler)
    assert not torch_profiler._is_profiler_enabled


def test_a_folder_that_is_missing_or_open_to_others_or_a_file_that_is_there_is_refused(
    training: Training,
) -> None:
    folder = training.traces / "open"
    folder.mkdir()
    folder.chmod(0o777)
    taken = training.traces / "taken.json"
    taken.write_text("theirs")
    for number, path, why in (
        (1, training.traces / "missing" / "1.json", "No such file or directory"),
        (2, folder / "2.json", "is not a directory of its user alone"),
        (3, taken, "File exists"),
    ):
        training.ask(number, trace=str(path))
        training.step(BEFORE + READY)
        assert (training.answer()["number"], training.answer()["state"]) == (number, "refused")
        assert why in training.answer()["why"]
    assert taken.read_text() == "theirs"
    assert list(folder.iterdir()) == []


def test_a_run_that_ends_in_a_window_leaves_what_is_recorded_by_then(training: Training) -> None:
    trace = training.ask(steps=20)
    training.step(BEFORE + READY + 2)
    otel_ddp.uninstrument()

    said = training.answer()
    assert (said["state"], said["steps"]) == ("written", 2)
    assert "aten::addmm" in names_in(trace)
    assert not torch_profiler._is_profiler_enabled


def test_an_error_of_the_profiler_costs_the_window_and_nothing_else(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("no room")

    trace = training.ask(steps=1)
    training.step(BEFORE + READY)
    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", fails)
    training.step(3)

    assert (training.answer()["state"], training.answer()["why"]) == (
        "failed",
        "RuntimeError: no room",
    )
    assert not trace.exists()
    assert len(training.steps()) == BEFORE + READY + 3
    monkeypatch.undo()
    training.ask(number=2, steps=1)
    training.step(14)
    assert training.answer()["state"] == "written"


# An annotation that begins in one window and ends in the next writes to freed memory, as torch has
# it. Each odd step has one for two steps, each even one frees and takes memory.
ANNOTATED = """
import json, os, sys, time
import torch
from torch import nn
from torch.profiler import record_function
import otel_ddp
from otel_ddp.torch import profile_window
from otel_ddp.torch import measure

profile_window._STEPS_BETWEEN = profile_window._QUIET_STEPS = 1
folder = sys.argv[1]
os.makedirs(folder, mode=0o700)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run = otel_ddp.instrument(model, run="annotated")
windows = 0
held = []
for step in range(80):
    window = measure._current.window
    if window._request is None:
        windows += 1
        asked = {"number": step, "steps": 1, "trace": f"{folder}/{step}.json", "until_ns": 2**62}
        window.ask(json.dumps(asked).encode())
    for _ in range(20):
        annotation = record_function("long")
        annotation.__enter__()
        held.append(annotation)
    for annotation in held[:-60]:
        annotation.__exit__(None, None, None)
    del held[:-60]
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
print("windows", windows > 10, flush=True)
run.finish()
"""


def test_an_annotation_that_is_open_between_two_windows_does_not_end_the_process() -> None:
    with Node(OTEL_DDP_AGENT="off") as node:
        said = finished(node.warm("-c", ANNOTATED, str(node.root / "traces")))

    assert "windows True" in said


def test_a_forked_child_has_torch_as_it_was(training: Training) -> None:
    before = torch_profiler.record_function.__enter__
    trace = training.ask(steps=5)
    training.step(BEFORE + READY)
    assert torch_profiler.record_function.__enter__ is not before

    child = os.fork()
    if child == 0:
        os._exit(0 if torch_profiler.record_function.__enter__ is before else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    training.step(5)

    assert training.answer()["state"] == "written"
    assert trace.exists()
    assert torch_profiler.record_function.__enter__ is before
