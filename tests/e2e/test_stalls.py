"""Hangs of real ranks, as the real agent tells of them: who, where, why, and when they are over."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import warm
from node import Node, until, without_figures
from otel_ddp.history.directory import histories
from otel_ddp.history.reader import History
from otel_ddp.journal.survey import survey
from otlp_receiver import Receiver

LIMIT_S, STEPS, ODD = 2, 10, 1
RANKS = ("0", "1")

TRAIN = """
import ctypes, os, signal, sys, threading, time
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import otel_ddp

STEPS, ODD = 10, 1
rank = int(os.environ["RANK"])
dist.init_process_group("gloo", init_method=sys.argv[2], rank=rank, world_size=2)
other = dist.new_group([0, 1])
# What ends a sleep that the test wants to end.
signal.signal(signal.SIGUSR1, lambda *_: None)


def batches(name):
    for step in range(STEPS + 2):
        if (rank, step) == (ODD, STEPS):
            if name == "data":
                signal.pause()
            if name == "thread":
                time.sleep(1000)
            if name == "leaves":
                threading.Thread(target=time.sleep, args=(1000,)).start()
                raise ValueError("a bad sample")
        yield torch.randn(4, 8)


def synchronise(name, mine):
    if name in ("late", "ended") and mine:
        signal.pause()
    if name == "skips" and mine:
        dist.barrier(group=other)
    elif name == "differs" and mine:
        dist.broadcast(torch.ones(1), src=0)
    else:
        dist.all_reduce(torch.ones(1))


def train(name):
    model = DistributedDataParallel(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run = otel_ddp.instrument(model, group="g", run=name)
    for step, batch in enumerate(otel_ddp.data(batches(name))):
        mine = (rank, step) == (ODD, STEPS)
        loss = model(batch).sum()
        if name == "gil" and mine:
            # C code that keeps the interpreter's lock.
            ctypes.PyDLL(None).pause()
        loss.backward()
        if step == STEPS:
            synchronise(name, mine)
        if name == "stopped" and mine:
            os.kill(os.getpid(), signal.SIGSTOP)
        optimizer.step()
        optimizer.zero_grad()
        if name == "moves" and step == STEPS:
            # Without a sign that any hook sees.
            with run.phase("evaluation of mine"):
                while True:
                    dist.all_reduce(torch.ones(1), group=other)
                    time.sleep(0.01)
    run.finish()


for name in sys.argv[1].split(","):
    if name == "thread":
        trains = threading.Thread(target=train, args=(name,))
        trains.start()
        trains.join()
    else:
        train(name)
dist.destroy_process_group()
"""


def start(node: Node, names: str, python: str = "") -> None:
    """Two ranks that hang in these ways, one after the other.

    Without a launcher: its workers would outlive it, and these cannot end by themselves.
    """
    script = node.root / "train.py"
    script.write_text(TRAIN)
    executable, more = warm.python()
    for rank in RANKS:
        node.start(
            *(python or executable, str(script), names, f"file://{node.root}/{names}"),
            env={"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", **more},
        )


class Stall(NamedTuple):
    """One of them, while it lasted."""

    verdict: dict[str, Any]
    stalled: dict[str, float]
    record: Any
    postmortem: tuple[dict[str, Any], str]


class Ward:
    """One launch of ranks that hang, one hang after the other."""

    def __init__(self, node: Node, receiver: Receiver, names: list[str]) -> None:
        self._node, self._receiver = node, receiver
        start(node, ",".join(names))

    def stall(self, run: str) -> Stall:
        """The stall of this run, once it is seen everywhere."""

        def open_one() -> dict[str, Any] | None:
            found = [each for each in self.open() if each["who"]["run"] == run]
            return found[0] if found else None

        until(open_one, f"the stall of {run}")
        until(lambda: self._stalled(run) == dict.fromkeys(RANKS, 1.0), "the series")
        until(lambda: self._records(run, "opened"), "the log record")
        until(lambda: self._postmortem(run), "the post-mortem")
        verdict = open_one()
        assert verdict is not None
        record = self._records(run, "opened")[-1]
        return Stall(verdict, self._stalled(run), record, self._postmortem(run)[0])

    def release(self, run: str, signal_number: int) -> None:
        """Let the odd rank go on; until everything says that it is over."""
        (pid,) = (
            each["pid"]
            for each in self._node.processes()
            if (each["run"], each["rank"]) == (run, ODD)
        )
        os.kill(pid, signal_number)
        until(lambda: not [e for e in self.open() if e["who"]["run"] == run], "the stall's end")
        until(lambda: self._records(run, "closed"), "the log record of its end")

    def end(self, run: str) -> tuple[str, str]:
        """Ask one rank after the other to end, as a launcher does.

        Returns what the log record and the status say of the stall that is over.
        """
        ranks = [each for each in self._node.processes() if each["run"] == run]
        ranks.sort(key=lambda each: int(each["rank"]))
        for ended, process in enumerate(ranks, start=1):
            os.kill(process["pid"], signal.SIGTERM)
            until(lambda ended=ended: self.death(ended), f"the verdict on {ended} ends")
        (record,) = until(lambda: self._records(run, "closed"), "the log record of its end")
        found = survey([self._node.place]).past
        (past,) = (e for e in found if (e["kind"], e["who"]["run"]) == ("stall", run))
        return record.body.string_value, past["sentence"]

    def death(self, ended: int) -> dict[str, Any] | None:
        """The verdict on the ends of so many ranks."""
        for each in survey([self._node.place]).verdicts:
            if each["kind"] == "death" and len(each["evidence"]["ended"]) == ended:
                return dict(each)
        return None

    def kept(self, run: str) -> dict[str, str]:
        """What the history of this run keeps of verdicts that are over, by their kinds."""
        found = {}
        for path in histories(Path(self._node.env["OTEL_DDP_HISTORY_DIR"])):
            with History(path) as history:
                if history.about["run"] == run:
                    found |= {each["kind"]: each["sentence"] for each in history.verdicts()}
        return found

    def open(self) -> list[dict[str, Any]]:
        found = survey([self._node.place]).verdicts
        return [each for each in found if each["kind"] == "stall"]

    def _stalled(self, run: str) -> dict[str, float]:
        found = self._node.series("training_stalled", run=run)
        return {labels["rank"]: value for labels, value in found}

    def _records(self, run: str, state: str) -> list[Any]:
        wanted = {"run": run, "verdict": "stall", "verdict.state": state}.items()
        return [
            each
            for each in self._receiver.logs()
            if wanted <= {pair.key: pair.value.string_value for pair in each.attributes}.items()
        ]

    def postmortem(self, run: str) -> tuple[dict[str, Any], str]:
        """The first one of this run."""
        (found,) = (e for e in self._postmortem(run) if e[0]["verdict"]["kind"] == "stall")
        return found

    def _postmortem(self, run: str) -> list[tuple[dict[str, Any], str]]:
        folder = Path(self._node.env["OTEL_DDP_HISTORY_DIR"])
        return [
            (json.loads(each.read_text()), each.with_suffix(".txt").read_text())
            for each in folder.glob(f"postmortem-{run}*.json")
        ]


RELEASED = {
    "data": signal.SIGUSR1,
    "late": signal.SIGUSR1,
    "gil": signal.SIGUSR1,
    "stopped": signal.SIGCONT,
}
ENDED = "ended"


class Ended(NamedTuple):
    """A hang that a launcher ends."""

    stall: Stall
    record: str
    past: str
    postmortem: tuple[dict[str, Any], str]
    death: dict[str, Any]
    kept: str


class Seen(NamedTuple):
    released: dict[str, Stall]
    ended: Ended


@pytest.fixture(scope="module")
def seen() -> Seen:
    """Hangs of the same two ranks, one after the other; the last one ends with them."""
    stalls = {}
    with Node(OTEL_DDP_STALL_TIMEOUT_S=str(LIMIT_S)) as node, Receiver() as receiver:
        node.export_to(receiver.start_http())
        ward = Ward(node, receiver, [*RELEASED, ENDED])
        for name, signal_number in RELEASED.items():
            stalls[name] = ward.stall(name)
            ward.release(name, signal_number)
        stall = ward.stall(ENDED)
        # Rank 0 ends first. It did not die before the others stood.
        record, past = ward.end(ENDED)
        death = ward.death(2)
        assert death is not None
        kept = until(lambda: ward.kept(ENDED).get("stall"), "the history")
        ended = Ended(stall, record, past, ward.postmortem(ENDED), death, kept)
    return Seen(stalls, ended)


@pytest.fixture
def released(seen: Seen) -> dict[str, Stall]:
    return seen.released


def lasting(sentence: str) -> str:
    """What does not change while ranks stand; that one sleeps is told from the second look on."""
    return without_figures(sentence).replace(" and sleeps", "")


def assert_told(stall: Stall, phase: str, cause: str) -> None:
    """The odd rank, the phase, the step and the cause, wherever a user may look."""
    verdict, record = stall.verdict, stall.record
    said = {pair.key: pair.value.string_value for pair in record.attributes}
    assert verdict["evidence"]["culprits"] == [str(ODD)]
    assert (verdict["phase"], verdict["evidence"]["cause"]) == (phase, cause)
    # The last step that was completed.
    assert verdict["step"] == STEPS
    assert f"rank {ODD}" in verdict["sentence"]
    assert set(stall.stalled.values()) == {1.0}
    assert (record.severity_text, record.event_name) == ("ERROR", "training.stall")
    assert lasting(record.body.string_value) == lasting(verdict["sentence"])
    assert (said["phase"], said["evidence.cause"]) == (phase, cause)
    content, text = stall.postmortem
    assert content["verdict"]["evidence"]["culprits"] == [str(ODD)]
    assert lasting(text.splitlines()[0]) == lasting(verdict["sentence"])


def test_a_rank_that_waits_for_data_for_good_is_named(released: dict[str, Stall]) -> None:
    assert_told(released["data"], "data", "not_reached")

    sentence = released["data"].verdict["sentence"]
    # That it sleeps is told from the second look on.
    assert "(batches)" in sentence
    assert "rank 0 waits for it" in sentence


def test_a_rank_that_does_not_come_to_a_users_own_all_reduce_is_named(
    released: dict[str, Stall],
) -> None:
    # No hook sees this collective: all are in `other`, and their witnesses tell them apart.
    assert_told(released["late"], "other", "not_reached")

    sentence = released["late"].verdict["sentence"]
    assert "train.py:" in sentence
    assert "(synchronise)" in sentence
    assert "rank 0 waits for it" in sentence


def test_a_rank_whose_c_code_keeps_the_gil_is_named(released: dict[str, Stall]) -> None:
    # It holds the lock where forward is over and backward has not begun.
    assert_told(released["gil"], "other", "gil")


def test_a_stopped_rank_is_named(released: dict[str, Stall]) -> None:
    assert_told(released["stopped"], "other", "stopped")


def test_a_hang_that_is_ended_is_told_as_it_stood(seen: Seen) -> None:
    ended = seen.ended

    known = lasting(ended.stall.verdict["sentence"])
    assert lasting(ended.past) == lasting(ended.kept) == known
    assert lasting(ended.record) == f"no longer, as the run ended: {known}"
    content, text = ended.postmortem
    assert {each["state"] for each in content["processes"]} == {"running"}
    assert lasting(text.splitlines()[0]) == known
    why = known.partition("): ")[2].partition(". Look")[0]
    end = lasting(f"Before that, no rank had moved for 8 s: {why}.")
    assert lasting(ended.death["sentence"]).endswith(end)


# -- side by side: hangs that end with their ranks, and what only looks like one

# By the way in which two ranks hang: the cause, who is named, and what is said.
HOW = {
    # Of a main thread that only waits, the thread that trains counts.
    "thread": ("not_reached", ["1"], "(batches)"),
    "leaves": ("not_reached", ["1"], "has left its program after step 10, at its end or by an exc"),
    # Each has entered one that the other has not: in another process group.
    "skips": ("crossed", ["0", "1"], "the order of their collectives"),
    "differs": ("different_collectives", ["0", "1"], "rank 1 entered broadcast [[1]]"),
}
MOVES = "moves"


@pytest.fixture(scope="module")
def hung() -> dict[str, dict[str, Any]]:
    """The verdicts by their runs, once each has its words and the last has moved for long."""
    with Node(OTEL_DDP_STALL_TIMEOUT_S=str(LIMIT_S)) as node:
        for how in (*HOW, MOVES):
            # How Python waits for threads at the end is seen where it starts by itself.
            start(node, how, sys.executable if how == "leaves" else "")

        def seen() -> dict[str, dict[str, Any]] | None:
            found = [each for each in node.agent()["verdicts"] if each["kind"] == "stall"]
            verdicts = {each["who"]["run"]: each for each in found}
            said = all(words in str(verdicts.get(how)) for how, (_, _, words) in HOW.items())
            return verdicts if said and all(map(moves_for_long, node.processes())) else None

        return dict(until(seen, "the verdicts"))


def moves_for_long(process: dict[str, Any]) -> bool:
    """Or is no part of the run that moves."""
    since_ns = process["phase_since_ns"] + 2 * LIMIT_S * 10**9
    return process["run"] != MOVES or (
        process["phase"] == "evaluation of mine" and time.time_ns() > since_ns
    )


@pytest.mark.parametrize("how", HOW)
def test_ranks_that_hang_each_in_their_way_are_named(
    hung: dict[str, dict[str, Any]], how: str
) -> None:
    evidence = hung[how]["evidence"]

    assert (evidence["cause"], evidence["culprits"]) == HOW[how][:2]


def test_a_loop_of_collectives_that_no_hook_sees_is_no_stall(
    hung: dict[str, dict[str, Any]],
) -> None:
    assert MOVES not in hung
