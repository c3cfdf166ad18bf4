"""What the time of a run has cost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from histories import write_history
from otel_ddp.cli import main
from otel_ddp.history.directory import find_run
from otel_ddp.history.goodput import costs_of, goodput_of


def test_the_time_of_all_nodes_has_one_price(tmp_path: Path) -> None:
    for node, hours in (("n0", 3), ("n1", 1)):
        spent = {"seconds": {"productive": 3600.0 * hours, "hang": 360.0}}
        first = 0 if node == "n0" else 1
        more = {"began_ns": 10**18, "about": {"time": spent}}
        write_history(tmp_path, "r", node=node, ranks=1, first_rank=first, steps=9, **more)

    with find_run("r", tmp_path) as run:
        found = goodput_of(run)
    assert found is not None
    costs = costs_of(found, (10.0, "$"))

    assert costs is not None
    assert (costs.currency, costs.per_hour, costs.total) == ("$", 10.0, pytest.approx(42.0))
    assert costs.of == pytest.approx({"productive": 40.0, "hang": 2.0})
    assert costs_of(found, None) is None


def test_time_that_nobody_is_known_to_have_paid_for_has_no_price(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    weekend = 64 * 3600.0
    spent = {"productive": 7200.0, "between_attempts": 3600.0, "between_launches": weekend}
    write_history(tmp_path, "r", ranks=1, steps=9, about={"time": {"seconds": spent}})

    monkeypatch.setenv("OTEL_DDP_HISTORY_DIR", str(tmp_path))
    monkeypatch.setenv("OTEL_DDP_GPU_HOUR_PRICE", "20 EUR")
    assert main(["goodput"]) == 0
    title, *_, gap = capsys.readouterr().out.splitlines()
    assert title == "sweep/r: 3.0% of 67 hours of all its ranks together moved it on, 60.00 EUR"
    assert gap.split()[:4] == ["95.5%", "64.0", "h", "-"]


def test_amounts_are_added_before_they_are_rounded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A third of a cent each.
    spent = dict.fromkeys(("productive", "start", "data", "checkpoint", "hang", "end"), 12.0)
    write_history(tmp_path, "r", ranks=1, steps=9, about={"time": {"seconds": spent}})
    monkeypatch.setenv("OTEL_DDP_HISTORY_DIR", str(tmp_path))
    monkeypatch.setenv("OTEL_DDP_GPU_HOUR_PRICE", "1 EUR")

    codes = [main(["goodput", *words]) for words in (["--json"], [])]
    document, words = capsys.readouterr().out.split("\n}\n")

    assert codes == [0, 0]
    costs = json.loads(f"{document}}}")["price"]["costs"]
    assert sum(costs.values()) == pytest.approx(0.02, abs=1e-5)
    assert "moved it on, 0.02 EUR" in words
