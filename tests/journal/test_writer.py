"""What the writer puts into the file, byte by byte, and what it never does."""

from __future__ import annotations

import contextlib
import gc
import gzip
import math
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

import commands
from otel_ddp.journal import layout
from otel_ddp.journal.parser import Scalars
from otel_ddp.journal.place import open_journal
from otel_ddp.journal.reader import JournalReader
from otel_ddp.journal.writer import JournalWriter, Shape

SMALLEST = 128 * 1024


def log(writer: JournalWriter, shape: Shape, step: int, *values: float) -> None:
    writer.scalars(shape, step * 10, step, math.nan, values)


# -- the bytes

KEPT = Path(__file__).with_name("version_1.journal.gz")
TAKEN = "6857010000000000100000000000000003000000000000003ea847a4"


def written(directory: Path) -> Path:
    """A journal with everything that one can hold, in whose ring the second lap has begun."""
    writer = JournalWriter(directory, SMALLEST, {"run": "r"})
    ids = writer.name("loss", "train"), writer.name("größe")
    steps, times = writer.counter("steps", {"kind": "x"}), writer.histogram("times", (0.5, 1.0))
    writer.document(layout.FACTS, {"gpu": "H200"})
    writer.document(layout.CONFIG, {"lr": 0.1})
    writer.add(steps, 3.0)
    writer.add(times + 2, 1.0)
    shape = Shape((*ids, ids[0]))
    for step in range(6):
        log(writer, shape, step, 1.5, -2.0, 3.0)
        writer.append(layout.EVENT, b'{"text":"%s"}' % (b"x" * 14_000))
    writer.scalars(shape, 222, layout.NO_STEP, 0.5, (4.5, 5.0, 6.0))
    writer.append(layout.SPAN, b'{"name":"save"}')
    writer.append(layout.STEPS, struct.pack("<QQ", 0, layout.STEPS_BEGAN << layout.CODE_SHIFT | 9))
    writer.phase(4, 5, 1_750_000_000_000_001)
    writer.step(13)
    writer.expect_ms(3)
    writer.state(2, 1_750_000_000_000_002)
    writer.reason("out of memory")
    writer.close()
    return writer.path


def content(path: Path) -> tuple[object, ...]:
    """All that a reader finds."""
    reader = JournalReader(path)
    definitions = reader.identity, reader.config, reader.facts, reader.names, reader.totals()
    found = (*definitions, reader.read(), reader.latest(), reader.progress(), reader.reason())
    reader.commit(*reader.bookmark())
    reader.close()
    return (*found, path.with_suffix(".taken").read_bytes().hex())


def test_a_journal_that_this_version_once_wrote_is_read_as_one_that_it_writes_now(
    tmp_path: Path,
) -> None:
    kept = tmp_path / "1-0.journal"
    kept.write_bytes(gzip.decompress(KEPT.read_bytes()))

    found = content(kept)

    assert found == content(written(tmp_path))
    assert found[-1] == TAKEN


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


def test_a_long_reason_is_cut_between_two_characters(
    writer: JournalWriter, reader: JournalReader
) -> None:
    writer.reason("x" + "ö" * 3000)

    assert reader.reason() == "x" + "ö" * 1019

    writer.reason("\ud800 gone")
    assert reader.reason() == "? gone"


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
