"""The environment of a program, its files, and the folder of each way of starting it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tools.programs.program import Edit, Program

ROOT = Path(__file__).parents[2]
WITNESS = Path(__file__).with_name("witness.py")
_SITE = "site-packages/"


class Workplace:
    """Below one folder: an environment, and what the program brings."""

    def __init__(self, program: Program, root: Path) -> None:
        self.program = program
        self.root = root / program.name
        self.bin = self.root / "venv" / "bin"
        self._source = self.root / "source"

    def make(self) -> None:
        """Install and fetch what is not there yet."""
        wanted = "\n".join([str(ROOT), self.program.python, *self.program.packages])
        stamp = self.root / "installed"
        if not stamp.exists() or stamp.read_text() != wanted:
            self._install()
            stamp.write_text(wanted)
        shutil.copy(WITNESS, self.site_packages() / "step_witness.py")
        (self.site_packages() / "step_witness.pth").write_text("import step_witness\n")
        if self.program.repository:
            self._fetch()
        self._get_ready()

    def _fetch(self) -> None:
        """Fetch only the program's folder: repositories of examples are large."""
        wanted = f"{self.program.commit} {self.program.folder}"
        stamp = self.root / "fetched"
        if stamp.exists() and stamp.read_text() == wanted:
            return
        shutil.rmtree(self._source, ignore_errors=True)
        self._source.mkdir(parents=True)
        folder = self.program.folder
        alone = [] if folder == "." else [["sparse-checkout", "set", folder]]
        for words in (
            ["init", "--quiet"],
            ["remote", "add", "origin", self.program.repository],
            *alone,
            ["fetch", "--quiet", "--depth=1", "--filter=blob:none", "origin", self.program.commit],
            ["checkout", "--quiet", "FETCH_HEAD"],
        ):
            subprocess.run(["git", *words], cwd=self._source, check=True)
        stamp.write_text(wanted)

    def _install(self) -> None:
        shutil.rmtree(self.root / "venv", ignore_errors=True)
        uv = [sys.executable, "-m", "uv", "--quiet"]
        place = str(self.root / "venv")
        subprocess.run([*uv, "venv", "--python", self.program.python, place], check=True)
        # Build requirements that some packages do not declare.
        wanted = ["setuptools", "--editable", str(ROOT), *self.program.packages]
        python = str(self.bin / "python")
        subprocess.run([*uv, "pip", "install", "--python", python, *wanted], check=True)

    def site_packages(self) -> Path:
        """Where the environment keeps its packages."""
        (found,) = (self.root / "venv" / "lib").glob("python*/site-packages")
        return found

    def env(self) -> dict[str, str]:
        """The variables of a command of this program."""
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("OTEL_", "PYTHON"))}
        return {
            **clean,
            "PATH": f"{self.bin}{os.pathsep}{clean['PATH']}",
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            # Hubs and trackers fail at once, or stay offline.
            "HF_HUB_OFFLINE": "1",
            "WANDB_MODE": "disabled",
            **self.program.env,
        }

    def folder(self, way: str) -> Path:
        """A new copy of the program's files and data for this way of starting it."""
        made = self.root / way
        shutil.rmtree(made, ignore_errors=True)
        shutil.copytree(self.root / "ready", made, symlinks=True)
        return made

    def _get_ready(self) -> None:
        """The program's files with the data that all ways share."""
        ready = self.root / "ready"
        shutil.rmtree(ready, ignore_errors=True)
        if self.program.repository:
            ignored = shutil.ignore_patterns(".git")
            shutil.copytree(self._source, ready, symlinks=True, ignore=ignored)
        inside = ready / self.program.folder
        inside.mkdir(parents=True, exist_ok=True)
        for name, text in self.program.files.items():
            (inside / name).parent.mkdir(parents=True, exist_ok=True)
            (inside / name).write_text(text)
        if self.program.prepare:
            subprocess.run(self.program.prepare, shell=True, cwd=inside, env=self.env(), check=True)

    @contextmanager
    def edited(self, folder: Path, edits: list[Edit]) -> Iterator[None]:
        """Inserts our lines into the program during the block."""
        before: dict[Path, str] = {}
        try:
            for each in edits:
                path = self._path(folder, each.file)
                text = path.read_text()
                before.setdefault(path, text)
                if text.count(each.after) != 1:
                    found = text.count(each.after)
                    raise SystemExit(f"{path}: {each.after!r} stands there {found} times.")
                # Other environments may share this file: it is replaced, not written into.
                path.unlink()
                path.write_text(text.replace(each.after, each.after + each.add))
            yield
        finally:
            for path, text in before.items():
                path.unlink()
                path.write_text(text)

    def _path(self, folder: Path, name: str) -> Path:
        if name.startswith(_SITE):
            return self.site_packages() / name.removeprefix(_SITE)
        return folder / self.program.folder / name
