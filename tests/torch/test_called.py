"""Functions of torch's that are replaced, for want of a hook, come back in any order."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
from torch.distributed import ProcessGroup

from otel_ddp.torch.hooks.called import Called


class Maker:
    def make(self, number: int) -> int:
        return number + 1


ORIGINAL = Maker.make


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Maker, "make", ORIGINAL)


def of_another_tool(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def around(*args: Any) -> Any:
        return function(*args)

    return around


@pytest.mark.parametrize("first", [0, 1])
def test_the_function_is_back_whichever_of_two_is_taken_off_first(first: int) -> None:
    heard: list[int] = []
    both = [Called(Maker, "make", lambda _, n, k=k: heard.append(k)) for k in (0, 1)]
    assert Maker().make(1) == 2
    assert heard == [0, 1]

    both[first].take_off()
    Maker().make(1)
    both[1 - first].take_off()
    Maker().make(1)

    assert heard == [0, 1, 1 - first]
    assert Maker.make is ORIGINAL


def test_a_method_of_a_class_of_c_is_itself_again() -> None:
    before = vars(ProcessGroup)["send"]

    Called(ProcessGroup, "send", lambda *_: None).take_off()

    assert vars(ProcessGroup)["send"] is before


def test_below_another_tool_ours_is_silent_and_goes_when_the_tool_has_gone() -> None:
    heard: list[int] = []
    ours = Called(Maker, "make", lambda _, n: heard.append(n))
    below = Maker.make
    theirs = of_another_tool(below)
    Maker.make = theirs  # type: ignore[method-assign]

    ours.take_off()
    assert Maker().make(1) == 2
    assert heard == []
    # What the tool has copied from ours does not make it one of ours.
    next_one = Called(Maker, "make", lambda _, n: heard.append(n))
    next_one.take_off()
    assert Maker.make is theirs

    Maker.make = below  # type: ignore[method-assign]
    next_one = Called(Maker, "make", lambda _, n: heard.append(n))
    Maker().make(3)
    next_one.take_off()

    assert heard == [3]
    assert Maker.make is ORIGINAL
