"""One address: what a webhook and apprise are sent, and what is never shown."""

from __future__ import annotations

import json
import socket
import sys
import threading

import pytest

from extras import needed
from golden import Golden
from otel_ddp.agent.notify.addresses import Address, Message
from otel_ddp.agent.queue.delivery import Outcome
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
    from apprise.plugins import discord, slack

    forms = ("@everyone", "a@here", "<@&12>", "<@12>", "<!channel>", "!channel>", "<at id=all>")
    evil = MESSAGE._replace(title=f"run {forms[0]} != 1", text=" ".join(forms))

    outcome = Address(f"json://127.0.0.1:{webhook.port}/hook").send(evil)

    assert outcome == Outcome("delivered")
    (posted,) = webhook.posted
    said = f"{posted.body['title']} {posted.body['message']}"
    assert said.replace("\u200b", "") == f"{evil.title} {evil.text}\n\n{evil.url}"
    assert not [form for form in forms if form in said]
    # What its services look for.
    assert not discord.USER_ROLE_DETECTION_RE.search(said)
    found = slack.NotifySlack._re_channel_support.search(said)
    assert found is None or found["channel"].startswith("\u200b")


@by_apprise
@pytest.mark.parametrize(
    ("scheme", "code", "is_final"),
    [
        *((scheme, 503, False) for scheme in ("http", "json")),
        *((scheme, 404, False) for scheme in ("http", "json")),
        *((scheme, 403, True) for scheme in ("http", "json")),
        ("http", 429, False),
        # It is not followed; apprise does.
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
        ("discord://s3cret/s3cret", "discord://..."),
        ("slack://s3cret/s3cret/s3cret", "slack://..."),
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


def test_an_answer_that_is_no_http_shows_nothing_of_the_address(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            client, _ = server.accept()
            with client:
                client.recv(65536)
                client.sendall(b"HTTP/1.1 200 OK\r\nno header\r\nContent-Length: 0\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        outcome = Address(f"http://127.0.0.1:{server.getsockname()[1]}/s3cret").send(MESSAGE)
        thread.join()

    assert outcome == Outcome("delivered")
    assert "s3cret" not in caplog.text


def test_without_apprise_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "apprise", None)
    why = "it needs the library apprise: pip install 'otel-ddp[notify]'"

    assert Address("slack://a/b/c").send(MESSAGE) == Outcome("retry", why)


def test_a_message_survives_its_file() -> None:
    assert Message.from_json(json.loads(json.dumps(MESSAGE.to_json()))) == MESSAGE
