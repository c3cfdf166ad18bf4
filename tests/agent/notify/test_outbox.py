"""Messages: what an address is sent and never shown; once each, later if need be, not too many."""

from __future__ import annotations

import json
import re
import sys
import zlib
from pathlib import Path

import pytest

from extras import needed
from golden import Golden
from make import Clock
from otel_ddp.agent.export.delivery import Outcome
from otel_ddp.agent.notify.outbox import MOST_OF_A_KIND, Address, Message, Outbox
from webhook import Webhook

MESSAGE = Message(
    id="5f",
    kind="death",
    level="error",
    title="run r: rank 1 (n) died",
    text="rank 1 (n) was killed: SIGKILL.",
    time="2026-01-02T03:04:05+00:00",
    group="g",
    run="r",
    node="n",
    rank="1",
    url="http://n:9464/run/r",
)
# What apprise imports warns of itself.
by_apprise = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def test_a_webhook_gets_what_the_page_promises(webhook: Webhook, golden: Golden) -> None:
    outcome = Address(f"http://me:p%40ss@127.0.0.1:{webhook.port}/hook?team=x").send(MESSAGE)

    assert outcome == Outcome("delivered")
    (posted,) = webhook.posted
    assert posted.path == "/hook?team=x"
    assert posted.headers["Content-Type"] == "application/json"
    assert posted.headers["Authorization"] == "Basic bWU6cEBzcw=="
    golden.check(json.dumps(posted.body, indent=1))


@by_apprise
def test_apprise_sends_it_to_its_own_kind_of_webhook(webhook: Webhook) -> None:
    needed("apprise", "dev")

    outcome = Address(f"json://127.0.0.1:{webhook.port}/hook").send(MESSAGE)

    assert outcome == Outcome("delivered")
    (posted,) = webhook.posted
    assert posted.body["title"] == MESSAGE.title
    assert posted.body["message"] == f"{MESSAGE.text}\n\n{MESSAGE.url}"
    assert posted.body["type"] == "failure"


@by_apprise
def test_a_run_cannot_call_the_people_of_a_chat(webhook: Webhook) -> None:
    needed("apprise", "dev")
    forms = ("@everyone", "a@here", "<@&12>", "<@12>", "<!channel>", "!channel>", "<at id=all>")
    evil = MESSAGE._replace(title=f"run {forms[0]} != 1", text=" ".join(forms))

    outcome = Address(f"json://127.0.0.1:{webhook.port}/hook").send(evil)

    assert outcome == Outcome("delivered")
    (posted,) = webhook.posted
    said = f"{posted.body['title']} {posted.body['message']}"
    assert said.replace("\u200b", "") == f"{evil.title} {evil.text}\n\n{evil.url}"
    assert not [form for form in forms if form in said]


@by_apprise
@pytest.mark.parametrize(
    ("scheme", "code", "is_final"),
    [
        *((scheme, 503, False) for scheme in ("http", "json")),
        *((scheme, 404, False) for scheme in ("http", "json")),
        *((scheme, 403, True) for scheme in ("http", "json")),
        ("http", 429, False),
        ("http", 302, False),
    ],
)
def test_an_answer_decides_whether_it_is_tried_again(
    webhook: Webhook, scheme: str, code: int, is_final: bool
) -> None:
    if scheme == "json":
        needed("apprise", "dev")
    webhook.code = code

    outcome = Address(f"{scheme}://127.0.0.1:{webhook.port}/hook").send(MESSAGE)

    assert outcome == Outcome("refused" if is_final else "retry", f"it answered {code}")
    assert webhook.posted == []


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        (
            "https://me:s3cret@hooks.example.org:8443/s3cret?a=s3cret",
            "https://hooks.example.org:8443",
        ),
        ("HTTP://[::1]:80/s3cret", "http://[::1]:80"),
        ("mailtos://me:s3cret@mail.example.org?to=a@b.c", "mailtos://mail.example.org"),
        # What stands where a host would is a token.
        ("tgram://s3cret/12315544/", "tgram://..."),
        # A password that should have been written as %2F.
        ("https://me:s3cret/more@hooks.example.org/", "https://..."),
    ],
)
def test_of_an_address_only_its_kind_and_its_host_are_shown(url: str, shown: str) -> None:
    assert Address(url).shown == shown
    assert "s3cret" not in Address(url).key


@by_apprise
@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("https://127.0.0.1:1/s3cret", "connection refused by the receiver"),
        (
            "https://127.0.0.1:s3cret/",
            "the receiver is no address to send to; http://host:4318 would be one",
        ),
        ("json://127.0.0.1:1/s3cret", "apprise could not send it"),
        ("nope://s3cret", "apprise does not know this form of address"),
        (
            "mailto://s3cret:s3cret@127.0.0.1:1?to=a@b.c&from=a@example.org",
            "apprise could not send it",
        ),
    ],
)
def test_a_failure_says_why_and_nothing_of_the_address(
    url: str, why: str, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    needed("apprise", "dev")

    outcome = Address(url).send(MESSAGE)

    assert (outcome.kind != "delivered", outcome.why) == (True, why)
    assert "s3cret" not in caplog.text + "".join(capfd.readouterr())


def test_without_apprise_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "apprise", None)
    why = "it needs the library apprise: pip install 'otel-ddp[notify]'"

    assert Address("slack://a/b/c").send(MESSAGE) == Outcome("retry", why)


@pytest.fixture
def clock() -> Clock:
    return Clock(1.7e9)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "spool" / "notify"


@pytest.fixture
def outbox(folder: Path, webhook: Webhook, clock: Clock) -> Outbox:
    return Outbox(folder, [Address(f"{webhook.url}/s3cret")], clock)


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
    webhook: Webhook, outbox: Outbox, folder: Path, clock: Clock
) -> None:
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
    webhook: Webhook, outbox: Outbox, folder: Path, clock: Clock
) -> None:
    outbox.put(message(1))
    outbox.put(message(1))
    deliver(outbox)
    webhook.code = 503
    outbox.put(message(2))
    deliver(outbox)

    webhook.code = 200
    after = Outbox(folder, [Address(f"{webhook.url}/s3cret")], clock)
    deliver(after)

    assert titles(webhook) == ["title 1", "title 2"]


def test_of_a_rank_that_flaps_a_hundred_times_no_more_than_the_limit_is_sent(
    webhook: Webhook, outbox: Outbox, clock: Clock
) -> None:
    for number in range(100):
        outbox.put(message(number))
        clock.now += 31
    deliver(outbox)

    assert titles(webhook) == [f"title {number}" for number in range(MOST_OF_A_KIND)]
    assert outbox.describe().endswith("20 taken, 80 left out beyond 20 a kind, run and hour")

    outbox.put(message(0, run="other"))
    clock.now += 3600
    outbox.put(message(100))
    deliver(outbox)

    assert titles(webhook)[MOST_OF_A_KIND:] == ["title 0", "title 100"]


def test_a_scripts_alerts_leave_out_neither_death_nor_hang_nor_end_of_its_run(
    webhook: Webhook, outbox: Outbox
) -> None:
    for number in range(30):
        outbox.put(message(number, kind="alert"))

    for kind in ("death", "stall", "ended"):
        outbox.put(message(0, kind=kind))

    deliver(outbox)
    kinds = [each.body["kind"] for each in webhook.posted]
    assert kinds == [*["alert"] * MOST_OF_A_KIND, "death", "stall", "ended"]


def test_an_address_that_does_not_take_it_is_told_with_why_and_since_when(
    webhook: Webhook, outbox: Outbox
) -> None:
    webhook.code = 503
    outbox.put(message(1))

    deliver(outbox)

    said = rf".*: 0 taken, 1 wait; {webhook.url}: it answered 503 since [0-9:]{{8}}"
    assert re.fullmatch(said, outbox.describe())


def test_an_agent_stays_an_hour_for_a_message_that_waits(
    webhook: Webhook, outbox: Outbox, folder: Path, clock: Clock
) -> None:
    webhook.code = 503
    assert not outbox.is_awaited()
    outbox.put(message(1))
    deliver(outbox)
    clock.now += 3599
    assert outbox.is_awaited()

    clock.now += 1

    assert not outbox.is_awaited()
    assert len(waiting(folder)) == 1


def test_at_most_a_hundred_wait_alerts_are_given_up_first_and_each_waits_a_day_at_most(
    webhook: Webhook, outbox: Outbox, folder: Path, clock: Clock
) -> None:
    webhook.code = 503
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
