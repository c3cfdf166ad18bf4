"""Whether a parent has ended its worker, and when that is known."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from otel_ddp.agent.reading.process import Process
from otel_ddp.agent.verdicts.ends import Here
from otel_ddp.agent.verdicts.observe import ExitCauses
from otel_ddp.journal import layout
from otel_ddp.journal.reader import JournalReader
from otel_ddp.journal.writer import JournalWriter
from otel_ddp.vocabulary.words import PHASES, STATES

SIGTERM = {"signal": "SIGTERM"}


class FakeExitCauses(ExitCauses):
    """The kernel's report of an end, given by the test."""

    def __init__(self) -> None:
        super().__init__()
        self.report: dict[str, Any] = {}

    # The processes of these journals are all this one.
    def goes_on(self, pid: int, start_ticks: int) -> bool:
        return False

    def why(self, pid: int, start_ticks: int) -> dict[str, Any]:
        return {"resident_bytes": 1, **self.report}


class Bench:
    """Workers of one parent, some of which die."""

    def __init__(self, folder: Path) -> None:
        self.causes = FakeExitCauses()
        self.now = 100.0
        self.writers: list[JournalWriter] = []
        self.journals: list[Process] = []
        self.folder = folder

    def worker(self, pool: bool, parent: int = 1) -> Process:
        writer = JournalWriter(self.folder, 128 * 1024, {"run": "r", "settled": True})
        writer.document(layout.FACTS, {"parent": parent, "pool": pool})
        writer.phase(PHASES["other"], 0, 5)
        writer.state(STATES["running"], 6)
        reader = JournalReader(writer.path)
        journal = Process(Here(reader, self.causes, lambda: self.now), lambda who: "n")
        self.writers.append(writer)
        self.journals.append(journal)
        self.poll({})
        return journal

    def poll(self, report: dict[str, Any], *gone: Process, later_s: float = 0.0) -> list[float]:
        """One round of the agent's loop, so much later; the states of the dead workers."""
        self.now += later_s
        self.causes.report = report
        for each in self.journals:
            each.life.gone_ns = each.life.gone_ns or (1 if each in gone else 0)
            each.poll(1, each not in gone)
        return [each.life.state for each in gone]

    def close(self) -> None:
        self.causes.close()
        for writer, journal in zip(self.writers, self.journals, strict=True):
            journal.reader.close()
            writer.close()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.close()


RUNNING, FINISHED, KILLED = ([STATES[word]] for word in ("running", "finished", "killed"))


@pytest.mark.parametrize("pool", [False, True])
def test_a_child_counts_as_running_until_the_kernel_has_reported_its_end(
    pool: bool, bench: Bench
) -> None:
    child = bench.worker(pool=pool)

    assert bench.poll({}, child) == RUNNING
    assert child.ended_at is None
    assert bench.poll(SIGTERM, child, later_s=1.9) == FINISHED
    assert child.ended_at is not None
    assert bench.poll({"signal": "SIGKILL"}, child, later_s=9.0) == FINISHED


@pytest.mark.parametrize("word", [{"signal": "SIGSEGV"}, {"exit_code": 3}, {"out_of_memory": "x"}])
def test_a_worker_that_died_is_killed_at_once(word: dict[str, Any], bench: Bench) -> None:
    worker = bench.worker(pool=True)

    assert bench.poll({}, worker) == RUNNING
    assert bench.poll(word, worker, later_s=0.1) == KILLED


@pytest.mark.parametrize(
    ("pool", "parent", "expected"),
    [(True, os.getpid(), FINISHED), (False, os.getpid(), KILLED), (False, 1 << 22, FINISHED)],
    ids=["of a pool", "its parent lives", "its parent has ended too"],
)
def test_without_the_kernels_report_a_pool_or_a_parent_that_ended_has_ended_its_worker(
    pool: bool, parent: int, expected: list[int], bench: Bench
) -> None:
    worker = bench.worker(pool=pool, parent=parent)

    assert bench.poll({}, worker) == RUNNING
    assert bench.poll({}, worker, later_s=1.9) == RUNNING
    assert bench.poll({}, worker, later_s=0.2) == expected


# Becomes another program; or closes what it has open, its journal's lock too, as a daemon does.
LEAVES = """
import os, sys
from pathlib import Path
from otel_ddp.journal.writer import JournalWriter
writer = JournalWriter(Path(sys.argv[1]), 128 * 1024, {"run": "r", "settled": True})
writer.state(1, 0)
if sys.argv[2] == "exec":
    code = "print('there', flush=True); input()"
    os.execv(sys.executable, [sys.executable, "-c", code])
os.closerange(3, 64)
print("there", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("how", ["close", "exec"])
def test_a_process_that_leaves_its_journal_and_goes_on_is_not_dead(
    how: str, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", LEAVES, str(tmp_path), how]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        (path,) = tmp_path.glob(f"*{layout.SUFFIX}")
        causes, reader = ExitCauses(), JournalReader(path)
        journal = Process(Here(reader, causes), lambda _: "n")
        assert not reader.writer_is_alive()

        journal.poll(1, alive=False)
        while_it_lives = [journal.life.state]
        process.kill()
        process.wait()
        journal.poll(2, alive=False)

        assert (while_it_lives, [journal.life.state]) == (FINISHED, FINISHED)
    causes.close()
    reader.close()
