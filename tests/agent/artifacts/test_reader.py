"""The digest of files and directories, which anybody can work out; what is read and copied."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import fsspec
import pytest

from otel_ddp.agent import artifacts
from otel_ddp.agent.artifacts import CHUNK_BYTES, read


def answer(path: Path, **request: Any) -> dict[str, Any]:
    given = {"store": "", "run": "r", "name": "model", **request}
    before = open_files()
    try:
        return read(f"file://{path}", **given)
    finally:
        # The reader's own process would end now.
        for fd in open_files() - before:
            os.close(fd)


def open_files() -> set[int]:
    there = map(int, os.listdir("/proc/self/fd"))
    return {fd for fd in there if os.path.lexists(f"/proc/self/fd/{fd}")}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With names that sort in another order than their folders, and odd ones."""
    made = tmp_path / "checkpoint"
    (made / "a").mkdir(parents=True)
    (made / "empty").mkdir()
    for name in ("a/rank_0.pt", "a.json", "z z", "back\\slash", "line\nbreak", "ü"):
        (made / name).write_text(name)
    (made / "large").write_bytes(b"1" * (CHUNK_BYTES + 1))
    return made


def test_the_digest_of_a_directory_is_that_of_what_sha256sum_prints(folder: Path) -> None:
    script = "find . -type f -printf '%P\\0' | LC_ALL=C sort -z | xargs -0 sha256sum | sha256sum"
    said = subprocess.run(
        ["bash", "-c", script], cwd=folder, capture_output=True, text=True, check=True
    )

    found = answer(folder)

    assert found == {
        "digest": said.stdout.split()[0],
        "size": sum(each.stat().st_size for each in folder.rglob("*") if each.is_file()),
    }


def test_a_link_within_a_directory_counts_by_where_it_leads_and_is_not_followed(
    folder: Path, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("1")
    (folder / "link").symlink_to(secret)
    before = answer(folder)

    secret.write_text("another one")
    same = answer(folder)
    (folder / "link").unlink()
    (folder / "link").symlink_to(folder)
    other = answer(folder)

    assert same == before
    assert (other["size"], other["digest"] != before["digest"]) == (before["size"], True)


@pytest.mark.parametrize("name", ["a.json", "large"])
def test_what_is_written_to_while_it_is_read_has_no_digest(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = artifacts._Tree.digest

    def meanwhile(tree: Any, read: Any) -> str:
        with (folder / name).open("ab") as file:
            file.write(b"more" * CHUNK_BYTES)
        return digest(tree, read)

    monkeypatch.setattr(artifacts._Tree, "digest", meanwhile)

    for path in (folder, folder / name):
        assert answer(path) == {"problem": "it was written to while the agent read it"}


def test_what_is_no_file_has_no_digest_and_says_why(folder: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "round").symlink_to("round")

    assert answer(tmp_path / "none") == {"problem": "No such file or directory"}
    assert answer(tmp_path / "a%00b") == {"problem": "lstat: embedded null character in path"}
    for path in (tmp_path / "fifo", Path("/dev/null"), tmp_path / "round"):
        assert answer(path) == {"problem": "it is neither a file nor a directory"}
    os.mkfifo(folder / "fifo")
    assert "neither file nor directory" in answer(folder)["problem"]


def test_a_directory_of_very_many_files_is_not_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(artifacts, "MOST_FILES", 6)

    assert answer(folder) == {"problem": "there are more than 6 files in it"}


def test_a_folder_that_becomes_a_link_while_its_directory_is_read_is_not_followed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "rank_0.pt").write_text("a secret...")
    listed = artifacts._Tree._listed

    def swapped_after(tree: Any) -> list[Any]:
        found = listed(tree)
        (folder / "a").rename(tmp_path / "before")
        (folder / "a").symlink_to(elsewhere)
        return found

    monkeypatch.setattr(artifacts._Tree, "_listed", swapped_after)

    assert answer(folder) == {"problem": "it was written to while the agent read it"}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's link")
def test_a_link_in_place_of_an_artifact_is_followed_unless_it_is_another_users(
    folder: Path, tmp_path: Path
) -> None:
    latest = tmp_path / "latest"
    latest.symlink_to("checkpoint/a")
    assert answer(latest) == answer(folder / "a")

    os.chown(latest, 65534, 65534, follow_symlinks=False)

    assert answer(latest) == {"problem": "it is a link of user 65534, which is not followed"}


# -- copies


@pytest.fixture(params=["directory", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    yield f"{'' if request.param == 'directory' else 'memory:/'}{tmp_path}/store"
    fsspec.filesystem("memory").store.clear()


def stored(store: str) -> dict[str, bytes]:
    """Content by path below the store."""
    system, root = fsspec.core.url_to_fs(store)
    return {each[len(root) + 1 :]: system.cat_file(each) for each in system.find(root)}


def test_a_copy_of_a_file_lies_once_under_its_digest(store: str, folder: Path) -> None:
    content = (folder / "large").read_bytes()

    first = answer(folder / "large", store=store, run="../r", name="best?")
    again = answer(folder / "large", store=store, run="../r", name="best?")

    base = f"%2Fr/best%3F/{sha256(content).hexdigest()[:16]}"
    key = f"{base}/large"
    listing = f"{sha256(content).hexdigest()}  large\n".encode()
    assert stored(store) == {key: content, f"{base}.sha256": listing}
    system, root = fsspec.core.url_to_fs(store)
    assert first["uri"] == again["uri"] == system.unstrip_protocol(f"{root}/{key}")


def test_the_list_of_a_directory_lies_beside_its_copy_and_has_its_digest(
    store: str, folder: Path
) -> None:
    (folder / "a" / "link").symlink_to("rank_0.pt")

    found = answer(folder, store=store)

    base = f"r/model/{found['digest'][:16]}"
    copied = stored(store)
    listing = copied.pop(f"{base}.sha256")
    assert sha256(listing).hexdigest() == found["digest"]
    assert copied.keys() == {
        f"{base}/{name}"
        for name in ("a/rank_0.pt", "a.json", "z z", "back%5Cslash", "line%0Abreak", "%C3%BC")
    } | {f"{base}/large"}
    assert found["uri"].endswith(f"/store/{base}")


def test_what_changes_before_it_is_copied_has_no_list(
    store: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = artifacts._Tree.check

    def change_after(tree: Any) -> None:
        check(tree)
        # Of the same size, and in the same file.
        (folder / "a.json").write_bytes(b"2" * 6)

    monkeypatch.setattr(artifacts._Tree, "check", change_after)

    found = answer(folder / "a.json", store=store)

    assert found["digest"] == sha256(b"a.json").hexdigest()
    assert "it is not stored: Problem: it was written to" in found["problem"]
    assert not [each for each in stored(store) if each.endswith(".sha256")]


def test_a_store_that_takes_nothing_is_said_without_its_password(
    folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "store").write_text("no directory")
    for store in (f"{tmp_path}/store", "nothing-like-it://me:secret@bucket"):
        found = answer(folder / "a.json", store=store)

        assert found["digest"] == sha256(b"a.json").hexdigest()
        assert found["problem"].startswith("it is not stored: ")
        assert "secret" not in found["problem"]
