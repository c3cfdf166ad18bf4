"""A node for tests: a place of its own, real training processes, the real agent, no leftovers."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, cast
from urllib.parse import urlencode

from tools.exposition import parse

import leftovers
import warm
from make import process_of
from otel_ddp.cli.picture import picture
from otel_ddp.journal.parser import Unreadable
from otel_ddp.journal.place import Place
from otel_ddp.journal.process_state import table
from otel_ddp.journal.survey import Survey, last_of_agent, survey

# A test waits this long for what should happen soon: the machine may be many times too busy.
PATIENCE_S = 180.0
# It asks after so long, later after this share of the time waited, at last after so long again.
_OFTEN_S, _LATER, _RARELY_S = 0.02, 0.05, 0.25
_TOUCHY = (
    *("OTEL_", "WANDB_", "SWANLAB_", "SLURM_", "TORCHELASTIC_", "OMPI_", "PMI"),
    # With it, `print` writes the end of a line by itself: lines of several processes mix.
    *("TRACEPARENT", "PYTHONUNBUFFERED"),
)

Labels = dict[str, str]


def without_figures(sentence: str) -> str:
    """The same sentence for any durations and shares: those of an open verdict move."""
    return re.sub(r"\d[\d.]* (us|ms|s|%)", "#", sentence)


def until(true: Callable[[], Any], what: str, patience_s: float = PATIENCE_S) -> Any:
    """The first true answer; other processes are asked again and again, as a person would."""
    began = time.monotonic()
    while not (answer := true()):
        waited_s = time.monotonic() - began
        assert waited_s < patience_s, f"in vain for {patience_s:g} s: {what}"
        # Each question takes processor time of those that are asked: the longer, the rarer.
        time.sleep(min(max(_OFTEN_S, waited_s * _LATER), _RARELY_S))
    return answer


def stop_agent(place: Place) -> None:
    """And each that takes its place: where one starts slowly, processes start another."""
    told = set()

    def none_is_left() -> bool:
        pid = place.agent_pid()
        if pid and pid not in told:
            told.add(pid)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        return pid is None

    until(none_is_left, "the agent's end")


class Node:
    """What a test starts here ends here."""

    def __init__(self, **env: str) -> None:
        memory = Path("/dev/shm")
        root = memory if memory.is_dir() else None
        self._folder = tempfile.TemporaryDirectory(prefix="otel_ddp-test-", dir=root)
        self.root = Path(self._folder.name)
        self.place = Place(self.root / "place")
        self.spool = self.root / "spool"
        clean = {k: v for k, v in os.environ.items() if not k.startswith(_TOUCHY)}
        self.env = {
            **clean,
            "OTEL_DDP_DIR": str(self.place.directory),
            "OTEL_DDP_SPOOL_DIR": str(self.spool),
            "OTEL_DDP_HISTORY_DIR": str(self.root / "history"),
            "OTEL_EXPORTER_PROMETHEUS_PORT": "0",
            # Tests of what a run says of itself say so.
            "OTEL_DDP_SAY": "nothing",
            "OTEL_METRIC_EXPORT_INTERVAL": "500",
            # No collector that happens to run on this machine is found by accident.
            "OTEL_METRICS_EXPORTER": "none",
            "OTEL_TRACES_EXPORTER": "none",
            "OTEL_LOGS_EXPORTER": "none",
            # Steps of tests are short, and each is to be seen.
            "OTEL_DDP_OVERHEAD": "all",
            "OMP_NUM_THREADS": "1",
            leftovers.NODE: self.root.name,
            **env,
        }
        self.started: list[subprocess.Popen[str]] = []
        """The programs, in the order in which they were started."""

    def export_to(self, endpoint: str) -> None:
        """From here on, agents send to this collector."""
        for signal_name in ("METRICS", "TRACES", "LOGS"):
            self.env.pop(f"OTEL_{signal_name}_EXPORTER", None)
        self.env["OTEL_EXPORTER_OTLP_ENDPOINT"] = endpoint

    def start(self, *command: str, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        """Start a program on this node."""
        process = subprocess.Popen(
            command,
            env={**self.env, **(env or {})},
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            # What ends the tests at a terminal is not for it.
            start_new_session=True,
        )
        self.started.append(process)
        return process

    def warm(self, *arguments: str, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        """Start Python with these arguments, in a process in which torch is imported already."""
        executable, more = warm.python()
        return self.start(executable, *arguments, env={**more, **(env or {})})

    def torchrun(self, ranks: int, *program: str) -> subprocess.Popen[str]:
        """Start a torchrun of so many ranks, all with torch imported already."""
        how = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
        return self.warm(*how, *program)

    def python(self, code: str, **env: str) -> subprocess.Popen[str]:
        """Start a Python program on this node."""
        return self.start(sys.executable, "-c", code, env=env)

    def run(self, code: str, **env: str) -> str:
        """Run a Python program on this node to its end; what it printed."""
        return finished(self.python(code, **env))

    def told(self) -> Survey:
        """What the agent has written last, once it is up."""

        def up() -> Survey | None:
            told = last_of_agent(self.place)
            served = told.agent.get("scrape") and told.agent["pid"] == self.place.agent_pid()
            return told if served else None

        return cast(Survey, until(up, "the agent"))

    def agent(self) -> Mapping[str, Any]:
        """What the agent says of itself, once it is up."""
        return self.told().agent

    def scrape(self) -> list[tuple[str, Labels, float]]:
        """Everything on the node's endpoint."""
        return list(parse(self._answer(urllib.request.Request(self.agent()["scrape"])).decode()))

    def page(self, path: str, /, **query: str) -> Any:
        """What the page of the node is answered."""
        address = self.agent()["scrape"].replace("/metrics", f"/api/{path}?{urlencode(query)}")
        request = urllib.request.Request(address, headers={"X-Otel-Ddp": "page"})
        return json.loads(self._answer(request))

    def _answer(self, request: urllib.request.Request) -> bytes:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            return bytes(answer.read())

    def series(self, metric: str, /, **labels: str) -> list[tuple[Labels, float]]:
        """The samples of one name that carry these labels."""
        return [
            (found, value)
            for each, found, value in self.scrape()
            if each == metric and labels.items() <= found.items()
        ]

    def value(self, metric: str, /, **labels: str) -> float | None:
        """The one sample of this name with these labels, if it is there."""
        found = self.series(metric, **labels)
        assert len(found) < 2, found
        return found[0][1] if found else None

    def processes(self) -> list[dict[str, Any]]:
        """What the agent knows, and journals tell at this moment."""
        told = survey([self.place]).processes
        ended = [each for each in told if each.ended]
        read = []
        for path in self.place.journals():
            # The agent may delete one meanwhile.
            with suppress(Unreadable):
                read.append(process_of(path))
        return [each.to_json() for each in table(ended, read, told)]

    def shown(self) -> str:
        """What `otel-ddp status` prints."""
        return "\n".join(each.text for each in picture(survey([self.place]), time.time_ns()))

    def insufficient(self, run: str) -> str:
        """Why the agent cannot say of this run who keeps the others waiting."""
        said = self.told().insufficient
        return next((str(each["why"]) for each in said if each["run"] == run), "")

    def kill_agent(self) -> int:
        """kill -9; its process id."""
        pid = int(self.agent()["pid"])
        os.kill(pid, signal.SIGKILL)
        until(lambda: self.place.agent_pid() != pid, "the agent's death")
        return pid

    def stop_agent(self) -> None:
        stop_agent(self.place)

    @contextmanager
    def agent_stopped(self, pid: int) -> Iterator[None]:
        """It writes nothing meanwhile."""
        os.kill(pid, signal.SIGSTOP)
        try:
            threads = Path(f"/proc/{pid}/task").glob("*/status")
            for status in list(threads):
                until(lambda status=status: "State:\tT" in status.read_text(), "the stop")
            yield
        finally:
            os.kill(pid, signal.SIGCONT)

    def _no_start_under_way(self) -> bool:
        return self.place.agent_is_alive() or time.monotonic() > self.place.start_not_before()

    def __enter__(self) -> Node:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # The ranks of a torchrun are in sessions of their own, and hold its output open.
        leftovers.end(leftovers.NODE, self.root.name, agents=False)
        try:
            for process in self.started:
                process.communicate()
            # An agent that is being started would come into a place that is gone.
            until(lambda: self._no_start_under_way(), "the start of an agent to end")
            log = self.place.agent_log
            if kind is not None and log.exists():
                sys.stderr.write(log.read_text())
            self.stop_agent()
        finally:
            leftovers.end(leftovers.NODE, self.root.name)
            self._folder.cleanup()


def finished(process: subprocess.Popen[str], patience_s: float = PATIENCE_S) -> str:
    """Wait for a program that should end well; what it printed."""
    output, _ = process.communicate(timeout=patience_s)
    assert process.returncode == 0, output
    return str(output)


def new_certificate(folder: Path, name: str) -> None:
    """Makes a certificate for 127.0.0.1 and its key, *name*.crt and *name*.key."""
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj"
    where = ("-addext", "subjectAltName=IP:127.0.0.1")
    files = ("-keyout", str(folder / f"{name}.key"), "-out", str(folder / f"{name}.crt"))
    subprocess.run([*command.split(), "/CN=tls", *where, *files], check=True, capture_output=True)
