"""Whether the lead of a run is sought in the store of its process group."""

from __future__ import annotations

import pytest

from otel_ddp.run.opening import LeadSearch
from otel_ddp.settings import Settings


def test_a_lead_that_is_off_is_not_sought() -> None:
    assert not LeadSearch(Settings(lead="off")).is_sought


def test_replica_groups_of_torchft_seek_no_lead_in_stores_that_do_not_know_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert LeadSearch(Settings()).is_sought
    monkeypatch.setenv("REPLICA_GROUP_ID", "0")
    monkeypatch.setenv("NUM_REPLICA_GROUPS", "2")
    monkeypatch.setenv("TORCHFT_LIGHTHOUSE", "http://localhost:29510")

    assert not LeadSearch(Settings()).is_sought
