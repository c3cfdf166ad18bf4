"""Builds the collector, Prometheus and promtool into .stack/ once."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

from tools.stack import go, versions
from tools.stack.go import CannotBuild

ROOM = Path(__file__).parents[2] / ".stack"
_LINES_OF_A_FAILURE = 15


class Binaries(NamedTuple):
    """Where the servers are."""

    collector: Path
    prometheus: Path
    promtool: Path


def binaries(room: Path = ROOM, say: Callable[[str], None] = print) -> Binaries:
    """The servers of the pinned versions; missing ones are built, which takes minutes."""
    room.mkdir(parents=True, exist_ok=True)
    parts = {"collector": _build_collector, "prometheus": _build_prometheus}
    with _alone(room, say):
        missing = {part: build for part, build in parts.items() if not _is_built(room / part)}
        if missing:
            steps = _Steps(room, say)
            steps.go = go.find(room, steps.run)
            for part, build in missing.items():
                _into(room / part, partial(build, steps))
    return Binaries(
        room / "collector" / "otelcol",
        room / "prometheus" / "prometheus",
        room / "prometheus" / "promtool",
    )


def collector_manifest(folder: Path) -> str:
    """The input of the collector builder (YAML is a superset of JSON)."""
    asked = {
        "dist": {
            "name": "otelcol",
            "description": "The collector with what otel_ddp's configurations use",
            "version": versions.COLLECTOR,
            "output_path": str(folder),
        },
        **{
            kind: [{"gomod": module} for module in modules]
            for kind, modules in versions.COLLECTOR_PARTS.items()
        },
    }
    return json.dumps(asked, indent=1)


def _recipe(part: str) -> str:
    """The inputs of a build: if they change, the binary is built again."""
    if part == "collector":
        return collector_manifest(Path())
    return f"{versions.PROMETHEUS_MODULE} {versions.PROMETHEUS_TAGS}"


def _is_built(folder: Path) -> bool:
    stamp = folder / "stamp"
    return stamp.is_file() and stamp.read_text() == _recipe(folder.name)


@contextmanager
def _alone(room: Path, say: Callable[[str], None]) -> Iterator[None]:
    with (room / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("stack: another process is building the servers; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        # The kernel drops the lock with the descriptor, however this process ends.
        yield


def _into(folder: Path, build: Callable[[Path], None]) -> None:
    """Atomic: an interrupted build leaves nothing."""
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    build(unfinished)
    (unfinished / "stamp").write_text(_recipe(folder.name))
    shutil.rmtree(folder, ignore_errors=True)
    unfinished.rename(folder)


class _Steps:
    """Runs the steps of a build, and prints a line for each."""

    def __init__(self, room: Path, say: Callable[[str], None]) -> None:
        self._log, self._say = room / "build.log", say
        self.go = Path("go")
        # Without toolchain downloads and the user's module settings.
        self._env = {
            **os.environ,
            "CGO_ENABLED": "0",
            "GOTOOLCHAIN": "local",
            "GOFLAGS": "-buildvcs=false",
            "GOWORK": "off",
        }

    def run(self, what: str, command: list[str], cwd: Path | None = None) -> None:
        began = time.monotonic()
        # The collector builder looks for Go on the PATH.
        path = f"{self.go.parent}:{os.environ.get('PATH', '')}"
        with self._log.open("w") as log:
            try:
                failed = subprocess.run(
                    command,
                    cwd=cwd,
                    env={**self._env, "PATH": path},
                    stdout=log,
                    stderr=subprocess.STDOUT,
                ).returncode
            except OSError as why:
                raise CannotBuild(f"{what}: {why}") from None
        if failed:
            lines = self._log.read_text(errors="replace").splitlines()
            raise CannotBuild("\n".join([f"{what} failed:", *lines[-_LINES_OF_A_FAILURE:]]))
        self._say(f"stack: {what}: {time.monotonic() - began:.0f} s")


def _build_collector(steps: _Steps, folder: Path) -> None:
    sources = folder / "sources"
    manifest = folder / "manifest.yaml"
    manifest.write_text(collector_manifest(sources))
    builder = f"go.opentelemetry.io/collector/cmd/builder@v{versions.COLLECTOR}"
    steps.run(
        f"building collector {versions.COLLECTOR}",
        [str(steps.go), "run", builder, "--config", str(manifest), "--ldflags=-s -w"],
    )
    (sources / "otelcol").rename(folder / "otelcol")


def _build_prometheus(steps: _Steps, folder: Path) -> None:
    # Prometheus' own go.mod excludes versions, which `go install` refuses: a module of our own.
    sources = folder / "sources"
    sources.mkdir()
    commands = [
        f"github.com/prometheus/prometheus/cmd/{name}" for name in ("prometheus", "promtool")
    ]
    at = [f"{command}@{versions.PROMETHEUS_MODULE}" for command in commands]
    named = f"-X github.com/prometheus/common/version.Version={versions.PROMETHEUS}"
    steps.run(
        f"fetching Prometheus {versions.PROMETHEUS}",
        ["sh", "-c", '"$0" mod init stack && exec "$0" get -tool "$@"', str(steps.go), *at],
        cwd=sources,
    )
    steps.run(
        f"building Prometheus {versions.PROMETHEUS} and promtool",
        [
            *(str(steps.go), "build", "-tags", versions.PROMETHEUS_TAGS),
            *(f"-ldflags=-s -w {named}", "-o", f"{folder}/", *commands),
        ],
        cwd=sources,
    )
