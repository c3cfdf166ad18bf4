"""otel-ddp open: opens the page of a run in the browser; without an agent, serves it too."""

from __future__ import annotations

import argparse
import os
import sys
import threading
import webbrowser
from pathlib import Path

from otel_ddp import settings
from otel_ddp.agent.serve.server import Handler, NoToken, admits, bind, find_token
from otel_ddp.cli.command import add_directory_option, find_places, history_directory, run_name
from otel_ddp.errors import ConfigError
from otel_ddp.history.directory import NotFound, find_run
from otel_ddp.history.page.app import App
from otel_ddp.history.page.http import Answer
from otel_ddp.identity import addresses
from otel_ddp.journal.survey import last_of_agent

_HOST = "127.0.0.1"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what",
        nargs="?",
        type=run_name,
        metavar="RUN|DIR",
        help="a run by its name, or a folder with histories of runs (default: the newest run)",
    )
    add_directory_option(parser)


def run(options: argparse.Namespace) -> int:
    _, places, _ = find_places(options.dir)
    served = {place: base for place in places if (base := addresses.page(place))}
    try:
        folder, group, name = _folder_and_run(options.what or "")
    except NotFound:
        if options.what or not served:
            raise
        # There is no history, but an agent runs here: its page shows the live runs.
        _open(f"{next(iter(served.values()))}/now")
        return 0
    for place, base in served.items():
        if last_of_agent(place).agent.get("history", {}).get("directory") == str(folder):
            _open(addresses.page_of_run(base, name, group))
            return 0
    return _serve(folder, group, name)


def _folder_and_run(words: str) -> tuple[Path, str, str]:
    """A folder of histories, and the group and name of a run in it.

    If *words* is the path of a folder, group and name are empty: the page then shows all its runs.
    """
    try:
        with find_run(words, history_directory(), paths=False) as found:
            return history_directory(), found.group, found.name
    except NotFound:
        # No run has this name, so it may be the path of a folder.
        folder = Path(os.path.expanduser(words)).absolute()
        if words and os.path.isdir(folder):
            return folder, "", ""
        raise


def _open(address: str) -> None:
    print(address, flush=True)
    if tunnel := addresses.tunnel(address, os.environ):
        print(f"from your machine: {tunnel}", flush=True)
    elif not webbrowser.open(address):
        print("no browser could be started here: open the address yourself", flush=True)


def _serve(folder: Path, group: str, name: str) -> int:
    conf = settings.read()
    app = App(folder, ours=folder == history_directory())
    try:
        token = find_token(conf.scrape_token_file, _HOST)
    except NoToken as why:
        raise ConfigError(f"The page cannot be served: {why}.") from None

    def answer(asked: Handler) -> Answer:
        given = asked.headers.get("Authorization") or ""
        return asked.page_answer(app, is_known=bool(token) and admits(token, given))

    try:
        server = bind(_HOST, conf.scrape_port, answer)
    except OSError as error:
        raise ConfigError(f"The page cannot be served: {error}.") from None
    with server:
        print(f"This command serves {folder}, as no agent does. Ctrl-C ends it.", file=sys.stderr)
        # Serve in a thread. `_open` may start a browser in this terminal, and would then block
        # until the user closes it.
        serving = threading.Thread(target=server.serve_forever, daemon=True)
        serving.start()
        base = f"http://localhost:{server.server_port}"
        _open(addresses.page_of_run(base, name, group) if name else f"{base}/")
        serving.join()
    return 0
