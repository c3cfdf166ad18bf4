"""Answers the agent's requests for the stacks of all threads and the pending collectives."""

from __future__ import annotations

import _thread
import atexit
import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from otel_ddp import errors, files
from otel_ddp.files import close_ours, file_of
from otel_ddp.journal.layout import ANSWER_SUFFIX, ASK_SUFFIX
from otel_ddp.recording.progress import DevicePosition
from otel_ddp.torch import collectives
from otel_ddp.torch.inspection import outward

# Requests arrive through a fifo next to the journal; a file beside it holds the last answer.

_MOST_THREADS = _MOST_FRAMES = 64
_LONGEST_TEXT = 300
_END_S = 0.5
# Our thread does not block these signals: only a fault in the thread itself raises them, and the
# kernel kills a process that has blocked such a signal.
_FAULTS = {
    *(signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT, signal.SIGTRAP)
}


class _StackAnswers:
    """A fifo for requests, and a thread that reads and answers them."""

    def __init__(
        self,
        journal: Path,
        training: Callable[[], int],
        device_position: Callable[[], DevicePosition | None],
        profile: Callable[[bytes], None],
    ) -> None:
        """*training*: returns the training thread, or 0 if unknown. *profile*: gets each request
        for a profile."""
        self.journal = journal
        self._training = training
        self._device_position = device_position
        self._profile = profile
        self._ask = journal.with_suffix(ASK_SUFFIX)
        self._answer = journal.with_suffix(ANSWER_SUFFIX)
        self._stopped = False
        # Held while a request is answered. At the exit, the process waits for this lock.
        self._answering = threading.Lock()
        files.make_fifo(self._ask)
        # Open for writing as well: without a writer, a read would return at once (end of file).
        self._fd = files.open_own(self._ask, os.O_RDWR)
        os.set_blocking(self._fd, True)
        self._fifo = file_of(self._fd)
        self._ended = threading.Event()
        # Block all signals in the new thread, which inherits the mask. User code may wait for a
        # signal that it has blocked in all threads; the kernel must not deliver it to ours.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - _FAULTS)
        try:
            # Not a threading.Thread: code that joins all threads must not wait for this one.
            _thread.start_new_thread(self._run, ())
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def close(self) -> None:
        """Stop answering; waits up to half a second for an answer that is being written."""
        self._stopped = True
        try:
            self._wake()
        except OSError:
            errors.reraise_foreign()
        ended = self._ended.wait(_END_S)
        files.remove(self._ask, self._answer)
        if ended:
            close_ours(self._fd, self._fifo)

    def _wake(self) -> None:
        if file_of(self._fd) == self._fifo:
            os.set_blocking(self._fd, False)
            os.write(self._fd, b"\n")
            return
        # The program has closed our descriptor, but the thread still waits in its read. Wake it by
        # writing to the fifo through its path.
        files.write_to_fifo(self._ask, "\n")

    def leave_to_exit(self) -> None:
        """The interpreter exits: let the thread finish its answer, and then run no Python code."""
        self._stopped = True
        self._answering.acquire(timeout=_END_S)

    def forget(self) -> None:
        """In a forked child: close the fifo, as its requests are for the parent."""
        close_ours(self._fd, self._fifo)

    def _run(self) -> None:
        try:
            self._answer_questions()
        finally:
            self._ended.set()

    def _answer_questions(self) -> None:
        # Check before each read: the program may have closed our descriptor and reused its number,
        # and a read would take the program's data.
        while not self._stopped and file_of(self._fd) == self._fifo:
            try:
                asked = os.read(self._fd, 65536)
            except OSError:
                return
            if self._answering.acquire(blocking=False):
                try:
                    if not self._stopped:
                        self._reply(asked)
                finally:
                    self._answering.release()

    @errors.contained()
    def _reply(self, asked: bytes) -> None:
        # One answer serves all pending requests: it has the highest number and the fullest content.
        words = []
        for line in asked.splitlines():
            first, _, rest = line.partition(b" ")
            if first == b"profile":
                self._profile(rest)
            else:
                words += line.split()
        numbers = [int(word) for word in words if word.isdigit()]
        if not numbers:
            return
        everything = b"what" in words
        recorded = collectives.flight_recorders(with_collectives=everything)
        answer: dict[str, Any] = {
            "question": max(numbers),
            "kind": "what" if everything else "where",
            "threads": _threads(threading.get_ident(), self._training()),
            "groups": collectives.groups(recorded),
        }
        if everything:
            answer["collectives"] = collectives.latest(recorded)
            if position := errors.attempt(self._device_position, None):
                answer["device"] = position._asdict()
        # If the disk is full or the directory is gone, the request stays without an answer.
        with contextlib.suppress(OSError):
            files.replace(self._answer, json.dumps(answer))


_current: _StackAnswers | None = None


@errors.contained()
def start(
    journal_path: Path,
    training: Callable[[], int],
    device_position: Callable[[], DevicePosition | None],
    profile: Callable[[bytes], None] = lambda question: None,
) -> None:
    """Answer requests through a fifo beside this journal, and no longer beside an earlier one."""
    global _current
    if _current is not None and _current.journal != journal_path:
        stop()
    if _current is None:
        try:
            _current = _StackAnswers(journal_path, training, device_position, profile)
        except (OSError, RuntimeError) as error:  # no fifos in this directory, or no more threads
            errors.reraise_foreign()
            errors.log.info("The agent cannot ask this process where it hangs: %s", error)


@errors.contained()
def stop() -> None:
    """Stop answering; leaves no file and no thread behind."""
    global _current
    found, _current = _current, None
    if found is not None:
        found.close()


# -- stacks


def _threads(own: int, training: int) -> list[dict[str, Any]]:
    """The stacks of all threads except *own*, main thread first; keeps no reference to frames."""
    known = {each.ident: each for each in threading.enumerate()}
    main = threading.main_thread().ident
    frames = sys._current_frames()
    # Remove our own frame. It refers to this dictionary, so this reference cycle would keep all
    # frames alive until a garbage collection.
    frames.pop(own, None)
    found = []
    first = sorted(frames, key=lambda each: (each != main, each != training))
    for ident in first[:_MOST_THREADS]:
        thread = known.get(ident)
        found.append(
            {
                "name": "" if thread is None else thread.name[:_LONGEST_TEXT],
                "id": None if thread is None else thread.native_id,
                "main": ident == main,
                "trains": ident == training,
                "frames": _stack(frames[ident]),
            }
        )
    return found


def _stack(innermost: FrameType) -> list[tuple[str, int | None, str]]:
    """File, line and function of each frame, the innermost first."""
    frames = [(each.f_code, each.f_lineno) for each in outward(innermost)[:_MOST_FRAMES]]
    # Cut a long path at its beginning, as its end says more.
    return [
        (code.co_filename[-_LONGEST_TEXT:], line, code.co_name[:_LONGEST_TEXT])
        for code, line in frames
    ]


# -- exit and fork


def _at_exit() -> None:
    if _current is not None:
        _current.leave_to_exit()


def _after_fork() -> None:
    global _current
    found, _current = _current, None
    if found is not None:
        found.forget()


atexit.register(_at_exit)
os.register_at_fork(after_in_child=_after_fork)
