"""The real collector and Prometheus for tests: on ports of their own, waited for, and ended."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import pytest
from tools.stack import build
from tools.stack.build import Binaries
from tools.stack.go import CannotBuild
from tools.stack.server import Server, environment, free_port

DEPLOY = Path(__file__).parents[2] / "deploy"
CONFIGURATIONS = DEPLOY / "otel-collector"

# Enough for a test that brings no configuration of its own.
_PROMETHEUS = "storage: {tsdb: {out_of_order_time_window: 2h}}\n"


_had: Binaries | str | None = None


def prepare(say: Callable[[str], None] = print) -> Binaries | str:
    """The servers, or why there are none; what is missing is built, which takes minutes."""
    global _had
    if _had is None:
        try:
            _had = build.binaries(say=say)
        except CannotBuild as why:
            _had = str(why)
            say(f"NO REAL SERVERS, THEIR TESTS DO NOT RUN: {_had}")
    return _had


def binaries() -> Binaries:
    """Where the servers are; without them the test is skipped, or fails where CI is set."""
    had = prepare()
    if isinstance(had, str):
        if os.environ.get("CI"):
            pytest.fail(f"The real servers cannot be had: {had}", pytrace=False)
        pytest.skip(f"the real servers cannot be had: {had.splitlines()[0]}")
    return had


class _Shown(Server):
    """Whoever fails sees what the server had to say."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, trace)
        if kind is not None:
            sys.stderr.write(f"--- {self.name} ---\n{self.last_lines()}\n")


class Sample(NamedTuple):
    """One series of an instant query; `name` is its `__name__`, empty where it has none."""

    name: str
    labels: dict[str, str]
    value: float
    time_s: float


class Series(NamedTuple):
    """One series with its samples: time in seconds, value."""

    name: str
    labels: dict[str, str]
    points: list[tuple[float, float]]


class Prometheus(_Shown):
    """Its data lie in `folder` and outlive `kill` and `start`; the port stays the same."""

    def __init__(
        self, built: Binaries, folder: Path, *flags: str, config: str | Path = _PROMETHEUS
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        if isinstance(config, str):
            (folder / "prometheus.yml").write_text(config)
            config = folder / "prometheus.yml"
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        self.otlp_metrics = f"{self.url}/api/v1/otlp/v1/metrics"
        self.remote_write = f"{self.url}/api/v1/write"
        super().__init__(
            "Prometheus",
            [
                str(built.prometheus),
                f"--config.file={config}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
                "--web.enable-otlp-receiver",
                "--web.enable-remote-write-receiver",
                "--web.enable-lifecycle",
                *flags,
            ],
            ready=f"{self.url}/-/ready",
            log=folder / "prometheus.log",
            env=environment(),
        )

    def query(self, promql: str, *, at_s: float | None = None) -> list[Sample]:
        """An instant query; at `at_s`, or now."""
        asked = {"query": promql, **({} if at_s is None else {"time": repr(at_s)})}
        return [
            Sample(_name(each), _labels(each), float(each["value"][1]), float(each["value"][0]))
            for each in self._ask("query", asked)
        ]

    def raw(self, selector: str) -> list[Series]:
        """The samples as they were stored: `selector` ends in a range, such as `up[10m]`."""
        return [_series(each) for each in self._ask("query", {"query": selector})]

    def query_range(
        self, promql: str, *, start_s: float, end_s: float, step_s: float
    ) -> list[Series]:
        """A range query, as a dashboard asks it."""
        times = {"start": repr(start_s), "end": repr(end_s), "step": repr(step_s)}
        return [_series(each) for each in self._ask("query_range", {"query": promql, **times})]

    def api(self, path: str) -> Any:
        """What `/api/v1/<path>` answers: `alerts`, `rules`, `targets`, `labels`."""
        return _data(urllib.request.Request(f"{self.url}/api/v1/{path}"))

    def _ask(self, how: str, asked: dict[str, str]) -> list[dict[str, Any]]:
        body = urllib.parse.urlencode(asked).encode()
        answer = _data(urllib.request.Request(f"{self.url}/api/v1/{how}", data=body))
        return list(answer["result"])


def _data(request: urllib.request.Request) -> Any:
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)["data"]
    except urllib.error.HTTPError as refused:
        # Otherwise a mistake in a query would be nothing but a number.
        with refused:
            raise AssertionError(refused.read().decode(errors="replace")) from None


def _name(result: dict[str, Any]) -> str:
    return str(result["metric"].get("__name__", ""))


def _labels(result: dict[str, Any]) -> dict[str, str]:
    return {name: value for name, value in result["metric"].items() if name != "__name__"}


def _series(result: dict[str, Any]) -> Series:
    points = [(float(time_s), float(value)) for time_s, value in result["values"]]
    return Series(_name(result), _labels(result), points)


class Collector(_Shown):
    """Runs these configurations, one laid over the other, with these variables.

    The queue lies in `folder` and outlives `kill` and `start`; the ports stay the same.
    """

    def __init__(
        self,
        built: Binaries,
        folder: Path,
        *configs: Path,
        scheme: str = "http",
        **env: str,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        ports = {
            name: str(free_port())
            for name in ("OTLP_GRPC_PORT", "OTLP_HTTP_PORT", "HEALTH_PORT", "TELEMETRY_PORT")
        }
        self.http = f"{scheme}://127.0.0.1:{ports['OTLP_HTTP_PORT']}"
        self.telemetry = f"http://127.0.0.1:{ports['TELEMETRY_PORT']}/metrics"
        super().__init__(
            "collector",
            [str(built.collector), *_named(configs)],
            ready=f"http://127.0.0.1:{ports['HEALTH_PORT']}",
            log=folder / "collector.log",
            env={
                **environment(),
                "LISTEN_HOST": "127.0.0.1",
                "QUEUE_DIR": str(folder / "queue"),
                **ports,
                **env,
            },
        )


def validated(built: Binaries, *configs: Path, **env: str) -> tuple[int, str]:
    """What the collector says of a configuration without starting it: exit status and words."""
    done = subprocess.run(
        [built.collector, "validate", *_named(configs)],
        env={**environment(), **env},
        capture_output=True,
        text=True,
        timeout=300,
    )
    return done.returncode, done.stdout + done.stderr


def _named(configs: tuple[Path, ...]) -> list[str]:
    return [word for config in configs for word in ("--config", str(config))]
