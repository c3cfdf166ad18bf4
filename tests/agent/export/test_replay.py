"""A replay sends spools in order, each request once, and remembers it wherever it ends."""

from __future__ import annotations

import os
import time
import tracemalloc
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from otel_ddp.agent.export.delivery import Outcome
from otel_ddp.agent.export.folder import BLOCK_BYTES, Queue, Request
from otel_ddp.agent.export.otlp.variables import SIGNALS
from otel_ddp.cli import main
from otel_ddp.cli.replay import Replay, delivery_of, find_spools, merge_by_time
from otlp_receiver import Receiver

PLENTY = 1024 * BLOCK_BYTES
TAKEN = Outcome("delivered", "")
AWAY = Outcome("retry", "connection refused")


class Home:
    """Answers as configured, and then accepts everything."""

    def __init__(self, *answers: Outcome) -> None:
        self.answers = list(answers)
        self.bodies: list[bytes] = []

    def send(self, lane: str, body: bytes) -> Outcome:
        outcome = self.answers.pop(0) if self.answers else TAKEN
        if outcome.kind == "delivered":
            self.bodies.append(body)
        return outcome


def spool(directory: Path, *requests: tuple[str, str, int]) -> Path:
    """One as an agent leaves it; each request by signal, content and the time of its oldest."""
    opened = Queue(SIGNALS, directory, PLENTY)
    for signal, name, oldest_s in requests:
        opened.add(Request(signal, name.encode(), 1, oldest_s=oldest_s))
        opened.write(signal)
    return directory


def three(directory: Path) -> Path:
    return spool(directory, ("metrics", "a", 1), ("traces", "b", 2), ("metrics", "c", 3))


class Sent(NamedTuple):
    """One replay, over."""

    delivered: int
    dropped: dict[str, int]
    left: int
    pauses: list[float]


def sent(home: Home, directory: Path, *, again: bool = False, attempts: int = 99) -> Sent:
    """A replay that is interrupted after so many attempts."""
    pauses: list[float] = []
    replay = Replay(find_spools(directory), again=again)
    delivery = delivery_of(replay, home.send, lambda: sum(pauses))
    for _, _ in zip(range(attempts), replay.send(delivery, pauses.append), strict=False):
        pass
    return Sent(delivery.attempts["delivered"], dict(replay.dropped), replay.left, pauses)


def test_spools_of_several_nodes_are_sent_by_time_and_each_in_its_own_order(tmp_path: Path) -> None:
    # What was logged long before it was read is sent where it was put, not sooner.
    spool(tmp_path / "offline-a", ("metrics", "a1", 10), ("metrics", "a2", 30), ("logs", "a3", 5))
    spool(tmp_path / "offline-b", ("metrics", "b1", 20), ("metrics", "b2", 40))
    spool(tmp_path / "spool-c", ("metrics", "of an agent that sends", 1))

    bodies = [entry.read() for entry in merge_by_time(find_spools(tmp_path))]

    assert bodies == [b"a1", b"b1", b"a2", b"a3", b"b2"]


def test_a_collector_that_goes_away_is_tried_for_a_while_and_then_no_more(tmp_path: Path) -> None:
    directory = three(tmp_path)
    home = Home(TAKEN, TAKEN, *[AWAY] * 7)

    over = sent(home, directory)

    assert over.pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0]
    assert (over.delivered, over.left) == (2, 1)
    assert sent(home, directory).left == 0
    assert home.bodies == [b"a", b"c", b"b"]


def test_an_interrupted_replay_goes_on_where_it_stopped(tmp_path: Path) -> None:
    directory, home = three(tmp_path), Home()

    sent(home, directory, attempts=1)
    sent(home, directory)
    sent(home, directory)

    assert home.bodies == [b"a", b"c", b"b"]
    sent(home, directory, again=True)
    assert home.bodies == [b"a", b"c", b"b"] * 2


def test_what_is_refused_or_damaged_keeps_the_others_not_back(tmp_path: Path) -> None:
    home = Home(TAKEN, Outcome("retry", "500 from http://c", doubtful=True))
    directory = spool(three(tmp_path), ("logs", "d", 4))
    next(directory.glob("*2-traces*")).write_bytes(b"torn")

    over = sent(home, directory)

    assert over == (2, {"refused": 1, "corrupt": 1}, 0, [])
    assert home.bodies == [b"a", b"d"]
    # What was refused is tried again.
    sent(home, directory)
    assert home.bodies == [b"a", b"d", b"c"]


def test_a_request_that_unpacks_to_more_than_any_of_ours_takes_little_memory(
    tmp_path: Path,
) -> None:
    (packed,) = spool(tmp_path, ("logs", "a", 1)).glob("*.z")
    packed.write_bytes(zlib.compress(bytes(128 << 20)))

    tracemalloc.start()
    over = sent(Home(), tmp_path)
    _, most_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert over.dropped == {"corrupt": 1}
    assert most_bytes < 64 << 20


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    """The collector that is named."""
    with Receiver() as receiver:
        os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = receiver.start_http()
        yield receiver


def test_what_did_not_arrive_is_said_and_fails_a_script(
    tmp_path: Path, receiver: Receiver, capsys: pytest.CaptureFixture[str]
) -> None:
    spool(tmp_path, ("metrics", "", 1), ("traces", "", 1), ("logs", "", 1))
    # The first signal: one that was never taken is not tried again.
    receiver.set_mode(404, "metrics")
    receiver.set_mode(400, "traces")

    assert main(["replay", str(tmp_path)]) == 1

    printed = capsys.readouterr().out
    assert f"sent 1 requests to {os.environ['OTEL_EXPORTER_OTLP_ENDPOINT']}\n" in printed
    assert "! 1 points did not arrive: refused\n" in printed
    assert "! 1 requests are left, and the next replay goes on there\n" in printed


@pytest.mark.usefixtures("receiver")
@pytest.mark.parametrize("hours", [0.5, 26])
def test_a_warning_names_the_age_of_values_that_prometheus_may_refuse(
    hours: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    then_s = int(time.time() - hours * 3600)
    # Of metrics: what keeps spans takes them of any age.
    spool(tmp_path, ("traces", "", then_s - 999_999), ("metrics", "", then_s), ("logs", "", then_s))

    assert main(["replay", str(tmp_path)]) == 0

    printed = capsys.readouterr().out
    assert ("The oldest value is 26 h old." in printed) == (hours == 26)
    assert ("Set it to 28h before." in printed) == (hours == 26)


def test_what_cannot_be_replayed_is_refused_with_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refusal(directory: Path) -> str:
        assert main(["replay", str(directory)]) == 2
        return capsys.readouterr().err

    assert f"{tmp_path} holds no data of an offline run." in refusal(tmp_path)
    assert f"{tmp_path}/gone cannot be read: No such file" in refusal(tmp_path / "gone")
    assert "Set OTEL_EXPORTER_OTLP_ENDPOINT" in refusal(three(tmp_path))
