"""The record of a run's lead: what journals and stores hold of it, and whether one is sought."""

from __future__ import annotations

import json
from typing import Any

import pytest

from otel_ddp.identity import lead
from otel_ddp.run.opening import LeadSearch
from otel_ddp.settings import Settings

SECRET = "0123456789abcdef" * 4
RECORD = {"secret": SECRET, "hosts": ["node-0", "10.0.0.5", "fd00::2%eth0"], "ports": [23456, 1]}


def test_a_lead_comes_back_from_its_text() -> None:
    found = lead.parse(RECORD)

    assert found == (SECRET, ("node-0", "10.0.0.5", "fd00::2%eth0"), (23456, 1))
    assert lead.parse_text(found.as_text()) == found
    assert found.as_json() == RECORD


def test_no_two_leads_have_the_same_secret_and_their_ports_are_below_those_of_the_system() -> None:
    one, other = lead.propose(["node-0"]), lead.propose()

    assert one.secret != other.secret
    assert (one.hosts, other.hosts) == (("node-0",), ())
    assert lead.parse_text(one.as_text()) == one
    assert all(20000 <= port < 30000 for port in (*one.ports, *other.ports))


def test_a_lead_does_not_show_its_secret() -> None:
    found = lead.parse(RECORD)

    assert SECRET not in f"{found} {found!r} {[found]}"


def test_a_lead_has_few_hosts_and_only_what_can_be_one() -> None:
    hosts = ["", "a b", "x" * 300, "node-0", "node-0", *map(str, range(20))]

    assert lead.propose(hosts).hosts == ("node-0", *map(str, range(7)))


@pytest.mark.parametrize(
    "content",
    [
        None,
        RECORD | {"secret": None},
        RECORD | {"secret": SECRET[1:]},
        RECORD | {"hosts": "node-0"},
        RECORD | {"hosts": ["no de"]},
        RECORD | {"hosts": ["node"] * 9},
        RECORD | {"ports": [65536]},
        RECORD | {"ports": [23456.0]},
    ],
)
def test_what_is_no_lead_is_none(content: Any) -> None:
    assert lead.parse(content) is None
    assert lead.parse_text(json.dumps(content)) is None


@pytest.mark.parametrize("text", ["", "{", "[" * 4000, "\ufffd", json.dumps(RECORD) + " " * 4096])
def test_a_text_that_another_program_has_written_is_no_lead(text: str) -> None:
    assert lead.parse_text(text) is None


def test_a_lead_that_is_off_is_not_sought() -> None:
    assert not LeadSearch(Settings(lead="off")).is_sought
