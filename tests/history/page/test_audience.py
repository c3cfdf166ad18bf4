"""Who sees what: our own user and root all of it, others what /metrics tells them."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from histories import two_attempts, write_history
from history.page.serving import Client, Served
from otel_ddp.agent.ledger import Ledger
from otel_ddp.agent.serve.endpoint import Endpoint
from otel_ddp.agent.serve.server import is_own
from otel_ddp.history.page import static_files
from otel_ddp.history.page.app import App
from otel_ddp.journal.process_state import ProcessState
from otel_ddp.journal.survey import Survey

_STRANGER = 65534


def live() -> Survey:
    alive = ProcessState("alive", "sweep", rank=0, started_ns=2**62, reason="RuntimeError: secret")
    who = {"group": "sweep", "run": "alive", "rank": "0"}
    verdict = {"kind": "stall", "who": who, "phase": "", "sentence": "it stands in secret.py"}
    agent = {"node": "node-0", "remark": "secret"}
    return Survey(agents=[agent], processes=[alive], verdicts=[verdict])


@pytest.fixture
def endpoint(tmp_path: Path) -> Iterator[Endpoint]:
    spent = two_attempts(10**18, why="secret")
    write_history(tmp_path, "alive", late=1, state="running", about=spent)
    write_history(tmp_path, "ended")
    app = App(tmp_path, live=live, ask_stacks=lambda *_: [])
    served = Endpoint(Ledger(), "127.0.0.1", 0, app)
    served.start()
    yield served
    served.stop()


def ask(port: int, path: str, method: str = "GET", **headers: str) -> tuple[int, str]:
    found = Client(port).ask(path, method, **headers)
    return found.status, found.body.decode()


def as_stranger(work: Callable[[], Any]) -> Any:
    """The answer of a process of another user."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setgid(_STRANGER)
            os.setuid(_STRANGER)
            os.write(writing, json.dumps(work()).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        content = pipe.read()
    os.waitpid(pid, 0)
    return json.loads(content)


def test_our_own_user_sees_everything(endpoint: Endpoint) -> None:
    _, runs = ask(endpoint.port, "/api/runs")
    status, head = ask(endpoint.port, "/api/run?run=alive")
    found = json.loads(head)

    assert {each["run"] for each in json.loads(runs)["runs"]} == {"alive", "ended"}
    assert (status, found["config"]) == (200, {"lr": 0.3, "batch": 32})
    _, table = ask(endpoint.port, "/api/ranks?run=alive")
    assert json.loads(table)["ranks"][0]["reason"] == "RuntimeError: secret"
    assert [each.get("why") for each in found["time"]["attempts"]] == ["secret", None]
    assert "secret.py" in ask(endpoint.port, "/api/now")[1]
    assert ask(endpoint.port, "/api/stacks", "POST", X_Otel_Ddp="page")[0] == 200


def test_another_user_sees_nothing_but_the_empty_page(endpoint: Endpoint) -> None:
    questions = ("runs", "now", "run?run=alive", "ranks?run=alive", "values?run=alive&name=loss")
    port = endpoint.port
    page = as_stranger(lambda: ask(port, "/"))
    answers = as_stranger(lambda: [ask(port, f"/api/{each}") for each in questions])
    answers.append(as_stranger(lambda: ask(port, "/api/stacks", "POST", X_Otel_Ddp="page")))

    # But for its number it is the page of anybody.
    assert (page[0], len(page[1])) == (200, len(static_files.served()[0]))
    assert {status for status, _ in answers} == {403}
    assert all("OTEL_DDP_SCRAPE_TOKEN_FILE" in json.loads(body)["error"] for _, body in answers)
    everything = " ".join(body for _, body in answers)
    for word in ("secret", "is slow in", "batch", "alive"):
        assert word not in everything


def test_a_folder_shows_another_user_nothing(tmp_path: Path) -> None:
    write_history(tmp_path)
    with Served(App(tmp_path)) as served:
        port = served.port
        answers = as_stranger(lambda: [ask(port, "/api/runs"), ask(port, "/api/run?run=lr-0.3")])

    assert [status for status, _ in answers] == [403, 403]


def test_a_token_admits_to_everything(tmp_path: Path) -> None:
    write_history(tmp_path)
    served = Endpoint(Ledger(), "127.0.0.1", 0, App(tmp_path), token=b"abc")
    served.start()
    try:
        port = served.port
        named = {"Authorization": "Bearer abc"}
        with_token = as_stranger(lambda: ask(port, "/api/run?run=lr-0.3", **named))
        without = ask(port, "/api/run?run=lr-0.3")
        post_without = ask(port, "/api/stacks", "POST", X_Otel_Ddp="page")
    finally:
        served.stop()

    assert (with_token[0], without[0], post_without[0]) == (200, 401, 401)


def row(local: str, remote: str, state: str, uid: int, inode: int) -> str:
    return f"   1: {local} {remote} {state} 00000000:00000000 00:00000000 00000000 {uid} 0 {inode}"


LOOPBACK = "0100007F" if sys.byteorder == "little" else "7F000001"
MAPPED = f"{'0' * 16}{'FFFF0000' if sys.byteorder == 'little' else '0000FFFF'}{LOOPBACK}"


@pytest.mark.parametrize(
    ("table", "line", "expected"),
    [
        ("tcp", row(f"{LOOPBACK}:9C40", f"{LOOPBACK}:24F8", "01", 0, 7), True),
        ("tcp", row(f"{LOOPBACK}:9C40", f"{LOOPBACK}:24F8", "01", _STRANGER, 7), False),
        # The other direction is our own end.
        ("tcp", row(f"{LOOPBACK}:24F8", f"{LOOPBACK}:9C40", "01", 0, 7), False),
        # What its process has closed is nobody's, and the kernel says root.
        ("tcp", row(f"{LOOPBACK}:9C40", f"{LOOPBACK}:24F8", "01", 0, 0), False),
        ("tcp6", row(f"{MAPPED}:9C40", f"{MAPPED}:24F8", "01", 0, 7), True),
    ],
)
def test_the_kernel_says_who_holds_the_other_end(
    tmp_path: Path, table: str, line: str, expected: bool
) -> None:
    (tmp_path / table).write_text(f"head\n{line}\n")

    peer, own = ("127.0.0.1", 0x9C40), ("127.0.0.1", 0x24F8)

    assert is_own(peer, own, tmp_path) is expected


def test_a_connection_from_another_machine_is_not_ours(tmp_path: Path) -> None:
    assert not is_own(("192.0.2.7", 40000), ("192.0.2.1", 9464), tmp_path)
