"""otel-ddp agent: runs the node agent in the foreground, for systemd, a DaemonSet or by hand."""

from __future__ import annotations

import argparse

from otel_ddp.cli.options import add_directory_option
from otel_ddp.journal.place import find


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_directory_option(parser)


def run(options: argparse.Namespace) -> int:
    from otel_ddp.agent.service import main

    if options.dir:
        # The agent checks this too, but its error would name OTEL_DDP_DIR.
        find(options.dir, given_as="--dir")
    return main(options.dir, foreground=True)
