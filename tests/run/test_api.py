"""What `import otel_ddp` offers, and what it costs."""

from __future__ import annotations

import sys

import pytest

import commands
import otel_ddp
from conftest import Here

FORBIDDEN = ("torch", "opentelemetry", "prometheus_client", "pynvml", "requests", "grpc")


def test_every_public_name_is_there_and_nothing_else_is_listed() -> None:
    public = {name for name in dir(otel_ddp) if not name.startswith("_")}

    for name in otel_ddp.__all__:
        assert getattr(otel_ddp, name) is not None
    assert len(otel_ddp.__all__) == len(set(otel_ddp.__all__))
    assert set(otel_ddp.__all__) - {"__version__"} <= public


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'otel_ddp' has no attribute 'instrumment'"):
        otel_ddp.instrumment  # noqa: B018


def test_a_bare_import_loads_nothing_of_ours_and_nothing_heavy() -> None:
    done = commands.python(
        "import sys; before = set(sys.modules); import otel_ddp; "
        "print(*sorted(set(sys.modules) - before))"
    )
    new = done.stdout.split()

    assert [name for name in new if name.startswith("otel_ddp")] == ["otel_ddp"]
    heavy = {"dataclasses", "inspect", "json", "logging", "asyncio", "typing_extensions"}
    assert set() == heavy & set(new)
    assert set() == {*FORBIDDEN} & {name.split(".")[0] for name in new}


def test_without_torch_no_model_is_searched_and_values_are_recorded(
    place: Here, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)

    otel_ddp.instrument().log({"loss": 1.0})

    assert place.only().values == {"loss": 1.0}
    assert "PyTorch, which is not installed here" in caplog.text
