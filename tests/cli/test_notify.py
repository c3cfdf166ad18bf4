"""otel-ddp notify: whether each address takes a message."""

from __future__ import annotations

import os

import pytest

from otel_ddp.cli import main
from webhook import Webhook


def test_each_address_is_tried_and_said_to_have_taken_it_or_not(
    webhook: Webhook, capsys: pytest.CaptureFixture[str]
) -> None:
    os.environ["OTEL_DDP_NOTIFY"] = f"{webhook.url}/s3cret http://127.0.0.1:1/s3cret"

    assert main(["notify", "does it arrive?"]) == 1

    (posted,) = webhook.posted
    assert (posted.path, posted.body["kind"]) == ("/s3cret", "test")
    assert posted.body["text"] == "does it arrive?"
    assert capsys.readouterr().out.splitlines() == [
        f"ok   taken by {webhook.url}",
        "fail http://127.0.0.1:1: connection refused by the receiver",
    ]


def test_without_a_failure_the_status_is_0(webhook: Webhook) -> None:
    os.environ["OTEL_DDP_NOTIFY"] = webhook.url

    assert main(["notify"]) == 0


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("", "OTEL_DDP_NOTIFY names no address: set it, as in OTEL_DDP_NOTIFY=https://"),
        ("https://a/ s3cret", "OTEL_DDP_NOTIFY: entry 2 must begin with its kind, as in https://"),
    ],
)
def test_a_setting_that_names_nothing_is_an_error_without_its_value(
    value: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    os.environ["OTEL_DDP_NOTIFY"] = value

    assert main(["notify"]) == 2

    error = capsys.readouterr().err
    assert error.startswith(f"otel-ddp notify: {said}")
    assert "s3cret" not in error
