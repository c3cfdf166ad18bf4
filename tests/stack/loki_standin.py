"""Stands in for Loki's HTTP API where no Loki was built: OTLP in, the boards' queries out.

It keeps what Loki 3 keeps, under the same names: some attributes of the resource are labels, all
others are metadata of each line. It understands the part of LogQL that the boards use, and refuses
anything else. Where there is a real Loki, the same tests ask that one too.
"""

from __future__ import annotations

import gzip
import json
import re
import threading
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import (
    ExportLogsServiceRequest,
    ExportLogsServiceResponse,
)

# Of a line, labels included. Loki refuses a request with a line that has more.
MOST_METADATA = 128
_LABELS = ("service.name", "service.namespace", "service.instance.id")
_LEVELS = ((4, "trace"), (8, "debug"), (12, "info"), (16, "warn"), (20, "error"), (24, "fatal"))
_STREAM = re.compile(r"\s*\{(\w+)(=~?)(\"(?:[^\"\\]|\\.)*\")\}\s*")
_FILTER = re.compile(r"\|\s*(\w+)\s*(=~?)\s*(\"(?:[^\"\\]|\\.)*\")\s*")
_FORMAT = re.compile(r"\|\s*line_format\s+`([^`]*)`\s*")
_COUNTED = re.compile(r"sum by \((\w+)\) \(count_over_time\((.*) \[\d+m?s\]\)\)", re.DOTALL)


class Line(NamedTuple):
    """One record."""

    time_ns: int
    text: str
    labels: dict[str, str]


class LogStore(NamedTuple):
    """Where one is."""

    url: str

    @property
    def otlp_logs(self) -> str:
        return f"{self.url}/otlp/v1/logs"


def received(request: ExportLogsServiceRequest) -> Iterator[Line]:
    for of_resource in request.resource_logs:
        resource = _attributes(of_resource.resource.attributes)
        for of_scope in of_resource.scope_logs:
            for record in of_scope.log_records:
                found = {**resource, **_attributes(record.attributes)}
                found["scope_name"] = of_scope.scope.name
                found["scope_version"] = of_scope.scope.version
                found["severity_text"] = record.severity_text
                found["severity_number"] = str(record.severity_number)
                found["trace_id"], found["span_id"] = record.trace_id.hex(), record.span_id.hex()
                number = record.severity_number
                levels = (word for most, word in _LEVELS if 0 < number <= most)
                found["detected_level"] = next(levels, "unknown")
                # What is empty is not there.
                labels = {name: value for name, value in found.items() if value}
                if len(labels) > MOST_METADATA + len(_LABELS):
                    raise ValueError("structured metadata has too many entries")
                yield Line(record.time_unix_nano, record.body.string_value, labels)


def _attributes(pairs: Any) -> dict[str, str]:
    found = {}
    for pair in pairs:
        value = getattr(pair.value, pair.value.WhichOneof("value") or "string_value")
        text = str(value).lower() if isinstance(value, bool) else str(value)
        found[re.sub(r"\W", "_", pair.key)] = text
    return found


def chosen(lines: list[Line], query: str) -> list[Line]:
    """What a query for lines brings; raises ValueError for one that is not understood."""
    stream = _STREAM.match(query)
    if stream is None:
        raise ValueError(f"no stream is chosen: {query}")
    rest = query[stream.end() :]
    found = [line for line in lines if _matches(line, *stream.groups())]
    while rest:
        if (wanted := _FILTER.match(rest)) is not None:
            found = [line for line in found if _matches(line, *wanted.groups())]
        elif (wanted := _FORMAT.match(rest)) is not None:
            shape = wanted[1]
            found = [line._replace(text=_formatted(shape, line)) for line in found]
        else:
            raise ValueError(f"not understood: {rest}")
        rest = rest[wanted.end() :]
    return found


def _matches(line: Line, name: str, how: str, quoted: str) -> bool:
    value, wanted = line.labels.get(name, ""), json.loads(quoted)
    return bool(re.fullmatch(wanted, value)) if how == "=~" else value == wanted


def _formatted(shape: str, line: Line) -> str:
    def maybe(found: re.Match[str]) -> str:
        return found[2] if line.labels.get(found[1]) else ""

    text = re.sub(r"\{\{if \.(\w+)\}\}(.*?)\{\{end\}\}", maybe, shape, flags=re.DOTALL)
    text = re.sub(r"\{\{\.(\w+)\}\}", lambda found: line.labels.get(found[1], ""), text)
    return text.replace("{{__line__}}", line.text)


def answer(lines: list[Line], query: str, end_s: float) -> dict[str, Any]:
    """As /loki/api/v1/query_range answers; a count is told of one moment, the end."""
    counted = _COUNTED.fullmatch(query)
    if counted is None:
        streams = [
            {"stream": line.labels, "values": [[str(line.time_ns), line.text]]}
            for line in chosen(lines, query)
        ]
        return {"resultType": "streams", "result": streams}
    label, of = counted.groups()
    counts: dict[str, int] = {}
    for line in chosen(lines, of):
        counts[line.labels.get(label, "")] = counts.get(line.labels.get(label, ""), 0) + 1
    series = [
        {"metric": {label: value}, "values": [[end_s, str(count)]]}
        for value, count in counts.items()
    ]
    return {"resultType": "matrix", "result": series}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def do_POST(self) -> None:
        # A connection that stays would keep its thread beyond the test.
        self.close_connection = True
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        if self.path != "/otlp/v1/logs":
            self._ask(body.decode("utf-8", "replace"))
            return
        try:
            self.server.lines += received(ExportLogsServiceRequest.FromString(body))
        except ValueError as why:
            self._say(400, str(why).encode())
            return
        self._say(200, ExportLogsServiceResponse().SerializeToString(), "application/x-protobuf")

    def do_GET(self) -> None:
        self.close_connection = True
        self._ask(self.path.partition("?")[2])

    def _ask(self, asked: str) -> None:
        words = dict(urllib.parse.parse_qsl(asked))
        if not self.path.startswith("/loki/api/v1/query_range"):
            self._say(404, b"no such page")
            return
        try:
            found = answer(list(self.server.lines), words["query"], float(words["end"]) / 1e9)
        except ValueError as why:
            self._say(400, str(why).encode())
            return
        self._say(200, json.dumps({"status": "success", "data": found}).encode())

    def _say(self, status: int, body: bytes, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """A test's output is not the place."""


class _Server(ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.lines: list[Line] = []
        self.daemon_threads = False


@contextmanager
def standin() -> Iterator[LogStore]:
    """One on a port of its own, for as long as the block lasts."""
    server = _Server()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield LogStore(f"http://127.0.0.1:{server.server_port}")
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
