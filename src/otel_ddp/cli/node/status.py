"""otel-ddp status: the runs, ranks and GPUs of this node, once or live, also without an agent."""

from __future__ import annotations

import argparse
import sys
import time

from otel_ddp.cli.node import screen
from otel_ddp.cli.node.picture import Line, picture
from otel_ddp.cli.options import add_directory_option, find_places
from otel_ddp.cli.text import print_answer, print_json
from otel_ddp.errors import ConfigError
from otel_ddp.journal.survey import Survey, survey
from otel_ddp.settings import Settings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--json", action="store_true", help="the same as JSON, for programs")
    how.add_argument(
        "--watch", action="store_true", help="the same live, until Ctrl-C; also `otel-ddp top`"
    )
    add_directory_option(parser)


def run(options: argparse.Namespace) -> int:
    if options.watch:
        return watch(options.dir)
    if options.json:
        return print_json(_survey(options.dir)[0].to_json())
    columns = screen.size()[0] if screen.is_terminal(sys.stdout) else None
    lines = _picture(options.dir, columns)
    coloured = columns is not None and screen.has_colours()
    return print_answer("\n".join(screen.styled(line, coloured) for line in lines))


def watch(directory: str) -> int:
    """Show the picture until a person ends it; the exit status."""
    if why := screen.why_not_live():
        raise ConfigError(f"{why}; `otel-ddp status` prints it once.")
    _survey(directory)

    def draw(columns: int, rows: int) -> list[Line]:
        try:
            return _picture(directory, columns, rows)
        except (ConfigError, OSError) as error:
            # The directory may have gone for a moment only.
            return [Line(str(error), "trouble")]

    screen.show(draw)
    return 0


def _picture(directory: str, columns: int | None, rows: int | None = None) -> list[Line]:
    found, conf = _survey(directory)
    return picture(
        found,
        time.time_ns(),
        agent=conf.agent,
        named=bool(conf.directory),
        columns=columns,
        rows=rows,
    )


def _survey(directory: str) -> tuple[Survey, Settings]:
    conf, places, missing = find_places(directory)
    found = survey(places)
    if missing:
        found.unreadable.append(missing)
    return found, conf
