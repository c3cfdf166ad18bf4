"""How the real servers are had: built once, found again, started together."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml
from tools.stack import build, go
from tools.stack.build import Binaries
from tools.stack.go import CannotBuild
from tools.stack.server import free_port, next_free
from tools.stack.up import Addresses, AlreadyRunning, Ports, up

from node import until
from stack import servers
from stack.servers import DEPLOY

# Stands for Go: makes the files that would come out, and writes down that it was asked.
FAKE_GO = f"""#!{sys.executable}
import json, pathlib, sys
asked = sys.argv[1:]
if asked == ["env", "GOVERSION"]:
    print("go1.26.1")
    raise SystemExit
here = pathlib.Path(__file__).parent
if asked == ["env", "GOMODCACHE"]:
    print(here / "modules")
    raise SystemExit
with (here / "asked").open("a") as log:
    print(*asked[:2], file=log)
if (here / "broken").exists():
    print("no space left on device")
    raise SystemExit(1)
if asked[0] == "run":
    there = pathlib.Path(json.loads(pathlib.Path(asked[3]).read_text())["dist"]["output_path"])
    there.mkdir()
    (there / "otelcol").touch()
if asked[:2] == ["mod", "download"]:
    (here / "modules" / asked[2]).mkdir(parents=True)
if asked[0] == "build" and asked[-1] == "./cmd/loki":
    pathlib.Path(asked[asked.index("-o") + 1]).touch()
elif asked[0] == "build":
    for name in ("prometheus", "promtool"):
        pathlib.Path(asked[asked.index("-o") + 1], name).touch()
"""


class FakeGo:
    """A Go that is first on the PATH."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder = folder
        program = folder / "go"
        program.write_text(FAKE_GO)
        program.chmod(0o755)
        os.environ["PATH"] = f"{folder}:{os.environ['PATH']}"

    def asked(self) -> str:
        """Since it was last asked for."""
        log = self._folder / "asked"
        said = log.read_text() if log.exists() else ""
        log.unlink(missing_ok=True)
        return said

    def breaks(self) -> None:
        (self._folder / "broken").touch()


@pytest.fixture
def fake_go(tmp_path: Path) -> FakeGo:
    return FakeGo(tmp_path / "go")


def quiet(line: str) -> None:
    pass


def test_what_is_built_is_not_built_again(fake_go: FakeGo, tmp_path: Path) -> None:
    first = build.binaries(tmp_path / "room", quiet)
    assert "run" in fake_go.asked()

    second = build.binaries(tmp_path / "room", quiet)

    assert first == second
    assert all(each.is_file() for each in second)
    assert fake_go.asked() == ""


def test_a_build_that_fails_says_why_and_leaves_nothing_that_looks_built(
    fake_go: FakeGo, tmp_path: Path
) -> None:
    fake_go.breaks()

    for _ in range(2):
        with pytest.raises(CannotBuild, match=r"building collector .*\n.*no space left on device"):
            build.binaries(tmp_path / "room", quiet)


def test_two_processes_do_not_build_at_once(fake_go: FakeGo, tmp_path: Path) -> None:
    room = tmp_path / "room"
    room.mkdir()
    waiting = threading.Event()
    said: list[str] = []

    def hear(line: str) -> None:
        said.append(line)
        waiting.set()

    with (room / "lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        second = threading.Thread(target=build.binaries, args=(room, hear))
        second.start()
        assert waiting.wait(30)
        second.join(1.0)
        assert second.is_alive()
        assert fake_go.asked() == ""
    second.join(30)

    assert "waiting" in said[0]
    assert fake_go.asked() != ""


def no_network(what: str, command: list[str]) -> None:
    raise CannotBuild(f"{what} failed: no network")


@pytest.mark.parametrize("found", ["none", "too old"])
def test_without_a_go_it_is_said_what_to_do(found: str, tmp_path: Path) -> None:
    if found == "too old":
        program = tmp_path / "go"
        program.write_text("#!/bin/sh\necho go1.20.3\n")
        program.chmod(0o755)

    with pytest.raises(CannotBuild, match=r"need Go 1\.26 or newer.*no network"):
        go.find(tmp_path / "room", no_network, path=str(tmp_path))


@pytest.mark.parametrize(("ci", "outcome"), [("", pytest.skip), ("1", pytest.fail)])
def test_without_servers_tests_are_skipped_but_fail_where_ci_is_set(
    ci: str, outcome: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CI", ci)
    monkeypatch.setattr(servers, "_had", "no Go here")

    # A skip that is not expected would skip this test.
    with pytest.raises((pytest.skip.Exception, pytest.fail.Exception), match="no Go here") as how:
        servers.binaries()

    assert how.type is outcome.Exception


# Stands for Grafana, which is never fetched: its health, and what it was told.
FAKE_GRAFANA = f"""#!{sys.executable}
import http.server, json, os
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(dict(os.environ)).encode())
address = os.environ["GF_SERVER_HTTP_ADDR"], int(os.environ["GF_SERVER_HTTP_PORT"])
http.server.HTTPServer(address, Answer).serve_forever()
"""


def answer(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as said:
        return str(said.read().decode())


def assert_grafana_is_provisioned_as_deployed(addresses: Addresses) -> None:
    env = json.loads(answer(f"{addresses.grafana}/api/health"))
    provisioning, deployed = Path(env["GF_PATHS_PROVISIONING"]), DEPLOY / "grafana" / "provisioning"
    (sources,) = (provisioning / "datasources").iterdir()
    (boards,) = (provisioning / "dashboards").iterdir()
    (provider,) = yaml.safe_load(boards.read_text())["providers"]
    (as_deployed,) = yaml.safe_load((deployed / "dashboards" / boards.name).read_text())[
        "providers"
    ]
    assert sources.read_text() == (deployed / "datasources" / sources.name).read_text()
    # Every address in there is a variable, and each of them is set.
    asked = re.findall(r"^ +url: \$(\w+)$", sources.read_text(), re.M)
    assert set(asked) <= set(env)
    assert env["PROMETHEUS_URL"] == addresses.prometheus
    assert list(Path(provider.pop("options")["path"]).glob("*.json"))
    assert as_deployed.pop("options")
    assert provider == as_deployed


def assert_prometheus_scrapes_this_collector(addresses: Addresses) -> None:
    def target() -> str | None:
        found = json.loads(answer(f"{addresses.prometheus}/api/v1/targets"))["data"]
        return next((str(each["scrapeUrl"]) for each in found["activeTargets"]), None)

    assert "otelcol_process_uptime" in answer(until(target, "the collector among the targets"))


def test_the_stack_runs_once_and_ends_with_all_it_started(
    binaries: Binaries, tmp_path: Path
) -> None:
    grafana = tmp_path / "bin" / "grafana"
    grafana.parent.mkdir()
    grafana.write_text(FAKE_GRAFANA)
    grafana.chmod(0o755)
    os.environ["GRAFANA"] = str(grafana)

    # Not the usual ports: an agent on this machine would take the collector for its own.
    ports = Ports(*[free_port()] * 7)

    with up(binaries, tmp_path / "room", quiet, ports) as addresses:
        assert "Ready" in answer(f"{addresses.prometheus}/-/ready")
        request = urllib.request.Request(
            f"{addresses.collector}/v1/metrics",
            data=b"",
            headers={"content-type": "application/x-protobuf"},
        )
        with urllib.request.urlopen(request, timeout=10) as taken:
            assert taken.status == 200
        assert_grafana_is_provisioned_as_deployed(addresses)
        assert_prometheus_scrapes_this_collector(addresses)
        with (
            pytest.raises(AlreadyRunning) as second,
            up(binaries, tmp_path / "room", quiet, ports),
        ):
            pass
        assert second.value.addresses == addresses

    for address in filter(None, addresses):
        port = int(address.rpartition(":")[2])
        assert next_free(port) == port


def test_a_server_does_not_outlive_a_process_that_is_killed(
    binaries: Binaries, tmp_path: Path
) -> None:
    code = f"""
import os, signal
from pathlib import Path
from tools.stack.build import Binaries
from stack.servers import Prometheus
built = Binaries({str(binaries.collector)!r}, {str(binaries.prometheus)!r}, "")
Prometheus(built, Path({str(tmp_path)!r})).start()
os.kill(os.getpid(), signal.SIGKILL)
"""
    here = Path(__file__).parents[1]
    env = {**os.environ, "PYTHONPATH": f"{here}:{here.parent}"}

    ended = subprocess.run([sys.executable, "-c", code], env=env, timeout=300)

    assert ended.returncode == -signal.SIGKILL
    lock = tmp_path / "data" / "lock"
    assert lock.exists()
    until(lambda: _nobody_locks(lock), "the end of Prometheus")


def _nobody_locks(path: Path) -> bool:
    with path.open("r+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True
