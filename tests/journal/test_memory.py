"""Where memory is short: on small and full file systems of our own, in a mount namespace."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import commands

PREAMBLE = """
import errno, json, math, os, sys
from pathlib import Path
from otel_ddp.journal import place
from otel_ddp.journal.reader import JournalReader
from otel_ddp.journal.place import open_journal
from otel_ddp.journal.writer import JournalWriter, Shape

here = Path(sys.argv[1])
mounts = [Path(path) for path in sys.argv[2:]]

def answer(**said):
    print(json.dumps(said), flush=True)

def fill(directory):
    # Another process takes all that is left, to the last block.
    child = os.fork()
    if child == 0:
        with open(directory / "greedy", "wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError as error:
                os._exit(0 if error.errno == errno.ENOSPC else 1)
    assert os.waitpid(child, 0)[1] == 0
    room = os.statvfs(directory)
    assert room.f_bavail == 0

def laps(writer, count):
    shape = Shape([writer.name(f"name {i}") for i in range(40)])
    total = writer.counter("total")
    step = 0
    while writer.position < count * os.path.getsize(writer.path):
        step += 1
        writer.scalars(shape, step, step, math.nan, [float(step)] * 40)
        writer.phase(2, 0, step)
        writer.step(step)
        writer.expect_ms(step)
        writer.state(1, step)
        writer.add(total, 1.0)
    writer.reason("r" * 3000)
    while writer.name("n" * 50):
        pass
    return step

def last(path):
    reader = JournalReader(path)
    return reader.read()[-1].step
"""


@pytest.fixture(scope="module")
def namespace() -> list[str]:
    """How to get a mount namespace here; its mounts go with the process."""
    for command in (["unshare", "--mount"], ["unshare", "--mount", "--map-root-user"]):
        probe = [*command, "mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", "/mnt"]
        try:
            if subprocess.run(probe, capture_output=True).returncode == 0:
                return command
        except FileNotFoundError:
            break
    pytest.skip("this machine lets nobody mount a tmpfs of his own")


class Elsewhere:
    """Runs Python where file systems of chosen sizes are mounted."""

    def __init__(self, namespace: list[str], root: Path) -> None:
        self._namespace = namespace
        self._root = root

    def run(self, code: str, *mounts: str, also: str = "true") -> subprocess.CompletedProcess[str]:
        points, lines = [], ["set -e"]
        for number, options in enumerate(mounts):
            point = self._root / f"mount{number}"
            point.mkdir(exist_ok=True)
            points.append(str(point))
            kind, _, more = options.partition(":")
            lines.append(f"mount -t {kind} {'-o ' + more if more else ''} none '{point}'")
            lines.append(f"chmod 700 '{point}'")
        lines += [also, 'exec "$@"']
        command = [*self._namespace, "sh", "-c", "\n".join(lines), "sh"]
        command += [sys.executable, "-c", PREAMBLE + code, str(self._root), *points]
        return commands.run(*command)

    def ask(self, code: str, *mounts: str, also: str = "true") -> Any:
        done = self.run(code, *mounts, also=also)
        assert (done.returncode, done.stderr) == (0, "")
        return json.loads(done.stdout)


@pytest.fixture
def elsewhere(namespace: list[str], tmp_path: Path) -> Elsewhere:
    return Elsewhere(namespace, tmp_path)


OPEN = """
writer, remark = open_journal(mounts, 2 * 1024 * 1024, {})
steps = laps(writer, 3) if writer else 0
assert not writer or last(writer.path) == steps
left = [name for point in mounts for name in os.listdir(point)]
answer(
    remark=remark,
    kib=os.path.getsize(writer.path) // 1024 if writer else 0,
    at=writer.path.parent.name if writer else None,
    files=len(left),
)
"""


@pytest.mark.parametrize(
    ("mount", "kib", "remark"),
    [
        ("tmpfs:size=1020k", 0, "no room for a journal ({}: No space left on device): "),
        ("tmpfs:size=8m", 1024, "little room in {}: the journal is 1024 KiB instead of 2048 KiB, "),
        ("tmpfs:size=64m", 2048, ""),
        # Such a file system says that it has no blocks, neither free nor at all.
        ("tmpfs:size=0", 2048, ""),
    ],
)
def test_the_journal_takes_no_more_than_an_eighth_of_the_room(
    elsewhere: Elsewhere, tmp_path: Path, mount: str, kib: int, remark: str
) -> None:
    found = elsewhere.ask(OPEN, mount)

    said, endings = found["remark"], ("this process is not recorded", "absence of the agent", "")
    assert said.startswith(remark.format(tmp_path / "mount0"))
    assert said.endswith(endings[(kib > 0) + (kib == 2048)])
    assert (found["kib"], found["files"]) == (kib, int(kib > 0))


def test_a_directory_without_room_is_skipped_with_a_remark(
    elsewhere: Elsewhere, tmp_path: Path
) -> None:
    found = elsewhere.ask(OPEN, "tmpfs:size=64m,nr_inodes=1", "tmpfs:size=64m")

    at, then = tmp_path / "mount0", tmp_path / "mount1"
    assert found == {
        "remark": f"no journal in {at}: No space left on device, so it lies in {then}",
        "kib": 2048,
        "at": "mount1",
        "files": 1,
    }


FULL = """
writer, remark = open_journal(mounts, 128 * 1024, {})
fill(mounts[0])
steps = laps(writer, 5)
writer.close()
answer(steps=steps, last=last(writer.path), blocks=os.stat(writer.path).st_blocks)
"""


def test_a_full_tmpfs_does_not_kill_a_writer_that_has_its_blocks(elsewhere: Elsewhere) -> None:
    found = elsewhere.ask(FULL, "tmpfs:size=2m")

    assert found["steps"] == found["last"] > 1000
    assert found["blocks"] == 256


FIND = """
env = {"TMPDIR": str(here)}
places, remark = place.find("", env)
answer(places=[str(each.directory) for each in places], remark=remark)
"""


def test_without_shared_memory_the_journal_lies_elsewhere_with_a_remark(
    elsewhere: Elsewhere, tmp_path: Path
) -> None:
    own = f"otel_ddp-{os.geteuid()}"
    # Something else lies over /dev, as in a container that has no /dev/shm.
    found = elsewhere.ask(FIND, also="mount -t tmpfs none /dev && : > /dev/null")

    assert [str(tmp_path / own)] == found["places"]
    assert found["remark"] == (
        f"no shared memory for the journal (/dev/shm/{own} cannot be used: No such file or "
        f"directory), so it lies in {tmp_path / own}"
    )


ENDED = """
lasting, _ = open_journal(mounts, 2 << 20, {})
for _ in range(60):
    # One process, and one run after the other.
    writer, remark = open_journal(mounts, 2 << 20, {})
    assert writer is not None and not remark, remark
    writer.close()
assert lasting.path.exists()
answer(left=len(list(mounts[0].glob("*.journal"))))
"""
DEAD = """
for _ in range(60):
    # Each life is a process: a dead one's lock is free.
    child = os.fork()
    if child == 0:
        writer, remark = open_journal(mounts, 2 << 20, {})
        os._exit(0 if writer is not None and not remark else 1)
    assert os.waitpid(child, 0)[1] == 0
answer(left=len(list(mounts[0].glob("*.journal"))))
"""


@pytest.mark.parametrize("code", [DEAD, ENDED], ids=["dead", "ended"])
def test_the_dead_make_room_for_the_living(elsewhere: Elsewhere, code: str) -> None:
    # Without an agent they stay as long as there is room, and no longer.
    assert 1 < elsewhere.ask(code, "tmpfs:size=40m")["left"] < 20
