"""otel-ddp demo: trains on the CPU and shows what the node recorded."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from otel_ddp.cli.command import end_by_signals
from otel_ddp.cli.picture import picture
from otel_ddp.errors import ConfigError, MissingDependency
from otel_ddp.identity import addresses
from otel_ddp.journal.place import Place
from otel_ddp.journal.survey import last_of_agent, survey

_PREFIX = "otel_ddp-demo-"
_RANKS = 2
# Faults that the demo can inject. Either a phase, the rank, and how late the rank is in this phase;
# or `hang` or `kill`, and the rank.
_FAULTS = ("backward:1:30ms", "data:1:30ms", "hang:1", "kill:1")
# The fault begins only at this step, so that the page shows healthy steps before it.
TROUBLE_AT = 150
_NO_TORCH = (
    "The demo trains with PyTorch, which is not installed for this Python: pip install "
    "'torch>=2.4'. After `uvx` or `pipx run`, add `--with torch`."
)
# How long to wait for the agent. A rank starts it once torch is imported, and the first import in a
# new environment may take a minute.
_AGENT_STARTS_S = 120.0
_VERDICT_S = 3.5
# How long to wait for the agent's end: it first writes its history and exports once more, and the
# machine may be busy.
_AGENT_ENDS_S = 30.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--seconds", type=float, default=20.0, help="how long to train (default: %(default)g)"
    )
    parser.add_argument(
        "--inject",
        default="",
        choices=_FAULTS,
        help="what goes wrong with rank 1 after a while, such as 30 ms in backward "
        "(default: nothing)",
    )


def run(options: argparse.Namespace) -> int:
    if not options.seconds > 0:
        raise ConfigError("--seconds must be positive.")
    if importlib.util.find_spec("torch") is None:
        raise MissingDependency(_NO_TORCH)
    end_by_signals()
    print(
        f"Training on {_RANKS} ranks for {options.seconds:g} s, once torch is imported ...",
        flush=True,
    )
    if options.inject:
        print(f"After {TROUBLE_AT} steps, on purpose: {options.inject}", flush=True)
    with _training(options) as node:
        node.tell_where()
        # Wait until the training ends. If it hangs on purpose it would not end, so limit the wait.
        status = node.wait(options.seconds if options.inject == "hang:1" else None)
        # Give the agent time for its verdict. If a rank was killed, the agent cannot read the
        # signal before torchrun has reaped the dead process.
        time.sleep(_VERDICT_S)
        found = survey([node.place])
        if status and options.inject not in ("hang:1", "kill:1"):
            print(node.log.read_text(errors="replace"), end="", file=sys.stderr)
            print("The training failed.", file=sys.stderr)
            return status
    print("\nRecorded, as `otel-ddp status` shows it:")
    print("\n".join(line.text for line in picture(found, time.time_ns())))
    print(f"\nLook again:  otel-ddp open demo/{node.run}")
    return 0


# -- the training


@contextlib.contextmanager
def _training(options: argparse.Namespace) -> Iterator[_Node]:
    """Run the training, and end it. All its files but the history are deleted."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(
        prefix=_PREFIX, dir=memory, ignore_cleanup_errors=True
    ) as folder:
        node = _Node(Path(folder), options)
        try:
            yield node
        finally:
            # Ignore a second Ctrl-C, which would leave processes behind.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            node.end()


class _Node:
    """Torchrun, its ranks and their agent, in a temporary directory."""

    def __init__(self, root: Path, options: argparse.Namespace) -> None:
        self.run = time.strftime("demo-%m%d-%H%M%S")
        self.place = Place(root / "place")
        self.log = root / "training.log"
        own = {
            "OTEL_DDP_RUN": self.run,
            "OTEL_DDP_DIR": str(self.place.directory),
            "OTEL_DDP_SPOOL_DIR": str(root / "spool"),
            # The default, a minute, is longer than the demo trains.
            "OTEL_DDP_STALL_TIMEOUT_S": "5",
            # By default, a busy machine measures one step in 16: too few for a verdict within 20 s.
            "OTEL_DDP_OVERHEAD": "all",
            "OMP_NUM_THREADS": "1",
        }
        # Do not pass the user's settings, such as the name of a run or the choice of agent: they
        # are meant for other trainings.
        passed = {
            name: text
            for name, text in os.environ.items()
            if name == "OTEL_DDP_HISTORY_DIR"
            or not name.startswith(("OTEL_DDP_", "OTEL_SDK_DISABLED"))
        }
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={_RANKS}",
            "-m",
            "otel_ddp.cli.demo_training",
            str(options.seconds),
            options.inject,
        ]
        with self.log.open("wb") as log:
            # torchrun prints pages about a killed rank or Ctrl-C. `run` shows them only if the
            # training fails without an injected fault.
            self._torchrun = subprocess.Popen(
                command, env={**passed, **own}, stderr=log, start_new_session=True
            )

    def tell_where(self) -> None:
        """Print the address of the page and the status command that show the training."""
        if remark := self._agent().get("remark"):
            print(f"Note:  {remark}")
        if page := addresses.page(self.place):
            print(f"Look:  {addresses.page_of_run(page, self.run)}")
            if tunnel := addresses.tunnel(page, os.environ):
                print(f"       from your machine: {tunnel}")
        print(f"       otel-ddp status --dir {self.place.directory}", flush=True)

    def _agent(self) -> Mapping[str, Any]:
        """The state that the agent publishes. Waits for the agent, which the first rank starts."""
        deadline = time.monotonic() + _AGENT_STARTS_S
        while time.monotonic() < deadline and self._torchrun.poll() is None:
            if agent := last_of_agent(self.place).agent:
                return agent
            time.sleep(0.1)
        return {}

    def wait(self, most_s: float | None) -> int | None:
        """The exit status of the training; None if it is still running."""
        try:
            return self._torchrun.wait(most_s)
        except subprocess.TimeoutExpired:
            return None

    def end(self) -> None:
        """End the training, then its agent, and wait for the agent's last export."""
        if self._torchrun.poll() is None:
            self._torchrun.terminate()
            self._torchrun.wait()
        if not (pid := self.place.agent_pid()):
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + _AGENT_ENDS_S
        while self.place.agent_is_alive() and time.monotonic() < deadline:
            time.sleep(0.02)
