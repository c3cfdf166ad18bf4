"""Plays a late rank, a hang and a death: trainings of two ranks with an agent of their own."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Protocol

from otel_ddp.agent.export.otlp.outcome import one_line
from otel_ddp.cli.temporary_place import agent_description, new_directory, stop_agent
from otel_ddp.cli.text import mappings
from otel_ddp.journal.place import Place

if TYPE_CHECKING:
    from typing_extensions import Self

GROUP = "drill"
RANKS = 2
# Two agents that speak for one node would contradict each other: this one has a name of its own.
NODE = f"drill-{os.uname().nodename}"
_PREFIX = "otel_ddp-drill-"
_TROUBLED_RANK = 1
_END_S = 15.0
# What says who a process is, and what belongs to the agent of real trainings.
_NOT_PASSED_ON = (
    *("SLURM_", "TORCHELASTIC_", "PET_", "OMPI_", "PMI", "MV2_", "MASTER_", "GROUP_", "ROLE_"),
    # Their offline modes would count here too.
    *("WANDB_", "SWANLAB_"),
    *("OTEL_DDP_AGENT", "OTEL_DDP_STRATEGY", "OTEL_DDP_LINGER_S", "OTEL_DDP_WEB_CONFIG"),
    *("OTEL_DDP_RUN", "OTEL_DDP_INHERITED_RUN", "OTEL_DDP_RANK", "OTEL_DDP_LOCAL_RANK"),
    *("OTEL_DDP_WORLD_SIZE", "OTEL_DDP_NODE_RANK", "OTEL_DDP_GROUP"),
)


class Play(Protocol):
    """One trouble, as the checks see it."""

    run: str
    alert: str

    def failure(self) -> str:
        """Why the trouble is not there as it should be; empty while all goes as planned."""

    def verdict(self) -> str:
        """What the agent found; empty as long as it has found nothing."""


class PlayedTraining:
    """A training of two ranks on this machine; rank 1 has the trouble."""

    def __init__(self, trouble: str, alert: str, verdict: str, drill: str) -> None:
        self.trouble, self.alert = trouble, alert
        self.run = f"drill-{trouble}-{drill}"
        self._kind = verdict
        self._folder = Path()
        self._place = Place(Path())
        self._ranks: list[subprocess.Popen[bytes]] = []

    def start(self, folder: Path, place: Place, env: Mapping[str, str]) -> None:
        """Start both ranks, as a launcher would."""
        self._folder, self._place = folder, place
        folder.mkdir()
        command = [
            *(sys.executable, "-m", "otel_ddp.cli.drill.training", self.trouble, str(folder))
        ]
        for rank in range(RANKS):
            identity = {"OTEL_DDP_RUN": self.run, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            with self._log(rank).open("wb") as log:
                self._ranks.append(_begin(command, {**env, **identity}, log))

    def failure(self) -> str:
        for rank, process in enumerate(self._ranks):
            status = process.poll()
            if status is None:
                continue
            if self.trouble != "death":
                return f"rank {rank} has ended with status {status}: {self._last_line(rank)}"
            if rank == _TROUBLED_RANK and status != -signal.SIGKILL:
                return f"rank {rank} was to be killed, but: {self._last_line(rank)}"
        return ""

    def verdict(self) -> str:
        for each in mappings(agent_description(self._place).get("verdicts")):
            who = each.get("who")
            same_run = isinstance(who, Mapping) and who.get("run") == self.run
            if same_run and each.get("kind") == self._kind:
                return str(each.get("sentence", ""))
        return ""

    def end(self) -> None:
        """Ask both ranks to come to their end; a hanging one goes on then."""
        if self._ranks:
            (self._folder / "end").touch()

    def wait(self, deadline: float) -> None:
        """Wait for that, and insist."""
        for process in self._ranks:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:  # noqa: PERF203
                process.kill()
                process.wait()

    def _log(self, rank: int) -> Path:
        return self._folder / f"{rank}.log"

    def _last_line(self, rank: int) -> str:
        lines = self._log(rank).read_text(errors="replace").splitlines()
        return one_line(next((line for line in reversed(lines) if line.strip()), "no output"))


def _begin(command: list[str], env: Mapping[str, str], log: IO[bytes]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        # Ctrl-C is for the drill, which ends its ranks one by one.
        start_new_session=True,
    )


def three_plays(drill: str = "") -> list[PlayedTraining]:
    """A late rank, a hang and a death."""
    drill = drill or secrets.token_hex(3)
    return [
        PlayedTraining("late", "TrainingStraggler", "straggler", drill),
        PlayedTraining("hang", "TrainingStalled", "stall", drill),
        PlayedTraining("death", "TrainingRunKilled", "death", drill),
    ]


class Stage:
    """Where plays run: a directory, an agent and a node name of their own, for a `with` block."""

    def __init__(self, plays: Iterable[PlayedTraining], env: Mapping[str, str]) -> None:
        self._plays, self._given = list(plays), env
        self._root = Path()
        self._place = Place(Path())

    def __enter__(self) -> Self:
        self._root = new_directory(_PREFIX)
        self._place = Place(self._root / "place")
        try:
            env = environment(self._given, self._root, self._place)
            for play in self._plays:
                play.start(self._root / play.trouble, self._place, env)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()

    def _end(self) -> None:
        # A second Ctrl-C would leave processes behind.
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            for play in self._plays:
                play.end()
            deadline = time.monotonic() + _END_S
            for play in self._plays:
                play.wait(deadline)
            # It exports that the runs have ended: a run that falls silent is an alert.
            stop_agent(self._place)
            shutil.rmtree(self._root, ignore_errors=True)
        finally:
            signal.signal(signal.SIGINT, before)


def environment(given: Mapping[str, str], root: Path, place: Place) -> dict[str, str]:
    """The variables of the ranks and of their agent: the user's, but for whose they are."""
    kept = {name: text for name, text in given.items() if not name.startswith(_NOT_PASSED_ON)}
    return {
        **kept,
        "OTEL_DDP_DIR": str(place.directory),
        "OTEL_DDP_SPOOL_DIR": str(root / "spool"),
        "OTEL_DDP_POSTMORTEM_DIR": str(root / "postmortems"),
        "OTEL_DDP_HISTORY_DIR": str(root / "history"),
        "OTEL_DDP_AGENT": "auto",
        "OTEL_DDP_GROUP": GROUP,
        "OTEL_DDP_NODE": NODE,
        "OTEL_DDP_SOURCES": "host,process",
        "OTEL_DDP_STALL_TIMEOUT_S": "5",
        "OTEL_EXPORTER_PROMETHEUS_HOST": "127.0.0.1",
        "OTEL_EXPORTER_PROMETHEUS_PORT": "0",
        "WORLD_SIZE": str(RANKS),
        "LOCAL_WORLD_SIZE": str(RANKS),
        "GLOO_SOCKET_IFNAME": "lo",
        # The GPUs belong to trainings.
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
