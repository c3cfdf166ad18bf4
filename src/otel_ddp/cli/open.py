"""otel-ddp open: the page of the newest run, in the browser."""

from __future__ import annotations

import argparse
import os
import sys
import webbrowser

from otel_ddp.cli.options import add_directory_option, find_places
from otel_ddp.identity import addresses
from otel_ddp.journal.survey import survey


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_directory_option(parser)


def run(options: argparse.Namespace) -> int:
    _, places, _ = find_places(options.dir)
    served = [(place, base) for place in places if (base := addresses.page(place))]
    if not served:
        print(
            "no agent serves a page on this node: start a run, or look at those that are kept "
            "with `otel-ddp page`",
            file=sys.stderr,
        )
        return 1
    found = [
        (each.started_ns, addresses.page_of_run(base, each.run), base)
        for place, base in served
        for each in survey([place]).processes
        if each.run
    ]
    _, address, base = max(found, default=(0, f"{served[0][1]}/", served[0][1]))
    print(address, flush=True)
    if tunnel := addresses.tunnel(base, os.environ):
        print(f"from your machine: {tunnel}")
    elif not webbrowser.open(address):
        print("no browser could be started here: open the address yourself")
    return 0
