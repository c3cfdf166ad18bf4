"""Exceptions, verdicts and events: the boards ask Loki for what log records have."""

from __future__ import annotations

import re

import pytest
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from tools.dashboards.queries import boards

import otel_ddp
from conftest import Here
from make import labels_of
from otel_ddp.agent.export.otlp.render import Renderer
from otel_ddp.journal import layout
from otel_ddp.journal.parser import Document
from otlp_receiver import attributes_of


def test_the_queries_for_events_name_what_a_log_record_has(place: Here) -> None:
    def train() -> None:
        with otel_ddp.init() as run:
            run.log({"loss": 1.0}, step=7)
            raise ValueError("of rank 3")

    with pytest.raises(ValueError, match="of rank 3"):
        train()
    (event,) = place.only().events.values()
    (request,) = Renderer({"service.name": "otel-ddp"}).documents(
        [(labels_of(3), "", [Document(layout.EVENT, event, 0)])]
    )
    (found,) = ExportLogsServiceRequest.FromString(request.body).resource_logs
    (record,) = found.scope_logs[0].log_records
    has = {*attributes_of(found.resource.attributes), *attributes_of(record.attributes)}
    # As Loki names them; the level is its own.
    known = {re.sub(r"\W", "_", name) for name in has} | {"detected_level"}

    queries = [each for board in boards() for each in board.log_questions]

    assert queries
    for query in queries:
        filtered = re.findall(r"[{|] *(\w+)=", query)
        shown = re.findall(r"\{\{(?:if )?\.(\w+)\}\}", query)
        assert {*filtered, *shown} <= known, query
