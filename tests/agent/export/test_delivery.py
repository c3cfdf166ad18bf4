"""The delivery keeps the order, survives outages, and loses and repeats nothing."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from make import Clock
from otel_ddp import settings
from otel_ddp.agent.export.delivery import Delivery
from otel_ddp.agent.export.otlp import SIGNALS, Outcome, Request, Signal
from otel_ddp.agent.export.otlp.encode import (
    attribute_bytes,
    metric,
    metrics_request,
    number_point,
    resource_bytes,
)
from otel_ddp.agent.export.otlp.transport import Transport
from otel_ddp.agent.export.spool import BLOCK_BYTES, Spool
from otlp_receiver import Receiver, points_in
from shortages import descriptors_below, no_threads

DELIVERED = Outcome("delivered", "accepted by http://c")
DOWN = Outcome("retry", "connection refused by http://c")
BAD = Outcome("refused", "400 from http://c/v1/metrics")
TOO_LARGE = Outcome("refused", "413 from http://c/v1/metrics", too_large=True)
PLENTY = 1024 * BLOCK_BYTES
PATIENCE_S = 60.0


class FakeTransport:
    """Answers as configured, and remembers what arrived."""

    destination = "http://c"

    def __init__(self) -> None:
        self.answer: Callable[[Signal, bytes], Outcome] = lambda signal, body: DELIVERED
        self.tried: list[bytes] = []
        self.arrived: list[bytes] = []

    def send(self, signal: Signal, body: bytes) -> Outcome:
        self.tried.append(body)
        outcome = self.answer(signal, body)
        if outcome.kind == "delivered":
            self.arrived.append(body)
        return outcome

    def always(self, outcome: Outcome) -> None:
        self.answer = lambda signal, body: outcome


class Bench(Delivery):
    """Without a thread: the test calls `send_next`. The jitter is in the middle."""

    def __init__(self, spool: Spool, **how: Any) -> None:
        self.transport, self.spool, self.clock = FakeTransport(), spool, Clock()
        how = {"jitter": lambda: 0.5, **how}
        super().__init__(self.transport, spool, self.clock, **how)


@pytest.fixture
def transport() -> FakeTransport:
    return FakeTransport()


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    return Spool(tmp_path / "spool", PLENTY)


@pytest.fixture
def delivery(spool: Spool) -> Bench:
    return Bench(spool)


def requests(
    *names: str, signal: Signal = "metrics", points: int = 10, irreplaceable: bool = True
) -> list[Request]:
    return [Request(signal, name.encode(), points, irreplaceable) for name in names]


def send_next(delivery: Delivery) -> float | None:
    """One request of the first signal that has one; or the seconds until one is due."""
    waits_s = []
    for signal in SIGNALS:
        if (wait_s := delivery.send_next(signal)) == 0.0:
            return 0.0
        waits_s += [] if wait_s is None else [wait_s]
    return min(waits_s, default=None)


def send_all_due(delivery: Delivery) -> None:
    """Send until nothing is due."""
    while send_next(delivery) == 0.0:
        pass


# --------------------------------------------------------------------------- order


def test_order_is_kept_through_an_outage(delivery: Bench) -> None:
    settled: list[str] = []
    delivery.transport.always(DOWN)
    delivery.submit(requests("a", "b"), lambda: settled.append("ab"))
    assert settled == []
    send_next(delivery)
    assert settled == ["ab"]
    delivery.submit(requests("c"), lambda: settled.append("c"))
    assert settled == ["ab", "c"]
    assert delivery.spool.entries == 3

    delivery.transport.always(DELIVERED)
    delivery.clock.now += 100
    send_next(delivery)
    # One is gone and two wait on disk: what comes now goes behind them.
    delivery.submit(requests("d"), lambda: settled.append("d"))
    assert delivery.spool.entries == 3
    send_all_due(delivery)

    assert delivery.transport.arrived == [b"a", b"b", b"c", b"d"]
    assert settled == ["ab", "c", "d"]
    assert delivery.spool.entries == 0


def test_a_batch_is_not_settled_before_those_that_were_submitted_earlier(delivery: Bench) -> None:
    settled: list[str] = []
    delivery.submit(requests("span", signal="traces"), lambda: settled.append("first"))
    delivery.submit(requests("a"), lambda: settled.append("second"))

    # Marks of the second say that the first was read, too: after a kill it would be lost.
    delivery.send_next("metrics")
    early = list(settled)
    delivery.send_next("traces")

    assert early == []
    assert settled == ["first", "second"]


# --------------------------------------------------------------------------- patience


@pytest.mark.parametrize(("jitter", "wait_s"), [(0.0, 0.5), (1.0, 1.5)])
def test_nodes_do_not_try_again_in_the_same_moment(
    spool: Spool, jitter: float, wait_s: float
) -> None:
    delivery = Bench(spool, jitter=lambda: jitter)
    delivery.transport.always(DOWN)
    delivery.submit(requests("a"))

    send_next(delivery)

    assert send_next(delivery) == pytest.approx(wait_s)


@pytest.mark.parametrize(("wish_s", "wait_s"), [(0.0, 1.0), (8.0, 10.0), (3600.0, 75.0)])
def test_the_pause_that_a_collector_asks_for_is_kept_up_to_a_minute(
    delivery: Bench, wish_s: float, wait_s: float
) -> None:
    delivery.transport.always(Outcome("retry", "503", retry_after_s=wish_s))
    delivery.submit(requests("a"))

    send_next(delivery)

    assert send_next(delivery) == pytest.approx(wait_s)


def test_a_refused_request_is_dropped_and_the_next_goes_on_at_once(delivery: Bench) -> None:
    settled: list[str] = []
    delivery.transport.answer = lambda signal, body: BAD if body == b"bad" else DELIVERED
    delivery.submit(requests("a", "bad", "c"), lambda: settled.append("all"))

    send_all_due(delivery)

    assert delivery.transport.arrived == [b"a", b"c"]
    assert settled == ["all"]
    status = delivery.status()
    assert status.dropped_points == {"refused": 10}
    assert (status.delivered, status.refused, status.failed) == (2, 1, 0)


def points_of(*series: tuple[str, int]) -> bytes:
    """A real request with one point for each metric and rank."""
    metrics = [
        metric(name, "", "", "gauge", [number_point(attribute_bytes({"rank": rank}), 17, rank)])
        for name, rank in series
    ]
    return metrics_request(resource_bytes({}), "otel_ddp", "1", metrics)


def series_in(bodies: Sequence[bytes]) -> list[tuple[str, int]]:
    """The metric and the rank of every point, in the order of their arrival."""
    return [(each.metric, each.attributes["rank"]) for each in points_in(*bodies)]


MANY = [(name, rank) for name in ("training.a", "training.b") for rank in range(100)]


def test_after_a_failure_the_parts_that_were_delivered_are_not_sent_again(delivery: Bench) -> None:
    def fail_at_the_third(signal: Signal, body: bytes) -> Outcome:
        if len(delivery.transport.tried) == 1:
            return TOO_LARGE
        return DOWN if len(delivery.transport.tried) == 3 else DELIVERED

    delivery.transport.answer = fail_at_the_third
    delivery.submit([Request("metrics", points_of(*MANY), len(MANY))])
    send_all_due(delivery)
    assert delivery.spool.entries == 1

    delivery.clock.now += 100
    send_all_due(delivery)

    assert len(series_in(delivery.transport.arrived)) == len(MANY)
    assert delivery.spool.entries == 0


def test_what_is_too_large_is_split_and_one_large_point_is_dropped_alone(delivery: Bench) -> None:
    series = [("training.large." + "x" * 5000, 3), *MANY]
    delivery.transport.answer = lambda signal, body: TOO_LARGE if len(body) > 2000 else DELIVERED

    delivery.submit([Request("metrics", points_of(*series), len(series))])
    send_all_due(delivery)

    assert series_in(delivery.transport.arrived) == MANY
    assert delivery.status().dropped_points == {"refused": 1}


def test_a_request_over_which_the_receiver_fails_holds_the_others_up_for_minutes_only(
    delivery: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    failed = Outcome("retry", "500 from http://c/v1/logs", doubtful=True)
    delivery.transport.answer = lambda signal, body: failed if body == b"poison" else DELIVERED
    delivery.submit(requests("poison", "b", signal="logs", points=1))
    begin = delivery.clock.now

    while delivery.clock.now < begin + 890:
        delivery.clock.now += send_next(delivery) or 0.0
    before = list(delivery.transport.arrived)
    delivery.clock.now += 60
    send_all_due(delivery)

    assert before == []
    assert delivery.transport.arrived == [b"b"]
    assert delivery.status().dropped_points == {"refused": 1}
    assert "OTLP logs: 500 from http://c/v1/logs; points dropped: 1." in caplog.messages


def test_a_torn_file_is_counted_and_the_next_goes_out(delivery: Bench) -> None:
    torn = delivery.spool.append(Request("metrics", b"torn", 7))
    delivery.spool.append(Request("metrics", b"whole", 1))
    assert torn is not None
    torn.path.write_bytes(b"")

    send_all_due(delivery)

    assert delivery.transport.arrived == [b"whole"]
    assert delivery.status().dropped_points == {"corrupt": 7}


def test_a_file_that_cannot_be_read_now_is_sent_later(delivery: Bench) -> None:
    delivery.spool.append(Request("metrics", b"whole", 7))

    with descriptors_below(3):
        send_next(delivery)
        due_s = send_next(delivery)
    during = delivery.status()
    delivery.clock.now += 100
    send_all_due(delivery)

    assert due_s == pytest.approx(1.0)
    assert "cannot be read: Too many open files since" in during.state
    assert delivery.transport.arrived == [b"whole"]
    assert delivery.status().dropped_points == {}


# --------------------------------------------------------------------------- no disk


def test_when_the_disk_recovers_memory_moves_there(no_disk: Spool) -> None:
    delivery = Bench(no_disk)
    settled: list[str] = []
    delivery.transport.always(DOWN)
    delivery.submit(requests("a", "b"), lambda: settled.append("ab"))
    send_next(delivery)

    no_disk.directory.unlink()
    delivery.submit(requests("c"), lambda: settled.append("c"))

    assert settled == ["ab", "c"]
    assert (no_disk.entries, delivery.status().memory_bytes) == (3, 0)
    delivery.transport.always(DELIVERED)
    delivery.clock.now += 100
    send_all_due(delivery)
    assert delivery.transport.arrived == [b"a", b"b", b"c"]


def test_without_a_disk_memory_is_bounded_and_the_oldest_is_dropped_and_counted(
    no_disk: Spool,
) -> None:
    delivery = Bench(no_disk, memory_limit_bytes=3)
    settled: list[str] = []
    delivery.transport.always(DOWN)

    for name in "abcde":
        delivery.submit(requests(name), functools.partial(settled.append, name))
        send_next(delivery)

    status = delivery.status()
    assert settled == ["a", "b"]
    assert status.dropped_points == {"memory_full": 20}
    assert status.memory_bytes == 3
    assert "the disk does not take it" in status.state
    assert delivery.move_to_disk() is False
    delivery.transport.always(DELIVERED)
    delivery.clock.now += 100
    send_all_due(delivery)
    assert delivery.transport.arrived == [b"c", b"d", b"e"]


def test_a_batch_that_neither_network_nor_disk_accepts_delays_no_later_one(no_disk: Spool) -> None:
    delivery = Bench(no_disk)
    settled: list[str] = []
    delivery.transport.answer = lambda signal, body: DOWN if signal == "traces" else DELIVERED
    delivery.submit(requests("span", signal="traces"), lambda: settled.append("first"))
    send_all_due(delivery)

    delivery.submit(requests("a"), lambda: settled.append("second"))
    send_all_due(delivery)

    assert settled == ["second"]
    assert delivery.status().state.startswith("traces: connection refused by http://c since")


@pytest.fixture
def no_disk(tmp_path: Path) -> Spool:
    in_the_way = tmp_path / "spool"
    in_the_way.write_text("")
    return Spool(in_the_way, PLENTY)


def test_without_a_disk_current_values_are_dropped_before_logged_ones(no_disk: Spool) -> None:
    delivery = Bench(no_disk, memory_limit_bytes=4)

    def answer(signal: Signal, body: bytes) -> Outcome:
        if body == b"C":
            # What is being sent meanwhile stays.
            delivery.submit(requests("D", "E", "F", "G", irreplaceable=False))
        return DELIVERED

    delivery.transport.answer = answer
    # One export after the other before the first attempt came back: nothing is known to be away.
    for logged, standing in ("aA", "bB", "cC"):
        delivery.submit(requests(logged) + requests(standing, points=3, irreplaceable=False))
    send_all_due(delivery)

    assert delivery.transport.arrived == [b"a", b"b", b"c", b"C", b"E", b"F", b"G"]
    assert delivery.status().dropped_points == {"memory_full": 3 + 3 + 10}


# --------------------------------------------------------------------------- what people see


def test_the_status_describes_success_and_failure(
    delivery: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    assert delivery.status().state == "nothing sent yet to http://c"
    delivery.transport.always(Outcome("delivered", "http://c accepted the rest", rejected=3))
    delivery.submit(requests("a"))
    send_next(delivery)
    well = delivery.status()
    delivery.transport.always(DOWN)
    delivery.submit(requests("b"))
    send_next(delivery)
    ill = delivery.status()

    assert well.state == "delivering to http://c"
    assert (well.delivered, well.dropped_points) == (1, {"rejected": 3})
    assert caplog.messages[0] == "OTLP metrics: http://c accepted the rest; points dropped: 3."
    assert (ill.delivered, ill.failed, ill.spool_bytes) == (1, 1, BLOCK_BYTES)
    assert ill.state.startswith("connection refused by http://c since ")
    assert ill.state.endswith(", 4 KiB wait on disk")


def test_an_outage_is_logged_at_its_begin_its_end_and_every_five_minutes(
    delivery: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "otel_ddp.agent")
    delivery.transport.always(DOWN)
    delivery.submit(requests("a") + requests("s", signal="traces"))
    begin = delivery.clock.now
    while delivery.clock.now < begin + 590:
        delivery.clock.now += send_next(delivery) or 0.0
    lines_during = len(caplog.records)
    delivery.transport.always(DELIVERED)
    delivery.clock.now += 60
    send_all_due(delivery)

    assert lines_during == 2
    assert caplog.messages[0].startswith("OTLP metrics: connection refused by http://c; 4 KiB wait")
    assert len(caplog.records) == 3
    assert caplog.messages[-1].startswith("OTLP: http://c takes data again after ")

    # One that comes and goes is not logged each time.
    for _ in range(10):
        delivery.transport.always(DOWN)
        delivery.submit(requests("a"))
        send_next(delivery)
        delivery.transport.always(DELIVERED)
        delivery.clock.now += 10
        send_all_due(delivery)
    assert len(caplog.records) == 5


def test_what_is_refused_is_said_at_once_also_in_an_outage_and_then_every_five_minutes(
    delivery: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    delivery.transport.always(DOWN)
    delivery.submit(requests("a"))
    send_next(delivery)
    delivery.transport.always(BAD)
    for _ in range(31):
        delivery.clock.now += 10
        delivery.submit(requests("b"))
        send_all_due(delivery)

    assert caplog.messages == [
        "OTLP metrics: connection refused by http://c; 4 KiB wait on disk.",
        "OTLP metrics: 400 from http://c/v1/metrics; points dropped: 10.",
        "OTLP metrics: 400 from http://c/v1/metrics; points dropped: 300.",
    ]


# --------------------------------------------------------------------------- with its thread


class Gate:
    """A transport that hangs until the test releases it."""

    destination = "http://c"

    def __init__(self, outcome: Outcome = DELIVERED) -> None:
        self.entered = threading.Event()
        self.let_go = threading.Event()
        self.outcome = outcome
        self.sent: list[bytes] = []

    def send(self, signal: Signal, body: bytes) -> Outcome:
        self.sent.append(body)
        self.entered.set()
        assert self.let_go.wait(60)
        return self.outcome


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.let_go.set()


def test_moving_to_disk_does_not_wait_for_a_hanging_collector_and_loses_nothing(
    gate: Gate, spool: Spool
) -> None:
    delivery = Delivery(gate, spool)
    settled: list[str] = []
    delivery.start()
    delivery.submit(requests("a", "b", "c"), lambda: settled.append("abc"))
    assert gate.entered.wait(60)

    # It returns although the transport does not: the gate is still closed.
    taken = delivery.move_to_disk()

    assert taken
    assert not gate.let_go.is_set()
    assert settled == ["abc"]
    after_a_kill = Spool(spool.directory, PLENTY)
    assert after_a_kill.entries == 3
    oldest = after_a_kill.oldest("metrics")
    assert oldest is not None
    assert oldest.read() == b"a"

    gate.let_go.set()
    assert delivery.flush(60)
    delivery.stop(60)
    # The copy of what arrived after all is gone, so it is not sent again.
    assert gate.sent == [b"a", b"b", b"c"]
    assert (settled, spool.entries) == (["abc"], 0)


@pytest.mark.parametrize(("outcome", "left"), [(DOWN, 1), (BAD, 0)])
def test_a_request_that_was_moved_to_disk_in_flight_and_then_failed_is_handled_once(
    gate: Gate, spool: Spool, outcome: Outcome, left: int
) -> None:
    gate.outcome = outcome
    delivery = Delivery(gate, spool, backoff_s=(1e6, 1e6))
    settled: list[str] = []
    delivery.start()
    delivery.submit(requests("a"), lambda: settled.append("a"))
    assert gate.entered.wait(60)
    delivery.move_to_disk()

    gate.let_go.set()
    delivery.stop(60)

    assert settled == ["a"]
    assert spool.entries == left


def test_a_lane_that_an_error_ended_is_started_again_and_loses_nothing(
    transport: FakeTransport, spool: Spool
) -> None:
    failed = threading.Event()

    def fail_once(signal: Signal, body: bytes) -> Outcome:
        if not failed.is_set():
            failed.set()
            raise AssertionError("a fault of ours")
        return DELIVERED

    transport.answer = fail_once
    delivery = Delivery(transport, spool)
    settled = threading.Event()
    delivery.start()
    delivery.submit(requests("a", "b"), settled.set)
    assert failed.wait(PATIENCE_S)
    lane = delivery.threads()[0]
    while lane.is_alive():
        pass
    problem = lane.problem

    delivery.start()

    assert problem == "the thread metrics does not run: an error ended it"
    assert settled.wait(PATIENCE_S)
    assert transport.arrived == [b"a", b"b"]
    assert lane.problem == ""
    delivery.stop(PATIENCE_S)


def test_without_threads_everything_goes_to_disk_and_is_sent_once_there_are_some(
    transport: FakeTransport, spool: Spool
) -> None:
    delivery = Delivery(transport, spool)
    settled: list[str] = []
    with no_threads():
        delivery.start()
        delivery.submit(requests("a", "b"), lambda: settled.append("ab"))
        assert settled == ["ab"]
        assert spool.entries == 2

    delivery.start()

    assert delivery.flush(PATIENCE_S)
    assert transport.arrived == [b"a", b"b"]
    delivery.stop(PATIENCE_S)


def test_flush_tries_once_more_and_does_not_wait_for_a_collector_that_is_down(
    transport: FakeTransport, spool: Spool
) -> None:
    delivery = Delivery(transport, spool, backoff_s=(1e6, 1e6))
    failed = threading.Event()
    transport.always(DOWN)
    delivery.start()
    delivery.submit(requests("a"), failed.set)
    assert failed.wait(60)

    assert delivery.flush(60)
    assert spool.entries == 1
    transport.always(DELIVERED)
    assert delivery.flush(60)

    delivery.stop(60)
    assert transport.arrived == [b"a"]


# --------------------------------------------------------------------------- over real sockets


@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
def test_an_outage_of_a_real_collector_loses_nothing_and_keeps_the_order(
    spool: Spool, protocol: str
) -> None:
    with Receiver() as receiver:
        begin = receiver.start_grpc if protocol == "grpc" else receiver.start_http
        transport = Transport(settings.read({}, endpoint=begin(), protocol=protocol), {})
        delivery = Delivery(transport, spool, backoff_s=(0.001, 0.001))
        delivery.start()
        for number in range(10):
            delivery.submit([Request("metrics", points_of(("loss", number)), 1)])
        assert receiver.wait_for(lambda r: len(r.points()) == 10)
        receiver.set_mode(503)
        for number in range(10, 20):
            delivery.submit([Request("metrics", points_of(("loss", number)), 1)])
        assert receiver.wait_for(lambda r: len(r.attempts) >= 13)
        receiver.set_mode("ok")
        for number in range(20, 30):
            delivery.submit([Request("metrics", points_of(("loss", number)), 1)])

        assert receiver.wait_for(lambda r: len(r.points()) == 30)
        assert [point.value for point in receiver.points()] == [float(n) for n in range(30)]
        assert delivery.flush(60)
        assert delivery.stop(60)
        transport.close()
    status = delivery.status()
    assert status.dropped_points == {}
    assert (status.delivered, status.spool_bytes) == (30, 0)


def test_traces_that_are_never_answered_delay_no_metrics(spool: Spool) -> None:
    with Receiver() as receiver:
        receiver.set_mode("hang", "traces")
        endpoint = receiver.start_http()
        transport = Transport(settings.read({}, endpoint=endpoint, timeout_s=60.0), {})
        delivery = Delivery(transport, spool)
        delivery.start()
        delivery.submit([Request("traces", b"", 1)])
        assert receiver.wait_for(lambda r: r.hanging == 1)

        delivery.submit([Request("metrics", points_of(("loss", 1)), 1)])

        assert receiver.wait_for(lambda r: len(r.points()) == 1)
        assert receiver.hanging == 1
    delivery.stop(60)
    transport.close()


@pytest.mark.parametrize("mode", ["redirect", 401, 404, 500, 503])
def test_a_route_that_is_wrong_for_a_while_after_an_outage_loses_nothing(
    spool: Spool, mode: str | int, caplog: pytest.LogCaptureFixture
) -> None:
    """What stands in the log about it is true: nothing is dropped, and it is taken in the end."""
    with Receiver() as receiver:
        endpoint = receiver.start_http()
        transport = Transport(settings.read({}, endpoint=endpoint), {})
        clock = Clock()
        delivery = Delivery(transport, spool, clock)
        receiver.set_mode(503)
        for _ in range(5):
            delivery.submit([Request("metrics", points_of(*MANY), len(MANY))])
            send_all_due(delivery)
        receiver.set_mode(mode)
        for _ in range(10):
            clock.now += 50
            send_all_due(delivery)
        during = list(caplog.messages)
        receiver.set_mode("ok")
        clock.now += 50
        send_all_due(delivery)

        assert len(receiver.points()) == 5 * len(MANY)
        transport.close()
    assert delivery.status().dropped_points == {}
    assert {each.endswith(" wait on disk.") for each in during} == {True}
    assert "takes data again" in caplog.messages[-1]
