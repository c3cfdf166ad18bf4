"""The digest of files and directories, which anybody can work out again; and what may be read."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from otel_ddp.agent.artifacts.content import (
    CHUNK_BYTES,
    CannotRead,
    Content,
    Pace,
    Stopped,
    chunks,
    content_of,
    listed,
    opened,
)

FAST = 1 << 40


def read(path: Path, roots: tuple[str, ...] | None = None) -> Content:
    with opened(os.fsencode(path), roots) as top:
        return content_of(top, listed(top), Pace(FAST))


def refused(path: Path, roots: tuple[str, ...] | None = None) -> CannotRead:
    with pytest.raises(CannotRead) as why:
        read(path, roots)
    return why.value


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

    found = read(folder)

    assert found.digest == said.stdout.split()[0]
    assert found.size == sum(each.stat().st_size for each in folder.rglob("*") if each.is_file())


def test_a_link_within_a_directory_counts_by_where_it_leads_and_is_not_followed(
    folder: Path, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("1")
    (folder / "link").symlink_to(secret)
    before = read(folder)

    secret.write_text("another one")
    same = read(folder)
    (folder / "link").unlink()
    (folder / "link").symlink_to(folder)

    assert same == before
    assert read(folder).digest != before.digest
    assert before.size == read(folder).size


def test_a_file_that_has_another_size_than_before_was_written_to(folder: Path) -> None:
    with opened(os.fsencode(folder), None) as top:
        (large,) = (file for file in listed(top) if file.name == b"large")
        for size in (0, CHUNK_BYTES, CHUNK_BYTES + 2):
            with pytest.raises(CannotRead, match="was written to") as why:
                list(chunks(top, large._replace(size=size), Pace(FAST)))
            assert why.value.again


def test_what_is_not_there_may_come_and_a_device_never_becomes_a_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")

    assert refused(tmp_path / "none").again
    assert not refused(tmp_path / "fifo").again
    assert not refused(Path("/dev/null")).again


def test_an_agent_of_the_platform_reads_only_below_the_roots(folder: Path, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret")
    (folder / "out").symlink_to(token)

    assert read(folder / "a.json", (str(folder),)).size == 6
    assert read(folder, (str(folder),)).size
    for path in (token, folder / "out", folder / ".." / "token", tmp_path):
        assert "OTEL_DDP_ARTIFACT_ROOTS" in str(refused(path, (str(folder),)))
    assert "none is named" in str(refused(token, ()))
    # A name that only begins alike.
    (tmp_path / "checkpoint-2").write_text("another team's")
    assert "OTEL_DDP_ARTIFACT_ROOTS" in str(refused(tmp_path / "checkpoint-2", (str(folder),)))
    assert read(token, ("/",)).size == len("secret")


def test_links_of_ours_are_followed_wherever_they_stand_in_a_path(
    folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "up").symlink_to("checkpoint/a")
    (tmp_path / "over").symlink_to(tmp_path / "up" / ".." / "a")
    (tmp_path / "round").symlink_to("round")

    assert read(tmp_path / "up") == read(folder / "a")
    assert read(tmp_path / "over" / "rank_0.pt") == read(folder / "a" / "rank_0.pt")
    assert read(tmp_path / "over" / ".." / "a.json") == read(folder / "a.json")
    assert "too many links" in str(refused(tmp_path / "round"))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's link")
@pytest.mark.parametrize("swapped", ["checkpoint", "checkpoint/a", "checkpoint/a/rank_0.pt"])
def test_a_link_that_another_user_has_swapped_in_is_not_followed(
    swapped: str, folder: Path, tmp_path: Path
) -> None:
    secrets = tmp_path / "secrets"
    (secrets / "a").mkdir(parents=True)
    for name in ("a/rank_0.pt", "rank_0.pt"):
        (secrets / name).write_text("secret")
    (tmp_path / swapped).rename(tmp_path / "before")
    target = secrets / "rank_0.pt" if swapped.endswith(".pt") else secrets
    (tmp_path / swapped).symlink_to(target)
    os.chown(tmp_path / swapped, 65534, 65534, follow_symlinks=False)

    for path in (folder / "a" / "rank_0.pt", tmp_path / swapped):
        assert "a link of user 65534, which is not followed" in str(refused(path))
        assert "not followed" in str(refused(path, (str(tmp_path),)))


def test_a_root_counts_for_what_was_opened_and_not_for_what_has_its_name_by_now(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "rank_0.pt").write_text("secret")
    real = os.path.realpath

    def swapped_after(path: bytes) -> bytes:
        found = real(path)
        if path.endswith(b"rank_0.pt") and not (folder / "a").is_symlink():
            (folder / "a").rename(folder / "b")
            (folder / "a").symlink_to(elsewhere)
        return found

    monkeypatch.setattr(os.path, "realpath", swapped_after)

    assert "OTEL_DDP_ARTIFACT_ROOTS" in str(refused(folder / "a" / "rank_0.pt", (str(folder),)))


def test_reading_keeps_below_its_rate_and_ends_at_once() -> None:
    clock = Clock()
    pace = Pace(1000, stopping=clock, clock=lambda: clock.now_s)  # type: ignore[arg-type]

    for _ in range(5):
        pace.take(100)
    clock.now_s += 10.0
    pace.take(100)

    assert clock.waited_s == pytest.approx([0.1, 0.1, 0.1, 0.1, 0.1, 0.1])
    clock.stops = True
    with pytest.raises(Stopped):
        pace.take(100)


class Clock:
    """Time that passes only where it is waited for."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.waited_s: list[float] = []
        self.stops = False

    def wait(self, seconds: float) -> bool:
        self.waited_s.append(seconds)
        self.now_s += seconds
        return self.stops


@pytest.fixture(autouse=True)
def no_file_stays_open() -> Iterator[None]:
    before = len(os.listdir("/proc/self/fd"))
    yield
    assert len(os.listdir("/proc/self/fd")) == before
