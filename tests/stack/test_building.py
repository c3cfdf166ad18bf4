"""How the real servers are started: together, once, and never longer than what started them."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
import yaml
from tools.stack.build import Binaries
from tools.stack.server import free_port, next_free
from tools.stack.up import Addresses, AlreadyRunning, Ports, up

from node import until
from stack.servers import DEPLOY

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

    with up(binaries, tmp_path / "room", lambda line: None, ports) as addresses:
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
            up(binaries, tmp_path / "room", lambda line: None, ports),
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
