"""python -m tools.dashboards: writes Grafana's dashboards."""

from __future__ import annotations

from tools.dashboards import compare, fleet, goodput, gpus, pipeline, ranks, run, runs
from tools.dashboards.queries import FOLDER

BOARDS = {
    "compare": compare.build,
    "fleet": fleet.build,
    "goodput": goodput.build,
    "gpus": gpus.build,
    "pipeline": pipeline.build,
    "ranks": ranks.build,
    "run": run.build,
    "runs": runs.build,
}


if __name__ == "__main__":
    for name, build in BOARDS.items():
        (FOLDER / f"{name}.json").write_text(build(), encoding="utf-8")
