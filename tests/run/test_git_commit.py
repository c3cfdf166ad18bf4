"""The commit of a script, as git itself says it."""

from __future__ import annotations

from pathlib import Path

import pytest

import commands
from otel_ddp.run.opening import revision


def git(folder: Path, *words: str) -> str:
    who = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    return commands.run("git", *who, *words, cwd=folder, check=True).stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    (folder / "scripts").mkdir(parents=True)
    (folder / "scripts" / "train.py").write_text("pass\n")
    git(folder, "init", "--quiet", "--initial-branch", "main")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "--message", "first")
    return folder


def test_it_is_the_commit_of_the_branch_packed_or_not(repository: Path) -> None:
    said = git(repository, "rev-parse", "HEAD")

    loose = revision(str(repository / "scripts" / "train.py"))
    git(repository, "pack-refs", "--all")

    assert loose == said
    assert revision(str(repository / "scripts" / "train.py")) == said


def test_a_detached_head_and_a_worktree_have_one_as_well(repository: Path) -> None:
    said = git(repository, "rev-parse", "HEAD")
    git(repository, "worktree", "add", "--quiet", "-b", "other", "../other")
    git(repository, "checkout", "--quiet", "--detach")

    assert revision(str(repository / "train.py")) == said
    assert revision(str(repository.parent / "other" / "scripts" / "train.py")) == said


def test_without_git_or_with_a_damaged_one_there_is_none(tmp_path: Path) -> None:
    # Somewhere above there may be a repository: this one is nearer.
    (tmp_path / ".git").mkdir()
    none_yet = revision(str(tmp_path / "train.py"))
    (tmp_path / ".git" / "HEAD").write_bytes(b"\xff\xfe not a commit")

    assert none_yet == ""
    assert revision(str(tmp_path / "train.py")) == ""
    assert revision("\0") == ""
