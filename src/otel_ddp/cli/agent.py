"""otel-ddp agent: the node agent in the foreground, for systemd, a DaemonSet, or a look."""

from __future__ import annotations

import argparse
import sys

from otel_ddp.cli import where
from otel_ddp.errors import ConfigError
from otel_ddp.journal.place import find


def arguments(parser: argparse.ArgumentParser) -> None:
    where.argument(parser)


def run(asked: argparse.Namespace) -> int:
    from otel_ddp.agent.service import main

    if asked.dir:
        # The agent does the same, but takes whatever it is told for that of OTEL_DDP_DIR.
        try:
            find(asked.dir, given_as="--dir")
        except ConfigError as error:
            print(error, file=sys.stderr)
            return 2
    return main(asked.dir, foreground=True)
