"""A lead that variables name: for launches without a store, and evaluators beside a run."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

import otel_ddp
from conftest import Here
from otel_ddp import ConfigError
from otel_ddp.identity import lead
from otel_ddp.run.lead_search import LeadSearch
from otel_ddp.settings import Settings

TOKEN = "canary7x-0123456789"


def token_file(folder: Path, content: str | bytes = f"{TOKEN}\n", mode: int = 0o600) -> str:
    path = folder / "token"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    path.chmod(mode)
    return str(path)


def named(place: Here, address: str, path: str) -> lead.Lead | None:
    """The lead in the journal of a run with these variables."""
    os.environ.update(OTEL_DDP_LEAD=address, OTEL_DDP_LEAD_TOKEN_FILE=path)
    with otel_ddp.init():
        pass
    return lead.parse(place.read()[-1].facts.get("lead"))


@pytest.mark.parametrize(
    ("address", "hosts", "port"),
    [
        ("node-0:23456", ("node-0",), 23456),
        ("10.0.0.5:1", ("10.0.0.5",), 1),
        ("[fd00::5]:65535", ("fd00::5",), 65535),
    ],
)
def test_a_lead_that_variables_name_is_noted_and_has_the_tokens_secret(
    address: str, hosts: tuple[str, ...], port: int, place: Here, tmp_path: Path
) -> None:
    found = named(place, address, token_file(tmp_path))

    assert found == lead.of_token(TOKEN, hosts[0], port)
    assert (found.hosts, found.ports) == (hosts, (port,))


def test_the_token_alone_makes_the_secret_and_another_token_makes_another() -> None:
    one = lead.of_token(TOKEN, "node-0", 1)

    assert lead.parse(one.as_json()) == one
    assert TOKEN not in one.secret
    assert one.secret == lead.of_token(TOKEN, "10.0.0.5", 2).secret
    assert one.secret != lead.of_token(f"{TOKEN}0", "node-0", 1).secret


def test_a_token_may_be_a_link_that_the_group_can_read_as_kubernetes_mounts_it(
    place: Here, tmp_path: Path
) -> None:
    link = tmp_path / "mounted"
    link.symlink_to(token_file(tmp_path, mode=0o440))

    assert named(place, "node-0:1", str(link)) is not None


def test_a_lead_that_is_off_is_not_looked_for(place: Here, tmp_path: Path) -> None:
    assert named(place, "OFF", token_file(tmp_path)) is None


@pytest.mark.parametrize(
    "address", ["node-0", "node-0:", ":1", "a b:1", "n:0", "n:65536", "fd::5:1"]
)
def test_what_is_no_address_of_a_lead_stops_init_with_help(address: str, place: Here) -> None:
    os.environ["OTEL_DDP_LEAD"] = address

    with pytest.raises(ConfigError, match="must be host:port, as in node-0:23456") as raised:
        otel_ddp.init()

    assert f"got {address!r}" in str(raised.value)
    assert place.journals() == []


def missing(folder: Path) -> str:
    return str(folder / "missing")


WRONG: dict[str, Callable[[Path], str]] = {
    "it cannot be read: No such file or directory": missing,
    "it is no file": str,
    "every user can use it (mode 0644), make it 0600": lambda at: token_file(at, mode=0o644),
    "its token has fewer than 16 characters": lambda at: token_file(at, TOKEN[:15]),
    "it is no text": lambda at: token_file(at, b"\xff" * 32),
}


@pytest.mark.parametrize("problem", WRONG)
def test_a_token_that_cannot_be_used_stops_init_with_help(
    problem: str, place: Here, tmp_path: Path
) -> None:
    path = WRONG[problem](tmp_path)

    with pytest.raises(ConfigError) as raised:
        named(place, "node-0:23456", path)

    said = str(raised.value)
    assert said.startswith(f"OTEL_DDP_LEAD_TOKEN_FILE={path}: {problem}")
    assert "Correct it, or unset" in said
    assert TOKEN[:15] not in said
    assert place.journals() == []


@pytest.mark.parametrize(
    ("variable", "value"),
    [("OTEL_DDP_LEAD", "node-0:23456"), ("OTEL_DDP_LEAD_TOKEN_FILE", "/token")],
)
def test_one_of_both_variables_alone_stops_init_with_help(
    variable: str, value: str, place: Here
) -> None:
    os.environ[variable] = value

    with pytest.raises(ConfigError, match="need each other: set both, or unset both"):
        otel_ddp.init()

    assert place.journals() == []


def test_replica_groups_of_torchft_seek_no_lead_in_stores_that_do_not_know_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert LeadSearch.by(Settings()).is_sought
    monkeypatch.setenv("REPLICA_GROUP_ID", "0")
    monkeypatch.setenv("NUM_REPLICA_GROUPS", "2")
    monkeypatch.setenv("TORCHFT_LIGHTHOUSE", "http://localhost:29510")

    assert not LeadSearch.by(Settings()).is_sought
