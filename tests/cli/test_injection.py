"""What the demo may be asked to break."""

from __future__ import annotations

import pytest

from otel_ddp.cli.demo.injection import Injection, parse


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("backward:1:30ms", Injection("backward", 1, 0.03)),
        ("data:3:0.5s", Injection("data", 3, 0.5)),
        ("forward", Injection("forward", 1, 0.03)),
        (" Hang:2 ", Injection("hang", 2)),
    ],
)
def test_what_is_asked_for_is_understood(text: str, meant: Injection) -> None:
    assert parse(text) == meant


@pytest.mark.parametrize("text", ["sideways:1:30ms", "backward:1:30", "hang:1:3s", "backward:-1"])
def test_what_means_nothing_is_answered_with_what_does(text: str) -> None:
    with pytest.raises(ValueError, match=r"30ms|hang:1"):
        parse(text)
