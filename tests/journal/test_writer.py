"""What the writer puts into the file, byte by byte, and what it never does."""

from __future__ import annotations

import contextlib
import gc
import json
import math
import os
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

import commands
from otel_ddp.journal import layout
from otel_ddp.journal.parser import Document, Scalars
from otel_ddp.journal.place import open_journal
from otel_ddp.journal.reader import JournalReader
from otel_ddp.journal.writer import JournalWriter, Shape

SMALLEST = 128 * 1024


def log(writer: JournalWriter, shape: Shape, step: int, *values: float) -> None:
    writer.scalars(shape, step * 10, step, math.nan, values)


def read(writer: JournalWriter) -> list[Scalars | Document]:
    reader = JournalReader(writer.path)
    try:
        return reader.read()
    finally:
        reader.close()


# -- the bytes


def test_every_byte_lies_where_the_documentation_says(
    writer: JournalWriter, reader: JournalReader
) -> None:
    # Only numbers of docs/internals/journal.md, none from the code: they must not drift apart.
    loss, grad = writer.name("loss", "train"), writer.name("größe")
    steps = writer.counter("steps", {"kind": "x"})
    times = writer.histogram("times", (0.5, 1.0))
    writer.document(6, {"gpu": "H200"})
    writer.document(5, {"lr": 0.1})
    writer.add(steps, 3.0)
    writer.add(times, 0.7)
    writer.add(times + 2, 1.0)
    shape = Shape((loss, grad, loss))
    writer.scalars(shape, 111, 7, 0.5, (1.5, -2.0, 3.0))
    writer.append(17, b'{"name":"save"}')
    writer.scalars(shape, 222, layout.NO_STEP, math.nan, (4.5, 5.0, 6.0))
    writer.phase(4, 5, 1_750_000_000_000_001)
    writer.step(13)
    writer.expect_ms(3)
    writer.state(2, 1_750_000_000_000_002)
    writer.reason("out of memory")

    data = writer.path.read_bytes()

    def u32(at: int) -> int:
        return int(struct.unpack_from("<I", data, at)[0])

    def u64(at: int) -> int:
        return int(struct.unpack_from("<Q", data, at)[0])

    def i64(at: int) -> int:
        return int(struct.unpack_from("<q", data, at)[0])

    def f64(at: int) -> float:
        return float(struct.unpack_from("<d", data, at)[0])

    # The head.
    assert data[0:8] == b"OTELDDPJ"
    assert (u32(8), u32(12), u64(16)) == (1, 4096, 131072)
    assert (u64(24), u64(32)) == (4096, 32768)  # definitions
    assert (u64(40), u64(48)) == (36864, 4096)  # totals
    assert (u64(56), u64(64)) == (40960, 16384)  # latest
    assert (u64(72), u64(80)) == (57344, 73728)  # ring
    assert u64(88) == os.getpid()
    stat = Path("/proc/self/stat").read_text()
    assert u64(96) == int(stat.rpartition(")")[2].split()[19])
    assert u64(104) == 0
    assert i64(112) == writer.created_ns
    assert i64(120) > 0
    assert data[128:144] == writer.journal_id
    assert u32(144) == zlib.crc32(data[0:144], 0)

    # Progress: a word each; a code and its time share one.
    assert u64(512) == 4 * 2**56 + 1_750_000_000_000_001
    assert u64(520) == 5
    assert u64(528) == 13 + 1
    assert u64(536) == 3
    assert u64(544) == 2 * 2**56 + 1_750_000_000_000_002
    assert data[552:1024] == bytes(472)

    # The reason.
    assert u32(1024) == 13
    assert u32(1028) == zlib.crc32(b"out of memory", 1024)
    assert data[1032:1045] == b"out of memory"

    # Definitions: records from the area's start to the word at 264.
    def records(start: int, end: int) -> list[tuple[int, int, int, bytes]]:
        found, at = [], 0
        while at < end:
            size = u32(start + at + 4)
            body = data[start + at + 4 : start + at + size]
            assert size % 8 == 0
            assert u32(start + at) == zlib.crc32(body, at)
            kind, flags, number = struct.unpack_from("<HHI", body, 4)
            assert flags == 0
            found.append((at, kind, number, body[12:]))
            at += size
        assert at == end
        return found

    definitions = records(4096, u64(264))
    kinds = [kind for _, kind, _, _ in definitions]
    assert kinds == [1, 2, 2, 3, 4, 6, 5]
    assert {number for _, _, number, _ in definitions} == {0}
    documents = [payload for _, kind, _, payload in definitions if kind != 2]
    assert [json.loads(payload.rstrip(b"\0")) for payload in documents] == [
        {"run": "r"},
        {"index": 0, "metric": "steps", "attributes": {"kind": "x"}},
        {"index": 1, "metric": "times", "attributes": {}, "bounds": [0.5, 1.0]},
        {"gpu": "H200"},
        {"lr": 0.1},
    ]
    names = [payload for _, kind, _, payload in definitions if kind == 2]
    assert struct.unpack_from("<IHH", names[0]) == (1, 4, 5)
    assert names[0][8:17] == b"losstrain"
    assert struct.unpack_from("<IHH", names[1]) == (2, 7, 0)
    assert names[1][8:15] == "größe".encode()

    # Totals: a float each; a histogram has its sum, then one total a bucket.
    assert [f64(36864 + 8 * i) for i in range(6)] == [3.0, 0.7, 0.0, 1.0, 0.0, 0.0]

    # The ring, up to the word at 256.
    ring = records(57344, u64(256))
    assert [(kind, number) for _, kind, number, _ in ring] == [(16, 1), (17, 2), (16, 3)]
    assert ring[1][3].rstrip(b"\0") == b'{"name":"save"}'
    for (_, _, _, payload), time_ns, step, values in (
        (ring[0], 111, 7, (1.5, -2.0, 3.0)),
        (ring[2], 222, -(2**63), (4.5, 5.0, 6.0)),
    ):
        assert struct.unpack_from("<IIqq", payload) == (3, 0, time_ns, step)
        assert struct.unpack_from("<III", payload, 32) == (1, 2, 1)
        assert payload[44:48] == bytes(4)
        assert struct.unpack_from("<ddd", payload, 48) == values
    assert struct.unpack_from("<d", ring[0][3], 24) == (0.5,)
    assert math.isnan(struct.unpack_from("<d", ring[2][3], 24)[0])

    # The latest values: size, its complement, position, then a copy of the ring's record.
    at = ring[2][0]
    assert u64(272) == 16 + 88
    assert (u32(40960), u32(40964), u64(40968)) == (88, 88 ^ 0xFFFFFFFF, at)
    assert data[40976 : 40976 + 88] == data[57344 + at : 57344 + at + 88]

    # The reader's own file.
    reader.read()
    reader.commit(*reader.bookmark())
    taken = writer.path.with_name(writer.path.name.replace(".journal", ".taken")).read_bytes()
    assert len(taken) == 28
    assert struct.unpack("<QQQ", taken[:24]) == (u64(256), 4, 0)
    assert struct.unpack("<I", taken[24:])[0] == zlib.crc32(taken[:24], 0)


def test_the_end_of_a_lap_is_filled_as_the_documentation_says(writer: JournalWriter) -> None:
    # 2 values: 72 bytes. 1024 of them fill a ring of 73728 bytes exactly.
    shape = Shape((1, 2))
    for step in range(1023):
        log(writer, shape, step, 1.0, 2.0)
    assert writer.append(17, bytes(44))  # 64 bytes: leaves 8, too few for a record's head
    log(writer, shape, 2000, 1.0, 2.0)
    assert writer.position == 73728 + 72
    for step in range(1022):
        log(writer, shape, step, 1.0, 2.0)
    at = writer.position % 73728
    assert writer.append(17, bytes(90))  # 112 bytes: more than the 72 that are left

    data = writer.path.read_bytes()

    crc, size, kind, flags, number = struct.unpack_from("<IIHHI", data, 57344 + at)
    assert (size, kind, flags) == (73728 - at, 0, 0)
    assert number == 2047
    # Of a filler, only its head is checked: what follows is left as it was.
    assert crc == zlib.crc32(data[57344 + at + 4 : 57344 + at + 16], 73728 + at)
    assert writer.position == 2 * 73728 + 112


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (128 * 1024, ((4096, 32768), (36864, 4096), (40960, 16384), (57344, 73728))),
        (512 * 1024, ((4096, 65536), (69632, 4096), (73728, 65536), (139264, 385024))),
        (2**21, ((4096, 262144), (266240, 16384), (282624, 262144), (544768, 1552384))),
    ],
)
def test_a_file_is_divided_as_the_documentation_says(
    size: int, expected: tuple[tuple[int, int], ...]
) -> None:
    assert expected == layout.areas(size)


# -- values that do not fit


def test_a_value_that_does_not_pack_is_not_counted_as_lost(
    writer: JournalWriter, reader: JournalReader
) -> None:
    shape = Shape((1,))
    log(writer, shape, 1, 1.0)
    with pytest.raises(struct.error):
        log(writer, shape, 2, 10**400)
    with pytest.raises(struct.error):
        writer.scalars(shape, 1, 2, "late", (1.0,))  # type: ignore[arg-type]
    log(writer, shape, 3, 3.0)

    steps = [record.step for record in reader.read() if isinstance(record, Scalars)]

    assert steps == [1, 3]
    assert reader.lost == 0


def test_a_lap_that_an_agent_has_taken_is_not_overwritten_unread(
    writer: JournalWriter, reader: JournalReader
) -> None:
    shape = Shape([writer.name("loss")])

    def lap() -> None:
        before = writer.position
        while writer.position - before < writer.ring_bytes - 2 * shape.size:
            log(writer, shape, 1, 0.5)

    lap()
    first = writer.overwrites_unread()
    reader.read()
    reader.commit(*reader.bookmark())
    lap()
    taken = writer.overwrites_unread()
    lap()

    assert (first, taken, writer.overwrites_unread()) == (False, False, True)


def test_where_no_more_latest_values_fit_the_ring_still_has_them(
    writer: JournalWriter, reader: JournalReader
) -> None:
    shapes = [Shape(range(i * 100, i * 100 + 100)) for i in range(1, 15)]
    for step, shape in enumerate(shapes):
        log(writer, shape, step, *([1.0] * 100))
        log(writer, shape, step, *([2.0] * 100))

    latest = reader.latest()

    # 16 + 1248 bytes each
    assert list(range(16384 // 1264)) == [record.step for record in latest]
    assert {2.0} == {value for record in latest for value in record.values}
    assert len(reader.read()) == 28


def test_whatever_there_is_much_of_the_rest_of_the_definitions_finds_room(
    writer: JournalWriter,
) -> None:
    said = {"text": "x" * 40}
    most = {"text": "x" * 2000}
    while writer.name("n" * 40):
        pass
    while writer.document(layout.CONFIG, said) or writer.document(layout.FACTS, said):
        pass
    of_names = 0
    while writer.counter("of a name", {"name": "n" * 40}, of_name=True) >= 0:
        of_names += 1

    # What docs/metrics.md lists of one process is 48 of them and 5,152 bytes.
    places = [writer.counter("c" * 60, {"phase": str(number)}) for number in range(44)]
    assert of_names > 10
    assert -1 not in places
    assert writer.histogram("h" * 30, range(15)) >= 0
    assert writer.document(layout.IDENTITY, most)

    reader = JournalReader(writer.path)
    assert reader.identity == most
    reader.close()


def test_counters_of_names_leave_places_for_the_others(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path, 2**20, {})
    count = 0
    while writer.counter("c", {"name": str(count)}, of_name=True) >= 0:
        count += 1

    # 8,192 bytes of totals.
    assert count == 1024 - 128
    assert writer.counter("c") == count
    # What fits no more has no place, and takes none.
    assert writer.histogram("h", range(124)) == count + 1
    assert writer.histogram("i", (1.0,)) == -1
    assert writer.counter("d") == 1023
    assert writer.counter("e") == -1
    writer.close()


def test_a_long_reason_is_cut_between_two_characters(
    writer: JournalWriter, reader: JournalReader
) -> None:
    writer.reason("x" + "ö" * 3000)

    assert reader.reason() == "x" + "ö" * 1019

    writer.reason("\ud800 gone")
    assert reader.reason() == "? gone"


def test_running_numbers_go_round_after_four_billion(
    writer: JournalWriter, reader: JournalReader
) -> None:
    # Nobody logs four billion values in a test: the counter is wound forward.
    writer.number = 2**32 - 3
    reader.ring.expected = 2**32 - 2
    for step in range(6):
        log(writer, Shape((1,)), step, 1.0)

    assert len(reader.read()) == 6
    assert reader.lost == 0


# -- what it costs the process


def open_files() -> dict[str, str]:
    links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    # The descriptor of the listing itself is gone by now.
    return {link.rpartition("/")[2]: os.readlink(link) for link in links if os.path.lexists(link)}


def test_a_journal_is_two_descriptors_no_thread_and_nothing_after_close(tmp_path: Path) -> None:
    before, tasks = open_files(), os.listdir("/proc/self/task")

    writer, remark = open_journal([tmp_path], SMALLEST, {})
    assert writer is not None
    assert remark == ""
    log(writer, Shape((1,)), 1, 1.0)

    new = {fd: at for fd, at in open_files().items() if fd not in before}
    # Ours, which holds the lock, and the one that mmap keeps.
    assert [str(writer.path)] * 2 == list(new.values())
    assert not any(os.get_inheritable(int(fd)) for fd in new)
    assert Path("/proc/self/maps").read_text().count(str(tmp_path)) == 1
    assert tasks == os.listdir("/proc/self/task")
    writer.close()
    writer.close()
    assert before == open_files()
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


WITHOUT_STANDARD_STREAMS = """
import os, sys
from pathlib import Path
from otel_ddp.journal.writer import JournalWriter
for fd in map(int, sys.argv[2:]):
    os.close(fd)
writer = JournalWriter(Path(sys.argv[1]), 128 * 1024, {"run": "r"})
for fd in range(3):
    try:
        os.write(fd, b"a message of a library" * 100)
    except OSError:
        pass
os._exit(0)
"""


def test_no_message_of_a_library_goes_into_the_journal(tmp_path: Path) -> None:
    streams = ("0", "1", "2")
    commands.python(WITHOUT_STANDARD_STREAMS, tmp_path, *streams, stdin=subprocess.DEVNULL)
    (path,) = tmp_path.glob("*.journal")

    reader = JournalReader(path)
    assert reader.identity == {"run": "r"}
    reader.close()


@pytest.mark.parametrize("which", ["all", "the lock's", "the map's"])
def test_descriptors_that_are_the_users_by_now_stay_open(tmp_path: Path, which: str) -> None:
    before = open_files()
    writer = JournalWriter(tmp_path, SMALLEST, {})
    both = [int(fd) for fd in open_files() if fd not in before]
    locks = [writer._fd]
    maps = [fd for fd in both if fd not in locks]
    taken = {"all": both, "the lock's": locks, "the map's": maps}[which]
    # As after a closerange: the numbers are given out again.
    with (tmp_path / "user").open("wb") as user:
        for fd in taken:
            os.dup2(user.fileno(), fd)

        writer.close()
        del writer
        gc.collect()

        found = open_files()
        for fd in taken:
            assert found[str(fd)] == str(tmp_path / "user")
    for fd in both:
        with contextlib.suppress(OSError):
            os.close(fd)


def test_the_file_is_for_its_owner_alone_and_not_to_be_written(writer: JournalWriter) -> None:
    assert writer.path.stat().st_mode == 0o100400
    assert writer.path.stat().st_blocks * 512 >= SMALLEST


def test_an_opening_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    before = open_files()

    with pytest.raises(TypeError):
        JournalWriter(tmp_path, SMALLEST, {"run": object()})

    assert list(tmp_path.iterdir()) == []
    assert before == open_files()


def test_nothing_in_place_of_the_taken_file_blocks_a_process(
    writer: JournalWriter, tmp_path: Path
) -> None:
    log(writer, Shape((1,)), 1, 1.0)
    taken = writer.path.with_suffix(".taken")
    secret = tmp_path / "elsewhere"
    secret.write_bytes(b"untouched")

    for make in (
        lambda: os.mkfifo(taken),
        lambda: taken.symlink_to(secret),
        lambda: taken.write_bytes(b"short"),
        lambda: taken.write_bytes(bytes(28)),
    ):
        make()
        assert writer.agent_position() == 0
        reader = JournalReader(writer.path)
        assert len(reader.read()) == 1
        reader.commit(*reader.bookmark())
        reader.close()
        taken.unlink()
    assert secret.read_bytes() == b"untouched"


# -- the lock

OPEN = """
import os, signal, sys
from pathlib import Path
from otel_ddp.journal.writer import JournalWriter
writer = JournalWriter(Path(sys.argv[1]), 128 * 1024, {})
"""


def process(code: str, directory: Path, *before: str) -> subprocess.Popen[str]:
    """A process with a journal, told to go on by the end of its input."""
    return subprocess.Popen(
        [*before, sys.executable, "-c", OPEN + code, str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def first_line(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


def test_a_forked_child_does_not_hold_the_lock_of_its_dead_parent(tmp_path: Path) -> None:
    code = "child = os.fork()\nif child: print(writer.path, child, flush=True)\nsys.stdin.read()"
    with process(code, tmp_path) as parent:
        path, child = first_line(parent).split()
        reader = JournalReader(Path(path))
        assert reader.writer_is_alive()

        parent.kill()
        parent.wait()

        os.kill(int(child), 0)
        assert path in [os.readlink(link) for link in Path(f"/proc/{child}/fd").iterdir()]
        assert not reader.writer_is_alive()
        reader.close()
        assert parent.stdin is not None
        assert parent.stdout is not None
        parent.stdin.close()
        assert parent.stdout.read() == ""  # the child has gone as well


@pytest.mark.parametrize("ending", ["writer.close(); os._exit(0)", "sys.exit(0)"])
def test_a_child_that_ends_leaves_its_parent_the_lock(tmp_path: Path, ending: str) -> None:
    code = (
        f"\nchild = os.fork()\nif not child: {ending}\n"
        "os.waitpid(child, 0)\nprint(writer.path, flush=True)\nsys.stdin.read()"
    )
    with process(code, tmp_path) as parent:
        reader = JournalReader(Path(first_line(parent)))

        assert reader.writer_is_alive()

        parent.kill()
        parent.wait()
        assert not reader.writer_is_alive()
        reader.close()


NAMESPACE = ["unshare", "--pid", "--fork", "--kill-child"]


def pid_namespace() -> list[str]:
    for more in ([], ["--map-root-user"]):
        command = [*NAMESPACE, *more]
        if subprocess.run([*command, "true"], capture_output=True).returncode == 0:
            return command
    pytest.skip("this machine lets nobody make a PID namespace")


def test_a_writer_in_another_pid_namespace_is_seen_to_live(tmp_path: Path) -> None:
    command = pid_namespace()
    code = "\nprint(writer.path, os.getpid(), flush=True)\nsys.stdin.read()\nos._exit(0)"
    with process(code, tmp_path, *command) as parent:
        path, pid = first_line(parent).split()
        reader = JournalReader(Path(path))
        assert pid == "1"
        assert reader.pid == 1
        assert reader.writer_is_alive()

        parent.communicate()

        assert not reader.writer_is_alive()
        reader.close()
