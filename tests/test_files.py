"""Files whose place another program or another user could have taken."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

from otel_ddp import files
from otel_ddp.files import check_kept, default_root, is_kept, make_kept

OTHER = 65534
NAME = f"otel_ddp-{os.geteuid()}"

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's files")


def of_another(path: Path) -> Path:
    """A directory that another user has made."""
    path.mkdir(parents=True)
    path.chmod(0o777)
    os.chown(path, OTHER, OTHER)
    return path


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """As /var/tmp is."""
    path = tmp_path / "disk"
    path.mkdir()
    path.chmod(0o1777)
    return path


def test_what_no_variable_names_lies_on_the_nodes_own_disk(disk: Path) -> None:
    assert default_root() == Path("/var/tmp") / NAME
    make_kept(disk / NAME / "history")
    assert (disk / NAME).stat().st_mode & 0o777 == 0o700


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


@as_root
@pytest.mark.parametrize("whose", ["directory", "file", "link"])
def test_what_is_anothers_or_lies_in_their_directory_is_neither_opened_nor_replaced_nor_deleted(
    whose: str, tmp_path: Path
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir(0o700)
    path, fifo = folder / "status", folder / "fifo"
    path.write_text("{}")
    os.mkfifo(fifo)
    if whose == "link":
        folder.rename(tmp_path / "elsewhere")
        folder.symlink_to(tmp_path / "elsewhere")
    for each in (folder,) if whose == "directory" else (path, fifo):
        os.chown(each, OTHER, OTHER)
    before = sorted(os.listdir(folder))

    for act in (files.open_own, files.read_own, files.lock_holder, files.read_json):
        with contextlib.suppress(OSError):
            assert act(path) is None
    if whose == "file":
        return
    acts = (
        lambda: files.write_to_fifo(fifo, "where"),
        lambda: files.replace(path, "ours"),
        lambda: files.create(folder / "new"),
    )
    for change in acts:
        with pytest.raises(OSError, match=r"belongs to user 65534|Not a directory"):
            change()
    files.remove(path)
    assert sorted(os.listdir(folder)) == before
    assert path.read_text() == "{}"


def nested(depth: int) -> str:
    return '{"a":' * depth + "1" + "}" * depth


@pytest.mark.parametrize("text", ["[" * 100_000, "[" * 900 + "]" * 900, nested(65), "", "{"])
def test_what_is_damaged_or_nested_too_deeply_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"nested too deeply|Expecting"):
        files.parse_json(text)


@pytest.mark.timeout(60)
def test_what_lies_there_in_place_of_a_file_is_not_read(tmp_path: Path) -> None:
    real, link, fifo = (tmp_path / name for name in ("real", "link", "fifo"))
    real.write_text('{"a": 1}')
    link.symlink_to(real)
    os.mkfifo(fifo)

    assert files.read_mapping(real) == {"a": 1}
    assert files.read_text(real, most=4) == '{"a"'
    assert files.read_json(real, most=4) is None
    for path in (link, fifo, tmp_path, tmp_path / "missing"):
        assert files.read_mapping(path) == {}
        assert not files.read_text(path)


def test_a_file_is_replaced_as_a_whole_and_closed_to_others(tmp_path: Path) -> None:
    elsewhere, path = tmp_path / "elsewhere", tmp_path / "status"
    elsewhere.write_text("of a user")
    path.symlink_to(elsewhere)
    (tmp_path / "status.half").symlink_to(elsewhere)

    files.replace(path, "ours")

    assert (path.read_text(), elsewhere.read_text()) == ("ours", "of a user")
    assert path.stat().st_mode & 0o777 == 0o600
    assert {each.name for each in tmp_path.iterdir()} == {"elsewhere", "status"}


def test_what_cannot_be_replaced_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "status"
    path.mkdir()

    with pytest.raises(OSError, match="directory"):
        files.replace(path, "ours")
    assert [each.name for each in tmp_path.iterdir()] == ["status"]
