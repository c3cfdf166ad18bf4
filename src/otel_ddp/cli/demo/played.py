"""Plays one training of the demo: in a directory, and with an agent, of its own."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from otel_ddp import files
from otel_ddp.agent.export.otlp import one_line
from otel_ddp.cli.demo.injection import Injection
from otel_ddp.cli.text import dated, integer, mappings
from otel_ddp.journal.place import Place

if TYPE_CHECKING:
    from typing_extensions import Self

_PREFIX = "otel_ddp-demo-"
_AGENT_STARTS_S = 30.0
_VERDICT_S = 3.5
# How long a training may take to see that it is to end, and to end.
_END_S = 30.0
_AGENT_ENDS_S = 5.0
# The user's variables that belong to another training: its identity and its agent.
_NOT_PASSED_ON = (
    *("OTEL_DDP_AGENT", "OTEL_DDP_STRATEGY", "OTEL_DDP_LINGER_S"),
    *("OTEL_DDP_RUN", "OTEL_DDP_INHERITED_RUN", "OTEL_DDP_RANK", "OTEL_DDP_LOCAL_RANK"),
    *("OTEL_DDP_WORLD_SIZE", "OTEL_DDP_NODE_RANK"),
)


class Played:
    """A training with its trouble, for a `with` block, after which nothing of it is there."""

    def __init__(
        self, run: str, seconds: float, ranks: int, injected: Injection, **env: str
    ) -> None:
        self.run, self.injected = run, injected
        self._seconds, self._ranks, self._env = seconds, ranks, env

    def __enter__(self) -> Self:
        try:
            self._root = Path(tempfile.mkdtemp(prefix=_PREFIX, dir="/dev/shm"))
        except OSError:
            self._root = Path(tempfile.mkdtemp(prefix=_PREFIX))
        self.place = Place(self._root / "place")
        self._errors, self._end_file = self._root / "training.log", self._root / "end"
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(self._ranks), "-m", "otel_ddp.cli.demo.training"),
            *(str(self._seconds), str(self._end_file), self.injected.text),
        ]
        with self._errors.open("wb") as log:
            # torchrun prints pages about a killed rank or Ctrl-C: shown only where it fails.
            self.process = subprocess.Popen(
                command, env=self._environment(), stderr=log, start_new_session=True
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # A second Ctrl-C would leave processes behind.
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            if self.process.poll() is None:
                self.process.terminate()
                self.process.wait()
            _stop_agent(self.place)
            shutil.rmtree(self._root, ignore_errors=True)
        finally:
            signal.signal(signal.SIGINT, before)

    def _environment(self) -> dict[str, str]:
        return {
            **{name: text for name, text in os.environ.items() if name not in _NOT_PASSED_ON},
            "OTEL_DDP_DIR": str(self.place.directory),
            "OTEL_DDP_RUN": self.run,
            "OTEL_DDP_SPOOL_DIR": str(self._root / "spool"),
            "OTEL_DDP_POSTMORTEM_DIR": str(self._root / "postmortems"),
            "OTEL_DDP_HISTORY_DIR": str(self._root / "history"),
            # The default of a minute is too long for a demo.
            "OTEL_DDP_STALL_TIMEOUT_S": os.environ.get("OTEL_DDP_STALL_TIMEOUT_S", "5"),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            **self._env,
        }

    def end(self) -> None:
        """Ask the ranks to come to their end: a run that is cut off is another trouble."""
        self._end_file.touch()
        try:
            self.process.wait(0 if self.injected.deadly else _END_S)
        except subprocess.TimeoutExpired:
            # A training that hangs on purpose does not end by itself.
            self.process.terminate()
            self.process.wait()

    def errors(self) -> str:
        """What the training and its launcher printed as errors."""
        return self._errors.read_text(errors="replace")

    def last_error(self) -> str:
        """The last line of that."""
        lines = [line for line in self.errors().splitlines() if line.strip()]
        return one_line(lines[-1]) if lines else "it printed nothing"

    def first_agent(self) -> Mapping[str, Any]:
        """How the agent describes itself; it starts a moment after the first rank."""
        deadline = time.monotonic() + _AGENT_STARTS_S
        while time.monotonic() < deadline and self.process.poll() is None:
            if agent := files.read_mapping(self.place.agent_file):
                return agent
            time.sleep(0.1)
        return {}

    def verdicts(self) -> list[str]:
        """The agent's verdicts; that on a death comes a moment after it."""
        if self.injected.what == "kill":
            # The kernel reports the signal once the launcher has waited for the dead process.
            time.sleep(_VERDICT_S)
        described, now_ns = files.read_mapping(self.place.agent_file), time.time_ns()
        found = [each for key in ("past", "verdicts") for each in mappings(described.get(key))]
        found.sort(key=lambda each: integer(each.get("since_ns")) or 0)
        return [dated(each, now_ns) for each in found]


def end_by_signals() -> None:
    """Let SIGTERM and SIGHUP clean up too, as Ctrl-C does."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda received, _: sys.exit(128 + received))


def _stop_agent(place: Place) -> None:
    """End the agent, and wait for its last export."""
    pid = place.agent_pid()
    if not pid:
        return
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + _AGENT_ENDS_S
    while place.agent_is_alive() and time.monotonic() < deadline:
        time.sleep(0.02)
