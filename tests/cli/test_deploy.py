"""otel-ddp deploy and up: what they write, what they leave alone, and what they say."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from otel_ddp import __version__
from otel_ddp.cli import main
from otel_ddp.cli.deploy import shipped_files

DEPLOY = Path(__file__).parents[2] / "deploy"

# Writes down what it is asked; fails where a file of that name is beside it, with its content.
DOCKER = """#!/bin/sh
here=$(dirname "$0")
echo "$*" >> "$here/asked"
case "$1 $2" in
    "compose version") failure=no-compose ;;
    "version "*) failure=no-daemon ;;
    *) failure=no-start ;;
esac
if [ -f "$here/$failure" ]; then cat "$here/$failure" >&2; exit 17; fi
"""


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_all_that_is_deployed_is_written_but_the_tests_of_the_rules(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "new" / "here"

    assert main(["deploy", str(folder)]) == 0

    everything = contents(DEPLOY)
    tests = {name for name in everything if name.startswith("prometheus/tests/")}
    assert contents(folder) == {k: v for k, v in everything.items() if k not in tests}
    assert tests
    assert os.access(folder / "slurm" / "epilog.sh", os.X_OK)
    files = len(everything) - len(tests)
    said = capsys.readouterr().out
    assert said.startswith(f"{files} files of otel_ddp {__version__} are in {folder} ({files} new)")
    assert f"otel-ddp up --dir {folder}\n" in said


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


def test_a_directory_without_a_name_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    with pytest.raises(SystemExit):
        main(["deploy", ""])

    assert not list(tmp_path.iterdir())


def test_a_directory_that_cannot_be_made_is_said_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")

    assert main(["deploy", str(tmp_path / "file" / "below")]) == 1

    assert "cannot be written: " in capsys.readouterr().err


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a stand-in for Docker."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "docker").write_text(DOCKER)
    (folder / "docker").chmod(0o700)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    return folder


def test_servers_that_run_are_left_alone_unless_their_files_are_new(
    docker: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "data" / "otel-ddp" / "deploy"

    assert main(["up"]) == 0
    main(["up"])
    (folder / "prometheus" / "rules" / "run.yml").write_text("of an earlier version")
    main(["up", "--force"])

    asked = (docker / "asked").read_text().splitlines()
    started = [each for each in asked if each.startswith("compose -f ")]
    assert started[0] == f"compose -f {folder}/compose.yaml up --detach --wait --force-recreate"
    assert ["--force-recreate" in each for each in started] == [True, False, True]
    assert (folder / "compose.yaml").read_bytes() == (DEPLOY / "compose.yaml").read_bytes()
    assert "Grafana: http://localhost:3000" in capfd.readouterr().out


def test_the_commands_that_up_names_work_from_any_folder(
    docker: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)

    assert main(["deploy", "my files"]) == 0
    assert main(["up", "--dir", "my files"]) == 0

    compose = f"docker compose -f '{tmp_path}/my files/compose.yaml'"
    said = capfd.readouterr().out.splitlines()
    assert "On one machine, with Docker: otel-ddp up --dir 'my files'" in said
    assert f"{compose} up --detach --wait" in said
    assert f"The end of it: {compose} down" in said


@pytest.mark.parametrize(
    ("lacks", "sentence"),
    [
        ("no-compose", "This Docker has no `docker compose`: install its plugin."),
        ("no-daemon", "Docker's daemon does not answer (Cannot connect. Is it running?)."),
    ],
)
def test_without_a_docker_that_works_nothing_is_written_and_the_reason_is_said(
    docker: Path, tmp_path: Path, lacks: str, sentence: str, capfd: pytest.CaptureFixture[str]
) -> None:
    (docker / lacks).write_text("Trying.\nCannot connect. Is it running?\n")

    assert main(["up", "--dir", str(tmp_path / "here")]) == 1

    said = capfd.readouterr().err
    assert said == f"{sentence} `otel-ddp deploy DIR` writes the files for servers of your own.\n"
    assert not (tmp_path / "here").exists()


def test_what_docker_says_as_it_fails_is_shown(
    docker: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (docker / "no-start").write_text("port is already allocated\n")

    assert main(["up", "--dir", str(tmp_path / "here")]) == 1

    said = capfd.readouterr().err
    assert "port is already allocated\nDocker ended with status 17" in said
