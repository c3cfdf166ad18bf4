"""Who has not the secret of a run neither reads nor writes, and does not make the lead grow."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import pytest
from cryptography import x509

from agent.link import linked
from agent.link.linked import SECRET, Links, until
from otel_ddp import __version__
from otel_ddp.agent.link import credentials
from otel_ddp.agent.link.link_pb2 import Answer, Report
from otel_ddp.agent.link.server import LinkServer

TESTS = Path(__file__).parents[2]
OTHER = b"another run's secret, 32 bytes.."


@pytest.fixture
def lead(links: Links) -> LinkServer:
    lead = links.lead()
    until(lambda: lead.state.startswith("listens"))
    return lead


def with_the_secret() -> ssl.SSLContext:
    return credentials.context(SECRET, leads=False)


def of_another_run() -> ssl.SSLContext:
    return credentials.context(OTHER, leads=False)


def without_a_certificate() -> ssl.SSLContext:
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    made.load_verify_locations(cadata=credentials.certificate(SECRET)[1].decode())
    return made


def with_a_certificate_of_another_run() -> ssl.SSLContext:
    """Trusts the lead, as one that has seen its certificate could."""
    made = of_another_run()
    made.load_verify_locations(cadata=credentials.certificate(SECRET)[1].decode())
    return made


def answers(port: int, given: ssl.SSLContext | None, *reports: bytes) -> list[Any]:
    """What the lead answers to these messages."""
    found: list[Any] = []
    with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
        link = socket.create_connection(("127.0.0.1", port), linked.WITHIN_S)
        stack.callback(link.close)
        if given is not None:
            link = stack.enter_context(given.wrap_socket(link, server_hostname=credentials.NAME))
        link.sendall(b"".join(len(each).to_bytes(4, "big") + each for each in reports))
        read = stack.enter_context(link.makefile("rb")).read
        sizes = (int.from_bytes(read(4), "big") for _ in reports)
        found.extend(Answer.FromString(read(size)) for size in sizes if size)
    return found


GREETING = Report(node="node-1", agent_began_ns=1, version=__version__)


@pytest.mark.parametrize(
    "made", [of_another_run, without_a_certificate, with_a_certificate_of_another_run, lambda: None]
)
def test_without_the_secret_nothing_is_answered_or_taken(
    links: Links, lead: LinkServer, made: Callable[[], ssl.SSLContext | None]
) -> None:
    report = Report(readings=b"a").SerializeToString()

    assert answers(links.port, made(), GREETING.SerializeToString(), report) == []
    assert not list(lead.take())
    # With the secret a greeting is answered.
    assert len(answers(links.port, with_the_secret(), GREETING.SerializeToString())) == 1


def test_connections_that_say_nothing_are_closed_within_seconds(
    links: Links, lead: LinkServer
) -> None:
    silent = [socket.create_connection(("127.0.0.1", links.port)) for _ in range(10)]
    for each in silent:
        each.settimeout(linked.WITHIN_S)

    assert [each.recv(1) for each in silent] == [b""] * 10
    for each in silent:
        each.close()


def test_a_wrong_clock_of_a_node_does_not_matter() -> None:
    _, own = credentials.certificate(SECRET)

    made = x509.load_pem_x509_certificate(own)
    assert (made.not_valid_before_utc.year, made.not_valid_after_utc.year) == (1970, 9999)


LEAD = """
import sys
from agent.link import linked
from otel_ddp.files import raise_file_limit
raise_file_limit()
with linked.links() as links:
    lead = links.lead()
    linked.until(lambda: lead.state.startswith("listens"))
    print(links.port, flush=True)
    sys.stdin.read()
"""


@contextlib.contextmanager
def other_process(stderr: IO[str]) -> Iterator[tuple[int, Callable[[], int]]]:
    """A lead in a process of its own: its port, and how many files it has open."""
    process = subprocess.Popen(
        [sys.executable, "-c", LEAD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        env={**os.environ, "PYTHONPATH": str(TESTS)},
    )
    with process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        yield port, lambda: len(os.listdir(f"/proc/{process.pid}/fd"))
        process.communicate()


def test_a_lead_holds_few_strangers_and_a_node_gets_past_all_of_them(
    links: Links, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    with (
        log.open("w") as stderr,
        other_process(stderr) as (port, files),
        contextlib.ExitStack() as strangers,
    ):
        before = files()
        # A handshake that fails leaves no descriptor.
        for made in (of_another_run, without_a_certificate, lambda: None):
            assert answers(port, made(), GREETING.SerializeToString()) == []
        until(lambda: files() <= before)
        for _ in range(600):
            strangers.enter_context(socket.create_connection(("127.0.0.1", port)))
        follower = links.follower(ports=[port])
        until(lambda: follower.is_connected)
        most = files()

    # Those of the node, and some that are being closed.
    assert most - before <= 128 + 8
    # Nor do links that are there when it ends leave a line.
    assert log.read_text() == ""
