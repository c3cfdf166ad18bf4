"""Messages that wait: once each, later where need be, and not too many of them."""

from __future__ import annotations

import re
import zlib
from pathlib import Path

import pytest

from make import Clock
from otel_ddp.agent.notify.addresses import Address, Message
from otel_ddp.agent.notify.notifier import MOST_OF_A_KIND, Outbox
from webhook import Webhook


@pytest.fixture
def clock() -> Clock:
    return Clock(1.7e9)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "spool" / "notify"


def message(number: int, run: str = "r", kind: str = "straggler") -> Message:
    key = f"{kind}{run}{number}"
    return Message(key, kind, "warn", f"title {number}", "text", "now", "g", run)


def deliver(outbox: Outbox) -> None:
    """What the threads do, and the agent's loop."""
    outbox.give_up_old()
    for thread in outbox.delivery.threads():
        while outbox.delivery.send_next(thread.name) == 0.0:
            pass


def titles(webhook: Webhook) -> list[str]:
    return [each.body["title"] for each in webhook.posted]


def waiting(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.z"))


def test_with_the_receiver_down_for_ten_minutes_it_arrives_once_and_later(
    webhook: Webhook, folder: Path, clock: Clock
) -> None:
    outbox = Outbox(folder, [Address(f"{webhook.url}/s3cret")], clock)
    webhook.code = None
    outbox.put(message(1))
    for _ in range(600):
        deliver(outbox)
        clock.now += 1
    (file,) = waiting(folder)
    assert b"s3cret" not in zlib.decompress(file.read_bytes()) + file.name.encode()
    # 5 s, 10 s, 20 s and so on, up to five minutes, each times 0.5 to 1.5.
    assert 4 <= webhook.attempts <= 12
    assert titles(webhook) == []

    webhook.code = 200
    clock.now += 450
    deliver(outbox)

    assert titles(webhook) == ["title 1"]
    assert waiting(folder) == []
    assert not outbox.is_awaited()


def test_nothing_is_told_twice_and_the_next_agent_sends_what_waits(
    webhook: Webhook, folder: Path, clock: Clock
) -> None:
    before = Outbox(folder, [Address(webhook.url)], clock)
    before.put(message(1))
    before.put(message(1))
    deliver(before)
    webhook.code = 503
    before.put(message(2))
    deliver(before)

    webhook.code = 200
    after = Outbox(folder, [Address(webhook.url)], clock)
    deliver(after)

    assert titles(webhook) == ["title 1", "title 2"]


def test_a_rank_that_flaps_a_hundred_times_makes_the_limit_and_the_last_says_so(
    webhook: Webhook, folder: Path, clock: Clock
) -> None:
    outbox = Outbox(folder, [Address(webhook.url)], clock)
    for number in range(100):
        outbox.put(message(number))
        clock.now += 31
    deliver(outbox)

    assert titles(webhook) == [f"title {number}" for number in range(MOST_OF_A_KIND)]
    texts = [each.body["text"] for each in webhook.posted]
    assert [text for text in texts if "further ones are left out" in text] == texts[-1:]
    assert outbox.describe().endswith("20 taken, 80 left out beyond 20 a kind, run and hour")

    outbox.put(message(0, run="other"))
    clock.now += 3600
    outbox.put(message(100))
    deliver(outbox)

    assert titles(webhook)[MOST_OF_A_KIND:] == ["title 0", "title 100"]


def test_a_scripts_alerts_leave_out_neither_death_nor_hang_nor_end_of_its_run(
    webhook: Webhook, folder: Path, clock: Clock
) -> None:
    outbox = Outbox(folder, [Address(webhook.url)], clock)
    for number in range(30):
        outbox.put(message(number, kind="alert"))

    for kind in ("death", "stall", "ended"):
        outbox.put(message(0, kind=kind))

    deliver(outbox)
    kinds = [each.body["kind"] for each in webhook.posted]
    assert kinds == [*["alert"] * MOST_OF_A_KIND, "death", "stall", "ended"]


def test_an_address_that_is_down_holds_up_no_other(
    webhook: Webhook, folder: Path, clock: Clock
) -> None:
    with Webhook() as down:
        down.code = 503
        outbox = Outbox(folder, [Address(down.url), Address(webhook.url)], clock)
        for number in range(3):
            outbox.put(message(number))
            deliver(outbox)
        assert titles(webhook) == ["title 0", "title 1", "title 2"]
        # It is not asked for each message.
        assert down.attempts == 1

        down.code = 200
        clock.now += 8
        deliver(outbox)

        assert titles(down) == ["title 0", "title 1", "title 2"]
    assert len(webhook.posted) == 3


def test_an_address_that_does_not_take_it_is_told_with_why_and_since_when(
    webhook: Webhook, folder: Path, clock: Clock
) -> None:
    outbox = Outbox(folder, [Address(f"{webhook.url}/s3cret")], clock)
    webhook.code = 503
    outbox.put(message(1))

    deliver(outbox)

    said = rf".*: 0 taken, 1 wait; {webhook.url}: it answered 503 since [0-9:]{{8}}"
    assert re.fullmatch(said, outbox.describe())


def test_an_agent_stays_an_hour_for_a_message_that_waits(
    webhook: Webhook, folder: Path, clock: Clock
) -> None:
    webhook.code = 503
    outbox = Outbox(folder, [Address(webhook.url)], clock)
    assert not outbox.is_awaited()
    outbox.put(message(1))
    deliver(outbox)
    clock.now += 3599
    assert outbox.is_awaited()

    clock.now += 1

    assert not outbox.is_awaited()
    assert len(waiting(folder)) == 1


def test_at_most_a_hundred_wait_alerts_are_given_up_first_and_each_waits_a_day_at_most(
    webhook: Webhook, folder: Path, clock: Clock
) -> None:
    webhook.code = 503
    outbox = Outbox(folder, [Address(webhook.url)], clock)
    outbox.put(message(0, kind="death"))
    for number in range(109):
        outbox.put(message(number, run=f"r{number}", kind="alert"))
    assert len(waiting(folder)) == 100

    webhook.code = 200
    outbox.delivery.send_next(outbox.delivery.threads()[0].name)
    clock.now += 86401
    deliver(outbox)

    assert [each.body["kind"] for each in webhook.posted] == ["death"]
    assert waiting(folder) == []
    assert "1 taken, 109 given up" in outbox.describe()
