"""The scrape endpoint: names, formats, odd label values, odd clients, and who may read it."""

from __future__ import annotations

import base64
import contextlib
import errno
import socket
import socketserver
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as parse_openmetrics,
)
from prometheus_client.parser import text_string_to_metric_families as parse_classic

from agent.scrape.serving import serving
from make import labels_of
from otel_ddp.agent.ledger import Buckets, Ledger
from otel_ddp.agent.serve.endpoint import Endpoint
from otel_ddp.agent.serve.server import NoToken, admits, find_token
from otel_ddp.history.page.app import App
from otel_ddp.vocabulary import catalog

PAGE = App(Path("/nowhere"))

RANK = labels_of(0)
SNAPSHOT = Path(__file__).with_name("exposition.txt")


def filled() -> Ledger:
    ledger = Ledger()
    loss = ledger.series(catalog.TRAINING_SCALAR, (*RANK, ("name", "loss"), ("split", "train")))
    ledger.log(loss, 0.25, 1_000_000_000)
    ledger.put(catalog.TRAINING_STATE, RANK, 1.0, 1_000_000_000)
    ledger.put(catalog.TRAINING_STEPS, RANK, 12.0, 1_000_000_000, 5)
    duration = catalog.TRAINING_CHECKPOINT_DURATION
    counts = tuple(1.0 if i in (0, 2) else 0.0 for i in range(len(duration.bounds) + 1))
    ledger.put(duration, RANK, Buckets(counts, 1.5), 1_000_000_000, 5)
    ledger.put(catalog.HW_GPU_MEMORY_USAGE, (("node", "n1"), ("hw.id", "GPU-1")), 5e9, 1)
    return ledger


@pytest.fixture
def served() -> Iterator[tuple[Ledger, Endpoint]]:
    ledger = filled()
    with serving(ledger) as endpoint:
        yield ledger, endpoint


def get(endpoint: Endpoint, path: str, accept: str = "") -> tuple[str, str]:
    url = endpoint.url.replace("/metrics", path)
    request = urllib.request.Request(url, headers={"Accept": accept} if accept else {})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.headers["Content-Type"], answer.read().decode()


def refusal(endpoint: Endpoint, path: str) -> tuple[int, str]:
    with pytest.raises(urllib.error.HTTPError) as refused:
        get(endpoint, path)
    with refused.value as answer:
        return answer.code, answer.read().decode()


def test_the_exposed_text_is_the_snapshot(served: tuple[Ledger, Endpoint]) -> None:
    kind, text = get(served[1], "/metrics")

    assert kind.startswith("text/plain")
    assert SNAPSHOT.read_text() == text


@pytest.mark.parametrize("odd", ['a"b', "a\nb", "a\\b", "ü√ 漢", "", "{}", "a,b=c"])
def test_odd_names_come_through_unharmed(served: tuple[Ledger, Endpoint], odd: str) -> None:
    ledger, endpoint = served
    labels = (*RANK, ("name", odd), ("split", "train"))
    ledger.log(ledger.series(catalog.TRAINING_SCALAR, labels), 7.0, 1)

    for accept, parse in (("", parse_classic), ("application/openmetrics-text", parse_openmetrics)):
        _, text = get(endpoint, "/metrics", accept)
        found = [
            sample.labels["name"]
            for family in parse(text)
            for sample in family.samples
            if sample.name == "training_scalar" and sample.value == 7.0
        ]
        assert found == [odd]


def test_a_label_that_is_no_utf_8_takes_no_other_series_along(
    served: tuple[Ledger, Endpoint],
) -> None:
    ledger, endpoint = served
    ledger.put(catalog.TRAINING_STATE, (("node", "n\udcff"),), 1.0, 1)

    _, text = get(endpoint, "/metrics")

    assert 'training_state{node="n?"} 1.0' in text
    assert "training_steps_total" in text


def test_health_page_and_wrong_paths(served: tuple[Ledger, Endpoint]) -> None:
    endpoint = served[1]

    assert get(endpoint, "/healthz")[1] == "ok\n"
    assert "<main" in get(endpoint, "/")[1]
    assert refusal(endpoint, "/etc/passwd")[0] == 404


def test_an_agent_of_which_something_does_not_run_is_not_healthy() -> None:
    problems = ["the thread metrics does not run: can't start new thread"]
    idle_s = [0.0]
    with serving(idle_s=lambda: idle_s[0], problems=lambda: problems) as endpoint:
        assert refusal(endpoint, "/healthz") == (503, f"{problems[0]}\n")
        problems.clear()
        assert get(endpoint, "/healthz")[1] == "ok\n"
        idle_s[0] = 75.0
        assert refusal(endpoint, "/healthz") == (503, "the agent's loop has not moved for 75 s\n")


def status(url: str, authorization: str = "") -> int:
    headers = {"Authorization": authorization} if authorization else {}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers)) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as refused:
        with refused:
            return refused.code


def basic(name: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{name}:{password}".encode()).decode()


def test_the_token_is_let_in_and_nothing_else() -> None:
    expected = {
        "": 401,
        "Bearer abc": 200,
        "bearer abc": 200,
        "Bearer abd": 401,
        # As a browser shows it, under any name.
        basic("anyone", "abc"): 200,
        basic("abc", ""): 401,
        basic("anyone", "abd"): 401,
        "Basic abc": 401,
    }
    with serving(token=b"abc") as endpoint:
        for path in ("", "metrics"):
            url = endpoint.url.replace("metrics", path)
            assert {each: status(url, each) for each in expected} == expected
        # A probe has no token.
        assert status(endpoint.url.replace("metrics", "healthz")) == 200
    assert not any(admits(b"abc", f"{kind} \u00fc") for kind in ("Bearer", "Basic"))


def test_loopback_is_open_and_other_addresses_need_a_token(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("abc\n")

    assert find_token("", "127.0.0.1") == find_token("", "::1") == b""
    assert find_token("insecure", "0.0.0.0") == b""
    for host in ("127.0.0.1", "0.0.0.0"):
        assert find_token(str(path), host) == b"abc"
    for host in ("0.0.0.0", "::", "10.1.2.3"):
        with pytest.raises(NoToken, match=f"^{host} is reached from other machines: set "):
            find_token("", host)


def test_a_file_without_a_token_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")

    for name, why in {"empty": "is empty", "nope": "cannot be read: No such file"}.items():
        path = tmp_path / name
        with pytest.raises(NoToken, match=f"^OTEL_DDP_SCRAPE_TOKEN_FILE names {path}, which {why}"):
            find_token(str(path), "127.0.0.1")


# -- many clients, and slow ones: those who ask are answered


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    with serving() as endpoint:
        yield endpoint


def connect(endpoint: Endpoint) -> socket.socket:
    return socket.create_connection(("127.0.0.1", endpoint.port), timeout=60)


def test_a_client_without_a_descriptor_keeps_no_core_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[float] = []
    thrice = threading.Event()

    def full(_: object) -> None:
        tried.append(time.monotonic())
        if len(tried) == 3:
            thrice.set()
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch, serving() as endpoint:
        patch.setattr(socketserver.TCPServer, "get_request", full)
        with connect(endpoint):
            assert thrice.wait(60)

    # However busy the machine is, two pauses take no less.
    assert tried[2] - tried[0] > 0.08


def drip(clients: list[socket.socket]) -> None:
    for each in clients:
        # Most have been cut off.
        with contextlib.suppress(OSError):
            each.send(b"G")


def test_idle_and_dripping_clients_stop_no_scrape(endpoint: Endpoint) -> None:
    with contextlib.ExitStack() as clients:
        idle, dripping = (
            [clients.enter_context(connect(endpoint)) for _ in range(80)] for _ in "ab"
        )
        answered = []
        for _ in range(8):
            drip(dripping)
            answered.append(status(endpoint.url))

        # Those that are awaited longest have made room: the endpoint is as bounded as ever. It was
        # at once, not by their timeout.
        idle[0].settimeout(1)
        assert idle[0].recv(1) == b""

    assert answered == [200] * 8
