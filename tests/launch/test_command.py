"""`otel-ddp run`: what its command, and every Python below it, notice of it."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import venv
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path

import pytest

import commands
from otel_ddp.cli import main
from otel_ddp.integrations import launch
from otel_ddp.integrations.launch.startup.sitecustomize import Finder

RUN = (sys.executable, "-m", "otel_ddp", "run")
# What a program can see of its interpreter.
LOOK = """
import json, os, sys
found = {
    "modules": sorted(sys.modules), "path": sys.path, "flags": list(sys.flags),
    "finders": len(sys.meta_path), "site": str(sys.modules.get("sitecustomize")),
}
print(json.dumps(found))
"""


def below(env: dict[str, str]) -> dict[str, str]:
    """These variables as a Python below the command gets them."""
    found = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | env
    launch.add_to_path(found)
    return found


# -- the command


def test_the_command_takes_the_place_of_ours_with_its_status() -> None:
    with subprocess.Popen(
        [*RUN, "--", "sh", "-c", "echo $$; exit 7"], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert int(process.stdout.readline()) == process.pid
    assert process.returncode == 7

    # Python itself ignores the second one.
    for number in (signal.SIGTERM, signal.SIGPIPE):
        killed = commands.run(*RUN, "--", "sh", "-c", f"kill -{number} $$")

        assert killed.returncode == -number


def test_the_two_dashes_are_needed_by_nobody_but_those_who_read_it() -> None:
    for dashes in ((), ("--",)):
        assert commands.run(*RUN, *dashes, "echo", "-n", "r").stdout == "r"


def test_pythons_path_keeps_what_it_had() -> None:
    paths = {None: "", "": "", "/a": ":/a", "/a:": ":/a:", ":/a": "::/a"}

    for before, added in paths.items():
        env = {} if before is None else {"PYTHONPATH": before}
        launch.add_to_path(env)
        once = dict(env)
        launch.add_to_path(env)
        assert env == once == {"PYTHONPATH": launch.FOLDER + added}


# -- every Python below it


@pytest.mark.parametrize("flags", [["-W", "error"], ["-I"], ["-S"]])
def test_a_python_that_does_not_import_torch_is_as_without_us(flags: list[str]) -> None:
    command = (sys.executable, *flags, "-c", LOOK)
    env = os.environ | {"PYTHONPATH": os.environ.get("PYTHONPATH", "/nowhere")}

    bare, ours = commands.run(*command, env=env), commands.run(*RUN, "--", *command, env=env)

    assert ours.stderr == bare.stderr == ""
    plain, found = json.loads(bare.stdout), json.loads(ours.stdout)
    if flags == ["-S"]:
        # Python reads its path, and not the file in it.
        found["path"].remove(launch.FOLDER)
    # One that finds nothing before torch is asked for; with these flags Python reads no variable.
    assert found.pop("finders") - plain.pop("finders") == (flags not in (["-I"], ["-S"]))
    assert found == plain
    assert "otel_ddp" not in found["modules"]


@pytest.mark.parametrize(
    "content", ["print('mine', __name__, __file__)", "raise ValueError('mine')"]
)
def test_a_sitecustomize_of_the_programs_own_is_imported_as_ever(
    tmp_path: Path, content: str
) -> None:
    (tmp_path / "sitecustomize.py").write_text(content)
    command = (sys.executable, "-c", LOOK.replace('"finders": len(sys.meta_path),', ""))
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"PYTHONPATH": str(tmp_path)}

    bare, ours = commands.run(*command, env=env), commands.run(*command, env=below(env))

    assert (ours.stdout, ours.stderr) == (bare.stdout, bare.stderr)
    assert "mine" in bare.stdout + bare.stderr


def test_where_otel_ddp_cannot_be_imported_nothing_happens(tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=False)
    (tmp_path / "torch.py").write_text("print('imported')")
    command = (str(tmp_path / "venv/bin/python"), "-c", "import torch; print(torch.__loader__)")
    env = below({"PYTHONPATH": str(tmp_path)})

    done = commands.run(*command, env=env)

    assert done.stderr == ""
    assert done.stdout.startswith("imported\n<_frozen_importlib_external.SourceFileLoader")


# -- the finder


@pytest.fixture
def seen(tmp_path: Path) -> Iterator[list[str]]:
    """The imports that a finder has learned of, of two modules in a folder."""
    found: list[str] = []
    finder = Finder(("waited_for", "failing"), found.append)
    sys.meta_path.insert(0, finder)
    sys.path.insert(0, str(tmp_path))
    importlib.invalidate_caches()
    yield found
    sys.meta_path.remove(finder)
    sys.path.remove(str(tmp_path))
    for name in ("waited_for", "failing", "other"):
        sys.modules.pop(name, None)


def test_an_import_is_told_of_once_it_is_complete(tmp_path: Path, seen: list[str]) -> None:
    (tmp_path / "waited_for.py").write_text("import other")
    (tmp_path / "other.py").write_text("")

    module = importlib.import_module("waited_for")

    assert seen == ["waited_for"]
    assert type(module.__loader__) is SourceFileLoader
    assert "exec_module" not in vars(module.__loader__)
    del sys.modules["waited_for"]
    importlib.import_module("waited_for")
    assert seen == ["waited_for"]


def test_an_import_that_fails_raises_its_own_error_and_may_be_tried_again(
    tmp_path: Path, seen: list[str]
) -> None:
    with pytest.raises(ModuleNotFoundError, match="failing"):
        importlib.import_module("failing")
    (tmp_path / "failing.py").write_text("raise OSError('no library')")
    importlib.invalidate_caches()
    with pytest.raises(OSError, match="no library"):
        importlib.import_module("failing")
    assert seen == []
    (tmp_path / "failing.py").write_text("right = True  # and longer than before")
    importlib.invalidate_caches()

    assert importlib.import_module("failing").right
    assert seen == ["failing"]


@pytest.mark.parametrize(
    ("words", "env", "status", "said"),
    [
        ([], {}, 2, "nothing to run: otel-ddp run -- python train.py"),
        (["train.py"], {}, 127, "train.py: not found: otel-ddp run -- python train.py"),
        (["/"], {}, 126, "/: Permission denied"),
        (["true"], {"OTEL_DDP_STRATEGY": "mian"}, 2, "OTEL_DDP_STRATEGY"),
    ],
)
def test_a_command_that_cannot_be_run_as_asked_is_one_line(
    words: list[str],
    env: dict[str, str],
    status: int,
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    os.environ.update(env)

    assert main(["run", *words]) == status

    line = capsys.readouterr().err
    assert line.startswith("otel-ddp run: ")
    assert said in line
    assert line.count("\n") == 1


def test_a_module_that_is_only_called_torch_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("import sys; sys.exc_clear = 1")
    env = below({"PYTHONPATH": f"{tmp_path}{os.pathsep}{Path(launch.FOLDER).parents[3]}"})

    code = (
        "import sys, torch; print(torch.sys is sys, 'otel_ddp.integrations.launch' in sys.modules)"
    )
    done = commands.python(code, env=env)

    assert (done.stdout, done.stderr) == ("True True\n", "")
