"""Where GPUs lack numbers, as those of laptops do, the board of GPUs shows no 0."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml
from tools.dashboards.queries import boards

from stack.servers import binaries

(BOARD,) = (each for each in boards() if each.title == "GPUs & nodes")
PANELS = ("GPUs", "Held back", "Xid faults", "Memory errors", "Remapped rows")
H100, LAPTOPS = "GPU-00000000-7a5b-4c3d-9e1f-0123456789ab", "GPU-5f1e2d3c-4b5a-6978"
# By the name of a series the labels and the value that each board has.
SERIES = {
    H100: {
        "hw_gpu_memory_limit_bytes": ("", 8e10),
        "hw_temperature_celsius": ('hw_sensor_location="core"', 40.0),
        "otel_ddp_gpu_throttle_active": ('reason="hw_thermal"', 0.0),
        "hw_errors_total": ('error_type="uncorrected"', 0.0),
        "otel_ddp_gpu_remapped_rows_total": ('cause="correctable"', 0.0),
    },
    LAPTOPS: {
        "hw_gpu_memory_limit_bytes": ("", 8e9),
        "hw_temperature_celsius": ('hw_sensor_location="core"', 40.0),
    },
}
FAULTY = {**SERIES[H100], "otel_ddp_gpu_xid_errors_total": ('code="79"', 1.0)}


@pytest.mark.parametrize(
    ("series", "shown"),
    [
        ({H100: SERIES[H100]}, (1, 0, 0, 0, 0)),
        ({H100: FAULTY}, (1, 0, 1, 0, 0)),
        ({LAPTOPS: SERIES[LAPTOPS]}, (1, None, 0, None, None)),
        (SERIES, (2, 0, 0, 0, 0)),
    ],
    ids=["H100", "H100 with a fault", "of a laptop", "both"],
)
def test_a_number_is_shown_where_a_board_tells_it(
    series: dict[str, dict[str, tuple[str, float]]], shown: tuple[float | None, ...], tmp_path: Path
) -> None:
    asked = {each.panel: each.expr for each in BOARD.questions if each.panel in PANELS}
    given = [
        {"series": f'{name}{{node="n0",hw_id="{board}",gpu="0",{labels}}}', "values": f"{value}x20"}
        for board, numbers in series.items()
        for name, (labels, value) in numbers.items()
    ]
    expected = [
        {
            "expr": re.sub(r"\$\w+", ".*", asked[panel]),
            "eval_time": "15m",
            "exp_samples": [] if value is None else [{"labels": "{}", "value": value}],
        }
        for panel, value in zip(PANELS, shown, strict=True)
    ]
    path = tmp_path / "case.yml"
    test = {"interval": "1m", "input_series": given, "promql_expr_test": expected}
    path.write_text(yaml.safe_dump({"tests": [test]}))

    command = [str(binaries().promtool), "test", "rules", str(path)]
    told = subprocess.run(command, capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stdout + told.stderr
