"""otel-ddp deploy: what it writes, what it leaves alone, and what it says."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from otel_ddp import __version__
from otel_ddp.cli import main
from otel_ddp.cli.deploy import shipped_files

DEPLOY = Path(__file__).parents[2] / "deploy"


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_all_that_is_deployed_is_written_but_the_tests_of_the_rules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "new" / "my files"

    assert main(["deploy", "new/my files"]) == 0

    everything = contents(DEPLOY)
    tests = {name for name in everything if name.startswith("prometheus/tests/")}
    assert contents(folder) == {k: v for k, v in everything.items() if k not in tests}
    assert tests
    assert os.access(folder / "slurm" / "epilog.sh", os.X_OK)
    files = len(everything) - len(tests)
    said = capsys.readouterr().out
    said_of = f"{files} files of otel_ddp {__version__} are in new/my files"
    assert said.startswith(f"{said_of} ({files} new)")
    # From any folder; servers that run have not read what is new.
    compose = f"docker compose -f '{folder}/compose.yaml'"
    assert f"{compose} up --detach --wait --force-recreate\n" in said
    assert f"{compose} down\n" in said
    main(["deploy", "new/my files"])
    assert f"{compose} up --detach --wait\n" in capsys.readouterr().out


def test_the_users_of_the_servers_can_read_what_is_written_under_any_umask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        main(["deploy", str(tmp_path / "here")])
    finally:
        os.umask(before)

    # Of the folder itself they see nothing: what is mounted lies inside.
    modes = {
        path.relative_to(tmp_path / "here").as_posix(): path.stat().st_mode & 0o777
        for path in (tmp_path / "here").rglob("*")
    }
    unreadable = {name: oct(mode) for name, mode in modes.items() if mode & 0o044 != 0o044}
    assert unreadable == {}
    assert (modes["prometheus"], modes["compose.yaml"]) == (0o755, 0o644)
    assert modes["slurm/epilog.sh"] == 0o755


def test_a_file_that_was_changed_and_where_a_link_leads_are_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, mine = tmp_path / "here", tmp_path / "mine.yaml"
    main(["deploy", str(folder)])
    rules, compose = folder / "prometheus" / "rules" / "run.yml", folder / "compose.yaml"
    rules.write_text("mine")
    mine.write_text("mine")
    compose.unlink()
    compose.symlink_to(mine)
    capsys.readouterr()

    assert main(["deploy", str(folder)]) == 1

    assert rules.read_text() == "mine"
    said = capsys.readouterr().err
    assert "2 differ from the files" in said
    assert "compose.yaml, prometheus/rules/run.yml" in said
    assert "--force" in said
    assert main(["deploy", str(folder), "--force"]) == 0
    assert "(2 new)" in capsys.readouterr().out
    assert mine.read_text() == "mine"
    assert not compose.is_symlink()
    assert rules.read_bytes() == shipped_files()["prometheus/rules/run.yml"].read_bytes()


def test_a_directory_that_cannot_be_made_is_said_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")

    assert main(["deploy", str(tmp_path / "file" / "below")]) == 1

    assert "cannot be written: " in capsys.readouterr().err
