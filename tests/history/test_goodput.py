"""What the time of a run has cost: by the price of each node's GPUs, and never by a guess."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from histories import value_sums, write_history
from otel_ddp.cli import main
from otel_ddp.history.directory import file_name, find_run
from otel_ddp.history.goodput import Costs, costs_of
from otel_ddp.history.run_file import RunFile
from otel_ddp.history.tables import SeriesKey

PRICES = {"H100": (2.0, "EUR"), "MI300X": (1.0, "EUR")}


def two_nodes(folder: Path, other_gpu: str) -> None:
    for node, gpu, hours in (("n0", "H100", 3), ("n1", other_gpu, 1)):
        spent = {"seconds": {"productive": 3600.0 * hours, "hang": 360.0}}
        first = 0 if node == "n0" else 1
        more = {"began_ns": 10**18, "about": {"time": spent}, "gpu": gpu}
        write_history(folder, "r", node=node, ranks=1, first_rank=first, steps=9, **more)


def costs(folder: Path, prices: dict[str, tuple[float, str]]) -> Costs | None:
    with find_run("r", folder) as run:
        return costs_of(run, prices)


def test_each_node_costs_what_its_gpus_cost(tmp_path: Path) -> None:
    two_nodes(tmp_path, "MI300X")

    found = costs(tmp_path, PRICES)

    assert found is not None
    assert found.currency == "EUR"
    assert found.of == pytest.approx({"productive": 7.0, "hang": 0.3})
    assert found.total == pytest.approx(7.3)
    assert found.per_hour == pytest.approx(7.3 / 4.2)


def test_time_that_nobody_is_known_to_have_paid_for_has_no_price(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    weekend = 64 * 3600.0
    spent = {"productive": 7200.0, "between_attempts": 3600.0, "between_launches": weekend}
    write_history(tmp_path, "r", ranks=1, steps=9, about={"time": {"seconds": spent}})

    found = costs(tmp_path, {"": (20.0, "EUR")})

    assert found == Costs("EUR", 20.0, {"productive": 40.0, "between_attempts": 20.0})
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


def test_one_price_is_that_of_any_gpu(tmp_path: Path) -> None:
    two_nodes(tmp_path, "some other")

    found = costs(tmp_path, {"": (10.0, "$")})

    assert found is not None
    assert (found.currency, found.per_hour) == ("$", pytest.approx(10.0))
    assert found.of == pytest.approx({"productive": 40.0, "hang": 2.0})


@pytest.mark.parametrize(("gpu", "prices"), [("L4", PRICES), ("", PRICES), ("MI300X", {})])
def test_a_run_has_no_costs_where_a_gpu_of_it_has_no_price(
    tmp_path: Path, gpu: str, prices: dict[str, tuple[float, str]]
) -> None:
    two_nodes(tmp_path, gpu)

    assert costs(tmp_path, prices) is None


def test_a_node_with_two_kinds_of_gpus_has_no_price(tmp_path: Path) -> None:
    two_nodes(tmp_path, "MI300X")
    labels = (("hw.id", "GPU-9"), ("hw.model", "H100"))
    file = RunFile(tmp_path / file_name("sweep", "r", "n1"))
    key = SeriesKey("node", "hw.power", "1", labels)
    file.write(values={key: value_sums(file, key, [(1, 10**18, 300.0)])})
    file.close()

    assert costs(tmp_path, PRICES) is None


def test_the_command_takes_the_prices_of_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    two_nodes(tmp_path, "MI300X")
    monkeypatch.setenv("OTEL_DDP_HISTORY_DIR", str(tmp_path))
    file = tmp_path / "prices.json"
    file.write_text(json.dumps({"H100": "2.00 EUR", "MI300X": "1 EUR"}))
    monkeypatch.setenv("OTEL_DDP_GPU_HOUR_PRICE", str(file))

    codes = [main(["goodput", *words]) for words in (["--json"], [])]
    document, words = capsys.readouterr().out.split("\n}\n")
    file.unlink()
    codes.append(main(["goodput"]))

    assert codes == [0, 0, 2]
    price = json.loads(f"{document}}}")["price"]
    assert price == {
        "per_hour": 1.738095,
        "currency": "EUR",
        "costs": {"productive": 7.0, "hang": 0.3},
    }
    assert "hours of all its ranks together moved it on, 7.30 EUR" in words
    assert capsys.readouterr().err == (
        f"otel-ddp goodput: OTEL_DDP_GPU_HOUR_PRICE: {file} cannot be read: No such file or "
        "directory.\n"
    )
