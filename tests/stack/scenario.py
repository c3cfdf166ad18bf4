"""A small cluster and what befalls it, in a real Prometheus: two nodes, four runs of four ranks.

    run      group        what happens
    base     pretraining  goes on; rank 3 is late with its data, on a GPU that is too hot; rank 0
                          logs losses that are NaN, and those steps are skipped. Rank 0 is `train`,
                          all others are `worker`, and an evaluator is beside them
    lr-high  sweep        rank 2 is killed, and without it the others fail; its loader is not timed
    lr-low   sweep        rank 3 runs out of memory; started again, the run goes on from its
                          checkpoint and ends well; rank 1 says more than its journal holds
    debug    none         rank 1 hangs in its data loader and all others wait for it; rank 2 is as
                          talkative; without GPUs

Real agents send through a real collector; the deployed rules judge it, twelve times as fast.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from tools.stack.build import Binaries

import leftovers
from node import Node
from nvml_boards import GIB, Board, Boards, h100
from stack.servers import CONFIGURATIONS, DEPLOY, Collector, Prometheus, Sample
from trainings import as_launched

NODES = ("node-a", "node-b")
RANKS_PER_NODE = 2
WORLD_SIZE = len(NODES) * RANKS_PER_NODE
GPUS_PER_NODE = 8
LATE_RANK, KILLED_RANK, HUNG_RANK, FAILING_RANK = 3, 2, 1, 3
# By run: who says more than a journal holds.
TALKERS = {"lr-low": 1, "debug": 2}
EXPORT_EVERY_S = 1.0
STALL_TIMEOUT_S = 4.0
PATIENCE_S = 300.0
# Asked of a Prometheus that works on the same two cores.
LOOK_EVERY_S = 0.25

# Nobody waits five minutes in a test: the rules' clock runs so many times as fast.
FASTER = 12
_UNITS_S = {"s": 1, "m": 60, "h": 3600}
_DURATION = re.compile(r"(?<=\[)\d+[smh](?=\])|(?<=offset )\d+[smh]")
_FOR = re.compile(r"^(\s*(?:for|interval|keep_firing_for): )(\d+[smh])$", re.MULTILINE)

RANK = Path(__file__).with_name("scenario_rank.py")


class Run(NamedTuple):
    """What is started under one name."""

    name: str
    group: str
    job_type: str
    config: Mapping[str, float]
    first_gpu: int | None
    """On each node, of as many as it has ranks there; None where it runs on processors."""
    times_data: bool = True
    others: str = ""
    """The role of all ranks but rank 0, where that is another one."""
    called: str = ""
    """What people call it."""


BASE = Run(
    "base", "pretraining", "train", {"lr": 0.01, "batch_size": 4, "seed": 1}, 0, others="worker"
)
EVALUATOR = "eval"
HIGH = Run("lr-high", "sweep", "tune", {"lr": 0.1, "batch_size": 4, "seed": 1}, 4, False)
LOW = Run(
    *("lr-low", "sweep", "tune", {"lr": 0.001, "batch_size": 4, "seed": 2}, 4),
    called='a "low" rate',
)
DEBUG = Run("debug", "", "train", {"lr": 0.01, "batch_size": 4, "seed": 3}, None)


class Scenario:
    """Get it from `scenario`; `play` fills Prometheus, `rest` ends all that trains and reports."""

    def __init__(
        self,
        prometheus: Prometheus,
        nodes: Mapping[str, Node],
        boards: Mapping[str, Boards],
        folder: Path,
    ) -> None:
        self.prometheus = prometheus
        self.start_s = self.end_s = time.time()
        self._nodes, self._boards, self._folder = nodes, boards, folder

    # -- what happens

    def play(self) -> None:
        """All of the story; when it is told, Prometheus has all until `end_s`."""
        self.start(BASE)
        self._evaluate(BASE)
        self.start(HIGH)
        self.start(DEBUG)
        self._tell(DEBUG, "burst", TALKERS[DEBUG.name])
        self.steps(HIGH, 30)
        self._tell(HIGH, "kill", KILLED_RANK)
        self.steps(BASE, 30)
        self._tell(BASE, "late", LATE_RANK)
        self._tell(BASE, "nan", 0)
        self._heat()
        self.steps(DEBUG, 40)
        self._tell(DEBUG, "hang", HUNG_RANK)
        self.ended(HIGH, ">= 3")
        self.start(LOW)
        self._tell(LOW, "burst", TALKERS[LOW.name])
        saved = f'training_checkpoint_timestamp_seconds{{run="{LOW.name}"}}'
        self.until(saved, f"a checkpoint of {LOW.name}")
        reached = self.steps(LOW, 60)
        self._tell(LOW, "fail", FAILING_RANK)
        self.ended(LOW, ">= 3")
        self.start(LOW, restarts=1)
        self.steps(LOW, reached + 30, restarts=1)
        self._tell(LOW, "end", 0)
        self.ended(LOW, "== 2")
        # Boards have points for whole intervals: the last one shows this end, too.
        self.until(
            f'min_over_time(min(training_state{{run="{LOW.name}"}})[5s:1s]) == 2',
            f"five seconds of the end of {LOW.name}",
        )
        self.seen(HIGH, "TrainingRunKilled")
        self.seen(BASE, "TrainingStraggler")
        self.until(f'rank:training_straggler:ratio{{run="{BASE.name}"}}', "the rules' verdict")
        named = f'training_straggler{{run="{BASE.name}",rank="{LATE_RANK}"}} == 1'
        self.until(named, "the agent's verdict")
        self.until(f'node:training_late:share30d{{run="{BASE.name}"}}', "its late machine")
        self.seen(DEBUG, "TrainingStalled")
        self.until(f'rank:training_holds_up:last{{run="{DEBUG.name}"}}', "who hangs")
        # Where boards have a point a minute, this is the last one.
        spent = f'run_cause:otel_ddp_run_time:rate5m{{run="{DEBUG.name}"}}'
        self.until(f"{spent} @ {{minute}}", "what the time went to, at a whole minute")
        self._all_until_now()

    def start(self, run: Run, restarts: int = 0) -> None:
        folder = self._folder / run.name
        folder.mkdir(exist_ok=True)
        # Of the attempt before.
        for trouble in folder.glob("*-[0-9]"):
            if not trouble.name.startswith("store"):
                trouble.unlink()
        for rank in range(WORLD_SIZE):
            node_rank, local_rank = divmod(rank, RANKS_PER_NODE)
            own = {
                **as_launched(rank, WORLD_SIZE, RANKS_PER_NODE),
                "TORCHELASTIC_RESTART_COUNT": str(restarts),
                "OTEL_DDP_JOB_TYPE": (rank > 0 and run.others) or run.job_type,
            }
            gpu = "" if run.first_gpu is None else h100(run.first_gpu + local_rank).uuid
            self._rank(run, folder, NODES[node_rank], gpu, own)

    def _evaluate(self, run: Run) -> None:
        """One process more, under the name of the run, with steps and a world of its own."""
        folder = self._folder / f"{run.name}-{EVALUATOR}"
        folder.mkdir()
        own = {**as_launched(0, 1, 1), "TORCHELASTIC_RESTART_COUNT": "0"}
        self._rank(run, folder, NODES[1], "", {**own, "OTEL_DDP_JOB_TYPE": EVALUATOR})

    def _rank(self, run: Run, folder: Path, node: str, gpu: str, own: Mapping[str, str]) -> None:
        """Start one, with variables as torchrun sets them."""
        env = {
            **own,
            "TORCHELASTIC_RUN_ID": run.name,
            "GLOO_SOCKET_IFNAME": "lo",
            "OTEL_DDP_GROUP": run.group,
            "OTEL_DDP_RUN": run.name,
            "OTEL_DDP_NAME": run.called,
        }
        part = {"config": run.config, "gpu": gpu, "times_data": run.times_data}
        self._nodes[node].warm(str(RANK), str(folder), json.dumps(part), env=env)

    def rest(self) -> None:
        """Ranks and agents end; what is in Prometheus stays as it is."""
        for node in self._nodes.values():
            leftovers.end(leftovers.NODE, node.root.name, agents=False)
        for node in self._nodes.values():
            node.stop_agent()

    def _tell(self, run: Run, trouble: str, rank: int) -> None:
        (self._folder / run.name / f"{trouble}-{rank}").touch()

    def _heat(self) -> None:
        """The late rank's GPU grows too hot and loses a row."""
        node, gpu = NODES[LATE_RANK // RANKS_PER_NODE], LATE_RANK % RANKS_PER_NODE
        # Only what was 0 before grows.
        self.until(f'gpu:hw_errors_uncorrected:last{{node="{node}"}} == 0', "no error so far")
        for name in NODES:
            boards = self._healthy(name)
            if name == node:
                ill = boards[gpu]
                # hw_slowdown and hw_thermal.
                ill.numbers |= {"event_reasons": 0x48, "temperature": 92, "clock_mhz.1": 1200}
                ill.numbers |= {"remapped.uncorrected": 1, "ecc.1.0": 2}
                ill.xids = [63]
            self._boards[name].write(boards)

    def _healthy(self, name: str) -> list[Board]:
        boards = healthy()
        for each in self._nodes[name].processes():
            if each["run"] == BASE.name and each["job_type"] != EVALUATOR:
                boards[each["local_rank"]].compute = [(each["pid"], 40 * GIB)]
        return boards

    # -- what is seen of it

    def until(self, promql: str, what: str) -> list[Sample]:
        """Wait until this query brings something; *{minute}* in it is the last whole minute."""
        deadline = time.monotonic() + PATIENCE_S
        while not (found := self.prometheus.query(promql.replace("{minute}", _minute()))):
            assert time.monotonic() < deadline, f"in vain for {PATIENCE_S:g} s: {what}"
            time.sleep(LOOK_EVERY_S)
        return found

    def steps(self, run: Run, wanted: int, restarts: int = 0) -> int:
        """Wait until all ranks have done so many; how many they have done."""
        mine = f'training_step{{run="{run.name}",job_type!="{EVALUATOR}"}}'
        started = f'training_restarts_total{{run="{run.name}"}} == {restarts}'
        of = f"{mine} and on (job_type, rank) ({started})"
        told = f"min({of}) >= {wanted} and count({of}) == {WORLD_SIZE}"
        return int(self.until(told, f"step {wanted} of {run.name}")[0].value)

    def ended(self, run: Run, how: str) -> None:
        """Wait until all its ranks have ended, in such a state: 2 is well, 3 and 4 are not."""
        ranks = f'count(training_state{{run="{run.name}"}} {how})'
        self.until(f"{ranks} == {WORLD_SIZE}", f"the end of {run.name}")

    def seen(self, run: Run, alert: str) -> None:
        """Wait until such an alert about this run has fired."""
        fired = f'ALERTS{{alertstate="firing",alertname="{alert}",run="{run.name}"}}'
        self.until(f"last_over_time({fired}[1h])", f"{alert} for {run.name}")

    def _all_until_now(self) -> None:
        self.end_s = time.time()
        alive = f'timestamp(training_heartbeat_timestamp_seconds{{run="{BASE.name}"}})'
        self.until(f"min({alive}) > {self.end_s!r}", "all that was exported until now")


def _minute() -> str:
    return f"{time.time() // 60 * 60:.0f}"


def healthy() -> list[Board]:
    boards = [h100(index) for index in range(GPUS_PER_NODE)]
    for each in boards:
        # Only its power is at the limit, as it is under load; and nothing has failed yet.
        each.numbers |= {"event_reasons": 0x4, "remapped.uncorrected": 0, "ecc.1.0": 0}
    return boards


@contextmanager
def scenario(built: Binaries, folder: Path, library: Path) -> Iterator[Scenario]:
    """Servers, nodes, GPUs, and nothing that trains yet; *library* is that of standin_library."""
    with ExitStack() as life:
        config = folder / "prometheus.yml"
        prometheus = Prometheus(built, folder / "prometheus", config=config)
        collector = Collector(
            *(built, folder / "collector", CONFIGURATIONS / "all-in-one.yaml"),
            METRICS_URL=prometheus.otlp_metrics,
        )
        config.write_text(yaml.safe_dump(configured(folder, collector)))
        life.enter_context(prometheus)
        life.enter_context(collector)
        nodes, boards = {}, {}
        for name in NODES:
            (folder / name).mkdir()
            boards[name] = Boards(folder / name)
            boards[name].write(healthy())
            nodes[name] = life.enter_context(node(name, boards[name].environment(library)))
            nodes[name].export_to(collector.http)
        yield Scenario(prometheus, nodes, boards, folder)


def node(name: str, gpus: Mapping[str, str]) -> Node:
    return Node(
        OTEL_DDP_NODE=name,
        OTEL_DDP_STALL_TIMEOUT_S=f"{STALL_TIMEOUT_S:g}",
        OTEL_DDP_SAMPLE_STEPS="20",
        # One that a rank can fill before the agent looks.
        OTEL_DDP_JOURNAL_BYTES="128k",
        OTEL_METRIC_EXPORT_INTERVAL=f"{EXPORT_EVERY_S * 1000:g}",
        **gpus,
    )


def _faster(rules: str) -> str:
    """The same rules, each duration in them divided; counts of samples stay as they are."""

    def shorter(duration: str) -> str:
        return f"{int(duration[:-1]) * _UNITS_S[duration[-1]] * 1000 // FASTER}ms"

    rules = _DURATION.sub(lambda found: shorter(found[0]), rules)
    return _FOR.sub(lambda found: found[1] + shorter(found[2]), rules)


def configured(folder: Path, collector: Collector) -> dict[str, Any]:
    """As deployed, but faster; the collector is scraped where it listens here."""
    rules = folder / "rules"
    rules.mkdir()
    for kind in ("rules", "alerts"):
        for path in sorted((DEPLOY / "prometheus" / kind).glob("*.yml")):
            (rules / f"{kind}-{path.name}").write_text(_faster(path.read_text()))
    config: dict[str, Any] = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    config["rule_files"] = [str(rules / "*.yml")]
    config["global"]["scrape_interval"] = f"{EXPORT_EVERY_S:g}s"
    target = collector.telemetry.removeprefix("http://").removesuffix("/metrics")
    # Beside the configuration, where the deployed one looks for it.
    (folder / "collectors").mkdir()
    (folder / "collectors" / "here.yml").write_text(yaml.safe_dump([{"targets": [target]}]))
    return config
