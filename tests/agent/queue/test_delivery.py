"""The delivery keeps the order, survives outages, and loses and repeats nothing."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from make import Clock
from otel_ddp import settings
from otel_ddp.agent.export.delivery import Delivery, Outcome, Send
from otel_ddp.agent.export.folder import BLOCK_BYTES, Queue, Request
from otel_ddp.agent.export.otlp.transport import Transport
from otel_ddp.agent.export.otlp.variables import LANES, SIGNALS
from otlp_receiver import Receiver
from shortages import no_threads

DELIVERED = Outcome("delivered", "accepted by http://c")
DOWN = Outcome("retry", "connection refused by http://c")
BAD = Outcome("refused", "400 from http://c/v1/metrics")
PLENTY = 1024 * BLOCK_BYTES
PATIENCE_S = 60.0


class Bench(Delivery):
    """Sends to a receiver that answers as configured. The jitter is in the middle.

    Without a thread, unless the test starts some: it calls `send_next`.
    """

    def __init__(self, queue: Queue, send: Send | None = None, **how: Any) -> None:
        self.clock = Clock()
        self.answer: Callable[[bytes], Outcome] = lambda body: DELIVERED
        self.tried: list[bytes] = []
        self.arrived: list[bytes] = []
        how = {"jitter": lambda: 0.5, "clock": self.clock, **how}
        super().__init__(queue, send or self.receive, LANES, **how)

    def receive(self, lane: str, body: bytes) -> Outcome:
        self.tried.append(body)
        outcome = self.answer(body)
        if outcome.kind == "delivered":
            self.arrived.append(body)
        return outcome

    def always(self, outcome: Outcome) -> None:
        self.answer = lambda body: outcome

    def start(self) -> None:
        for thread in self.threads():
            thread.keep_running()

    def send_due(self) -> float | None:
        """Send until nothing is due; the seconds until something is."""
        waits_s = []
        for lane in SIGNALS:
            while (wait_s := self.send_next(lane)) == 0.0:
                pass
            waits_s += [] if wait_s is None else [wait_s]
        return min(waits_s, default=None)

    def send_all_after(self, seconds: float) -> None:
        """Everything is taken again, so long after the last attempt."""
        self.always(DELIVERED)
        self.clock.now += seconds
        self.send_due()


@pytest.fixture
def queue(tmp_path: Path) -> Queue:
    return Queue(SIGNALS, tmp_path / "spool", PLENTY)


@pytest.fixture
def delivery(queue: Queue) -> Bench:
    return Bench(queue)


@pytest.fixture
def no_disk(tmp_path: Path) -> Queue:
    in_the_way = tmp_path / "spool"
    in_the_way.write_text("")
    return Queue(SIGNALS, in_the_way, PLENTY, memory_limit_bytes=4)


def requests(*names: str, lane: str = "metrics", points: int = 10) -> list[Request]:
    return [Request(lane, name.encode(), points, True) for name in names]


def files_of(queue: Queue) -> list[Path]:
    return sorted(queue.folder.glob("*.z"))


# --------------------------------------------------------------------------- order and patience


@pytest.mark.parametrize(
    ("jitter", "wish_s", "wait_s"),
    [(0.0, 0.0, 0.5), (1.0, 0.0, 1.5), (0.5, 0.0, 1.0), (0.5, 8.0, 10.0), (0.5, 3600.0, 75.0)],
)
def test_the_pause_that_a_collector_asks_for_is_kept_up_to_a_minute_and_differs_by_node(
    queue: Queue, jitter: float, wish_s: float, wait_s: float
) -> None:
    delivery = Bench(queue, jitter=lambda: jitter)
    delivery.always(Outcome("retry", "503", retry_after_s=wish_s))
    delivery.put(requests("a"))

    assert delivery.send_due() == pytest.approx(wait_s)


def test_a_refused_request_is_dropped_and_the_next_goes_on_at_once(delivery: Bench) -> None:
    delivery.answer = lambda body: BAD if body == b"bad" else DELIVERED
    delivery.put(requests("a", "bad", "c"))

    assert delivery.send_due() is None

    assert delivery.arrived == [b"a", b"c"]
    assert delivery.queue.dropped == {"refused": 10}
    assert delivery.attempts == {"delivered": 2, "failed": 0, "refused": 1}


def test_a_request_over_which_the_receiver_fails_holds_the_others_up_for_minutes_only(
    delivery: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    failed = Outcome("retry", "500 from http://c/v1/logs", doubtful=True)
    delivery.answer = lambda body: failed if body == b"poison" else DELIVERED
    delivery.put(requests("poison", "b", lane="logs", points=1))
    begin = delivery.clock.now

    while delivery.clock.now < begin + 890:
        delivery.clock.now += delivery.send_due() or 0.0
    before = list(delivery.arrived)
    delivery.clock.now += 60
    delivery.send_due()

    assert before == []
    assert delivery.arrived == [b"b"]
    assert delivery.queue.dropped == {"refused": 1}
    assert "OTLP logs: 500 from http://c/v1/logs; dropped: 1." in caplog.messages


# --------------------------------------------------------------------------- no disk


def test_without_a_disk_memory_is_bounded_and_the_oldest_is_dropped_and_counted(
    no_disk: Queue,
) -> None:
    delivery = Bench(no_disk)
    delivery.always(DOWN)
    for name in "abcdef":
        delivery.put(requests(name))
        delivery.send_due()
    dropped, described = dict(no_disk.dropped), no_disk.describe()

    delivery.send_all_after(100)

    assert dropped == {"memory_full": 20}
    assert "the disk does not take it" in described
    assert delivery.arrived == [b"c", b"d", b"e", b"f"]


# --------------------------------------------------------------------------- what people see


def test_an_outage_is_logged_at_its_begin_its_end_and_every_five_minutes(
    delivery: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    delivery.always(DOWN)
    delivery.put(requests("a") + requests("s", lane="traces"))
    begin = delivery.clock.now
    while delivery.clock.now < begin + 590:
        delivery.clock.now += delivery.send_due() or 0.0
    during = list(caplog.messages)
    delivery.send_all_after(60)

    line = "OTLP {}: connection refused by http://c; "
    for lane in ("metrics", "traces"):
        assert len([each for each in during if each.startswith(line.format(lane))]) == 2
        (over,) = (each for each in caplog.messages[4:] if each.startswith(f"OTLP {lane}: "))
        assert re.fullmatch(f"OTLP {lane}: taken again after [0-9]+ s; .*", over)


def test_what_is_refused_is_said_at_once_also_in_an_outage_and_then_every_five_minutes(
    delivery: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    delivery.always(DOWN)
    delivery.put(requests("a"))
    delivery.send_due()
    delivery.always(BAD)
    for _ in range(31):
        delivery.clock.now += 10
        delivery.put(requests("b"))
        delivery.send_due()

    assert caplog.messages == [
        "OTLP metrics: connection refused by http://c; 4.1 kB wait on disk.",
        "OTLP metrics: 400 from http://c/v1/metrics; dropped: 10.",
        "OTLP metrics: 400 from http://c/v1/metrics; dropped: 300.",
    ]


# --------------------------------------------------------------------------- with its threads


class Gate:
    """A receiver that hangs until the test releases it."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.let_go = threading.Event()
        self.outcome = DELIVERED
        self.sent: list[bytes] = []

    def send(self, lane: str, body: bytes) -> Outcome:
        self.sent.append(body)
        self.entered.set()
        assert self.let_go.wait(60)
        return self.outcome


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.let_go.set()


def test_what_is_taken_at_once_touches_no_disk(queue: Queue) -> None:
    delivery = Bench(queue)
    delivery.start()

    delivery.put(requests("a", "b"))
    delivery.secure(PATIENCE_S)

    assert delivery.arrived == [b"a", b"b"]
    assert not queue.folder.exists()
    delivery.stop(0.0, PATIENCE_S)


@pytest.mark.parametrize(("outcome", "left"), [(DELIVERED, 1), (DOWN, 2), (BAD, 1)])
def test_what_a_hanging_collector_does_not_take_is_put_on_disk_and_handled_once(
    gate: Gate, queue: Queue, outcome: Outcome, left: int
) -> None:
    gate.outcome = outcome
    delivery = Bench(queue, gate.send)
    delivery.start()
    delivery.put(requests("a", "b"))
    assert gate.entered.wait(60)
    assert delivery.is_under_way()

    # At the agent's end, which does not wait for it: the gate is still closed.
    delivery.stop(0.0, 0.0)

    assert not delivery.is_under_way()
    # What the next agent finds after a kill.
    after_a_kill = Queue(SIGNALS, queue.folder, PLENTY)
    assert [each.read() for each in after_a_kill.lanes["metrics"]] == [b"a", b"b"]

    gate.let_go.set()
    for thread in delivery.threads():
        assert thread.join(PATIENCE_S)
    assert gate.sent == [b"a"]
    # The copy of what arrived after all is gone, so it is not sent again.
    assert len(files_of(queue)) == left


def test_without_threads_everything_goes_to_disk_and_is_sent_once_there_are_some(
    delivery: Bench,
) -> None:
    with no_threads():
        delivery.start()
        delivery.put(requests("a", "b"))
    assert len(files_of(delivery.queue)) == 2

    delivery.start()
    delivery.stop(PATIENCE_S, PATIENCE_S)

    assert delivery.arrived == [b"a", b"b"]


@pytest.mark.parametrize("outcome", [DELIVERED, DOWN])
def test_at_its_end_it_tries_once_more_and_does_not_wait_for_a_collector_that_is_down(
    delivery: Bench, outcome: Outcome
) -> None:
    failed = threading.Event()

    def fail(body: bytes) -> Outcome:
        failed.set()
        return DOWN

    delivery.answer = fail
    delivery.start()
    delivery.put(requests("a"))
    assert failed.wait(PATIENCE_S)
    delivery.secure(PATIENCE_S)
    assert len(files_of(delivery.queue)) == 1

    delivery.always(outcome)
    delivery.stop(PATIENCE_S, PATIENCE_S)

    assert delivery.tried == [b"a", b"a"]
    assert len(files_of(delivery.queue)) == (outcome is DOWN)


# --------------------------------------------------------------------------- over real sockets


def test_traces_that_are_never_answered_delay_no_metrics(queue: Queue) -> None:
    with Receiver() as receiver:
        receiver.set_mode("hang", "traces")
        endpoint = receiver.start_http()
        transport = Transport(settings.read({}, endpoint=endpoint, timeout_s=60.0), {})
        delivery = Bench(queue, transport.send)
        delivery.start()
        delivery.put([Request("traces", b"", 1)])
        assert receiver.wait_for(lambda r: r.hanging == 1)

        delivery.put([Request("metrics", b"", 1)])

        assert receiver.wait_for(lambda r: len(r.requests) == 1)
        assert receiver.hanging == 1
    delivery.stop(0.0, PATIENCE_S)
    transport.close()


@pytest.mark.parametrize("mode", [302, 401, 500])
def test_a_route_that_is_wrong_for_a_while_after_an_outage_loses_nothing(
    queue: Queue, mode: int, caplog: pytest.LogCaptureFixture
) -> None:
    """What stands in the log about it is true: nothing is dropped, and it is taken in the end."""
    with Receiver() as receiver:
        transport = Transport(settings.read({}, endpoint=receiver.start_http()), {})
        delivery = Bench(queue, transport.send)
        receiver.set_mode(503)
        for _ in range(5):
            delivery.put(requests(""))
            delivery.send_due()
        receiver.set_mode(mode)
        for _ in range(10):
            delivery.clock.now += 50
            delivery.send_due()
        during = list(caplog.messages)
        receiver.set_mode("ok")
        delivery.send_all_after(50)

        assert len(receiver.requests) == 5
        transport.close()
    assert delivery.queue.dropped == {}
    assert {each.endswith(" wait on disk.") for each in during} == {True}
    assert "taken again after " in caplog.messages[-1]
