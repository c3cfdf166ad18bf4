"""Where processes and agent meet: private, in memory where possible, and helpful where not."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
from pathlib import Path

import pytest

import commands
from otel_ddp import files
from otel_ddp.errors import ConfigError
from otel_ddp.files import private_directory
from otel_ddp.journal import place
from otel_ddp.journal.place import Place, candidates, existing, find
from shortages import descriptors_below, locked_elsewhere

NOBODY = 65534


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


# -- a named directory


@pytest.mark.parametrize("umask", [0o777, 0o077, 0o000])
def test_a_named_directory_is_made_for_its_owner_alone(tmp_path: Path, umask: int) -> None:
    (tmp_path / "a").mkdir()
    named = tmp_path / "a" / "b"
    before = os.umask(umask)
    try:
        places, remark = find(str(named), {})
    finally:
        os.umask(before)

    assert [named] == [each.directory for each in places]
    assert remark == ""
    assert mode_of(named) == 0o700


def test_a_default_directory_that_is_open_to_others_is_closed(tmp_path: Path) -> None:
    open_one = tmp_path / "open"
    open_one.mkdir()
    open_one.chmod(0o755)

    private_directory(open_one)

    assert mode_of(open_one) == 0o700


def test_a_named_directory_is_left_as_it_is_and_refused_if_others_can_write_to_it(
    tmp_path: Path,
) -> None:
    named = tmp_path / "shared"
    named.mkdir()
    named.chmod(0o755)
    places, remark = find(str(named), {})
    assert ([each.directory for each in places], remark) == ([named], "")
    assert mode_of(named) == 0o755

    named.chmod(0o777)
    with pytest.raises(ConfigError, match="other users can write to it"):
        find(str(named), {})
    assert mode_of(named) == 0o777


def complaint(named: Path | str) -> str:
    with pytest.raises(ConfigError) as why:
        find(str(named), {})
    text = str(why.value)
    start = "OTEL_DDP_DIR or --dir must be a directory that this user can write to, got "
    assert text.startswith(f"{start}{str(named)!r} (")
    assert text.endswith("). Name another one, or none for the default.")
    return text.removeprefix(f"{start}{str(named)!r} (").partition("). Name")[0]


def test_what_is_no_directory_is_refused(tmp_path: Path) -> None:
    target, dangling, file = tmp_path / "target", tmp_path / "dangling", tmp_path / "file"
    target.mkdir(mode=0o755)
    (tmp_path / "link").symlink_to(target)
    dangling.symlink_to(tmp_path / "nowhere")
    file.touch()

    for each in (tmp_path / "link", dangling, file):
        assert complaint(each) == "is no directory (a link is not followed)"
    assert complaint(file / "below") == "File exists"
    assert mode_of(target) == 0o755
    assert not (tmp_path / "nowhere").exists()


def directory_of_another(tmp_path: Path) -> tuple[Path, int]:
    if os.geteuid():
        return Path("/proc"), 0
    other = tmp_path / "other"
    other.mkdir(mode=0o777)
    os.chown(other, NOBODY, NOBODY)
    return other, NOBODY


def test_a_directory_of_another_user_is_refused_and_left_alone(tmp_path: Path) -> None:
    other, owner = directory_of_another(tmp_path)
    before = mode_of(other)

    assert f"belongs to user {owner}, not to us" == complaint(other)
    assert before == mode_of(other)


# -- the default


def test_the_candidates_are_shared_memory_and_temporary() -> None:
    own = f"otel_ddp-{os.geteuid()}"

    # Absolute ones, because the agent runs elsewhere.
    expected = [Path("/dev/shm") / own, Path.cwd() / "tmp" / own]
    assert expected == list(candidates({"TMPDIR": "tmp"}))
    assert len(list(candidates({}))) == 2


def test_offline_runs_have_a_place_of_their_own_and_status_finds_both(tmp_path: Path) -> None:
    env = {"TMPDIR": str(tmp_path)}
    sent, kept = (set(candidates(env, offline=offline)) for offline in (False, True))
    there = {path for path in sent | kept if path.is_relative_to(tmp_path)}
    for path in there:
        path.mkdir()

    found = {each.directory for each in existing("", env)}

    assert not sent & kept
    assert len(there) == 2
    assert there <= found


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Candidates of the test's own, instead of this machine's."""
    paths = [tmp_path / "first" / "mine", tmp_path / "second" / "mine"]
    monkeypatch.setattr(place, "candidates", lambda env, offline: iter(paths))
    monkeypatch.setattr(place, "_SHARED_MEMORY", tmp_path / "first")
    return paths


def test_what_cannot_be_used_is_passed_over_with_one_remark(
    here: list[Path], tmp_path: Path
) -> None:
    here[0].parent.mkdir()
    here[0].symlink_to(tmp_path)
    here[1].parent.mkdir()

    places, remark = find("", {})

    assert [here[1]] == [each.directory for each in places]
    assert remark == (
        f"no shared memory for the journal ({here[0]} cannot be used: is no directory "
        f"(a link is not followed)), so it lies in {here[1]}"
    )


def test_without_a_usable_place_a_remark_says_so_and_nothing_is_raised(here: list[Path]) -> None:
    places, remark = find("", {})

    assert places == []
    assert remark == (
        f"{here[0]} cannot be used: No such file or directory: this process is not recorded; name "
        "a writable directory in OTEL_DDP_DIR"
    )


# -- the files of a place


def test_journals_are_listed_without_what_is_still_being_made(tmp_path: Path) -> None:
    for name in ("2-b.journal", "1-a.journal", ".3-c.journal", "1-a.taken", "agent.json"):
        (tmp_path / name).touch()

    assert [path.name for path in Place(tmp_path).journals()] == ["1-a.journal", "2-b.journal"]
    assert Place(tmp_path / "nowhere").journals() == []


def test_the_doorbell_wakes_a_listening_agent_and_does_nothing_else(tmp_path: Path) -> None:
    here = Place(tmp_path)
    here.wake_agent()
    assert not here.doorbell.exists()

    os.mkfifo(here.doorbell)
    here.wake_agent()  # nobody listens
    listener = os.open(here.doorbell, os.O_RDWR | os.O_NONBLOCK)
    here.wake_agent()
    here.wake_agent()
    assert os.read(listener, 10) == b"!!"
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(listener, bytes(4096))
    here.wake_agent()  # it has been rung often enough
    os.close(listener)


def test_a_doorbell_without_a_listener_does_not_kill(tmp_path: Path) -> None:
    # The listener goes between the opening and the writing; with SIGPIPE as the system has it.
    code = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from otel_ddp.journal.place import Place\n"
        "signal.signal(signal.SIGPIPE, signal.SIG_DFL)\n"
        "here = Place(Path(sys.argv[1])); os.mkfifo(here.doorbell)\n"
        "listener = os.open(here.doorbell, os.O_RDONLY | os.O_NONBLOCK)\n"
        "write = os.write\n"
        "os.write = lambda *sent: (os.close(listener), write(*sent))\n"
        "here.wake_agent(); write(1, b'alive')\n"
    )

    done = commands.python(code, tmp_path)

    assert (done.stdout, done.returncode) == ("alive", 0)


def test_an_agent_lives_as_long_as_it_holds_its_lock(tmp_path: Path) -> None:
    here = Place(tmp_path)
    assert not here.agent_is_alive()
    here.agent_lock.touch()
    assert not here.agent_is_alive()

    with locked_elsewhere(here.agent_lock) as agent:
        assert here.agent_is_alive()
        assert here.agent_pid() == agent.pid
        agent.send_signal(signal.SIGKILL)
        agent.wait()

    assert not here.agent_is_alive()
    assert here.agent_pid() is None


def test_no_process_counts_as_dead_because_descriptors_have_run_out(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    path.touch()
    lowest = os.open("/dev/null", os.O_RDONLY)
    os.close(lowest)
    assert files.lock_holder(path) is None
    with descriptors_below(lowest):
        assert files.lock_holder(path) == 0
