"""Every logged value arrives with its own time and step, whatever happens to the collector."""

from __future__ import annotations

import socket

from node import Node
from otlp_receiver import Receiver


def test_labels_resource_spans_and_events_are_as_the_catalogue_says() -> None:
    code = """
import logging
import otel_ddp
log = logging.getLogger(__name__)
run = otel_ddp.init(group="g", run="r", job_type="eval", project="p", local_rank=1,
                    global_rank=3, world_size=4)
run.log({"loss": 1.0}, step=7)
try:
    with run.phase("checkpoint"):
        with run.span("upload", shards=3, rank="not mine"):
            run.event("retry", attempt=2)
            raise OSError("gone")
except OSError:
    log.exception("no %s today", "checkpoint")
run.finish()
"""
    said = "team=vision,host.name=renamed"
    with Node(OTEL_RESOURCE_ATTRIBUTES=said, OTEL_DDP_LOGS="info") as node, Receiver() as receiver:
        node.export_to(receiver.start_http())
        node.run(code)

        assert receiver.wait_for(
            lambda r: len(r.spans()) >= 4 and len(r.logs()) == 3 and _has(r, "training.state", 2.0)
        )
        host = socket.gethostname()
        labels = {
            "group": "g",
            "run": "r",
            "job_type": "eval",
            "node": host,
            "rank": "3",
            "local_rank": "1",
        }
        point = next(p for p in receiver.points() if p.metric == "training.scalar")
        assert point.attributes == {**labels, "name": "loss", "split": "train"}
        assert point.kind == "gauge"
        expected = {
            "service.name": "p",
            "service.instance.id": host,
            "host.name": "renamed",
            "team": "vision",
        }
        assert expected.items() <= point.resource.items()
        counter = next(p for p in receiver.points() if p.metric == "training.nonfinite")
        assert counter.monotonic
        assert 0 < counter.start_ns < counter.time_ns

        spans = {span.name: span for span in receiver.spans()}
        inner, outer = spans["upload"], spans["checkpoint"]
        assert inner.trace_id == outer.trace_id
        assert inner.parent_span_id == outer.span_id
        whole = spans["global step"]
        assert (outer.parent_span_id, whole.parent_span_id) == (whole.span_id, b"")
        attributes = {pair.key: pair.value for pair in inner.attributes}
        assert attributes["shards"].int_value == 3
        assert attributes["step"].int_value == 7
        assert {name: attributes[name].string_value for name in labels} == labels
        assert inner.status.code == 2
        assert inner.status.message == "OSError: gone"
        assert attributes["error.type"].string_value == "OSError"
        (event,) = inner.events
        assert (event.name, {each.key: each.value.string_value for each in event.attributes}) == (
            "exception",
            {"exception.type": "OSError", "exception.message": "gone"},
        )
        events = {record.event_name: record for record in receiver.logs()}
        assert set(events) == {"retry", "training.checkpoint", ""}
        assert events["retry"].span_id == inner.span_id
        assert events["training.checkpoint"].severity_text == "WARN"
        assert events["training.checkpoint"].span_id == outer.span_id
        told = {each.key: each.value for each in events["training.checkpoint"].attributes}
        assert told["error.type"].string_value == "OSError"
        line = events[""]
        assert (line.body.string_value, line.severity_text, line.severity_number) == (
            *("no checkpoint today", "ERROR"),
            17,
        )
        assert line.trace_id == inner.trace_id
        told = {pair.key: pair.value.string_value for pair in line.attributes}
        assert told.items() >= {**labels, "exception.type": "OSError"}.items()
        (request,) = (each for each in receiver.requests if each.signal == "logs")
        scopes = request.message.resource_logs[0].scope_logs
        assert {each.scope.name for each in scopes} == {"otel_ddp", "__main__"}


def _has(receiver: Receiver, metric: str, value: float) -> bool:
    return any(p.metric == metric and p.value == value for p in receiver.points())
