"""Records the demo with a straggler: what its agent exports, as data for tests of rules."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from otel_ddp.agent.scrape.endpoint import parse
from otel_ddp.journal.place import Place
from otel_ddp.vocabulary import catalog

FILE = Path(__file__).parents[1] / "tests" / "data" / "straggler.txt"
# What rules read of speed, and what the agent has found itself.
RECORDED = (
    *(catalog.TRAINING_WORK_STEP_TIME, catalog.TRAINING_WAIT_STEP_TIME),
    *(catalog.TRAINING_PHASE_STEP_TIME, catalog.TRAINING_STEPS, catalog.TRAINING_SAMPLES),
    *(catalog.TRAINING_STRAGGLER, catalog.TRAINING_STRAGGLER_EXCESS),
)
# Until the last minute is full of late steps, and some.
SECONDS, EVERY_S = 90, 5.0
INJECTED = "backward:1:30ms"
NAMES = {"run": "recorded", "node": "node-1"}

HEADER = f"""\
# Recorded once, by `python tools/record_run.py`: two ranks on a CPU, as `otel-ddp demo --seconds
# {SECONDS} --inject {INJECTED}` trains them. Rank 1 is 30 ms late in backward from step 150 on.
# What the node's endpoint served every {EVERY_S:g} s of what rules compare ranks by. A line is a
# series, its value, and when it was read in milliseconds since 1970. The run is called "recorded"
# and the node "node-1", whatever they were called.
"""


def recorded(url: str) -> Iterator[str]:
    """The lines of this moment."""
    names = {each.prometheus for each in RECORDED}
    with urlopen(url, timeout=10) as response:
        text = response.read().decode()
    now_ms = time.time_ns() // 1_000_000
    for name, labels, value in parse(text):
        if name in names:
            named = {**labels, **{each: NAMES[each] for each in NAMES if labels.get(each)}}
            inside = ",".join(f"{key}={json.dumps(text)}" for key, text in named.items())
            yield f"{name}{{{inside}}} {value!r} {now_ms}"


def main() -> None:
    """Train, read the endpoint now and then, write the file."""
    lines: list[str] = []
    with tempfile.TemporaryDirectory(prefix="otel_ddp-record-") as folder:
        env = {**os.environ, "OTEL_EXPORTER_PROMETHEUS_PORT": "0"}
        for each in ("METRICS", "TRACES", "LOGS"):
            env[f"OTEL_{each}_EXPORTER"] = "none"
        place = Place(Path(folder) / "place")
        env.update(
            OTEL_DDP_DIR=str(place.directory),
            OTEL_DDP_SPOOL_DIR=f"{folder}/spool",
            OTEL_DDP_POSTMORTEM_DIR=f"{folder}/postmortems",
            OMP_NUM_THREADS="1",
        )
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", "2", "-m", "otel_ddp.cli.demo.training"]
        training = subprocess.Popen([*command, str(SECONDS), f"{folder}/end", INJECTED], env=env)
        read_at = time.monotonic()
        while training.poll() is None:
            read_at += EVERY_S
            time.sleep(max(0.0, read_at - time.monotonic()))
            try:
                lines += recorded(json.loads(place.agent_file.read_text())["scrape"])
            except (OSError, ValueError, KeyError, URLError):
                continue
        if pid := place.agent_pid():
            os.kill(pid, signal.SIGTERM)
            while place.agent_is_alive():
                time.sleep(0.05)
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(HEADER + "\n".join(lines) + "\n")
    print(f"{len(lines)} lines, {FILE.stat().st_size} bytes: {FILE.name}")


if __name__ == "__main__":
    main()
