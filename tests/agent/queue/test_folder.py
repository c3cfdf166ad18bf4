"""Requests stay in order and within their limit on disk, and what is lost is counted."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from otel_ddp import settings
from otel_ddp.agent.export.exporter import folder_of
from otel_ddp.agent.export.folder import BLOCK_BYTES, Queue, Request
from otel_ddp.journal.place import Place
from shortages import locked_elsewhere

PLENTY = 1024 * BLOCK_BYTES
LANES = ("metrics", "traces", "logs")


def opened(folder: Path, limit_bytes: int = PLENTY) -> Queue:
    return Queue(LANES, folder, limit_bytes)


def put(queue: Queue, lane: str, body: bytes, points: int = 1, irreplaceable: bool = True) -> bool:
    """Whether the disk has taken it."""
    request = Request(lane, body, points, irreplaceable)
    queue.add(request)
    queue.write(lane)
    return request.number > 0


def drain(queue: Queue) -> list[bytes | None]:
    """What is read of all requests, in the order of their files."""
    bodies = []
    waiting = [each for lane in queue.lanes.values() for each in lane]
    for request in sorted(waiting, key=lambda each: each.number):
        bodies.append(request.read())
        queue.remove(request, "delivered")
    return bodies


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "spool"


def test_a_restart_finds_everything_in_order_and_adds_behind_it(folder: Path) -> None:
    before = opened(folder)
    for number in range(12):
        put(before, "metrics", b"%d" % number)

    after = opened(folder)
    put(after, "logs", b"12")

    assert after.size_bytes == 13 * BLOCK_BYTES
    assert drain(after) == [b"%d" % number for number in range(13)]


def test_a_folder_that_a_living_agent_uses_is_left_alone(folder: Path) -> None:
    put(opened(folder), "metrics", b"theirs")
    half = folder / "00000000000000000002-metrics-7-0.z.half"
    half.write_bytes(b"ha")
    # Closing any descriptor of it gives the lock back.
    (folder / "lock").open().close()
    with locked_elsewhere(folder / "lock"):
        queue = opened(folder)
        assert put(queue, "metrics", b"ours")

        assert queue.folder == folder.with_name("spool-2")
        assert half.exists()
        assert drain(queue) == [b"ours"]
    # Its agent is dead: the next one finds what it left.
    assert drain(opened(folder)) == [b"theirs"]
    assert not half.exists()


def test_nodes_and_places_that_share_a_disk_have_folders_of_their_own() -> None:
    conf = settings.read({"OTEL_DDP_SPOOL_DIR": "/disk"})
    here, there = Place(Path("/dev/shm/otel_ddp-0")), Place(Path("/dev/shm/otel_ddp-1"))

    found = [folder_of("spool-", conf, place, node) for place in (here, there) for node in "ab"]

    assert len(set(found)) == 4
    assert {path.parent for path in found} == {Path("/disk")}
    # The next agent of a node finds it again.
    assert folder_of("spool-", conf, Place(Path("/dev/shm/otel_ddp-0")), "a") == found[0]


def test_current_values_are_dropped_first_when_there_is_no_room(folder: Path) -> None:
    before = opened(folder, 4 * BLOCK_BYTES)
    put(before, "metrics", b"logged")
    put(before, "metrics", b"state", 2, irreplaceable=False)
    put(before, "metrics", b"newer state", 4, irreplaceable=False)

    queue = opened(folder, 4 * BLOCK_BYTES)
    for number in range(3):
        put(queue, "traces", b"span %d" % number, 8)
    before_logged = dict(queue.dropped)
    put(queue, "traces", b"span 3", 8)

    assert before_logged == {"spool_full": 2 + 4}
    assert queue.dropped == {"spool_full": 2 + 4 + 1}
    assert drain(queue) == [b"span 0", b"span 1", b"span 2", b"span 3"]


def test_the_disk_helps_out_where_memory_is_full(folder: Path) -> None:
    queue = Queue(LANES, folder, PLENTY, memory_limit_bytes=4)

    queue.add(Request("metrics", b"abc", 1))
    queue.add(Request("traces", b"de", 1))

    assert (queue.memory_bytes, queue.size_bytes, queue.dropped) == (0, 2 * BLOCK_BYTES, {})


def test_what_nobody_sends_any_more_is_forgotten(folder: Path) -> None:
    put(opened(folder), "traces", b"x")

    queue = Queue(("metrics",), folder, PLENTY)

    assert (queue.size_bytes, list(folder.glob("*.z"))) == (0, [])


def test_a_folder_that_vanished_is_made_again(folder: Path) -> None:
    queue = opened(folder)
    put(queue, "metrics", b"lost")
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()

    assert put(queue, "metrics", b"new")
    lost, new = queue.lanes["metrics"]
    with pytest.raises(FileNotFoundError):
        lost.read()
    assert new.read() == b"new"


@pytest.mark.parametrize("is_there", [True, False])
def test_the_folder_is_private_and_made_with_the_first_request(
    folder: Path, is_there: bool
) -> None:
    if is_there:
        folder.mkdir(mode=0o777)
        folder.chmod(0o777)

    queue = opened(folder)
    before = folder.exists()
    assert put(queue, "metrics", b"x")

    assert (before, queue.problem) == (is_there, "")
    assert folder.stat().st_mode & 0o777 == 0o700
    (file,) = folder.glob("*.z")
    assert file.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "path",
    ["/proc/nope/spool", "/dev/null/a/spool", "/tmp/" + "x" * 300, "a link"],
)
def test_a_folder_that_cannot_be_made_is_a_problem_and_no_exception(
    path: str, folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "elsewhere").mkdir()
    folder.symlink_to(tmp_path / "elsewhere")

    queue = opened(folder if path == "a link" else Path(path))

    assert not put(queue, "metrics", b"x")
    assert queue.problem
    assert drain(queue) == [b"x"]
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_full_disk_is_no_exception_and_leaves_no_half_file(folder: Path) -> None:
    # A limit on file size is the full disk that needs no root: the write comes back short.
    script = (
        "import os, resource, signal, sys; from pathlib import Path\n"
        "from otel_ddp.agent.export.folder import Queue, Request\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "queue = Queue(['metrics'], Path(sys.argv[1]), 2**24)\n"
        "def put(body):\n"
        "    queue.add(Request('metrics', body, 1)); queue.write('metrics')\n"
        "put(b'before')\n"
        "soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))\n"
        "put(os.urandom(5000))\n"
        "assert queue.problem and queue.memory_bytes == 5000\n"
        "assert len(os.listdir(sys.argv[1])) == 2, os.listdir(sys.argv[1])\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))\n"
        "put(os.urandom(5000))\n"
        "assert not queue.problem and not queue.memory_bytes and not queue.dropped\n"
        "assert len(os.listdir(sys.argv[1])) == 4, os.listdir(sys.argv[1])\n"
    )

    subprocess.run([sys.executable, "-c", script, str(folder)], check=True)
