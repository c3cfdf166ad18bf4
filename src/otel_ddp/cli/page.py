"""otel-ddp page: serves the runs of a folder to a browser, without an agent."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from otel_ddp import settings
from otel_ddp.agent.scrape.server import bind
from otel_ddp.errors import ConfigError
from otel_ddp.history.directory import default_directory, histories
from otel_ddp.history.page.app import App

_HOST = "127.0.0.1"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder",
        nargs="?",
        type=Path,
        metavar="DIR",
        help="a folder with histories of runs (default: where agents keep them here)",
    )
    parser.add_argument(
        "--port", type=int, default=0, help="the port to serve it on (default: any free one)"
    )


def run(options: argparse.Namespace) -> int:
    conf = settings.read()
    folder = (options.folder or default_directory(conf.history_directory)).absolute()
    if options.folder and not os.path.isdir(folder):
        raise ConfigError(f"{folder} is no folder.")
    app = App(folder, ours=not options.folder)
    try:
        server = bind(_HOST, options.port, lambda asked: asked.page_answer(app))
    except (OSError, OverflowError) as error:
        print(f"The page cannot be served: {error}.", file=sys.stderr)
        return 1
    with server:
        if options.port not in (0, server.server_port):
            print(
                f"Port {options.port} cannot be used: another program has it, or it is reserved. "
                "Choose another one, or leave --port out.",
                file=sys.stderr,
            )
            return 1
        count = sum(1 for _ in histories(folder))
        print(f"{count} histories of {folder}: http://localhost:{server.server_port}/", flush=True)
        print("Ctrl-C ends it.", flush=True)
        server.serve_forever()
    return 0
