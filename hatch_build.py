"""Puts the library of plots beside the files of the page: plotly.js, out of the package plotly."""

from __future__ import annotations

import gzip
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_TARGET = Path("src/otel_ddp/history/page/static/plotly.min.js.gz")
_SOURCE = "plotly/package_data/plotly.min.js"
# Who passes the library on has to pass this on too.
_LICENCE = Path("src/otel_ddp/history/page/static/plotly.LICENSE.txt")


class PlotlyHook(BuildHookInterface):  # type: ignore[type-arg]
    """For wheels, and for installations that are edited in place."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        plotly = distribution("plotly")
        source = Path(str(plotly.locate_file(_SOURCE)))
        (licence,) = (each for each in plotly.files or () if each.name == "LICENSE.txt")
        for target, content in (
            # Compressed once here, instead of by every agent. The same bytes with each build.
            (_TARGET, gzip.compress(source.read_bytes(), 9, mtime=0)),
            (_LICENCE, Path(str(licence.locate())).read_bytes()),
        ):
            path = Path(self.root) / target
            if not path.exists() or path.read_bytes() != content:
                path.write_bytes(content)
            # Git ignores the file, and a wheel would leave it out for that.
            build_data["artifacts"].append(f"/{target}")
