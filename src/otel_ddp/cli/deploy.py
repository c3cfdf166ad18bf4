"""otel-ddp deploy: writes collector, Prometheus, Grafana and the rest for this version."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path

from otel_ddp import __version__, files
from otel_ddp.cli.text import print_answer
from otel_ddp.errors import ConfigError

_MOST_NAMED = 10
# A wheel has copies; an editable installation has the checkout.
_WHEEL = Path(__file__).parents[1] / "deploy"
_CHECKOUT = Path(__file__).parents[3] / "deploy"
# The rules' own tests, which no deployment needs, are in the checkout alone.
_TESTS = "prometheus/tests/"


class Refused(Exception):
    """Says why nothing was written, or not all of it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Write what is deployed beside the agents, of this very version: configurations of the "
        "collector, rules and alerts of Prometheus, Grafana's boards, and files for Docker "
        "Compose, Helm, Kubernetes, Slurm and systemd. A file that was changed is left as it is: "
        "then nothing is written."
    )
    parser.add_argument("directory", metavar="DIR", help="made if it is not there")
    parser.add_argument(
        "--force", action="store_true", help="replace files that differ from this version's"
    )


def run(options: argparse.Namespace) -> int:
    if not options.directory:
        raise ConfigError("name a directory.")
    folder = Path(options.directory)
    try:
        shipped, new = write(folder, force=options.force)
    except Refused as error:
        print(error, file=sys.stderr)
        return 1
    # To be pasted, from any folder.
    compose = f"docker compose -f {shlex.quote(str(folder.absolute() / 'compose.yaml'))}"
    # Compose leaves servers alone that run already, and these have read the files before.
    anew = " --force-recreate" if new else ""
    return print_answer(
        f"{shipped} files of otel_ddp {__version__} are in {folder} ({new} new).\n"
        f"On one machine, with Docker: {compose} up --detach --wait{anew}\n"
        f"The end of it:               {compose} down\n"
        f"Everything else: {folder}/README.md"
    )


def shipped_files() -> dict[str, Path]:
    """Each file to deploy, by its path in the folder `deploy`."""
    folder = _WHEEL if _WHEEL.is_dir() else _CHECKOUT
    found = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*"))}
    return {
        name: path for name, path in found.items() if path.is_file() and not name.startswith(_TESTS)
    }


def write(folder: Path, *, force: bool) -> tuple[int, int]:
    """Write all files, or raise Refused and name those that differ.

    How many there are, and how many of them were not there like this.
    """
    files = shipped_files()
    try:
        new = [name for name, path in files.items() if not _is_there(folder / name, path)]
        differ = [name for name in new if os.path.lexists(folder / name)]
        if differ and not force:
            names = ", ".join(differ[:_MOST_NAMED]) + (", ..." if len(differ) > _MOST_NAMED else "")
            raise Refused(
                f"Nothing was written: in {folder}, {len(differ)} differ from the files of "
                f"otel_ddp {__version__}: {names}. Name another directory, or replace them with "
                "--force."
            )
        for name in new:
            _write(folder, Path(name), files[name].read_bytes())
    except OSError as error:
        raise Refused(f"{error.filename or folder} cannot be written: {error.strerror}.") from error
    return len(files), len(new)


def _write(folder: Path, name: Path, content: bytes) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    # A server that reads it meanwhile gets all of it, and a link is replaced, not its target.
    # The servers run as other users, who have to read it whatever the umask is here.
    into = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        files.replace_in(into, path.name, content, 0o755 if name.suffix == ".sh" else 0o644)
    finally:
        os.close(into)
    for inner in name.parents[:-1]:
        _allow(folder / inner, 0o555)


def _allow(path: Path, wanted: int) -> None:
    mode = path.stat().st_mode & 0o7777
    if mode & wanted != wanted:
        path.chmod(mode | wanted)


def _is_there(path: Path, shipped_file: Path) -> bool:
    return path.is_file() and path.read_bytes() == shipped_file.read_bytes()
