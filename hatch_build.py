"""Puts the library of plots beside the files of the page: plotly.js, out of the package plotly."""

from __future__ import annotations

import gzip
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_TARGET = Path("src/otel_ddp/history/page/static/plotly.min.js.gz")
_SOURCE = "plotly/package_data/plotly.min.js"


class PlotlyHook(BuildHookInterface):  # type: ignore[type-arg]
    """For wheels, and for installations that are edited in place."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        source = Path(str(distribution("plotly").locate_file(_SOURCE)))
        target = Path(self.root) / _TARGET
        # Compressed once here, instead of by every agent. The same bytes with each build.
        content = gzip.compress(source.read_bytes(), 9, mtime=0)
        if not target.exists() or target.read_bytes() != content:
            target.write_bytes(content)
        # Git ignores the file, and a wheel would leave it out for that.
        build_data["artifacts"].append(f"/{_TARGET}")
