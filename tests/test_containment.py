"""Our own failures are caught and counted; errors meant for the training loop pass through."""

from __future__ import annotations

import asyncio
import functools
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

import commands
from otel_ddp import errors


class Preempted(Exception):
    """An exception of the user's own."""


@pytest.fixture(autouse=True)
def _as_users_have_it(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(errors, "raise_failures", False)
    before = signal.getsignal(signal.SIGUSR1)
    yield
    signal.signal(signal.SIGUSR1, before)


def end() -> None:
    """Ends a handler that acts once: it resets its signal, then raises."""
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    raise Preempted


def plain(number: int, frame: Any) -> None:
    end()


class Limit:
    def raised(self, number: int, frame: Any) -> None:
        end()

    def __call__(self, *_: Any) -> None:
        end()


def decorated(handler: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(handler)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        handler()

    return wrapped


HANDLERS: dict[str, Callable[..., None]] = {
    "plain": plain,
    "lambda": lambda *_: end(),
    "method": Limit().raised,
    "object": Limit(),
    "partial": partial(lambda said, number, frame: end(), "said"),
    "decorated": decorated(end),
}


@pytest.mark.parametrize("kind", HANDLERS)
def test_the_error_of_a_handler_passes_through_though_it_installed_another_one(kind: str) -> None:
    @errors.contained()
    def ours() -> None:
        signal.raise_signal(signal.SIGUSR1)

    signal.signal(signal.SIGUSR1, HANDLERS[kind])

    with pytest.raises(Preempted):
        ours()
    assert errors.failures == {}


# Calls after which an error is raised in this thread, as another thread does it. In a process of
# its own: a library may have left a second state of Python for the thread that runs the tests.
RAISED_HERE = """
import ctypes, threading
from functools import partial
from otel_ddp import errors

class Preempted(Exception): pass

def raised_here(error):
    ident = ctypes.c_ulong(threading.get_ident())
    return partial(ctypes.pythonapi.PyThreadState_SetAsyncExc, ident, ctypes.py_object(error))

try:
    errors.attempt(raised_here(Preempted), None)
except Preempted:
    print("passed through")
print(errors.attempt(raised_here(ValueError), "default"))
"""


def test_an_error_that_another_thread_raises_in_the_middle_of_our_code_passes_through() -> None:
    ran = commands.python(RAISED_HERE)

    # A known limit: a class that our own code could raise may be the one or the other, and ours
    # must not end a training.
    assert ran.stdout.splitlines() == ["passed through", "default"]


def test_an_error_of_user_code_that_we_call_is_caught() -> None:
    def users_code() -> None:
        raise Preempted

    assert errors.attempt(users_code, "default") == "default"


def test_an_error_with_a_message_did_not_come_from_another_thread() -> None:
    class Library(Exception):
        pass

    # What C raises has our frame as its innermost one.
    loop = asyncio.new_event_loop()
    failed: asyncio.Future[None] = asyncio.Future(loop=loop)
    failed.set_exception(Library("a device has failed"))
    loop.close()

    assert errors.attempt(failed.result, "default") == "default"


def test_a_function_that_takes_a_frame_is_not_yet_a_handler() -> None:
    def deeper(frame: Any) -> None:
        raise LookupError("ours")

    @errors.contained(default="default")
    def ours() -> Any:
        return (lambda: deeper(sys._getframe(1)))()

    assert ours() == "default"
    assert errors.failures != {}
