"""otel-ddp top: the picture of `otel-ddp status`, live."""

from __future__ import annotations

import argparse

from otel_ddp.cli import status
from otel_ddp.cli.options import add_directory_option


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_directory_option(parser)


def run(options: argparse.Namespace) -> int:
    return status.watch(options.dir)
