"""Where boards of a vendor lack numbers: the board of GPUs has no 0, and no alert fires."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from tools.dashboards.queries import boards

from amd_boards import GIB, AmdBoards, mi300x
from otel_ddp.agent.node.gpu.amd import Amd
from otel_ddp.agent.node.gpu.polling import Gpus, GpuSample
from otel_ddp.vocabulary.catalog import prometheus_label
from stack.rule_files import rules
from stack.servers import DEPLOY, binaries

(BOARD,) = (each for each in boards() if each.title == "GPUs & nodes")
PANELS = ("GPUs", "Held back", "Xid faults", "Memory errors", "Remapped rows")
H100, MI300 = "GPU-00000000-7a5b-4c3d-9e1f-0123456789ab", "GPU-5f1e2d3c4b5a6978"
# By the name of a series the labels and the value that each board has.
SERIES = {
    H100: {
        "hw_gpu_memory_limit_bytes": ("", 8e10),
        "hw_temperature_celsius": ('hw_sensor_location="core"', 40.0),
        "otel_ddp_gpu_throttle_active": ('reason="hw_thermal"', 0.0),
        "hw_errors_total": ('error_type="uncorrected"', 0.0),
        "otel_ddp_gpu_remapped_rows_total": ('cause="correctable"', 0.0),
    },
    MI300: {
        "hw_gpu_memory_limit_bytes": ("", 2e11),
        "hw_temperature_celsius": ('hw_sensor_location="core"', 40.0),
        "hw_errors_total": ('error_type="uncorrected"', 2.0),
    },
}
FAULTY = {**SERIES[H100], "otel_ddp_gpu_xid_errors_total": ('code="79"', 1.0)}


@pytest.mark.parametrize(
    ("series", "shown"),
    [
        ({H100: SERIES[H100]}, (1, 0, 0, 0, 0)),
        ({H100: FAULTY}, (1, 0, 1, 0, 0)),
        ({MI300: SERIES[MI300]}, (1, None, None, 2, None)),
        (SERIES, (2, 0, 0, 2, 0)),
    ],
    ids=["NVIDIA", "NVIDIA with a fault", "AMD", "all"],
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
    check({"input_series": given, "promql_expr_test": expected}, tmp_path)


def check(test: dict[str, Any], folder: Path, **settings: Any) -> None:
    path = folder / "case.yml"
    path.write_text(yaml.safe_dump({**settings, "tests": [{"interval": "1m", **test}]}))
    command = [str(binaries().promtool), "test", "rules", str(path)]
    told = subprocess.run(command, capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stdout + told.stderr


# -- alerts, from what the drivers read of the stand-ins

RUNBOOKS = DEPLOY.parent / "docs" / "runbooks"
ALERTS = DEPLOY / "prometheus" / "alerts" / "gpu.yml"
RULES = [DEPLOY / "prometheus" / "rules" / f"{each}.yml" for each in ("state", "gpu")]
OF_RANK = 'group="g",run="r",job_type="train",node="n0",rank="{0}",local_rank="{0}"'
FIRING = 'count by (alertname, gpu, rank) (max_over_time(ALERTS{alertstate="firing"}[30m]))'


def amd(root: Path) -> tuple[GpuSample, GpuSample]:
    """Rank 0's board idles then, those of ranks 1 and 2 are full, and 2's has lost data."""
    shown, three = AmdBoards(root), [mi300x(index) for index in range(3)]
    gpus = Gpus([Amd(sys=shown.sys, dev=shown.dev)])
    shown.write(three)
    calm = gpus.read(0)
    three[0].files["gpu_busy_percent"] = "1"
    three[1].files["mem_info_vram_used"] = three[2].files["mem_info_vram_used"] = str(190 * GIB)
    three[2].files["ras/umc_err_count"] = "ue: 2\nce: 12\nde: 0"
    for each in three:
        each.files["hwmon/hwmon5/temp1_input"] = "110000"
    shown.write(three)
    return calm, gpus.read(600 * 10**9)


def series_of(sample: GpuSample) -> dict[str, float]:
    """As an agent exposes them, each board used by the rank of its number."""
    found = {}
    for device, measurements, _ in sample.devices:
        for metric, value, attributes, _ in measurements:
            words = [f'{prometheus_label(key)}="{word}"' for key, word in attributes]
            labels = ",".join([OF_RANK.format(device.index), *words])
            found[f"{metric.prometheus}{{{labels}}}"] = value
    return found


def test_an_alert_fires_where_boards_of_amd_report_what_it_needs_and_else_its_runbook_says_so(
    tmp_path: Path,
) -> None:
    calm, troubled = map(series_of, amd(tmp_path))
    firing = [
        '{alertname="GpuEccUncorrected",gpu="2"}',
        '{alertname="GpuIdle",gpu="0",rank="0"}',
        '{alertname="GpuMemoryNearLimit",rank="1"}',
        '{alertname="GpuMemoryNearLimit",rank="2"}',
    ]
    given = {
        name: f"{calm.get(name, '_')}x19 {troubled.get(name, '_')}x30" for name in calm | troubled
    }
    for rank in "012":
        given |= {
            f"training_state{{{OF_RANK.format(rank)}}}": "1x50",
            f"training_heartbeat_timestamp_seconds{{{OF_RANK.format(rank)}}}": "0+60x50",
            # The tensors of rank 1 need nearly all memory; rank 2's allocator empties its cache.
            f"training_device_memory_peak_bytes{{{OF_RANK.format(rank)}}}": (
                f"{60 * GIB}x19 {(190 if rank == '1' else 60) * GIB}x30"
            ),
            f"training_device_memory_alloc_retries_total{{{OF_RANK.format(rank)}}}": (
                f"0x19 {'0+1x30' if rank == '2' else '0x30'}"
            ),
        }
    case = {
        "input_series": [{"series": name, "values": each} for name, each in given.items()],
        "promql_expr_test": [
            {"expr": FIRING, "eval_time": "19m", "exp_samples": []},
            {
                "expr": FIRING,
                "eval_time": "45m",
                "exp_samples": [{"labels": each, "value": 1} for each in firing],
            },
        ],
    }
    check(case, tmp_path, rule_files=[*map(str, (*RULES, ALERTS))], evaluation_interval="30s")
    for rule in rules([ALERTS]):
        fires = rule["alert"] in str(firing)
        said = str(rule["annotations"])
        assert not (fires and re.search("NVIDIA|CUDA|Xid|NVLink", said)), said
        runbook = (RUNBOOKS / f"{rule['alert']}.md").read_text()
        never = str(re.findall("It never fires for [^:]*:", runbook))
        assert ("AMD's" in never) is not (fires or rule["alert"].startswith("Host")), never
