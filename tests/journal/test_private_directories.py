"""What lies on a disk belongs to its user alone, wherever another user came first."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from otel_ddp.journal.private_directories import check_kept, default_root, is_kept, make_kept

OTHER = 65534
NAME = f"otel_ddp-{os.geteuid()}"

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's files")


def of_another(path: Path, mode: int = 0o777) -> Path:
    """A directory that another user has made."""
    path.mkdir(parents=True)
    path.chmod(mode)
    os.chown(path, OTHER, OTHER)
    return path


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """As /var/tmp is."""
    path = tmp_path / "disk"
    path.mkdir()
    path.chmod(0o1777)
    return path


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "home").mkdir()
    return {"HOME": str(tmp_path / "home")}


def test_what_no_variable_names_lies_on_the_nodes_own_disk(disk: Path, env: dict[str, str]) -> None:
    assert default_root(env, disk) == disk / NAME
    make_kept(disk / NAME / "history")
    assert default_root(env, disk) == disk / NAME
    assert (disk / NAME).stat().st_mode & 0o777 == 0o700


@as_root
@pytest.mark.parametrize("trap", ["directory", "link", "file"])
def test_where_another_user_was_first_it_is_the_state_directory(
    trap: str, disk: Path, env: dict[str, str], tmp_path: Path
) -> None:
    if trap == "directory":
        of_another(disk / NAME)
    elif trap == "link":
        (disk / NAME).symlink_to(tmp_path)
    else:
        (disk / NAME).touch()

    home = Path(env["HOME"])
    assert default_root(env, disk) == home / ".local/state" / NAME
    state = tmp_path / "state"
    assert default_root({**env, "XDG_STATE_HOME": str(state)}, disk) == state / NAME
    make_kept(home / ".local/state" / NAME / "history")
    assert (home / ".local/state" / NAME / "history").stat().st_mode & 0o777 == 0o700


@as_root
def test_a_home_of_another_user_and_a_disk_without_a_sticky_bit_are_not_used(
    disk: Path, env: dict[str, str], tmp_path: Path
) -> None:
    disk.chmod(0o777)  # whoever may write to it may put another directory in place of ours
    assert default_root(env, disk).is_relative_to(env["HOME"])

    of_another(tmp_path / "shared")
    assert default_root({"HOME": str(tmp_path / "shared")}, disk) == disk / NAME


@as_root
@pytest.mark.parametrize("above", [False, True])
def test_a_directory_of_another_user_is_neither_written_to_nor_read(
    above: bool, disk: Path
) -> None:
    path = disk / NAME / "history"
    if above:
        of_another(disk / NAME)
        path.mkdir(0o700)
    else:
        (disk / NAME).mkdir(0o700)
        of_another(path)

    with pytest.raises(PermissionError, match=f"belongs to user {OTHER}, not to us"):
        make_kept(path)
    with pytest.raises(PermissionError, match=f"belongs to user {OTHER}, not to us"):
        check_kept(path)


def test_a_link_and_a_directory_that_others_may_write_to_are_not_read(tmp_path: Path) -> None:
    real, link, missing = (tmp_path / name for name in ("real", "link", "missing"))
    real.mkdir(0o755)
    link.symlink_to(real)

    assert is_kept(real)
    assert is_kept(missing)
    assert not is_kept(link)
    real.chmod(0o777)
    assert not is_kept(real)
