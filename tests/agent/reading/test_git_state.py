"""Whether the files of a repository were changed, as git itself says it, and not waited for."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from node import until
from otel_ddp.agent.reading.documents import GitState


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    (folder / "scripts").mkdir(parents=True)
    (folder / "scripts" / "train.py").write_text("pass\n")
    who = ("git", "-c", "user.name=a", "-c", "user.email=a@b.c")
    for words in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "--message", "first"]):
        subprocess.run([*who, *words], cwd=folder, check=True)
    return folder


def dirty(folder: Path) -> str:
    state = GitState(str(folder))
    until(state.known, "git's answer")
    return state.dirty


def test_a_tree_is_dirty_once_a_file_that_git_knows_is_changed(repository: Path) -> None:
    script = repository / "scripts" / "train.py"

    clean = dirty(script.parent)
    (repository / "notes.txt").write_text("git does not know this file")
    with_another = dirty(script.parent)
    script.write_text("changed\n")

    assert (clean, with_another, dirty(script.parent)) == ("false", "false", "true")


def test_where_there_is_no_repository_nothing_is_said(tmp_path: Path) -> None:
    state = GitState(str(tmp_path))

    assert (state.known(), state.dirty) == (True, "")
    assert GitState("").known()


def test_a_git_that_does_not_answer_is_not_waited_for(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    (tmp_path / "bin").mkdir()
    slow = tmp_path / "bin" / "git"
    slow.write_text("#!/bin/sh\nexec sleep 600\n")
    slow.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    state = GitState(str(repository), clock=lambda: now[0])

    assert not state.known()
    now[0] = 11.0

    assert (state.known(), state.dirty) == (True, "")
