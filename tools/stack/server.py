"""Starts one server, waits until it is up, and ends it."""

from __future__ import annotations

import ctypes
import os
import random
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Self

_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG = 1
_UP_WITHIN_S = 60.0
_DOWN_WITHIN_S = 15.0
_LINES_OF_A_FAILURE = 30


class NotUp(Exception):
    """The text names the server, and has the end of its log."""


class Server:
    """A process that is up once `ready` answers with 200; its log outlives it."""

    def __init__(
        self, name: str, command: Sequence[str], *, ready: str, log: Path, env: Mapping[str, str]
    ) -> None:
        self.name, self.log = name, log
        self._command, self._ready, self._env = list(command), ready, dict(env)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("ab") as log:
            try:
                self._process = self._begin(log)
            except OSError as why:
                raise NotUp(f"{self.name} cannot be started: {why}") from None
        deadline = time.monotonic() + _UP_WITHIN_S
        while not _answers(self._ready):
            if self._process.poll() is not None:
                raise NotUp(
                    f"{self.name} ended with {self._process.returncode}:\n{self.last_lines()}"
                )
            if time.monotonic() > deadline:
                self.kill()
                raise NotUp(f"{self.name} is not up after {_UP_WITHIN_S:g} s:\n{self.last_lines()}")
            time.sleep(0.05)

    def _begin(self, log: IO[bytes]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self._command,
            env=self._env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            # Ctrl-C is for the program that started it, which ends the servers one by one.
            start_new_session=True,
            preexec_fn=_die_with_the_parent,
        )

    def last_lines(self) -> str:
        """The end of its log."""
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join(lines[-_LINES_OF_A_FAILURE:])

    def send_signal(self, how: signal.Signals) -> None:
        """Send a signal to the running server."""
        if self._process is not None:
            self._process.send_signal(how)

    def kill(self) -> None:
        """Send SIGKILL."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """Send SIGTERM, wait, then send SIGKILL."""
        self._end(signal.SIGTERM)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def _end(self, how: signal.Signals) -> None:
        if self._process is None:
            return
        self._process.send_signal(how)
        try:
            self._process.wait(_DOWN_WITHIN_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None


def _die_with_the_parent() -> None:
    # However the parent ends, killed or not: no server is left behind.
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def is_free(port: int) -> bool:
    with socket.socket() as attempt:
        attempt.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            attempt.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def free_port() -> int:
    """A port that stays reserved while its server is down, also from our other processes.

    Outside of the ephemeral range: outgoing connections take ports there, and a client that retries
    such a port eventually connects to itself.
    """
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        if _reserve(port) and is_free(port):
            return port


def _reserve(port: int) -> bool:
    """Reserve a port among our processes until this process ends; returns False if it is taken."""
    # An abstract socket disappears with the process.
    name = socket.socket(socket.AF_UNIX)
    try:
        name.bind(f"\0otel_ddp-port-{port}")
    except OSError:
        name.close()
        return False
    # Left open, to the end of this process.
    name.detach()
    return True


def next_free(port: int) -> int:
    """The port, or the next free one."""
    while not is_free(port):
        port += 1
    return port


def environment() -> dict[str, str]:
    """Ours, without what would configure the SDK inside the collector."""
    return {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
