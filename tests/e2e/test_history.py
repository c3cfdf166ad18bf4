"""Every logged value arrives with its own time and step, whatever happens to the collector."""

from __future__ import annotations

import socket

from node import Node
from otlp_receiver import Receiver, attributes_of


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
        attributes = attributes_of(inner.attributes)
        assert attributes.items() >= {**labels, "shards": 3, "step": 7}.items()
        assert inner.status.message == "OSError: gone"
        events = {record.event_name: record for record in receiver.logs()}
        assert set(events) == {"retry", "training.checkpoint", ""}
        assert events["retry"].span_id == inner.span_id
        assert events["training.checkpoint"].span_id == outer.span_id
        line = events[""]
        assert line.trace_id == inner.trace_id
        assert (line.body.string_value, line.severity_text) == ("no checkpoint today", "ERROR")
        told = attributes_of(line.attributes)
        assert told.items() >= {**labels, "exception.type": "OSError"}.items()
        scopes = [
            each
            for request in receiver.requests
            if request.signal == "logs"
            for each in request.message.resource_logs[0].scope_logs
        ]
        assert {each.scope.name for each in scopes} == {"otel_ddp", "__main__"}


def _has(receiver: Receiver, metric: str, value: float) -> bool:
    return any(p.metric == metric and p.value == value for p in receiver.points())
