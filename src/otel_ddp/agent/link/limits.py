"""What both ends of a link keep to: the method, the largest messages, when a peer is dead."""

from __future__ import annotations

SERVICE, METHOD = "otel_ddp.link.Link", "Follow"

MOST_REPORT_BYTES = 4 << 20
MOST_ANSWER_BYTES = 1 << 20
# What an end writes into a message as it sends it.
STAMP_BYTES = 1024
MOST_NODE_LETTERS = 253
# Of an answer to a person's question: a part of a report.
MOST_TOLD_BYTES = 1 << 20

# A peer that answers no ping is dead within 5 s. Stricter would cut off a node that is busy.
_PING_AFTER_MS = 2000
_PONG_WITHIN_MS = 3000

# fmt: off
CONNECTION = (
    ("grpc.keepalive_time_ms", _PING_AFTER_MS),
    ("grpc.keepalive_timeout_ms", _PONG_WITHIN_MS),
    # Without it, this timeout has no effect: a minute has.
    ("grpc.http2.ping_timeout_ms", _PONG_WITHIN_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # It would ping with each report, to make large transfers quicker: half of the lead's CPU time.
    ("grpc.http2.bdp_probe", 0),
)
# fmt: on
