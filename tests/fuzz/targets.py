"""What is fuzzed: bytes become a journal, a history, a profile, a spool, a web configuration."""

from __future__ import annotations

import contextlib
import json
import shutil
import sqlite3
import struct
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest

from histories import write_history, write_profile
from otel_ddp.agent.export.otlp.documents import Documents
from otel_ddp.agent.export.render import Renderer
from otel_ddp.agent.export.spool import Entry
from otel_ddp.agent.history.histories import Collector, Histories
from otel_ddp.agent.ledger import Ledger
from otel_ddp.agent.reading.journals import Journals
from otel_ddp.agent.scrape import web_config
from otel_ddp.agent.scrape.endpoint import LedgerCollector
from otel_ddp.agent.verdicts.journal_source import JournalSources
from otel_ddp.agent.verdicts.judge import Judge
from otel_ddp.agent.verdicts.observe import ExitCauses
from otel_ddp.history import beside, report, terminal
from otel_ddp.history.compare import render, result, rows
from otel_ddp.history.directory import NotFound, find_run
from otel_ddp.history.page import answers
from otel_ddp.history.page.app import App
from otel_ddp.history.page.exchange import Question
from otel_ddp.history.reader import Unreadable as UnreadableHistory
from otel_ddp.history.tables import STEP_COLUMNS, SUM_COLUMNS
from otel_ddp.journal import layout
from otel_ddp.journal.place import Place
from otel_ddp.journal.reader import JournalReader, Unreadable
from otel_ddp.journal.survey import survey
from otel_ddp.journal.writer import JournalWriter, Shape
from otel_ddp.vocabulary import catalog

SMALLEST = 128 * 1024
KEYS = (
    *("run", "group", "job_type", "project", "name", "description", "tags", "node", "host"),
    *("global_rank", "local_rank", "world_size", "node_rank", "restarts", "settled", "exported"),
    *("strategy", "launcher", "run_settled", "rank_settled", "source", "markers", "pid"),
    *("script", "model", "backend", "precision", "torch", "cuda", "git_sha", "parameters"),
    *("capability", "terms", "parent", "pool", "sample_steps", "gpu", "gpus", "workers"),
    *("index", "metric", "attributes", "bounds", "time", "start", "end", "id", "trace", "step"),
    *("events", "error", "state", "span", "body", "phase", "data", "comm_wait", "device_clock"),
)
TEXTS = (
    *("", "r", "0", "train", "all", "main", "comm_wait", "no_group", "step/1", "ü\u2028", "a\nb"),
    *(metric.name for metric in catalog.METRICS[:40]),
)
WORDS = (0, 1, 2, 9, 2**31, 2**32, 2**48, layout.WORD_VALUE, 10**6, 10**9)


class Bytes:
    """Takes decisions from bytes; zeros once these are used up."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def byte(self) -> int:
        self._at += 1
        return self._data[self._at - 1] if self._at <= len(self._data) else 0

    def more(self) -> bool:
        return self._at < len(self._data)

    def raw(self) -> bytes:
        length = self.byte()
        self._at += length
        return self._data[self._at - length : self._at]

    def one_of(self, some: Any) -> Any:
        return some[self.byte() % len(some)]

    def integer(self) -> int:
        return int.from_bytes(bytes(self.byte() for _ in range(8)), "little", signed=True)

    def number(self) -> float:
        (found,) = struct.unpack("<d", bytes(self.byte() for _ in range(8)))
        return float(found)

    def json(self, depth: int = 0) -> Any:
        kind = self.byte() % (10 if depth < 4 else 8)
        if kind < 3:
            return (None, True, False)[kind]
        if kind == 3:
            return self.byte()
        if kind == 4:
            return self.integer()
        if kind == 5:
            return self.number()
        if kind == 6:
            return self.one_of(TEXTS)
        if kind == 7:
            return self.raw().decode("utf-8", "surrogateescape")
        if kind == 8:
            return [self.json(depth + 1) for _ in range(self.byte() % 5)]
        return {self.one_of(KEYS): self.json(depth + 1) for _ in range(self.byte() % 6)}

    def document(self) -> bytes:
        if self.byte() % 8 == 0:
            return self.raw()
        content = {self.one_of(KEYS): self.json() for _ in range(self.byte() % 12)}
        return json.dumps(content).encode()


def journal(data: bytes) -> None:
    """Contents with right checksums, through everything that the agent does with a journal."""
    took = Bytes(data)
    folder = Path(tempfile.mkdtemp(prefix="fuzz-", dir="/dev/shm"))
    try:
        identity = json.loads(took.document() or b"{}") if took.byte() % 2 else {"run": "r"}
    except ValueError:
        identity = {"run": "r"}
    try:
        writer = JournalWriter(folder, SMALLEST, identity if isinstance(identity, dict) else {})
        while took.more():
            _write(writer, took)
        writer.close()
        _read(folder)
    finally:
        shutil.rmtree(folder)


def _write(writer: JournalWriter, took: Bytes) -> None:
    kind = took.byte() % 9
    if kind == 0:
        writer.definitions.define(took.byte() % 8, took.document())
    elif kind == 1:
        writer.append(took.byte() % 24, took.document())
    elif kind == 2:
        writer.append(took.byte() % 24, took.raw())
    elif kind == 3:
        writer.name(took.one_of(TEXTS), took.one_of(("", "train", "val", "x")))
    elif kind == 4:
        numbers = tuple(took.byte() % 5 for _ in range(1 + took.byte() % 4))
        values = [took.number() for _ in numbers]
        writer.scalars(Shape(numbers), took.integer(), took.integer(), took.number(), values)
    elif kind == 5:
        metric = took.one_of(catalog.METRICS)
        if took.byte() % 2:
            writer.set(writer.counter(metric.name, {"phase": took.one_of(TEXTS)}), took.number())
        else:
            writer.set(writer.histogram(metric.name, metric.bounds), took.number())
    elif kind == 6:
        words = [
            (took.byte() << layout.CODE_SHIFT) | took.one_of(WORDS) for _ in range(took.byte() % 32)
        ]
        payload = struct.pack(f"<{len(words) + 1}Q", took.one_of(WORDS), *words)
        writer.append(took.one_of((layout.STEPS, layout.DEVICE_STEPS)), payload)
    elif kind == 7:
        writer.words[layout.PHASE // 8 + took.byte() % 6] = took.integer() & (2**64 - 1)
    else:
        writer.reason(took.raw().decode("utf-8", "surrogateescape"))


def _read(folder: Path) -> None:
    place, ledger = Place(folder), Ledger()
    ledger.keep_history = True
    journals = Journals(place, ledger, "")
    causes = ExitCauses()
    histories = Histories(str(folder / "history"), 1 << 30, "n")
    try:
        judge = Judge(ledger, 60.0, folder / "reports")
        collector = Collector(histories, ledger, "n")
        _judge_and_show(place, ledger, journals, judge, JournalSources(causes), collector)
        # What its thread does, in this one.
        histories.stop()
        histories._work()
        problem = histories.describe()["problem"]
        histories.stop()
        # A number that no column holds is left out, and told as a gap.
        assert problem in ("", "Python int too large to convert to SQLite INTEGER"), problem
    finally:
        for feed in journals.feeds():
            feed.reader.close()
        causes.close()


def _judge_and_show(
    place: Place,
    ledger: Ledger,
    journals: Journals,
    judge: Judge,
    sources: JournalSources,
    collector: Collector,
) -> None:
    now_ns = time.time_ns()
    for _ in range(3):
        journals.find()
        journals.poll()
        collector.feed(journals.feeds())
        judge.poll(sources.of(journals.feeds()))
        with ledger.lock:
            journals.update_series(now_ns)
            judge.update_series(now_ns)
            past = [*judge.past_bounds(), *judge.past()]
            collector.feed_states(journals.feeds(), [*past, *judge.verdicts()])
    documents = [*judge.flush_documents(), *journals.flush_documents()]
    Renderer({"host.name": "h"}).metrics(ledger, now_ns)
    Documents({"host.name": "h"}).render(documents)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(LedgerCollector(ledger))
    generate_latest(registry)
    described = {
        "processes": [each.to_json() for each in journals.describe()],
        "verdicts": judge.verdicts(),
        "past": judge.past(),
        "insufficient": judge.insufficient(),
    }
    json.dumps(described).encode()
    json.dumps(survey([place]).to_json()).encode()


def bytes_of_a_journal(data: bytes) -> None:
    """Any bytes behind a head that is right."""
    folder = Path(tempfile.mkdtemp(prefix="fuzz-", dir="/dev/shm"))
    try:
        writer = JournalWriter(folder, SMALLEST, {"run": "r"})
        writer.name("loss")
        writer.scalars(Shape((1,)), 1, 1, 1.0, (0.5,))
        writer.close()
        writer.path.chmod(0o600)
        content = bytearray(writer.path.read_bytes())
        took = Bytes(data)
        while took.more():
            at, piece = took.integer() % len(content), took.raw()
            content[at : at + len(piece)] = piece
        writer.path.write_bytes(bytes(content[:SMALLEST]))
        with contextlib.suppress(Unreadable):
            reader = JournalReader(writer.path)
            for _ in range(25):
                reader.read()
            reader.latest(), reader.totals(), reader.progress(), reader.reason()
            reader.close()
        _read(folder)
    finally:
        shutil.rmtree(folder)


def spool(data: bytes) -> None:
    """A file of a spool, compressed rightly or not."""
    with tempfile.NamedTemporaryFile(prefix="fuzz-", dir="/dev/shm") as file:
        file.write(zlib.compress(data[1:]) if data[:1] == b"\x01" else data)
        file.flush()
        Entry(Path(file.name), 1, "metrics", 1, 1).read()


def web_rules(data: bytes) -> None:
    """A web configuration file."""
    with tempfile.NamedTemporaryFile(prefix="fuzz-", dir="/dev/shm") as file:
        file.write(data)
        file.flush()
        with contextlib.suppress(web_config.Refused):
            web_config.read(Path(file.name)).admits("Basic " + data[:40].decode("latin-1"))


def history(data: bytes) -> None:
    """A file of histories with anything in its columns, through page, report and comparison."""
    took = Bytes(data)
    folder = Path(tempfile.mkdtemp(prefix="fuzz-", dir="/dev/shm"))
    try:
        write_history(folder, "a", ranks=2, steps=60, names=("loss",))
        path = write_history(folder, "r", ranks=2, steps=60, names=("loss",), late=1)
        with contextlib.closing(sqlite3.connect(path)) as db, db:
            while took.more():
                _change(db, took)
        _show(folder)
    finally:
        shutil.rmtree(folder)


def bytes_of_a_history(data: bytes) -> None:
    """A file of histories with damaged pages."""
    folder = Path(tempfile.mkdtemp(prefix="fuzz-", dir="/dev/shm"))
    try:
        write_history(folder, "a", ranks=1, steps=60, names=("loss",))
        path = write_history(folder, "r", ranks=1, steps=60, names=("loss",))
        content = bytearray(path.read_bytes())
        took = Bytes(data)
        while took.more():
            at, piece = took.integer() % len(content), took.raw()
            content[at : at + len(piece)] = piece
        path.write_bytes(bytes(content))
        _show(folder)
    finally:
        shutil.rmtree(folder)


_CELLS = {
    "about": ("key", "value"),
    "ranks": ("rank", "about"),
    "series": ("kind", "name", "rank", "labels", "width"),
    "sums": ("start", *SUM_COLUMNS),
    "steps": ("start", *STEP_COLUMNS),
    "events": ("time_ns", "step", "rank", "name", "severity", "body", "attributes"),
    "verdicts": ("kind", "rank", "phase", "step", "since_ns", "until_ns", "sentence", "about"),
}


def _change(db: sqlite3.Connection, took: Bytes) -> None:
    """One cell, or all of a column, becomes anything: SQLite takes a text for a number."""
    table = took.one_of(tuple(_CELLS))
    column = took.one_of(_CELLS[table])
    cell = took.one_of(
        (
            lambda: json.dumps(took.json()),
            took.integer,
            took.number,
            took.raw,
            lambda: took.raw().decode("utf-8", "replace"),
        )
    )()
    rows = f"SELECT {column} FROM {table} LIMIT 1 OFFSET {took.byte()}"
    where = f" WHERE {column} IN ({rows})" if took.byte() % 2 else ""
    with contextlib.suppress(sqlite3.Error):
        db.execute(f"UPDATE OR IGNORE {table} SET {column} = ?{where}", (cell,))


def _show(folder: Path) -> None:
    app, run = App(folder, profile_folder=folder), "group=sweep&run=r"
    for path in (
        *("runs", "now", f"run?{run}", f"names?{run}", f"values?{run}&name=loss"),
        *(f"values.csv?{run}&name=loss", f"node?{run}&name=hw.gpu.utilization", f"steps?{run}"),
        *(f"steps.csv?{run}", f"events?{run}&like=a", f"postmortems?{run}", f"profiles?{run}"),
        f"compare?run=a&group=sweep&{run}",
    ):
        answer = app.answer(Question.of_address(f"/api/{path}"))
        assert answer.status == 200 or path.endswith(run) or "&" in path, (path, answer)
        json.loads(answer.body) if "json" in answer.headers["Content-Type"] else None
    with contextlib.suppress(UnreadableHistory, NotFound), find_run("sweep/r", folder) as found:
        told = report.gather(found, profiles=beside.profiles("sweep", "r", folder))
        answers.saved(found)
        list(terminal.lines(report.card_of(told)))
    with contextlib.suppress(UnreadableHistory, NotFound):
        both = result.compare(rows.load("a", folder), rows.load("r", folder))
        list(render.text(both, []))


def profile(data: bytes) -> None:
    """A profile.json with anything in it, on the page and in a report."""
    folder = Path(tempfile.mkdtemp(prefix="fuzz-", dir="/dev/shm"))
    took = Bytes(data)
    try:
        write_history(folder, "r", ranks=1, steps=40, names=())
        path = write_profile(folder, "sweep", "r") / beside.PROFILE
        content = json.loads(path.read_text())
        while took.more():
            content[took.one_of(tuple(content))] = took.json()
        path.write_text(json.dumps(content | {"run": "r", "group": "sweep"}))
        _show(folder)
    finally:
        shutil.rmtree(folder)


TARGETS: dict[str, Callable[[bytes], None]] = {
    "journal": journal,
    "bytes_of_a_journal": bytes_of_a_journal,
    "history": history,
    "bytes_of_a_history": bytes_of_a_history,
    "profile": profile,
    "spool": spool,
    "web_rules": web_rules,
}
