"""Where a browser finds the board of a run."""

from __future__ import annotations

from urllib.parse import parse_qs, urlsplit

from otel_ddp.identity import addresses


def test_the_address_has_the_run_and_begins_before_what_it_shows() -> None:
    labels = {"group": "ours & theirs", "run": "lr/0.3", "rank": "3"}

    found = urlsplit(addresses.board("https://g.example", "Ranks", labels, 2_000 * 10**9))

    assert (found.netloc, found.path) == ("g.example", "/d/otel-ddp-ranks")
    assert parse_qs(found.query) == {
        "var-group": ["ours & theirs"],
        "var-run": ["lr/0.3"],
        "from": ["1400000"],
        "to": ["now"],
    }


def test_a_grafana_may_lie_below_a_path_and_name_an_organisation() -> None:
    found = addresses.board("https://g.example/grafana/?orgId=2", "Run", {"group": "", "run": "r"})

    assert found == "https://g.example/grafana/d/otel-ddp-run?orgId=2&var-group=&var-run=r"


def test_without_a_grafana_there_is_no_address() -> None:
    assert addresses.board("", "Run", {"run": "r"}) == ""
