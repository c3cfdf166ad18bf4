"""Whether the lead of a run is sought in the store of its process group."""

from __future__ import annotations

import pytest

from otel_ddp.run.lead_search import is_sought
from otel_ddp.settings import Settings


def test_a_lead_that_is_off_is_not_sought() -> None:
    assert not is_sought(Settings(lead="off"))


def test_replica_groups_of_torchft_seek_no_lead_in_stores_that_do_not_know_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert is_sought(Settings())
    monkeypatch.setenv("REPLICA_GROUP_ID", "0")
    monkeypatch.setenv("NUM_REPLICA_GROUPS", "2")
    monkeypatch.setenv("TORCHFT_LIGHTHOUSE", "http://localhost:29510")

    assert not is_sought(Settings())
