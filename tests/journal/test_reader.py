"""What the reader says about files that are no journals, and how it finds its way in real ones."""

from __future__ import annotations

import json
import math
import os
import struct
from pathlib import Path

import pytest

from otel_ddp.journal import layout
from otel_ddp.journal.parser import Document, Scalars, Unreadable
from otel_ddp.journal.reader import JournalReader
from otel_ddp.journal.writer import JournalWriter, Shape

SMALLEST = 128 * 1024


def log(writer: JournalWriter, shape: Shape, step: int, *values: float) -> None:
    writer.scalars(shape, step * 10, step, math.nan, values)


def steps(records: list[Scalars | Document]) -> list[int | None]:
    return [record.step for record in records if isinstance(record, Scalars)]


def overwrite(path: Path, at: int, content: bytes) -> None:
    # The file is read-only: what stands in it changes by accident, by root, or by a new kernel bug.
    path.chmod(0o600)
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(content)


# -- texts


def test_texts_of_a_journal_fit_every_terminal_label_and_encoding(
    writer: JournalWriter, reader: JournalReader
) -> None:
    odd = "a\x1b[31mb\x9bc\udcffd\te\nü"
    clean = "a\ufffd[31mb\ufffdc\ufffdd\te\nü"
    writer.definitions.define(layout.FACTS, json.dumps({odd: [{"deep": odd}]}).encode())
    raw = b'{"raw": "\xff\xed\xa0\x80\xc2\x9b"}'
    writer.definitions.define(layout.CONFIG, raw)
    writer.name("n\x1b")
    writer.reason("r\x1b")
    reader.read()

    assert reader.facts == {clean: [{"deep": clean}]}
    assert set(reader.config["raw"]) == {"\ufffd"}
    assert reader.names[1].text == "n\ufffd"
    assert reader.reason() == "r\ufffd"
    assert reader.unreadable == 0
    for text in ("a\rb", "a\bb", "a\x7fb"):
        writer.definitions.define(layout.FACTS, json.dumps({"ascii": text}).encode())
        reader.read()
        assert reader.facts["ascii"] == "a\ufffdb"


# -- what is no journal


def why_unreadable(path: Path) -> str:
    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(Unreadable) as why:
        JournalReader(path)
    assert descriptors == len(os.listdir("/proc/self/fd"))
    return str(why.value)


def test_what_is_no_regular_file_is_no_journal(tmp_path: Path, writer: JournalWriter) -> None:
    directory, fifo, link = tmp_path / "d.journal", tmp_path / "f.journal", tmp_path / "l.journal"
    directory.mkdir()
    os.mkfifo(fifo)
    link.symlink_to(writer.path)

    assert f"{directory} is not a journal" == why_unreadable(directory)
    assert f"{fifo} is not a journal" == why_unreadable(fifo)
    assert f"{link}: Too many levels of symbolic links" == why_unreadable(link)
    assert f"{tmp_path}/x: No such file or directory" == why_unreadable(tmp_path / "x")


def test_a_file_of_another_version_says_which(writer: JournalWriter) -> None:
    overwrite(writer.path, 8, struct.pack("<I", 2))

    expected = f"{writer.path} is a journal of version 2; this otel-ddp reads version 1"
    assert expected == why_unreadable(writer.path)


@pytest.mark.parametrize(
    ("at", "word"),
    [
        (24, 0),  # definitions that lie on the head
        (40, 2**63),  # totals beyond the end
        (64, 2**64 - 1),  # more latest values than a file has bytes
        (80, 73721),  # a ring that is no multiple of eight
        (80, 0),  # no ring at all
        (16, SMALLEST + 8),  # larger than it is
        (112, 2**63),  # made before 1970
    ],
)
def test_a_head_that_contradicts_itself_is_damaged(
    writer: JournalWriter, at: int, word: int
) -> None:
    overwrite(writer.path, at, struct.pack("<Q", word))
    data = writer.path.read_bytes()[:144]
    overwrite(writer.path, 144, struct.pack("<I", layout.checksum(data, 0)))

    assert f"{writer.path} is damaged" == why_unreadable(writer.path)


# -- in a real one


def test_a_later_document_replaces_or_completes_an_earlier_one(
    writer: JournalWriter, reader: JournalReader
) -> None:
    writer.document(layout.IDENTITY, {"rank": 3})
    writer.document(layout.CONFIG, {"lr": 0.1, "seed": 1})
    writer.document(layout.CONFIG, {"lr": 0.2})
    writer.document(layout.FACTS, {"python": "3.11"})
    writer.document(99, {"from": "a later version"})
    writer.definitions.define(layout.FACTS, b"not JSON")

    reader.read_definitions()

    assert reader.identity == {"rank": 3}
    assert reader.config == {"lr": 0.2, "seed": 1}
    assert reader.facts == {"python": "3.11"}
    assert reader.unreadable == 1


def test_records_that_it_does_not_understand_are_counted_and_passed_over(
    writer: JournalWriter, reader: JournalReader
) -> None:
    writer.append(99, b"{}")
    writer.append(layout.EVENT, b"[1]")
    writer.append(layout.EVENT, b"[" * 18_000)
    writer.append(layout.SPAN, b"\xff\xfe")
    writer.append(layout.SCALARS, struct.pack("<IIqqd", 9, 0, 0, 0, 0))
    writer.scalars(Shape((2,)), -1, 6, math.nan, (1.0,))  # before 1970
    log(writer, Shape((1,)), 7, 1.0)

    assert steps(reader.read()) == [7]
    assert steps(reader.latest()) == [7]
    assert reader.unreadable == 6
    assert reader.lost == 0


def test_a_torn_record_is_waited_for_and_then_given_up(
    writer: JournalWriter, reader: JournalReader
) -> None:
    shape = Shape((1,))
    for step in range(3):
        log(writer, shape, step, 1.0)
    torn = 57344 + 64 + 40
    before = writer.path.read_bytes()[torn : torn + 1]
    overwrite(writer.path, torn, b"\xaa")

    assert steps(reader.read()) == [0]
    for _ in range(19):
        assert reader.read() == []
    assert not reader.drained()
    assert steps(reader.read()) == [2]
    assert reader.drained()
    assert reader.lost == 1

    # A record whose bytes only arrive a little later is not lost.
    overwrite(writer.path, torn, before)
    again = JournalReader(writer.path)
    overwrite(writer.path, torn, b"\xaa")
    assert steps(again.read()) == [0]
    overwrite(writer.path, torn, before)
    assert steps(again.read()) == [1, 2]
    assert again.lost == 0
    again.close()


def test_a_damaged_definition_is_waited_for_and_then_counted_once(
    writer: JournalWriter, reader: JournalReader
) -> None:
    at = 4096 + struct.unpack_from("<Q", writer.path.read_bytes(), 264)[0]
    writer.name("x" * 100)
    writer.name("y")
    overwrite(writer.path, at + 30, b"!")

    for _ in range(19):
        reader.read_definitions()
        assert reader.names == {}
    reader.read_definitions()

    assert reader.names == {2: ("y", "")}
    assert reader.unreadable == 1


@pytest.mark.parametrize(
    "wrong",
    [{"index": -1}, {"index": 2**70}, {"bounds": 1}, {"attributes": None}, {"metric": 7}],
    ids=lambda wrong: "".join(wrong),
)
def test_a_definition_that_makes_no_sense_is_no_total(
    writer: JournalWriter, reader: JournalReader, wrong: dict[str, object]
) -> None:
    said = {"index": 0, "metric": "m", "attributes": {}, "bounds": None, **wrong}
    assert writer.definitions.define(layout.HISTOGRAM, json.dumps(said).encode())
    reader.read_definitions()

    assert reader.totals() == []


def test_one_reading_of_a_large_ring_is_bounded(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path, 16 * 1024 * 1024, {})
    shape = Shape(range(1, 901))
    count = 10 * 1024 * 1024 // shape.size
    for step in range(count):
        log(writer, shape, step, *([float(step)] * 900))
    reader = JournalReader(writer.path)

    readings = [steps(reader.read()) for _ in range(3)]

    assert [step for each in readings for step in each] == [*range(count)]
    assert max(map(len, readings)) * shape.size <= 4 * 1024 * 1024
    reader.close()
    writer.close()


def test_a_closed_reader_finds_nothing_and_raises_nothing(
    writer: JournalWriter, reader: JournalReader
) -> None:
    log(writer, Shape((1,)), 1, 1.0)
    reader.close()
    reader.close()

    assert reader.read() == []
    assert reader.latest() == []
    assert reader.totals() == []
    assert reader.progress() is None
    assert reader.reason() == ""
    assert not reader.writer_is_alive()
    assert reader.drained()
