"""The spans of a program that uses OpenTelemetry itself, and ours, below each other."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

import otel_ddp
from conftest import Here
from otel_ddp.journal import layout

LAUNCHER = ("4f" * 16, "5a" * 8)


class Users:
    """What the user's own SDK makes."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer = provider.get_tracer("users")

    def span(self, name: str) -> ReadableSpan:
        (found,) = (each for each in self._exporter.get_finished_spans() if each.name == name)
        return found

    def ids(self, name: str) -> tuple[str, str]:
        """The trace and the span, as ours name them."""
        context = self.span(name).context
        return f"id/{context.trace_id:032x}", f"{context.span_id:016x}"


@pytest.fixture
def users() -> Users:
    return Users()


def test_spans_events_and_run_are_below_the_users_span_that_is_open(
    place: Here, users: Users
) -> None:
    with users.tracer.start_as_current_span("job"):
        run = otel_ddp.init(run="r")
    with users.tracer.start_as_current_span("iteration"):
        run.log({"loss": 1.0}, step=7)
        with run.span("ours"):
            pass
        run.event("now")
    run.finish()

    journal = place.only()
    of_run, ours, event = journal.facts["span"], journal.spans["ours"], journal.events["now"]
    assert (of_run["trace"], of_run["parent"]) == users.ids("job")
    assert (ours["trace"], ours["parent"]) == users.ids("iteration")
    assert (event["trace"], event["span"]) == users.ids("iteration")


def test_the_users_spans_within_ours_are_below_them(place: Here, users: Users) -> None:
    with otel_ddp.init(run="r") as run:
        run.log({"loss": 1.0}, step=7)
        with run.phase("checkpoint"):
            with users.tracer.start_as_current_span("upload"), run.span("inside"):
                pass
            with run.span("beside"):
                pass
        with users.tracer.start_as_current_span("after"):
            pass

    spans = place.only().spans
    outer, upload = spans["checkpoint"], users.span("upload")
    assert upload.parent is not None
    assert f"{upload.parent.span_id:016x}" == outer["id"]
    assert upload.context.trace_id.to_bytes(16, "big") == layout.trace_id("r", outer["trace"])
    assert (spans["inside"]["trace"], spans["inside"]["parent"]) == users.ids("upload")
    assert (spans["beside"]["trace"], spans["beside"]["parent"]) == (outer["trace"], outer["id"])
    assert users.span("after").parent is None


def test_a_rank_that_is_not_exported_is_no_parent(place: Here, users: Users) -> None:
    with (
        otel_ddp.init(strategy="main", run="r", global_rank=1, world_size=2) as run,
        users.tracer.start_as_current_span("around"),
        run.span("ours"),
    ):
        with run.span("inside"):
            pass
        with users.tracer.start_as_current_span("theirs"):
            pass

    parent = users.span("theirs").parent
    assert parent is not None
    assert parent.span_id == users.span("around").context.span_id
    spans = place.only().spans
    assert spans["inside"]["parent"] == spans["ours"]["id"]


def test_a_users_span_that_is_not_sampled_is_no_parent(place: Here) -> None:
    tracer = TracerProvider(sampler=ALWAYS_OFF).get_tracer("users")

    with otel_ddp.init() as run, tracer.start_as_current_span("dropped"), run.span("ours"):
        pass

    journal = place.only()
    assert journal.spans["ours"]["parent"] == journal.facts["span"]["id"]


def test_a_generator_that_is_closed_elsewhere_leaves_the_users_context_alone(
    place: Here, users: Users, caplog: pytest.LogCaptureFixture
) -> None:
    run = otel_ddp.init(run="r")

    async def batches() -> AsyncIterator[int]:
        with run.span("batches"):
            yield 1

    async def main() -> None:
        abandoned = batches()
        await anext(abandoned)
        await asyncio.create_task(abandoned.aclose())  # type: ignore[arg-type]

    asyncio.run(main())
    run.finish()

    assert place.only().spans["batches"]["error"] == "GeneratorExit"
    assert "Failed to detach" not in caplog.text
    assert not trace.get_current_span().get_span_context().is_valid


@pytest.mark.parametrize(
    ("said", "is_parent"),
    [
        ("00-{}-{}-01", True),
        ("00-{}-{}-00", False),
        ("00-{}-{}", False),
    ],
)
def test_the_launchers_span_is_around_the_run(place: Here, said: str, is_parent: bool) -> None:
    os.environ["TRACEPARENT"] = said.format(*LAUNCHER)

    with otel_ddp.init():
        pass

    of_run = place.only().facts["span"]
    expected = (f"id/{LAUNCHER[0]}", LAUNCHER[1])
    assert ((of_run["trace"], of_run["parent"]) == expected) is is_parent
    assert is_parent or not of_run["parent"]
