"""A replay sends spools in order, once to each destination, and remembers it after a kill."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import pytest

from otel_ddp.agent.export.delivery import Delivery
from otel_ddp.agent.export.otlp import Outcome, Request, Signal
from otel_ddp.agent.export.otlp.documents import Documents
from otel_ddp.agent.export.report import DeliveryStatus
from otel_ddp.agent.export.spool import BLOCK_BYTES, Spool
from otel_ddp.cli import main
from otel_ddp.cli.replay import (
    KeptRequests,
    ReplayStopped,
    SentLog,
    find_spools,
    merge_by_time,
    send,
)
from otel_ddp.journal.layout import EVENT
from otel_ddp.journal.reader import Document
from otlp_receiver import Receiver, contents_in

PLENTY = 1024 * BLOCK_BYTES
TAKEN = Outcome("delivered", "")
AWAY = Outcome("retry", "connection refused")

HOLD = """
import sys; from pathlib import Path; from otel_ddp.cli.replay import SentLog
sent = SentLog(Path(sys.argv[1]), "metrics at home")
print("there", flush=True)
sys.stdin.read()
"""


class FakeTransport:
    """Answers as configured, and then accepts everything."""

    destination = "home"

    def __init__(self, *answers: Outcome) -> None:
        self.answers = list(answers)
        self.bodies: list[bytes] = []

    def address(self, signal: Signal) -> str:
        return f"{signal} at home"

    def send(self, signal: Signal, body: bytes) -> Outcome:
        outcome = self.answers.pop(0) if self.answers else TAKEN
        if outcome.kind == "delivered":
            self.bodies.append(body)
        return outcome


def spool(directory: Path, *requests: tuple[Signal, str, int]) -> Path:
    """One as an agent leaves it; each request by signal, content and the time of its oldest."""
    opened = Spool(directory, PLENTY)
    for signal, name, oldest_s in requests:
        assert opened.append(Request(signal, name.encode(), 1, oldest_s=oldest_s))
    return directory


def three(directory: Path) -> Path:
    return spool(directory, ("metrics", "a", 1), ("traces", "b", 2), ("metrics", "c", 3))


class Sent(NamedTuple):
    """One replay, over."""

    status: DeliveryStatus
    left: Mapping[Signal, int]
    pauses: Sequence[float]


def sent(transport: FakeTransport, directory: Path) -> Sent:
    pauses: list[float] = []
    with closing(KeptRequests(find_spools(directory), transport.address)) as kept:
        delivery = Delivery(
            *(transport, kept, lambda: sum(pauses)), jitter=lambda: 0.5, patience_s=0.0
        )
        for _ in send(kept, delivery, pauses.append):
            pass
        return Sent(delivery.status(), kept.left, pauses)


def test_spools_of_several_nodes_are_sent_by_time_and_each_in_its_own_order(
    tmp_path: Path,
) -> None:
    # What was logged long before it was read is sent where it was put, not sooner.
    spool(tmp_path / "offline-a", ("metrics", "a1", 10), ("metrics", "a2", 30), ("logs", "a3", 5))
    spool(tmp_path / "offline-b", ("metrics", "b1", 20), ("metrics", "b2", 40))
    spool(tmp_path / "spool-c", ("metrics", "of an agent that sends", 1))

    bodies = [entry.read() for entry in merge_by_time(find_spools(tmp_path))]

    assert bodies == [b"a1", b"b1", b"a2", b"a3", b"b2"]


def test_a_collector_that_goes_away_is_tried_for_a_while_and_then_no_more(tmp_path: Path) -> None:
    directory = three(tmp_path)
    transport = FakeTransport(TAKEN, TAKEN, *[AWAY] * 7)

    status, left, pauses = sent(transport, directory)

    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0]
    assert (status.delivered, left) == (2, {"traces": 1})
    assert sent(transport, directory).left == {}
    assert transport.bodies == [b"a", b"c", b"b"]


def test_a_collector_that_never_answered_is_not_tried_again(tmp_path: Path) -> None:
    status, left, pauses = sent(FakeTransport(*[AWAY] * 2), three(tmp_path))

    assert (pauses, status.delivered) == ([], 0)
    assert left == {"metrics": 2, "traces": 1}


def test_a_request_over_which_the_receiver_fails_does_not_keep_the_others_back(
    tmp_path: Path,
) -> None:
    transport = FakeTransport(TAKEN, Outcome("retry", "500 from http://c", doubtful=True))
    directory = three(tmp_path)

    status, left, pauses = sent(transport, directory)

    assert (pauses, left, status.refused_points) == ([], {}, {"500 from http://c": 1})
    assert transport.bodies == [b"a", b"b"]
    # What was refused is tried again.
    sent(transport, directory)
    assert transport.bodies == [b"a", b"b", b"c"]


def test_a_request_that_is_too_large_for_the_destination_is_sent_in_parts(tmp_path: Path) -> None:
    events = [Document(EVENT, {"name": "e", "time": at}, 0) for at in range(1, 9)]
    (request,) = Documents({}).render([((), "", events)])
    opened = Spool(tmp_path, PLENTY)
    assert opened.append(request)
    too_large = Outcome("refused", "413 from http://c", too_large=True)
    transport = FakeTransport(too_large, TAKEN, too_large)

    status = sent(transport, tmp_path).status

    found = [each.time_unix_nano for each in contents_in("logs", *transport.bodies)]
    assert found == [1, 2, 3, 4, 5, 6, 7, 8]
    assert (status.delivered_points, status.refused) == (8, 0)
    assert sent(FakeTransport(), tmp_path).status.delivered == 0


def test_a_damaged_request_is_counted_and_the_others_are_sent(tmp_path: Path) -> None:
    directory = three(tmp_path)
    next(directory.glob("*2-traces*")).write_bytes(b"torn")
    transport = FakeTransport()

    status = sent(transport, directory).status

    assert status.dropped_points == {"corrupt": 1}
    assert transport.bodies == [b"a", b"c"]


def test_a_line_that_a_kill_tore_does_not_count_as_sent(tmp_path: Path) -> None:
    directory, transport = three(tmp_path), FakeTransport()
    sent(transport, directory)
    with closing(SentLog(directory, "metrics at home")) as log:
        memory = log.path
    # The end of its last line is missing, and it is that of "c".
    memory.write_bytes(memory.read_bytes()[:-1])

    sent(transport, directory)
    again = list(transport.bodies)
    sent(transport, directory)

    assert transport.bodies == again == [b"a", b"c", b"b", b"c"]


def test_what_fills_an_emptied_spool_has_not_been_sent(tmp_path: Path) -> None:
    directory, transport = three(tmp_path), FakeTransport()
    sent(transport, directory)
    for path in directory.glob("*.z"):
        path.unlink()

    # Its numbers begin at 1 again, as those of the requests that were sent.
    spool(directory, ("metrics", "d", 4))
    sent(transport, directory)

    assert transport.bodies[3:] == [b"d"]


def test_two_replays_of_one_spool_do_not_send_at_once(tmp_path: Path) -> None:
    directory = three(tmp_path)
    other = [sys.executable, "-c", HOLD, str(directory)]
    with subprocess.Popen(other, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()

        with pytest.raises(ReplayStopped, match="Another replay of these data"):
            sent(FakeTransport(), directory)

        process.stdin.close()
    assert sent(FakeTransport(), directory).status.delivered == 3


def test_nothing_is_sent_where_it_cannot_be_remembered(tmp_path: Path) -> None:
    directory, transport = three(tmp_path), FakeTransport()
    with closing(SentLog(directory, "traces at home")) as log:
        memory = log.path
    memory.unlink()
    memory.mkdir()

    with pytest.raises(ReplayStopped, match=f"{memory} cannot be written: Is a directory"):
        sent(transport, directory)

    assert transport.bodies == []


@pytest.mark.parametrize(
    ("hours", "warning"),
    [
        (0.5, ""),
        (3, "The oldest value is 3 h old."),
        (26, "out_of_order_time_window (2h in deploy/prometheus/prometheus.yml)"),
        (26, "Set it to 28h before."),
        (100, "The oldest value is 4 days old."),
    ],
)
def test_a_warning_names_the_age_of_values_that_prometheus_may_refuse(
    hours: float, warning: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    then_s = int(time.time() - hours * 3600)
    # Of metrics: what keeps spans takes them of any age.
    spool(tmp_path, ("traces", "", then_s - 999_999), ("metrics", "", then_s), ("logs", "", then_s))
    with Receiver() as receiver:
        os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = receiver.start_http()

        assert main(["replay", str(tmp_path)]) == 0

    printed = capsys.readouterr().out
    assert warning in printed
    assert ("Prometheus" in printed) == bool(warning)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("", "{} holds no data of an offline run."),
        ("1-a.journal", "`otel-ddp agent --dir {}` exports them."),
    ],
)
def test_a_directory_without_a_spool_is_refused_with_a_reason(
    name: str, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if name:
        (tmp_path / name).touch()

    assert main(["replay", str(tmp_path)]) == 2
    assert sentence.format(tmp_path) in capsys.readouterr().err
    assert main(["replay", f"{tmp_path}/gone"]) == 2
    assert f"{tmp_path}/gone cannot be read: No such file" in capsys.readouterr().err


def test_without_a_collector_the_error_tells_how_to_name_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    three(tmp_path)
    # Nothing that happens to listen on this machine's port is asked.
    os.environ["OTEL_EXPORTER_OTLP_PROTOCOL"] = "grpc"

    assert main(["replay", str(tmp_path)]) == 2

    assert "set OTEL_EXPORTER_OTLP_ENDPOINT" in capsys.readouterr().err
