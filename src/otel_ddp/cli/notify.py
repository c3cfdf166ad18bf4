"""otel-ddp notify: sends a test message to each address, and shows which were accepted."""

from __future__ import annotations

import argparse
import os
import socket
from datetime import datetime, timezone

from otel_ddp import settings
from otel_ddp.agent.notify.outbox import Address, Message
from otel_ddp.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "text", nargs="?", default="A test of otel_ddp.", metavar="TEXT", help="what it says"
    )


def run(options: argparse.Namespace) -> int:
    conf = settings.read()
    if not conf.notify:
        raise ConfigError(
            "OTEL_DDP_NOTIFY names no address: set it, as in OTEL_DDP_NOTIFY=https://example.org/"
        )
    message = Message(
        id=os.urandom(8).hex(),
        kind="test",
        level="info",
        title="otel_ddp: a test",
        text=options.text,
        time=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        node=conf.node or socket.gethostname(),
    )
    failed = False
    for address in map(Address, dict.fromkeys(conf.notify)):
        outcome = address.send(message)
        taken = outcome.kind == "delivered"
        failed |= not taken
        print(f"ok   taken by {address.shown}" if taken else f"fail {address.shown}: {outcome.why}")
    return int(failed)
