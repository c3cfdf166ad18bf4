"""How long the rules on machines take over 30 days of N nodes, for docs/internals/scale.md.

    python bench/fleet_months.py [1250]

The weeks of bench/weeks.py, in a real Prometheus with the rules and alerts of fleet.yml.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import yaml  # noqa: E402
from weeks import openmetrics, played  # noqa: E402

from stack.servers import DEPLOY, Prometheus, binaries  # noqa: E402

# Groups are first evaluated within their own interval.
_PATIENCE_S = 420.0


def main(nodes: int) -> None:
    weeks = played(int(time.time()) // 300 * 300, nodes=nodes, days=30, of_run=8)
    with tempfile.TemporaryDirectory() as folder_name:
        folder = Path(folder_name)
        recorded = folder / "weeks.txt"
        with recorded.open("w") as file:
            count = sum(file.write(f"{line}\n") and 1 for line in openmetrics(weeks))
        print(f"{nodes} nodes, {len(weeks.runs)} runs of 8, {count / 1e6:.1f} million samples")
        backfill = [binaries().promtool, "tsdb", "create-blocks-from", "openmetrics", "--quiet"]
        backfill += ["--max-block-duration=60d", recorded, folder / "data"]
        subprocess.run(backfill, check=True)
        recorded.unlink()
        rules = [str(DEPLOY / "prometheus" / kind / "fleet.yml") for kind in ("rules", "alerts")]
        config = yaml.safe_dump({"rule_files": rules, "global": {"evaluation_interval": "30s"}})
        flags = ("--storage.tsdb.retention.time=90d",)
        with Prometheus(binaries(), folder, *flags, config=config) as server:
            for group in _evaluated(server):
                print(f"{group['name']}: {group['evaluationTime']:.2f} s")
            firing = server.query('ALERTS{alertname="NodeLateAgain"}')
            named = sorted({each.labels["node"] for each in firing})
            print(f"NodeLateAgain: {named}, bad: {weeks.bad}")


def _evaluated(server: Prometheus) -> list[dict[str, float | str]]:
    deadline = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline:
        groups = server.api("rules")["groups"]
        if groups and all(each["evaluationTime"] for each in groups):
            return list(groups)
        time.sleep(1)
    raise TimeoutError("a group of rules was not evaluated")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1250)
