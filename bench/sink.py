"""A collector that only counts: prints its address, then, once its input ends, what came in.

Its arguments are names of values; without any, all count.
"""

from __future__ import annotations

import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

bodies: list[bytes] = []


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path.endswith("/metrics"):
            bodies.append(body)
        self.send_response(200)
        self.send_header("Content-Type", "application/x-protobuf")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


def main() -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    print(f"http://127.0.0.1:{server.server_address[1]}", flush=True)
    sys.stdin.read()
    server.shutdown()
    # Decoding is left to the end: it must not compete with what is measured.
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
        ExportMetricsServiceRequest,
    )

    wanted = sys.argv[1:]
    points = 0
    for body in bodies:
        for resource in ExportMetricsServiceRequest.FromString(body).resource_metrics:
            for scope in resource.scope_metrics:
                for metric in scope.metrics:
                    if metric.name == "training.scalar":
                        points += sum(_is_wanted(each, wanted) for each in metric.gauge.data_points)
    print(points)


def _is_wanted(point: Any, names: list[str]) -> bool:
    return not names or any(
        each.key == "name" and each.value.string_value in names for each in point.attributes
    )


if __name__ == "__main__":
    main()
