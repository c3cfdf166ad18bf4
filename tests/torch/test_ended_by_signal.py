"""A signal handler ends the run at any moment: everything is recorded, and nothing fails."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import otel_ddp
from conftest import Here, Journal, open_files
from otel_ddp import Run, errors
from otel_ddp.journal.layout import END
from otel_ddp.journal.parser import Document
from otel_ddp.torch import measure, stack_answers
from otel_ddp.vocabulary import catalog

OURS = str(Path(otel_ddp.__file__).parent) + os.sep
WITNESS = stack_answers.__file__
# Where Python looks for signals: when a function has been entered, and after each call.
MOMENTS = ("call", "c_return")
INPUT = torch.ones(8, 4)


class Handler:
    """Called at each moment of ours at which a signal may be handled; acts at one of them."""

    def __init__(self, act: Callable[[], None], at: int) -> None:
        self.moments = 0
        self.during: list[str] = []
        self._act, self._at = act, at

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event not in MOMENTS or not code.co_filename.startswith(OURS):
            return
        # What is raised in a generator that is closed is lost in Python itself.
        if code.co_flags & inspect.CO_GENERATOR:
            return
        # A program that is left takes its threads along; this one stays.
        if any(each.f_code.co_filename == WITNESS for each, _ in traceback.walk_stack(frame)):
            return
        self.moments += 1
        if self.moments == self._at:
            sys.setprofile(None)
            self.during += [each.f_code.co_name for each, _ in traceback.walk_stack(frame)]
            self._act()


@contextlib.contextmanager
def interrupted_by(handler: Handler) -> Iterator[None]:
    sys.setprofile(handler)
    try:
        yield
    finally:
        sys.setprofile(None)


class Job:
    """All that a process records, in one round."""

    def __init__(self, leaves: bool) -> None:
        self.leaves = leaves
        self.run: Run = otel_ddp.init()
        self.model = nn.Linear(4, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        otel_ddp.instrument(self.model)
        self._rounds = 0
        self.steps = 0
        self.round()

    def preempted(self) -> None:
        if (records := self.run._records) is not None:
            self.steps = records.progress.steps.count
        self.run.finish("failed", reason="preempted")
        if self.leaves:
            raise SystemExit(0)

    def round(self) -> None:
        self._rounds += 1
        self.optimizer.zero_grad()
        self.model(INPUT).sum().backward()
        self.optimizer.step()
        self.run.log({"loss": 1.0}, step=self._rounds)
        self.run.log({f"new{self._rounds}": float("nan")}, step=self._rounds)
        with self.run.phase("checkpoint"):
            self.run.event("saved")
        if self.run._records is not None:
            self.run._records.progress.flush()


@pytest.fixture(autouse=True)
def _left(place: Here) -> Iterator[None]:
    """A program that is left takes along what it has open; this one stays."""
    yield
    otel_ddp.finish()
    for number, path in open_files().items():
        if path.startswith(str(place.directory)):
            os.close(number)


def _forget(place: Here) -> None:
    for path in place.journals():
        path.unlink()


def assert_quiet(caplog: pytest.LogCaptureFixture, handler: Handler) -> None:
    assert (caplog.messages, errors.failures) == ([], {}), handler.during


def ends_of(journal: Journal) -> list[Any]:
    """What the records of its end say."""
    records = (each for each in journal.records if isinstance(each, Document))
    return [each.content for each in records if each.kind == END]


def end_of(journal: Journal) -> Any:
    """What the only one says."""
    (end,) = ends_of(journal)
    return end


def assert_ended(journal: Journal, job: Job, handler: Handler) -> None:
    assert end_of(journal)["state"] == journal.state == "failed"
    assert journal.reason == "preempted"
    assert journal.unreadable == 0
    # Values of the round before, whatever became of this one.
    assert ("loss", 1.0) in journal.points
    # A step that is just being counted may be counted or not; and where the handler raises in the
    # middle of a flush, what was being flushed is lost.
    unsure = {"step_finished", *(("_flush",) if job.leaves else ())}.intersection(handler.during)
    assert journal.total(catalog.TRAINING_STEPS) in (job.steps, job.steps - bool(unsure))


LEAVES = pytest.mark.parametrize("leaves", [False, True], ids=["and goes on", "and leaves"])


def every(distance: int) -> pytest.MarkDecorator:
    """From one moment to the next; no divisor of how often anything is done in a round."""
    all_of_them = pytest.param(1, marks=pytest.mark.stress)
    return pytest.mark.parametrize("every", [all_of_them, distance], ids="every {}".format)


def interrupted(job: Job, act: Callable[[], Any], moment: int) -> Handler:
    """A handler ends the job at this moment of what is done."""
    handler = Handler(job.preempted, moment)
    with contextlib.suppress(SystemExit), interrupted_by(handler):
        act()
    return handler


@every(37)
@LEAVES
def test_a_handler_ends_the_run_at_any_moment(
    leaves: bool, every: int, place: Here, caplog: pytest.LogCaptureFixture
) -> None:
    for moment in itertools.count(1, every):
        job = Job(leaves)
        caplog.clear()
        handler = interrupted(job, job.round, moment)
        if handler.moments < moment:
            break
        if not leaves:
            job.round()

        assert_quiet(caplog, handler)
        assert_ended(place.only(), job, handler)
        _forget(place)
    job.run.finish()
    assert moment > 300


@every(19)
@LEAVES
def test_a_handler_ends_the_run_while_it_is_being_ended(
    leaves: bool, every: int, place: Here, caplog: pytest.LogCaptureFixture
) -> None:
    for moment in itertools.count(1, every):
        job = Job(leaves)
        caplog.clear()
        handler = interrupted(job, job.run.finish, moment)
        if handler.moments < moment:
            break

        if leaves:
            otel_ddp.finish()  # as it is when the program ends
            measure.stop(None)

        assert_quiet(caplog, handler)
        assert otel_ddp.current() is None
        assert not job.model._forward_hooks
        # Of whichever was first; and once more, where that one was interrupted at its end.
        assert {each["state"] for each in ends_of(place.only())} in ({"finished"}, {"failed"})
        _forget(place)
    assert moment > 50


@every(41)
def test_a_handler_that_logs_at_any_moment_tears_nothing(every: int, place: Here) -> None:
    for moment in itertools.count(1, every):
        job = Job(leaves=False)
        values = {"handled": 1.0, f"handled{moment}": 2.0}
        handler = Handler(partial(job.run.log, values), moment)
        with interrupted_by(handler):
            job.round()
        job.run.finish()
        if handler.moments < moment:
            break

        journal = place.only()
        handled = {name: value for name, value in journal.points if name.startswith("handled")}
        refused = journal.total(catalog.OTEL_DDP_VALUES_REFUSED, why="reentered")
        assert journal.unreadable == 0
        # All of it or nothing, which is counted.
        assert (handled, refused) in ((values, 0), ({}, 1)), handler.during
        assert [value for name, value in journal.points if name == "loss"] == [1.0, 1.0]
        _forget(place)
    assert moment > 300


def test_no_thread_waits_for_one_that_a_handler_interrupts(place: Here) -> None:
    run = otel_ddp.init()
    assert run._records is not None
    recorder, progress = run._records.recorder, run._records.progress
    progress.begin("eval")
    held, came = threading.Event(), threading.Event()

    def tell() -> None:
        # Holds what a telling holds, and wants what a writing needs.
        with recorder.gate.lock:
            held.set()
            came.wait(0.2)
            recorder.totals.count(catalog.TRAINING_STEPS)

    other = threading.Thread(target=tell)
    finished = threading.Thread(target=run.finish)

    def handle() -> None:
        other.start()
        held.wait(0.2)
        # As a handler does, in the thread that writes.
        run.finish("failed", reason="preempted")
        came.set()

    recorder.gate.write(handle, None)
    other.join(60)
    finished.start()
    finished.join(60)

    assert not other.is_alive()
    assert not finished.is_alive()
    assert end_of(place.only())["state"] == "failed"


class Preempted(Exception):
    """What users raise in their handlers."""


# How a handler is written is the matter of test_containment.
@every(150)
def test_what_a_handler_raises_reaches_the_loop(every: int, place: Here) -> None:
    # As users have it: nothing of ours is raised.
    errors.raise_failures = False

    def handle(number: int, _: Any) -> None:
        signal.signal(number, signal.SIG_DFL)
        raise Preempted

    before = signal.getsignal(signal.SIGUSR1)
    try:
        for moment in itertools.count(1, every):
            signal.signal(signal.SIGUSR1, handle)
            job = Job(leaves=False)
            found = Handler(lambda: signal.raise_signal(signal.SIGUSR1), moment)
            reached = False
            try:
                with interrupted_by(found):
                    job.round()
            except Preempted:
                reached = True
            job.run.finish()
            _forget(place)
            if found.moments < moment:
                break
            assert reached, found.during
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert moment > 300
