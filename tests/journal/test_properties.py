"""What holds for every journal, whatever is written, read, overwritten, torn or killed."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from otel_ddp.journal import layout
from otel_ddp.journal.parser import Document, Name, ProgressRecord, Scalars, Unreadable
from otel_ddp.journal.reader import JournalReader
from otel_ddp.journal.writer import JournalWriter, Shape

SMALLEST = 128 * 1024
QUIET = settings(
    deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
COUNTS = (1, 2, 3, 7, 8, 13, 39, 40)
BOUNDS = (0.1, 1.0, 10.0)
TIMES_US = st.integers(1, 2**56 - 1)


def memory_directory() -> Path:
    """A new directory, on tmpfs where there is one: a test writes many journals."""
    return Path(tempfile.mkdtemp(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))


@pytest.fixture
def directory() -> Iterator[Path]:
    made = memory_directory()
    yield made
    shutil.rmtree(made)


def bits(value: float | None) -> bytes | None:
    # NaN is not equal to itself, its bytes are.
    return None if value is None else struct.pack("<d", value)


def content(record: Scalars | Document) -> tuple[Any, ...]:
    """All that a record says, comparable."""
    if isinstance(record, Document):
        return (record.kind, json.dumps(record.content))
    named = zip(record.names, record.values, strict=True)
    values = tuple((number, bits(value)) for number, value in named)
    return (record.time_ns, record.step, bits(record.epoch), values)


def drain(reader: JournalReader, most_readings: int = 1) -> list[Scalars | Document]:
    """Read to the end, which an undamaged journal of less than 4 MiB reaches in one reading."""
    records: list[Scalars | Document] = []
    for _ in range(most_readings):
        records += reader.read()
        if reader.drained():
            return records
    raise AssertionError(f"not at the end after {most_readings} readings")


# -- any interleaving


def printable(text: str) -> str:
    """As a reader gives a text back: control characters and halves of a character are replaced."""
    kept = "\t\n"
    return "".join(
        "\ufffd" if unicodedata.category(each) in ("Cc", "Cs") and each not in kept else each
        for each in text
    )


class Conversation(RuleBasedStateMachine):
    """A writer and a reader, and a model that remembers everything that was written."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = memory_directory()
        self.writer: JournalWriter | None = None

    def open(self, size: int) -> JournalWriter:
        self.writer = JournalWriter(self.directory, size, {"run": "r"})
        self.reader = JournalReader(self.writer.path)
        self.ring_bytes = layout.areas(size - size % 8).ring[1]
        self.names: dict[int, Name] = {}
        self.shapes: list[tuple[Shape, tuple[int, ...]]] = []
        for count in COUNTS:
            ids = tuple(self.say_name(f"{count}/{i}", "train") for i in range(count))
            self.shapes.append((Shape(ids), ids))
        # (start, content) of each record; how many the reader has had, and had at the last commit
        self.written: list[tuple[int, tuple[Any, ...]]] = []
        self.lost_and_read = self.committed = (0, 0)
        self.mark = self.reader.bookmark()
        self.last: dict[int, tuple[Any, ...]] = {}
        self.stands = ProgressRecord(None, 0, 0, 0, 0, 0, 0)._asdict()
        self.totals: dict[str, list[float]] = {}
        self.places: dict[str, int] = {}
        return self.writer

    def teardown(self) -> None:
        if self.writer is not None:
            self.reader.close()
            self.writer.close()
        shutil.rmtree(self.directory)

    def the_writer(self) -> JournalWriter:
        return self.writer or self.open(SMALLEST)

    def say_name(self, text: str, split: str) -> int:
        assert self.writer is not None
        number = self.writer.name(text, split)
        if number:
            self.names[number] = Name(printable(text), printable(split))
        return number

    @rule(size=st.sampled_from((SMALLEST, 131_073, 200_004, 262_144, 524_288)))
    def start(self, size: int) -> None:
        if self.writer is None:
            self.open(size)

    @rule(
        which=st.integers(0, len(COUNTS) - 1),
        times=st.integers(1, 400),
        value=st.floats(),
        step=st.none() | st.integers(-(2**62), 2**62),
        epoch=st.none() | st.floats(allow_nan=False),
        time_ns=st.integers(0, 2**62),
    )
    def log(
        self,
        which: int,
        times: int,
        value: float,
        step: int | None,
        epoch: float | None,
        time_ns: int,
    ) -> None:
        writer = self.the_writer()
        shape, ids = self.shapes[which]
        for _ in range(times):
            # The first value is the record's own, so that no two records are alike.
            values = [float(len(self.written))] + [value] * (len(ids) - 1)
            # fmt: off
            writer.scalars(
                shape, time_ns, layout.NO_STEP if step is None else step,
                math.nan if epoch is None else epoch, values)
            # fmt: on
            packed = tuple(zip(ids, map(bits, values), strict=True))
            said = (time_ns, step, bits(epoch), packed)
            self.written.append((writer.position - shape.size, said))
            self.last[which] = said

    @rule(
        kind=st.sampled_from((layout.SPAN, layout.EVENT)),
        size=st.integers(0, 70_000),
        times=st.integers(1, 8),
    )
    def document(self, kind: int, size: int, times: int) -> None:
        writer = self.the_writer()
        for _ in range(times):
            text = json.dumps({"n": len(self.written), "text": "x" * size})
            whole = layout.padded(16 + len(text))
            fits = writer.append(kind, text.encode())
            assert fits == (whole <= min(60_000, self.ring_bytes // 4))
            if fits:
                self.written.append((writer.position - whole, (kind, text)))

    @rule(text=st.text(max_size=300), split=st.text(max_size=20))
    def name(self, text: str, split: str) -> None:
        self.the_writer()
        self.say_name(text, split)

    @rule(metric=st.sampled_from("abc"), amount=st.floats(0, 1e6))
    def count(self, metric: str, amount: float) -> None:
        writer = self.the_writer()
        if metric not in self.places:
            self.places[metric] = writer.counter(metric, {"why": metric})
        if self.places[metric] >= 0:
            writer.add(self.places[metric], amount)
            self.totals.setdefault(metric, [0.0])[0] += amount

    @rule(bucket=st.integers(0, 3), amount=st.floats(0, 1e6))
    def observe(self, bucket: int, amount: float) -> None:
        writer = self.the_writer()
        if "h" not in self.places:
            self.places["h"] = writer.histogram("h", BOUNDS)
        if self.places["h"] >= 0:
            writer.add(self.places["h"], amount)
            writer.add(self.places["h"] + 1 + bucket, 1.0)
            cells = self.totals.setdefault("h", [0.0] * 5)
            cells[0] += amount
            cells[1 + bucket] += 1.0

    @rule(code=st.integers(0, 255), name=st.integers(0, 2**32), after_ns=TIMES_US)
    def enter_phase(self, code: int, name: int, after_ns: int) -> None:
        self.the_writer().phase(code, name, after_ns)
        self.stands.update(phase=code, phase_name=name, phase_after_ns=after_ns)

    @rule(step=st.integers(-1, 2**63 - 1), expect_ms=st.integers(0, 2**63))
    def step(self, step: int, expect_ms: int) -> None:
        self.the_writer().step(step)
        self.the_writer().expect_ms(expect_ms)
        said = None if step < 0 else step
        self.stands.update(step=said, expect_ms=expect_ms)

    @rule(code=st.integers(0, 255), since_us=TIMES_US)
    def enter_state(self, code: int, since_us: int) -> None:
        self.the_writer().state(code, since_us)
        self.stands.update(state=code, state_since_ns=since_us * 1000)

    @rule()
    def read(self) -> None:
        writer = self.the_writer()
        lost, had = self.lost_and_read
        unread = self.written[lost + had :]
        behind = writer.position - self.reader.position

        records = drain(self.reader)

        # Everything that the ring still holds, in order, and nothing else.
        oldest = writer.position - self.ring_bytes
        whole = [said for start, said in unread if start >= oldest]
        assert [content(record) for record in records] == whole
        if behind <= self.ring_bytes:
            assert len(whole) == len(unread)
        self.lost_and_read = (lost + len(unread) - len(whole), had + len(whole))
        assert sum(self.lost_and_read) == len(self.written)
        if whole:
            assert self.reader.lost == self.lost_and_read[0]
        assert self.reader.unreadable == 0
        assert self.names == self.reader.names

    @rule()
    def commit(self) -> None:
        self.the_writer()
        self.reader.commit(*self.reader.bookmark())
        self.committed = self.lost_and_read
        self.mark = self.reader.bookmark()
        assert self.writer is not None
        assert self.mark[0] == self.writer.agent_position()

    @rule()
    def reopen(self) -> None:
        writer = self.the_writer()
        self.reader.close()
        self.reader = JournalReader(writer.path)
        assert self.mark == self.reader.bookmark()
        self.lost_and_read = self.committed

    @invariant()
    def what_stands_is_what_was_written_last(self) -> None:
        if self.writer is None:
            return
        said = ProgressRecord(**self.stands) if self.stands["state_since_ns"] else None
        assert said == self.reader.progress()
        latest = [content(record) for record in self.reader.latest()]
        assert sorted(map(repr, self.last.values())) == sorted(map(repr, latest))
        found = {total.metric: list(total.values) for total in self.reader.totals()}
        assert self.totals == found


class TestConversation(Conversation.TestCase):  # type: ignore[misc,name-defined]
    settings = settings(QUIET, max_examples=20, stateful_step_count=40)


# -- torn, cut, flipped


class Written:
    """A journal that went round several times, and the set of all that was ever said in it."""

    def __init__(self, directory: Path, size: int) -> None:
        writer = JournalWriter(directory, size, {"run": "r"})
        self.said: set[tuple[Any, ...]] = set()
        self.names: dict[int, Name] = {}
        shapes = []
        for count in COUNTS:
            ids = []
            for i in range(count):
                number = writer.name(f"{count}/{i}")
                self.names[number] = Name(f"{count}/{i}", "")
                ids.append(number)
            shapes.append((Shape(ids), ids))
        writer.document(layout.CONFIG, {"lr": 0.1})
        writer.document(layout.FACTS, {"parameters": 7})
        writer.counter("c")
        writer.histogram("h", BOUNDS)
        dice = random.Random(size)
        serial = 0
        while writer.position < 4.5 * layout.areas(size).ring[1]:
            serial += 1
            if dice.random() < 0.1:
                text = json.dumps({"n": serial, "text": "y" * dice.randrange(3000)})
                assert writer.append(layout.EVENT, text.encode())
                self.said.add((layout.EVENT, text))
            else:
                shape, ids = dice.choice(shapes)
                values = [float(serial)] + [dice.random() for _ in ids[1:]]
                writer.scalars(shape, serial * 1000, serial, serial / 8, values)
                packed = tuple(zip(ids, map(bits, values), strict=True))
                self.said.add((serial * 1000, serial, bits(serial / 8), packed))
            writer.phase(serial % 7, 1, serial)
            writer.step(serial)
            writer.state(1, serial)
        self.progress = ProgressRecord(serial, 0, serial % 7, 1, 1, serial, serial * 1000)
        writer.reason("killed by its own hand")
        writer.close()
        self.content = writer.path.read_bytes()
        self.areas = layout.areas(size)
        totals = self.areas.totals
        # Totals and progress have no checksums: what is flipped there is read as it stands.
        self.guarded = [range(512), range(560, totals[0]), range(sum(totals), size)]
        writer.path.unlink()

    def check(self, path: Path, damages: int, end: int = 2**20) -> str:
        """Read all that a copy holds, damaged, or zeros from *end* on; all of it was once said."""
        try:
            reader = JournalReader(path)
        except Unreadable as why:
            return str(why)
        try:
            # A damaged stretch is given up after twenty readings.
            for record in drain(reader, 21 * (2 * damages + 2)):
                assert content(record) in self.said
            for latest in reader.latest():
                assert content(latest) in self.said
            progress = reader.progress()
            if end <= 544 or end >= 560:
                # Whatever is damaged elsewhere, it stands.
                assert progress == (self.progress if end >= 560 else None)
            assert reader.names.items() <= self.names.items()
            assert reader.identity in ({}, {"run": "r"})
            assert reader.config in ({}, {"lr": 0.1})
            assert reader.facts in ({}, {"parameters": 7})
            assert {total.metric for total in reader.totals()} <= {"c", "h"}
            assert reader.reason() in ("", "killed by its own hand")
            assert not reader.writer_is_alive()
        finally:
            reader.close()
        return ""


@contextmanager
def damaged(path: Path, data: bytes) -> Iterator[None]:
    path.write_bytes(data)
    yield
    path.unlink()


@pytest.fixture(scope="module")
def journals() -> Iterator[tuple[Path, Written]]:
    directory = memory_directory()
    yield directory, Written(directory, SMALLEST)
    shutil.rmtree(directory)


@st.composite
def damages(draw: st.DrawFn) -> list[tuple[str, float, int, bytes]]:
    """What is done, where (0 to 1 of a place), to how many bytes, and with what."""
    one = st.tuples(
        st.sampled_from(("flip", "zero", "noise", "word")),
        st.floats(0, 1, exclude_max=True),
        st.integers(1, 300),
        st.binary(min_size=8, max_size=40),
    )
    return draw(st.lists(one, min_size=1, max_size=5))


WORDS = (layout.RING_POSITION, layout.DEFINITIONS_POSITION, layout.LATEST_POSITION)


def hurt(data: bytearray, where: range, what: tuple[str, float, int, bytes]) -> None:
    kind, place, length, noise = what
    at = where[int(place * len(where))]
    end = min(at + length, where[-1] + 1)
    if kind == "flip":
        data[at] ^= 1 << (length % 8)
    elif kind == "zero":
        data[at:end] = bytes(end - at)
    elif kind == "noise":
        data[at:end] = (noise * (length // len(noise) + 1))[: end - at]
    else:
        word = WORDS[length % 3]
        data[word : word + 8] = noise[:8]


@pytest.mark.parametrize("area", ["anywhere", "head", "definitions", "latest", "ring"])
def test_a_damaged_journal_yields_only_what_was_written(
    journals: tuple[Path, Written], area: str
) -> None:
    directory, written = journals
    places = {
        "anywhere": written.guarded,
        "head": [range(512), range(560, 3100)],
        "definitions": [range(4096, 4096 + 1200)],
        "latest": [range(written.areas.latest[0], written.areas.latest[0] + 2200)],
        "ring": [range(written.areas.ring[0], len(written.content))],
    }[area]
    outcomes = []

    @settings(QUIET, max_examples=40)
    @given(damages())
    def damage(done: list[tuple[str, float, int, bytes]]) -> None:
        data = bytearray(written.content)
        for what in done:
            hurt(data, places[what[2] % len(places)], what)
        path = directory / "copy.journal"
        with damaged(path, bytes(data)):
            outcomes.append(written.check(path, len(done)))

    damage()

    # Only the head can make a whole journal unreadable.
    assert "" in outcomes
    if area not in ("anywhere", "head"):
        assert {""} == set(outcomes)


@settings(QUIET, max_examples=30)
@given(length=st.floats(0, 1), zeros=st.booleans())
def test_a_cut_file_is_unreadable_and_a_half_zeroed_one_is_read_in_part(
    journals: tuple[Path, Written], length: float, zeros: bool
) -> None:
    directory, written = journals
    keep = int(length * (len(written.content) - 1))
    data = written.content[:keep]
    if zeros:
        data += bytes(len(written.content) - keep)

    path = directory / "copy.journal"
    with damaged(path, data):
        outcome = written.check(path, 1, end=keep)

    if not zeros:
        expected = "is not a journal" if keep < 148 else "is damaged"
        assert outcome.endswith(expected)


@settings(QUIET, max_examples=30)
@given(length=st.floats(0, 1), after=st.integers(0, 300))
def test_a_file_cut_while_it_is_open_is_read_in_part_and_ends(
    journals: tuple[Path, Written], length: float, after: int
) -> None:
    directory, written = journals
    path = directory / "copy.journal"
    with damaged(path, written.content):
        reader = JournalReader(path)
        os.truncate(path, int(length * len(written.content)))
        records = drain(reader, 21 * 4)
        assert {content(record) for record in records} <= written.said
        assert {content(record) for record in reader.latest()} <= written.said
        assert reader.progress() in (None, written.progress)
        assert reader.names.items() <= written.names.items()
        reader.totals()
        assert reader.reason() in ("", "killed by its own hand")
        reader.close()


def test_a_writer_stopped_at_any_bytecode_leaves_only_whole_values(directory: Path) -> None:
    # Death comes between two instructions: here it could come between any two of the writer's own.
    writer = JournalWriter(directory, SMALLEST, {"run": "r"})
    reader = JournalReader(writer.path)
    shape = Shape([writer.name("a")])
    said, reported, moments = set[Any](), [], 0
    seen: list[ProgressRecord] = []
    stands = ProgressRecord(None, 0, 0, 0, 0, 0, 0)
    stood: list[ProgressRecord] = []

    def look(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal moments
        if not frame.f_code.co_filename.endswith("journal/writer.py"):
            return None
        frame.f_trace_opcodes = True
        moments += 1
        reported.extend(reader.read())
        # What is published is whole: there is nothing to wait for.
        assert reader.drained()
        assert {content(record) for record in reader.latest()} <= said
        progress = reader.progress()
        if progress is not None and progress not in seen:
            seen.append(progress)
        return look

    before = sys.gettrace()
    # The second time that it looks closely the ring goes round, so a filler is seen as well.
    for step in range(1, 1601):
        said.add((step, step, bits(0.5), ((1, bits(float(step))),)))
        if step % 400 > 3:
            writer.scalars(shape, step, step, 0.5, [float(step)])
            if step % 100 == 0:
                reported.extend(reader.read())
            continue
        sys.settrace(look)
        try:
            writer.scalars(shape, step, step, 0.5, [float(step)])
            writer.append(layout.EVENT, b'{"text":"%s"}' % (b"x" * 12_000))
            writer.name(f"name {step}")
            writer.phase(step % 7, step, step * 3)
            writer.step(step)
            writer.expect_ms(step % 5)
            writer.state(1, step)
            writer.document(layout.FACTS, {"step": step})
        finally:
            sys.settrace(before)
        # One word after another, each whole: a code never without its time.
        for change in (
            {"phase_name": step},
            {"phase": step % 7, "phase_after_ns": step * 3},
            {"step": step},
            {"expect_ms": step % 5},
            {"state": 1, "state_since_ns": step * 1000},
        ):
            before_that, stands = stands, stands._replace(**change)  # type: ignore[arg-type]
            if stands.state and stands != before_that:
                stood.append(stands)
    reported.extend(reader.read())

    assert moments > 5000
    events = [record for record in reported if isinstance(record, Document)]
    scalars = [record.step for record in reported if isinstance(record, Scalars)]
    assert scalars == list(range(1, 1601))
    assert len(events) == 16
    assert stood == seen
    assert (reader.lost, reader.unreadable) == (0, 0)
    assert reader.facts == {"step": 1600}
    reader.close()
    writer.close()


# -- a writer that does not wait

FAST_WRITER = """
import sys
from pathlib import Path
from otel_ddp.journal import layout
from otel_ddp.journal.writer import JournalWriter, Shape

directory, size, records, name_every = Path(sys.argv[1]), *map(int, sys.argv[2:])
writer = JournalWriter(directory, size, {"run": "r"})
total = writer.counter("written")
shapes = [Shape([writer.name(f"{count}/{i}") for i in range(count)]) for count in (1, 3, 8, 40)]
print(writer.path, flush=True)
step = 0
while step != records:
    step += 1
    if step % 97 == 0:
        payload = b'{"n":%d,"text":"%s"}' % (step, b"z" * (step % 1500))
        assert writer.append(layout.EVENT, payload)
    elif name_every and step % name_every == 0:
        number = writer.name(f"new/{step}")
        writer.scalars(Shape([number]), step * 1000, step, step / 2, [step + 0.0])
    else:
        count = (1, 3, 8, 40)[step % 4]
        values = [step + i / 64 for i in range(count)]
        writer.scalars(shapes[step % 4], step * 1000, step, step / 2, values)
    writer.add(total, 1.0)
    if step % 10 == 0:
        writer.phase(step % 7, step, step * 3)
        writer.step(step)
        writer.expect_ms(step * (2**32 + 1))
        writer.state(1 + step % 5, step * 5)
"""


@contextmanager
def fast_writer(
    directory: Path, size: int, records: int, name_every: int
) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A real process that writes as fast as it can; values follow from the step."""
    arguments = [str(directory), str(size), str(records), str(name_every)]
    with subprocess.Popen(
        [sys.executable, "-c", FAST_WRITER, *arguments], stdout=subprocess.PIPE, text=True
    ) as child:
        try:
            assert child.stdout is not None
            yield child, Path(child.stdout.readline().strip())
        finally:
            child.kill()


def serial_of(record: Scalars | Document) -> int:
    """The step that a record of the fast writer belongs to, if all of it fits together."""
    if isinstance(record, Document):
        step = record.content["n"]
        assert {"n": step, "text": "z" * (step % 1500)} == record.content
        assert step % 97 == 0
        return int(step)
    step = record.step
    assert step is not None
    assert (step * 1000, step / 2) == (record.time_ns, record.epoch)
    assert [step + i / 64 for i in range(len(record.values))] == [*record.values]
    return step


def serials_of(progress: ProgressRecord | None) -> list[int]:
    """The steps that its words belong to, in the order of their writing; each of them is whole."""
    if progress is None:
        return []
    step, expect_ms, phase, name, state, phase_after_ns, state_since_ns = progress
    # fmt: off
    serials = [name, phase_after_ns // 3, step or 0, expect_ms % 2**32,
               state_since_ns // 5000]
    # fmt: on
    assert serials[1] % 7 == phase
    assert serials[3] == expect_ms // 2**32
    assert 1 + serials[4] % 5 == state
    assert all(serial % 10 == 0 for serial in serials)
    return serials


@pytest.mark.parametrize(
    ("size", "records", "name_every"), [(SMALLEST, 60_000, 0), (2 * 1024 * 1024, 40_000, 31)]
)
def test_a_reader_beside_a_writer_at_full_speed_sees_whole_records_in_order(
    directory: Path, size: int, records: int, name_every: int
) -> None:
    reported, last, readings = 0, 0, 0

    with fast_writer(directory, size, records, name_every) as (child, path):
        reader = JournalReader(path)
        running = True
        while running:
            running = child.poll() is None
            found = reader.read() if running else drain(reader, 3)
            for record in found:
                step = serial_of(record)
                assert step > last
                last = step
                if isinstance(record, Scalars):
                    assert all(number in reader.names for number in record.names)
            reported += len(found)
            readings += 1
            if readings % 16 == 0:
                serials_of(reader.progress())
                for latest in reader.latest():
                    serial_of(latest)
                    assert all(number in reader.names for number in latest.names)
        assert child.returncode == 0

    assert records == last
    assert records == reported + reader.lost
    assert reported > 0
    assert reader.unreadable == 0
    assert [(float(records),)] == [total.values for total in reader.totals()]
    assert [records] * 5 == serials_of(reader.progress())
    reader.close()


def test_a_writer_killed_in_the_middle_leaves_whole_values_and_no_lock(directory: Path) -> None:
    dice = random.Random(20)

    for _ in range(4):
        with fast_writer(directory, SMALLEST, -1, 50) as (child, path):
            reader = JournalReader(path)
            assert reader.writer_is_alive()
            moment, last, reported = dice.randrange(1000, 9000), 0, 0
            while last < moment:
                for record in reader.read():
                    assert serial_of(record) > last
                    last = serial_of(record)
                    reported += 1
            assert reader.writer_is_alive()

            child.send_signal(signal.SIGKILL)
            child.wait()

            assert not reader.writer_is_alive()
            for record in drain(reader, 25):
                assert serial_of(record) > last
                last = serial_of(record)
                reported += 1
            assert last == reported + reader.lost
            serials = serials_of(reader.progress())
            # At most the very last change of each word is missing, of the later ones first.
            assert serials == sorted(serials, reverse=True)
            assert set(serials) <= {last // 10 * 10, last // 10 * 10 - 10}
            assert len(serials) == 5
            for latest in reader.latest():
                serial_of(latest)
            (total,) = reader.totals()
            assert total.values[0] in (last, last - 1)
            reader.close()
