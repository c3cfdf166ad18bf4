"""Plays one training of the demo: each node of it in a directory, with an agent, of its own."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from otel_ddp.cli.demo.injection import Injection
from otel_ddp.cli.text import dated
from otel_ddp.journal.place import Place
from otel_ddp.journal.survey import told_by_agent

if TYPE_CHECKING:
    from typing_extensions import Self

_PREFIX = "otel_ddp-demo-"
# The first import of torch in a new environment may take a minute.
_AGENT_STARTS_S = 120.0
_VERDICT_S = 3.5
# It writes its history and exports once more, on a machine that may be busy.
_AGENT_ENDS_S = 30.0
# The user's variables that belong to another training: its identity and its agent.
_NOT_PASSED_ON = (
    *("OTEL_DDP_AGENT", "OTEL_DDP_STRATEGY", "OTEL_DDP_LINGER_S"),
    *("OTEL_DDP_RUN", "OTEL_DDP_INHERITED_RUN", "OTEL_DDP_RANK", "OTEL_DDP_LOCAL_RANK"),
    *("OTEL_DDP_WORLD_SIZE", "OTEL_DDP_NODE_RANK"),
)


class _Node:
    """One node: torchrun and its ranks, and their place."""

    def __init__(self, root: Path, command: Sequence[str], env: Mapping[str, str]) -> None:
        root.mkdir(exist_ok=True)
        self.place = Place(root / "place")
        self._errors = root / "training.log"
        own = {
            "OTEL_DDP_DIR": str(self.place.directory),
            "OTEL_DDP_SPOOL_DIR": str(root / "spool"),
            "OTEL_DDP_HISTORY_DIR": str(root / "history"),
        }
        with self._errors.open("wb") as log:
            # torchrun prints pages about a killed rank or Ctrl-C: shown only where it fails.
            self.process = subprocess.Popen(
                command, env={**env, **own}, stderr=log, start_new_session=True
            )

    def errors(self) -> str:
        return self._errors.read_text(errors="replace")

    def end(self) -> None:
        """End the training, then its agent."""
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait()
        _stop_agent(self.place)


class Played:
    """A training with its trouble, for a `with` block, after which nothing of it is there."""

    def __init__(
        self, run: str, seconds: float, ranks: int, injected: Injection, nodes: int = 1
    ) -> None:
        """*ranks*: of each node."""
        self.run, self.injected = run, injected
        self._seconds, self._ranks, self._count = seconds, ranks, nodes
        self._nodes: list[_Node] = []

    def __enter__(self) -> Self:
        try:
            self._root = Path(tempfile.mkdtemp(prefix=_PREFIX, dir="/dev/shm"))
        except OSError:
            self._root = Path(tempfile.mkdtemp(prefix=_PREFIX))
        port = _free_port() if self._count > 1 else 0
        for number in range(self._count):
            root, env, meet = self._root, self._environment(), ["--standalone"]
            if self._count > 1:
                root = self._root / f"node-{number}"
                env["OTEL_DDP_NODE"] = f"node-{number}"
                meet = [f"--nnodes={self._count}", f"--node-rank={number}"]
                meet += ["--master-addr=127.0.0.1", f"--master-port={port}"]
            command = [
                *(sys.executable, "-m", "torch.distributed.run", *meet),
                *(f"--nproc-per-node={self._ranks}", "-m", "otel_ddp.cli.demo.training"),
                *(str(self._seconds), self.injected.text),
            ]
            self._nodes.append(_Node(root, command, env))
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
            for each in self._nodes:
                each.end()
            shutil.rmtree(self._root, ignore_errors=True)
        finally:
            signal.signal(signal.SIGINT, before)

    def _environment(self) -> dict[str, str]:
        return {
            **{name: text for name, text in os.environ.items() if name not in _NOT_PASSED_ON},
            "OTEL_DDP_RUN": self.run,
            # The default of a minute is too long for a demo.
            "OTEL_DDP_STALL_TIMEOUT_S": os.environ.get("OTEL_DDP_STALL_TIMEOUT_S", "5"),
            # On a busy machine the budget is for one step in 16: too few to name a rank in 20 s.
            "OTEL_DDP_OVERHEAD": os.environ.get("OTEL_DDP_OVERHEAD", "all"),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        }

    @property
    def place(self) -> Place:
        """That of rank 0's node."""
        return self._nodes[0].place

    @property
    def places(self) -> list[Place]:
        return [each.place for each in self._nodes]

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The launcher on rank 0's node; the others end when it does."""
        return self._nodes[0].process

    def errors(self) -> str:
        """What the training and its launchers printed as errors."""
        return "".join(each.errors() for each in self._nodes)

    def first_agent(self) -> Mapping[str, Any]:
        """How the agent describes itself; it starts a moment after the first rank."""
        deadline = time.monotonic() + _AGENT_STARTS_S
        while time.monotonic() < deadline and self.process.poll() is None:
            if agent := told_by_agent(self.place).agent:
                return agent
            time.sleep(0.1)
        return {}

    def verdicts(self) -> list[str]:
        """Those of the agent on rank 0's node, which leads; on a death it comes a moment later."""
        if self.injected.what == "kill":
            # The kernel reports the signal once the launcher has waited for the dead process.
            time.sleep(_VERDICT_S)
        agent, now_ns = told_by_agent(self.place), time.time_ns()
        return [dated(each, now_ns) for each in (*agent.past, *agent.verdicts)]


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


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
