"""The spool keeps requests in order and within its limit, and counts what it loses."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from otel_ddp import settings
from otel_ddp.agent.export import spool_directory
from otel_ddp.agent.export.otlp import SIGNALS, Request
from otel_ddp.agent.export.spool import BLOCK_BYTES, Entry, Spool
from otel_ddp.journal.place import Place

PLENTY = 1024 * BLOCK_BYTES

HOLD = """
import sys; from pathlib import Path; from otel_ddp.agent.export.spool import Request, Spool
spool = Spool(Path(sys.argv[1]), 2**30)
spool.append(Request("metrics", b"theirs", 1))
print("there", flush=True)
sys.stdin.read()
"""


def drain(spool: Spool) -> list[bytes | None]:
    bodies = []
    while (entry := oldest(spool)) is not None:
        try:
            bodies.append(entry.read())
        except FileNotFoundError:  # noqa: PERF203
            spool.remove(entry, "spool_error")
        else:
            spool.remove(entry, "delivered")
    return bodies


def oldest(spool: Spool) -> Entry | None:
    """Of all signals."""
    found = filter(None, map(spool.oldest, SIGNALS))
    return min(found, key=lambda entry: entry.number, default=None)


def names(directory: Path) -> list[str]:
    """The files there, without the lock."""
    return [path.name for path in directory.iterdir() if path.name != "lock"]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "spool"


def test_a_restart_finds_everything_in_order_and_adds_behind_it(directory: Path) -> None:
    before = Spool(directory, PLENTY)
    for number in range(12):
        before.append(Request("metrics", b"%d" % number, number))

    after = Spool(directory, PLENTY)
    after.append(Request("logs", b"12", 1))

    assert (after.entries, after.size_bytes) == (13, 13 * BLOCK_BYTES)
    assert drain(after) == [b"%d" % number for number in range(13)]


def test_a_directory_that_a_living_agent_uses_is_left_alone(directory: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(directory)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        other.stdout.readline()
        being_written = directory / "00000000000000000002-metrics-7-0.z.half"
        being_written.write_bytes(b"ha")

        spool = Spool(directory, PLENTY)
        taken = spool.append(Request("metrics", b"ours", 1))
        theirs = sorted(names(directory))
        other.stdin.close()
        other.wait()

    assert taken is not None
    assert taken.path.parent == directory.with_name("spool-2")
    assert theirs == ["00000000000000000001-metrics-1-0.z", being_written.name]
    assert drain(spool) == [b"ours"]
    # Its agent is dead: the next one finds what it left.
    assert drain(Spool(directory, PLENTY)) == [b"theirs"]


def test_nodes_and_places_that_share_a_disk_have_spools_of_their_own() -> None:
    conf = settings.read({"OTEL_DDP_SPOOL_DIR": "/disk"})
    here, there = Place(Path("/dev/shm/otel_ddp-0")), Place(Path("/dev/shm/otel_ddp-1"))

    found = [spool_directory(conf, place, node) for place in (here, there) for node in "ab"]

    assert len(set(found)) == 4
    assert {path.parent for path in found} == {Path("/disk")}
    # The next agent of a node finds it again, and one that is offline does not.
    assert spool_directory(conf, Place(Path("/dev/shm/otel_ddp-0")), "a") == found[0]
    assert spool_directory(conf, here) == spool_directory(conf, here, socket.gethostname())
    offline = settings.read({"OTEL_DDP_SPOOL_DIR": "/disk", "OTEL_DDP_AGENT": "offline"})
    assert spool_directory(offline, here, "a").name.startswith("offline-")


def test_current_values_are_dropped_first_when_there_is_no_room(directory: Path) -> None:
    before = Spool(directory, 4 * BLOCK_BYTES)
    before.append(Request("metrics", b"logged", 1))
    before.append(Request("metrics", b"state", 2, irreplaceable=False))
    before.append(Request("metrics", b"newer state", 4, irreplaceable=False))

    spool = Spool(directory, 4 * BLOCK_BYTES)
    for number in range(3):
        spool.append(Request("traces", b"span %d" % number, 8))

    assert spool.dropped == {"spool_full": 2 + 4}
    assert drain(spool) == [b"logged", b"span 0", b"span 1", b"span 2"]


def test_a_directory_that_vanished_is_made_again(directory: Path) -> None:
    spool = Spool(directory, PLENTY)
    spool.append(Request("metrics", b"lost", 3))
    for path in directory.iterdir():
        path.unlink()
    directory.rmdir()

    assert spool.append(Request("metrics", b"new", 1))
    assert drain(spool) == [b"new"]
    assert spool.dropped == {"spool_error": 3}


@pytest.mark.parametrize("is_there", [True, False])
def test_the_directory_is_private_and_made_with_the_first_request(
    directory: Path, is_there: bool
) -> None:
    if is_there:
        directory.mkdir(mode=0o777)
        directory.chmod(0o777)

    spool = Spool(directory, PLENTY)
    before = directory.exists()
    entry = spool.append(Request("metrics", b"x", 1))

    assert (before, spool.problem) == (is_there, None)
    assert entry is not None
    assert directory.stat().st_mode & 0o777 == 0o700
    assert entry.path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "path",
    ["/proc/nope/spool", "/dev/null/a/spool", "/tmp/nul\0/spool", "/tmp/" + "x" * 300, "a link"],
)
def test_a_directory_that_cannot_be_made_is_a_problem_and_no_exception(
    path: str, directory: Path, tmp_path: Path
) -> None:
    (tmp_path / "elsewhere").mkdir()
    directory.symlink_to(tmp_path / "elsewhere")

    spool = Spool(directory if path == "a link" else Path(path), PLENTY)

    assert spool.append(Request("metrics", b"x", 1)) is None
    assert oldest(spool) is None
    assert spool.problem is not None
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_directory_of_another_user_is_refused(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory.mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)

    spool = Spool(directory, PLENTY)

    assert spool.append(Request("metrics", b"x", 1)) is None
    assert spool.problem == f"{directory}: belongs to user {os.getuid()}, not to us"


def test_a_full_disk_is_no_exception_and_leaves_no_half_file(directory: Path) -> None:
    # A limit on file size is the full disk that needs no root: the write comes back short.
    script = (
        "import os, resource, signal, sys; from pathlib import Path\n"
        "from otel_ddp.agent.export.spool import Request, Spool\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "spool = Spool(Path(sys.argv[1]), 2**24)\n"
        "assert spool.append(Request('metrics', b'before', 1))\n"
        "soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))\n"
        "assert spool.append(Request('metrics', os.urandom(5000), 1)) is None\n"
        "assert spool.problem\n"
        "assert len(os.listdir(sys.argv[1])) == 2, os.listdir(sys.argv[1])\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))\n"
        "assert spool.append(Request('metrics', os.urandom(5000), 1))\n"
        "assert spool.problem is None and spool.entries == 2 and not spool.dropped\n"
    )

    subprocess.run([sys.executable, "-c", script, str(directory)], check=True)
