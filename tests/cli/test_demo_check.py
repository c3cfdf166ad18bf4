"""What `otel-ddp demo --check` says of a Prometheus in which the alert does not fire."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fake_prometheus import FakePrometheus
from otel_ddp.cli import main
from otel_ddp.cli.demo.check import fires, why_not
from otel_ddp.cli.fetch import NoAnswer
from otel_ddp.cli.programs.prometheus import Prometheus

RUN = "demo-hang-1"
STATE, PENDING = f'training_state{{run="{RUN}"}}', f'ALERTS{{alertname="A",run="{RUN}"}}'
FIRING = f'ALERTS{{alertname="A",alertstate="firing",run="{RUN}"}}'


@pytest.fixture
def prometheus() -> Iterator[FakePrometheus]:
    with FakePrometheus() as server:
        yield server


def has(prometheus: FakePrometheus, *series: str) -> None:
    prometheus.answer = lambda query: [{"metric": {}}] if query in series else []


@pytest.mark.parametrize(
    ("series", "said"),
    [
        ([], "has no series of demo-hang-1: look into the log of the collector"),
        ([STATE, PENDING], "A is pending: wait longer (--seconds)"),
        ([STATE], "A has found nothing: load deploy/prometheus/alerts and rules of this version"),
    ],
)
def test_what_is_missing_on_the_way_to_an_alert_is_said(
    prometheus: FakePrometheus, series: list[str], said: str
) -> None:
    has(prometheus, *series)
    asked = Prometheus(prometheus.url, "")

    assert not fires(asked, "A", RUN)
    assert said in why_not(asked, "A", RUN)


def test_an_alert_that_fires_is_seen_and_the_token_is_sent(prometheus: FakePrometheus) -> None:
    has(prometheus, FIRING)

    assert fires(Prometheus(prometheus.url, "secret"), "A", RUN)
    assert fires(Prometheus(prometheus.url.replace("://", "://me:word@"), ""), "A", RUN)

    assert prometheus.tokens == ["Bearer secret", "Basic bWU6d29yZA=="]


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (302, b"", "302"),
        (401, b"", "401"),
        (503, b"<html>", "answers 503$"),
        (422, b'{"status": "error", "error": "too many samples"}', "422: too many samples$"),
        (200, b"<html>", "is no Prometheus"),
    ],
)
def test_an_answer_that_is_none_is_said_without_the_password(
    prometheus: FakePrometheus, status: int, body: bytes, said: str
) -> None:
    prometheus.status, prometheus.body = status, body

    with pytest.raises(NoAnswer, match=said) as error:
        fires(Prometheus(prometheus.url.replace("://", "://me:word@"), ""), "A", RUN)

    assert "word" not in str(error.value)
    # A redirect is not followed: the password is for this server alone.
    assert len(prometheus.tokens) == 1


def test_what_is_no_address_is_refused_before_anything_is_played(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["demo", "--check", "localhost:9090"]) == 2

    assert "begins with http:// or https://" in capsys.readouterr().err
