"""What is ours is swallowed and counted; what is meant for the training loop comes through."""

from __future__ import annotations

import asyncio
import ctypes
import functools
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from otel_ddp import containment


class Preempted(Exception):
    """What users raise."""


@pytest.fixture(autouse=True)
def _as_users_have_it(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(containment, "reraise", False)
    before = signal.getsignal(signal.SIGUSR1)
    yield
    signal.signal(signal.SIGUSR1, before)


def end() -> None:
    """As a handler does that acts once."""
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    raise Preempted


def plain(number: int, frame: Any) -> None:
    end()


def kept_by_a_closure(number: int, frame: Any) -> None:
    lambda: frame  # noqa: B018
    end()


def of_keywords(number: int, frame: Any = None, *rest: Any, said: str = "") -> None:
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
    "kept by a closure": kept_by_a_closure,
    "of keywords": of_keywords,
    "method": Limit().raised,
    "object": Limit(),
    "partial": partial(lambda said, number, frame: end(), "said"),
    "decorated": decorated(end),
}


@pytest.mark.parametrize("kind", HANDLERS)
def test_what_a_handler_raises_comes_through_though_another_stands_there_by_then(kind: str) -> None:
    @containment.contained()
    def ours() -> None:
        signal.raise_signal(signal.SIGUSR1)

    signal.signal(signal.SIGUSR1, HANDLERS[kind])

    with pytest.raises(Preempted):
        ours()
    assert containment.swallowed == {}


def raised_here(error: type[BaseException]) -> Any:
    """Another thread raises it in this one: when this call is over."""
    ident = ctypes.c_ulong(threading.get_ident())
    return partial(ctypes.pythonapi.PyThreadState_SetAsyncExc, ident, ctypes.py_object(error))


def test_what_another_thread_has_raised_in_the_middle_of_ours_comes_through() -> None:
    with pytest.raises(Preempted):
        containment.attempt(raised_here(Preempted), None)


def test_a_class_that_our_own_code_could_raise_is_taken_for_ours() -> None:
    # A known limit: it may be the one or the other, and ours must not end a training.
    assert containment.attempt(raised_here(ValueError), "otherwise") == "otherwise"


def test_what_the_users_code_raises_where_we_ask_it_is_swallowed() -> None:
    def asked() -> None:
        raise Preempted

    assert containment.attempt(asked, "otherwise") == "otherwise"


def test_what_says_something_is_no_class_that_another_thread_gave() -> None:
    class Library(Exception):
        pass

    # What C raises has our frame as its innermost one.
    loop = asyncio.new_event_loop()
    failed: asyncio.Future[None] = asyncio.Future(loop=loop)
    failed.set_exception(Library("a device has failed"))
    loop.close()

    assert containment.attempt(failed.result, "otherwise") == "otherwise"


def test_a_frame_that_is_handed_over_is_not_yet_a_handler() -> None:
    def deeper(frame: Any) -> None:
        raise LookupError("ours")

    @containment.contained(default="otherwise")
    def ours() -> Any:
        return (lambda: deeper(sys._getframe(1)))()

    assert ours() == "otherwise"
    assert containment.swallowed != {}
