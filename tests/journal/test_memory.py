"""Where memory is short: on small and full file systems of our own, in a mount namespace."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import commands

PREAMBLE = """
import errno, json, math, os, sys
from pathlib import Path
from otel_ddp.journal.reader import JournalReader
from otel_ddp.journal.place import open_journal
from otel_ddp.journal.writer import Shape

mounts = [Path(path) for path in sys.argv[1:]]

def answer(**said):
    print(json.dumps(said), flush=True)
"""
Ask = Callable[..., Any]


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


@pytest.fixture
def ask(namespace: list[str], tmp_path: Path) -> Ask:
    """Runs Python where file systems in memory with these options are mounted."""

    def ask(code: str, *options: str) -> Any:
        points = [tmp_path / f"mount{number}" for number in range(len(options))]
        lines = ["set -e"]
        for point, each in zip(points, options, strict=True):
            point.mkdir()
            lines.append(f"mount -t tmpfs -o {each} none '{point}'; chmod 700 '{point}'")
        command = [*namespace, "sh", "-c", "\n".join((*lines, 'exec "$@"')), "sh"]
        done = commands.run(*command, sys.executable, "-c", PREAMBLE + code, *points)
        assert (done.returncode, done.stderr) == (0, "")
        return json.loads(done.stdout)

    return ask


OPEN = """
writer, remark = open_journal(mounts, 2 * 1024 * 1024, {})
files = [path for point in mounts for path in point.iterdir()]
assert files == ([writer.path] if writer else [])
answer(
    remark=remark,
    kib=os.path.getsize(writer.path) // 1024 if writer else 0,
    at=writer.path.parent.name if writer else None,
)
"""


@pytest.mark.parametrize(
    ("options", "kib", "remark"),
    [
        ("size=1020k", 0, "no room for a journal ({}: No space left on device): "),
        ("size=8m", 1024, "little room in {}: the journal is 1024 KiB instead of 2048 KiB, "),
        # Such a file system says that it has no blocks, neither free nor at all.
        ("size=0", 2048, ""),
    ],
)
def test_the_journal_takes_no_more_than_an_eighth_of_the_room(
    ask: Ask, tmp_path: Path, options: str, kib: int, remark: str
) -> None:
    found = ask(OPEN, options)

    assert found["remark"].startswith(remark.format(tmp_path / "mount0"))
    assert found["kib"] == kib


def test_a_directory_without_room_is_skipped_with_a_remark(ask: Ask, tmp_path: Path) -> None:
    found = ask(OPEN, "size=64m,nr_inodes=1", "size=64m")

    at, then = tmp_path / "mount0", tmp_path / "mount1"
    assert found == {
        "remark": f"no journal in {at}: No space left on device, so it lies in {then}",
        "kib": 2048,
        "at": "mount1",
    }


FULL = """
writer, remark = open_journal(mounts, 128 * 1024, {})
with open(mounts[0] / "greedy", "wb", buffering=0) as file:
    try:
        while True:
            file.write(bytes(4096))
    except OSError as error:
        assert error.errno == errno.ENOSPC
assert os.statvfs(mounts[0]).f_bavail == 0

shape = Shape([writer.name(f"name {i}") for i in range(40)])
total = writer.counter("total")
step = 0
while writer.position < 5 * os.path.getsize(writer.path):
    step += 1
    writer.scalars(shape, step, step, math.nan, [float(step)] * 40)
    writer.phase(2, 0, step)
    writer.step(step)
    writer.state(1, step)
    writer.add(total, 1.0)
writer.reason("r" * 3000)
while writer.name("n" * 50):
    pass
writer.close()
last = JournalReader(writer.path).read()[-1].step
answer(steps=step, last=last, blocks=os.stat(writer.path).st_blocks)
"""


def test_a_full_tmpfs_does_not_kill_a_writer_that_has_its_blocks(ask: Ask) -> None:
    found = ask(FULL, "size=2m")

    assert found["steps"] == found["last"] > 1000
    assert found["blocks"] == 256


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


def test_journals_of_runs_that_are_over_make_room_for_the_next(ask: Ask) -> None:
    # Without an agent they stay as long as there is room, and no longer.
    assert 1 < ask(ENDED, "size=40m")["left"] < 20
