"""Two runs that only a Prometheus knows are compared: a real one, with the series of an agent."""

from __future__ import annotations

import random
import subprocess
import time
from collections.abc import Iterator

import pytest

from otel_ddp import catalog
from otel_ddp.cli import main
from stack.servers import Binaries, Prometheus

_EVERY_S = 10
_EXPORTS = 90
_PHASES_S = {"data": 0.001, "forward": 0.006, "backward": 0.009, "comm_wait": 0.002}


def exported(run: str, start_s: int, slower: float) -> dict[str, list[str]]:
    """The lines of each metric as two agents export them: pushed, and scraped as well."""
    chance = random.Random(run)
    lines: dict[str, list[str]] = {}

    def sample(metric: catalog.Metric, at_s: int, value: float, **labels: str) -> None:
        own = {"group": "g", "run": run, "job_type": "train", "node": "n", **labels}
        for job in ("", "scraped"):
            text = ",".join(f'{key}="{word}"' for key, word in {**own, "job": job}.items() if word)
            lines.setdefault(metric.prometheus, []).append(
                f"{metric.prometheus}{{{text}}} {value!r} {at_s}"
            )

    for rank in ("0", "1"):
        steps, spent_s = 0, dict.fromkeys(_PHASES_S, 0.0)
        for export in range(_EXPORTS):
            at_s = start_s + export * _EVERY_S
            made = 500 + chance.randrange(20) if export else 0
            steps += made
            for phase, each_s in _PHASES_S.items():
                factor = slower if phase == "forward" else 1.0
                spent_s[phase] += made * each_s * factor * chance.uniform(0.97, 1.03)
                more = {"sync": "gradients"} if phase == "comm_wait" else {}
                sample(
                    catalog.TRAINING_PHASE_TIME,
                    *(at_s, spent_s[phase]),
                    **{"rank": rank, "phase": phase, "clock": "host", **more},
                )
            sample(catalog.TRAINING_STEPS, at_s, float(steps), rank=rank)
            sample(catalog.TRAINING_SAMPLES, at_s, 32.0 * steps, rank=rank)
            if rank == "0":
                logged = {"rank": rank, "name": "loss", "split": "train"}
                sample(catalog.TRAINING_SCALAR, at_s, 1.0 / (export + 1), **logged)
                sample(catalog.TRAINING_SCALAR_STEP, at_s, float(steps), **logged)
                sample(catalog.TRAINING_RUN_START_TIMESTAMP, at_s, float(start_s), rank=rank)
                sample(catalog.TRAINING_RUN_INFO, at_s, 1.0, rank=rank, world_size="2")
    return lines


@pytest.fixture(scope="module")
def url(binaries: Binaries, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("kept")
    now_s = int(time.time())
    # Over for hours, as a run that is compared with.
    runs = [("a", 8, 1.0), ("same", 6, 1.0), ("slow", 4, 1.05)]
    lines: dict[str, list[str]] = {}
    for run, hours, slower in runs:
        for name, more in exported(run, now_s - hours * 3600, slower).items():
            lines.setdefault(name, []).extend(more)
    text = "".join(f"# TYPE {name} unknown\n" + "\n".join(lines[name]) + "\n" for name in lines)
    (folder / "exported.txt").write_text(f"{text}# EOF\n")
    command = ["tsdb", "create-blocks-from", "openmetrics", "exported.txt", "data"]
    subprocess.run([binaries.promtool, *command], cwd=folder, check=True, capture_output=True)
    with Prometheus(binaries, folder) as prometheus:
        yield prometheus.url


def compare(url: str, one: str, other: str, *words: str) -> int:
    return main(["compare", f"prometheus:{url}#{one}", f"prometheus:{url}#{other}", *words])


def test_a_slower_forward_is_found(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare(url, "a", "g/slow", "--fail-if", "forward:+3%,step_time:+5%") == 1

    said = capsys.readouterr().out
    assert said.startswith("A  g/a\nB  g/slow\n")
    assert "EXCEEDED: forward changed by +5." in said
    assert "kept: step_time changed by +1." in said
    assert "Result: worse: forward +5." in said
    assert "loss (train)" in said


def test_equal_runs_do_not_differ(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare(url, "a", "same", "--fail-if", "step_time:+1%") == 0

    assert "Result: no significant difference" in capsys.readouterr().out


def test_what_it_does_not_know_is_said(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare(url, "a", 'nothing"}') == 2
    assert "has no run 'nothing\"}'" in capsys.readouterr().err

    assert main(["compare", "prometheus:http://127.0.0.1:1#a", f"prometheus:{url}#a"]) == 2
    assert "http://127.0.0.1:1: no answer" in capsys.readouterr().err

    assert main(["compare", f"prometheus:{url}", f"prometheus:{url}#a"]) == 2
    assert "must be prometheus:http://HOST:9090#RUN" in capsys.readouterr().err
