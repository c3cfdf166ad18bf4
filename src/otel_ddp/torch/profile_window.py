"""Records some steps with torch's profiler when `otel-ddp profile` requests it."""

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
from otel_ddp.torch.steps.budget import SampledSteps

# Every use of torch's profiler calls one of these functions, including emit_nvtx.
_ENTRANCES = ("_prepare_profiler", "_enable_profiler")

# An annotation's record points to the profile in which it began, and writes to it when the
# annotation ends. Torch only checks whether any profile is on. So an annotation that ends during a
# later profile writes to freed memory. Freeing a record also ends its annotation, so records of
# annotations that outlive their profile are kept forever.
_never_ended: list[Any] = []


class OpenAnnotations:
    """The annotations that began in a profile and are still open."""

    def __init__(self) -> None:
        self._open: dict[int, record_function] = {}
        self._watched: list[Called] = []

    def watch(self, give_way: Callable[..., None]) -> None:
        """Track all annotations from now on.

        *give_way*: called before the program uses torch's profiler, which raises while ours is on.
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
        """The profile is over: stop tracking, and make sure that open annotations never end."""
        watched, self._watched = self._watched, []
        for each in watched:
            each.take_off()
        for annotation in self._open.values():
            annotation.run_callbacks_on_exit = False
            _never_ended.append(annotation.record)
        self._open.clear()


# Free disk space needed before a window begins, as its trace is a large text file.
_LEAST_ROOM = 512 * 1024 * 1024
# At least this many steps lie between two windows; and at least this many in which the program does
# not use the profiler lie before a window, so that annotations of its last profile have ended.
_STEPS_BETWEEN, _QUIET_STEPS = 10, 3
# Starting, stopping and writing a profile may take this long without being reported as a hang.
_EXPECT_S = 120.0


class Request(NamedTuple):
    """A request for a profile; its *number* is repeated in the answer."""

    number: int
    steps: int
    trace: Path
    until_ns: int
    """Do not begin the window after this time, as nobody waits for it any more."""


# Name of a device type in torch's profiler -> in `torch.device`, if they differ.
_DEVICES = {"PrivateUse1": "privateuseone"}


def activities(
    module: Callable[[torch.device], Any] = module_of,
    supported: Callable[[], Iterable[Any]] = torch.profiler.supported_activities,
) -> set[Any]:
    """What to profile: the CPU, and each kind of device that the process has initialized."""
    known = torch.profiler.ProfilerActivity

    def is_used(name: str) -> bool:
        device = module(torch.device(_DEVICES.get(name, name.lower())))
        return hasattr(device, "is_initialized") and device.is_initialized()

    # Exclude the CPU, which also has a device module, `torch.cpu`.
    used = {each for name, each in known.__members__.items() if each != known.CPU and is_used(name)}
    # Call `supported` only if a device is used: it counts devices, which initializes drivers.
    return {known.CPU, *(used.intersection(supported()) if used else ())}


class _Refused(Exception):
    """No trace is recorded; the text gives the reason."""


class ProfileWindow:
    """One per process: takes requests, and records one window at a time.

    The thread that answers the agent only stores the request. The training thread does the rest
    between steps, so a window contains whole steps. Its first step warms up the profiler and does
    not count as one of the requested steps.
    """

    def __init__(self, progress: Progress, sampled: SampledSteps) -> None:
        self._progress = progress
        self._sampled = sampled
        self._answer = progress.recorder.writer.path.with_suffix(PROFILE_SUFFIX)
        self._request: Request | None = None
        self._profiler: Any = None
        self._thread = 0
        # How many steps since the request ended without the program using the profiler.
        self._quiet = 0
        # Whether we created the trace file, so that we remove it after a failure.
        self._made = False
        # The last step of the previous window.
        self._last_step = -_STEPS_BETWEEN
        # The first step of the window, and how many are done.
        self._first = self._done = 0
        self._annotation: Any = None
        self._annotations = OpenAnnotations()

    # -- on the answering thread

    def ask(self, line: bytes) -> None:
        """Store a request, or ignore it if another one is pending."""
        content, before = json.loads(line), self._request
        waits = before is not None and (
            self._profiler is not None or time.time_ns() < before.until_ns
        )
        if not waits:
            self._quiet, self._made = 0, False
            trace = Path(content["trace"])
            self._request = Request(content["number"], content["steps"], trace, content["until_ns"])
            self._sampled.call_after_steps(self._profile_step)

    # -- on the training thread

    def _profile_step(self) -> None:
        request = self._request
        if request is None:
            self._sampled.call_after_steps(None)
        elif self._profiler is None or threading.get_ident() == self._thread:
            with self._answered(request):
                self._advance(request)

    @contextlib.contextmanager
    def _answered(self, request: Request) -> Iterator[None]:
        """If the block raises, switch the profiler off, and write an answer with the reason."""
        try:
            yield
        except _Refused as why:
            self._close(request, "refused", str(why))
        except (OSError, RuntimeError) as error:
            # Close before `reraise_foreign`, which raises if the error came from a signal handler
            # of the program.
            self._close(request, "failed", f"{type(error).__name__}: {error}")
            errors.reraise_foreign()
        except BaseException as error:
            self._close(request, "failed", type(error).__name__)
            raise

    def _advance(self, request: Request) -> None:
        step = self._progress.steps.count
        if self._profiler is None:
            _check(request)
            self._quiet += 1
            if self._quiet >= _QUIET_STEPS and step >= self._last_step + _STEPS_BETWEEN:
                self._start(request)
            return
        self._leave_annotation()
        if self._first:
            self._done += 1
        if self._done < request.steps:
            self._progress.mark_profiled()
            self._annotate(step + 1)
            return
        self._save(request)

    def _start(self, request: Request) -> None:
        # Create the trace file, or fail if it exists, so that torch overwrites no other file.
        try:
            os.close(files.create(request.trace))
        except OSError as error:
            errors.reraise_foreign()
            raise _Refused(_not_writable(request.trace.parent, error)) from None
        self._made = True
        profiler = torch.profiler.profile(activities=activities())
        self._thread, self._first, self._done = threading.get_ident(), 0, 0
        # Assign this before the start, which may fail halfway: `_close` then stops the profiler.
        self._profiler = profiler
        self._progress.mark_profiled()
        with _in_phase(self._progress):
            profiler.start()
        self._annotations.watch(self._give_way)
        self._write("recording", request)

    def _annotate(self, step: int) -> None:
        """Begin an annotation of the new step, with the name by which viewers recognize steps."""
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

    def _save(self, request: Request) -> None:
        with _in_phase(self._progress):
            self._stop().export_chrome_trace(str(request.trace))
        # Set the mode again, as torch may have replaced the file that we created.
        os.chmod(request.trace, 0o600)
        # Mark the current step as profiled, too: writing the trace takes part of its time.
        self._progress.mark_profiled()
        self._write("written", request)
        self._forget()

    # -- the end of a window

    def _close(self, request: Request, state: str, why: str) -> None:
        """End the window without a trace."""
        self._leave_annotation()
        try:
            self._stop()
        except RuntimeError:
            errors.reraise_foreign()
        if self._made:
            with contextlib.suppress(OSError):
                request.trace.unlink(missing_ok=True)
        self._write(state, request, why)
        self._forget()

    def _forget(self) -> None:
        self._request = None
        self._done = 0
        self._sampled.call_after_steps(None)

    @errors.contained()
    def close(self) -> None:
        """Measuring ends: write the recorded steps, if this thread started the profiler."""
        request = self._request
        if request is None:
            return
        mine = threading.get_ident() == self._thread
        if self._profiler is None or mine:
            with self._answered(request):
                self._leave_annotation()
                # Save if at least one step is complete.
                if not self._done:
                    raise _Refused("the training ended before that many steps")
                self._save(request)
        else:
            # Only the thread that started the profiler can stop it, but it ends no more steps.
            self._annotations.leave()
            self._write("refused", request, "the training ended in another thread")

    def leave_to_parent(self) -> None:
        """In a forked child: restore torch's functions, and record nothing."""
        self._annotations.leave()
        if self._profiler is not None:
            # Only the forking thread lives on in the child: nothing there would stop the profile.
            torch.autograd._enable_record_function(False)

    # -- the program's own profiler

    @errors.contained()
    def _give_way(self, *_: Any, **__: Any) -> None:
        request = self._request
        if request is not None and self._profiler is not None:
            if threading.get_ident() != self._thread:
                return
            self._close(request, "refused", "the program began to profile itself")
            # The program's profiler may have set torch's flag of a running profiler already, and
            # stopping ours has cleared this flag: set it again.
            torch_profiler._run_on_profiler_start()

    # -- the answer

    def _write(self, state: str, request: Request, why: str = "") -> None:
        written = state == "written"
        answer = {
            "number": request.number,
            "state": state,
            "why": why,
            "first_step": self._first if written else None,
            "steps": self._done if written else None,
        }
        try:
            files.replace(self._answer, json.dumps(answer))
        except OSError:
            # The disk is full or the directory gone: the request stays without an answer.
            errors.reraise_foreign()


@contextlib.contextmanager
def _in_phase(progress: Progress) -> Iterator[None]:
    """Report the phase `profile` meanwhile, so that the agent does not report a hang."""
    began_s = time.monotonic()
    phase = progress.begin("profile", _EXPECT_S)
    try:
        yield
    finally:
        progress.end(phase, time.monotonic() - began_s)


def _check(request: Request) -> None:
    """Raise _Refused if no window can be recorded."""
    if time.time_ns() > request.until_ns:
        raise _Refused("no step ended in time")
    if torch_profiler._is_profiler_enabled:
        raise _Refused("the program profiles itself at this moment")
    folder = request.trace.parent
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
