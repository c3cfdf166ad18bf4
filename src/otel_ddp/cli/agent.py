"""otel-ddp agent: runs the node agent in the foreground, as for systemd or a DaemonSet."""

from __future__ import annotations

import argparse

from otel_ddp.cli.command import add_directory_option


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_directory_option(parser)


def run(options: argparse.Namespace) -> int:
    from otel_ddp.agent.service import main

    return main(options.dir, foreground=True)
