"""Records some steps with torch's profiler, for a person who asks for it by `otel-ddp profile`."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.autograd import profiler as torch_profiler
from torch.autograd.profiler import record_function

from otel_ddp import errors, files
from otel_ddp.journal.layout import PROFILE_SUFFIX
from otel_ddp.recording.device_scalars import module_of
from otel_ddp.recording.progress import Progress
from otel_ddp.torch.hooks.called import Called
from otel_ddp.torch.steps.sampled import SampledSteps

# What every user of torch's profiler comes through, also those of emit_nvtx.
_ENTRANCES = ("_prepare_profiler", "_enable_profiler")

# An annotation holds a record, and its end writes through a pointer into the profile in which it
# began. Torch checks only whether any profile is on, so an annotation that began in one and ends in
# the next one writes to freed memory. A record that is dropped calls its end too: these stay.
_never_ended: list[Any] = []


class OpenAnnotations:
    """Those that began since `watch`, and have not ended; and the ways into torch's profiler."""

    def __init__(self) -> None:
        self._open: dict[int, record_function] = {}
        self._watched: list[Called] = []

    def watch(self, give_way: Callable[..., None]) -> None:
        """Look at each annotation that begins or ends; call it when a profile has begun.

        *give_way*: before the program itself profiles, since torch has one profiler at a time and
        would raise there.
        """
        opened = self._open

        def began(annotation: record_function) -> None:
            opened[id(annotation)] = annotation

        def ends(annotation: record_function, *_: Any) -> None:
            opened.pop(id(annotation), None)

        self._watched = [
            Called(record_function, "__enter__", began),
            Called(record_function, "__exit__", ends, before=True),
        ]
        for name in _ENTRANCES:
            if hasattr(torch_profiler, name):
                self._watched.append(Called(torch_profiler, name, give_way, before=True))

    def leave(self) -> None:
        """The profile is over: what is still open never ends."""
        watched, self._watched = self._watched, []
        for each in watched:
            each.take_off()
        for annotation in self._open.values():
            annotation.run_callbacks_on_exit = False
            _never_ended.append(annotation.record)
        self._open.clear()


# Room that must be on the disk before a window begins: its trace is text, and as large.
_LEAST_ROOM = 512 * 1024 * 1024
# Between two windows, and after a profile of the program: by then what has begun in one has ended.
_STEPS_BETWEEN, _QUIET_STEPS = 10, 3
# So long the process may start, stop or write without being taken for one that hangs.
_EXPECT_S = 120.0


class Asked(NamedTuple):
    """What was asked for, by the question of this number."""

    number: int
    steps: int
    trace: Path
    until_ns: int
    """A window that has not begun by then does not begin: nobody waits for it any more."""


# What torch's profiler calls the device of a vendor's own backend -> what `torch.device` does.
_DEVICES = {"PrivateUse1": "privateuseone"}


def activities(
    module: Callable[[torch.device], Any] = module_of,
    supported: Callable[[], Iterable[Any]] = torch.profiler.supported_activities,
) -> set[Any]:
    """What a window records: the CPU, and each kind of device that the process uses by now."""
    known = torch.profiler.ProfilerActivity

    def is_used(name: str) -> bool:
        device = module(torch.device(_DEVICES.get(name, name.lower())))
        return hasattr(device, "is_initialized") and device.is_initialized()

    # The CPU has a module too.
    used = {each for name, each in known.__members__.items() if each != known.CPU and is_used(name)}
    # Torch counts devices to answer: where none is used, that would start the driver.
    return {known.CPU, *(used.intersection(supported()) if used else ())}


class _Refused(Exception):
    """There will be no trace; the text says why."""


class ProfileWindow:
    """One a process: waits for a question, and records one window at a time.

    The thread of the questions only leaves the question here. The training thread does the rest
    after steps, so that a window begins and ends with a step. The first step makes the profiler
    ready, and is not one of those that were asked for.
    """

    def __init__(self, progress: Progress, sampled: SampledSteps) -> None:
        self._progress = progress
        self._sampled = sampled
        self._answer = progress.recorder.writer.path.with_suffix(PROFILE_SUFFIX)
        self._asked: Asked | None = None
        self._profiler: Any = None
        self._thread = 0
        # How many steps have ended without a profile since it was asked.
        self._quiet = 0
        # Whether the file of the trace is ours.
        self._made = False
        # The step with which the last window ended.
        self._last_step = -_STEPS_BETWEEN
        # Of the window: its first step, and how many there are.
        self._first = self._done = 0
        self._annotation: Any = None
        self._annotations = OpenAnnotations()

    # -- on the thread of the questions

    def ask(self, line: bytes) -> None:
        """Leave a question. A second one is not heard: the answer shows whose turn it is."""
        said, before = json.loads(line), self._asked
        waits = before is not None and (
            self._profiler is not None or time.time_ns() < before.until_ns
        )
        if not waits:
            self._quiet, self._made = 0, False
            trace = Path(said["trace"])
            self._asked = Asked(said["number"], said["steps"], trace, said["until_ns"])
            self._sampled.call_after_steps(self._profile_step)

    # -- on the training thread

    def _profile_step(self) -> None:
        asked = self._asked
        if asked is None:
            self._sampled.call_after_steps(None)
        elif self._profiler is None or threading.get_ident() == self._thread:
            with self._answered(asked):
                self._advance(asked)

    @contextlib.contextmanager
    def _answered(self, asked: Asked) -> Iterator[None]:
        """Whatever fails, the profiler is off afterwards, and the person who asked knows why."""
        try:
            yield
        except _Refused as why:
            self._close(asked, "refused", str(why))
        except (OSError, RuntimeError) as error:
            # Before the error goes on: it may be the program's own, by a signal handler.
            self._close(asked, "failed", f"{type(error).__name__}: {error}")
            errors.reraise_foreign()
        except BaseException as error:
            self._close(asked, "failed", type(error).__name__)
            raise

    def _advance(self, asked: Asked) -> None:
        step = self._progress.steps.count
        if self._profiler is None:
            _check(asked)
            self._quiet += 1
            if self._quiet >= _QUIET_STEPS and step >= self._last_step + _STEPS_BETWEEN:
                self._start(asked)
            return
        self._leave_annotation()
        if self._first:
            self._done += 1
        if self._done < asked.steps:
            self._progress.mark_profiled()
            self._annotate(step + 1)
            return
        self._save(asked)

    def _start(self, asked: Asked) -> None:
        # Only a file of our own making is written over.
        try:
            os.close(files.create(asked.trace))
        except OSError as error:
            errors.reraise_foreign()
            raise _Refused(_not_writable(asked.trace.parent, error)) from None
        self._made = True
        profiler = torch.profiler.profile(activities=activities())
        self._thread, self._first, self._done = threading.get_ident(), 0, 0
        # From here on it may have to be stopped.
        self._profiler = profiler
        self._progress.mark_profiled()
        with _in_phase(self._progress):
            profiler.start()
        self._annotations.watch(self._give_way)
        self._write("recording", asked)

    def _annotate(self, step: int) -> None:
        """Give the step that begins its name in the trace, the one by which viewers know a step."""
        self._first = self._first or step
        annotation = torch_profiler.record_function(f"ProfilerStep#{step}")
        annotation.__enter__()
        self._annotation = annotation

    def _leave_annotation(self) -> None:
        annotation, self._annotation = self._annotation, None
        if annotation is not None:
            annotation.__exit__(None, None, None)

    def _stop(self) -> Any:
        profiler, self._profiler = self._profiler, None
        self._annotations.leave()
        if profiler is not None:
            self._last_step = self._progress.steps.count
            profiler.stop()
        return profiler

    def _save(self, asked: Asked) -> None:
        with _in_phase(self._progress):
            self._stop().export_chrome_trace(str(asked.trace))
        # Torch may have put another file in the place of ours.
        os.chmod(asked.trace, 0o600)
        # The rest of this step is like no other either.
        self._progress.mark_profiled()
        self._write("written", asked)
        self._forget()

    # -- its end

    def _close(self, asked: Asked, state: str, why: str) -> None:
        """End what is under way without a trace."""
        self._leave_annotation()
        try:
            self._stop()
        except RuntimeError:
            errors.reraise_foreign()
        if self._made:
            with contextlib.suppress(OSError):
                asked.trace.unlink(missing_ok=True)
        self._write(state, asked, why)
        self._forget()

    def _forget(self) -> None:
        self._asked = None
        self._done = 0
        self._sampled.call_after_steps(None)

    @errors.contained()
    def close(self) -> None:
        """The hooks come off: what is recorded by now is written, if this thread may do that."""
        asked = self._asked
        if asked is None:
            return
        mine = threading.get_ident() == self._thread
        if self._profiler is None or mine:
            with self._answered(asked):
                self._leave_annotation()
                # The whole steps that are recorded, if there are any.
                if not self._done:
                    raise _Refused("the training ended before that many steps")
                self._save(asked)
        else:
            # Only its own thread could stop it, and no step ends there any more.
            self._annotations.leave()
            self._write("refused", asked, "the training ended in another thread")

    def leave_to_parent(self) -> None:
        """In a forked child: torch's functions are as they were, and nothing is recorded."""
        self._annotations.leave()
        if self._profiler is not None:
            # The thread that forks goes on in the child, and would record for ever: nothing stops
            # a profile there.
            torch.autograd._enable_record_function(False)

    # -- the program's own profiler

    @errors.contained()
    def _give_way(self, *_: Any, **__: Any) -> None:
        asked = self._asked
        if asked is not None and self._profiler is not None:
            if threading.get_ident() != self._thread:
                return
            self._close(asked, "refused", "the program began to profile itself")
            # The program's profiler may have said before that it is on.
            torch_profiler._run_on_profiler_start()

    # -- the answer

    def _write(self, state: str, asked: Asked, why: str = "") -> None:
        written = state == "written"
        answer = {
            "number": asked.number,
            "state": state,
            "why": why,
            "first_step": self._first if written else None,
            "steps": self._done if written else None,
        }
        try:
            files.replace(self._answer, json.dumps(answer))
        except OSError:
            errors.reraise_foreign()  # full or gone: the person who asked waits in vain


@contextlib.contextmanager
def _in_phase(progress: Progress) -> Iterator[None]:
    """Shown as a phase of its own, which is not taken for a hang."""
    began_s = time.monotonic()
    phase = progress.begin("profile", _EXPECT_S)
    try:
        yield
    finally:
        progress.end(phase, time.monotonic() - began_s)


def _check(asked: Asked) -> None:
    """Raises _Refused where this process records no window."""
    if time.time_ns() > asked.until_ns:
        raise _Refused("no step ended in time")
    if torch_profiler._is_profiler_enabled:
        raise _Refused("the program profiles itself at this moment")
    folder = asked.trace.parent
    try:
        found, disk = os.stat(folder), os.statvfs(folder)
    except OSError as error:
        errors.reraise_foreign()
        raise _Refused(_not_writable(folder, error)) from None
    if found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise _Refused(f"{folder} is not a directory of its user alone")
    if disk.f_bavail * disk.f_frsize < _LEAST_ROOM:
        raise _Refused(f"there are less than {_LEAST_ROOM >> 20} MiB free in {folder}")


def _not_writable(folder: Path, error: OSError) -> str:
    return f"it cannot write to {folder}: {error.strerror}"
