"""otel-ddp agent: the node agent in the foreground, for systemd, a DaemonSet, or a look."""

from __future__ import annotations

import argparse


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dir",
        default="",
        help="where journals and agent meet (default: OTEL_DDP_DIR, else a directory on tmpfs)",
    )


def run(asked: argparse.Namespace) -> int:
    from otel_ddp.agent.service import main

    return main(asked.dir, foreground=True)
