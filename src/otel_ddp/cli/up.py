"""otel-ddp up: runs collector, Prometheus, Tempo, Loki and Grafana on this machine with Docker."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from otel_ddp.cli import deploy
from otel_ddp.cli.text import cell

_INSTEAD = "`otel-ddp deploy DIR` writes the files for servers of your own."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Write the files as `otel-ddp deploy` does, and start collector, Prometheus, Tempo, Loki "
        "and Grafana with Docker Compose. They listen on loopback only, and stay until `docker "
        "compose down`."
    )
    parser.add_argument(
        "--dir",
        type=Path,
        help="where the files go (default: otel-ddp/deploy in XDG_DATA_HOME, or ~/.local/share)",
    )
    deploy.add_force_option(parser)


def run(options: argparse.Namespace) -> int:
    if why := _no_docker():
        print(f"{why} {_INSTEAD}", file=sys.stderr)
        return 1
    folder = (options.dir or _default_folder()).absolute()
    try:
        written = deploy.write(folder, force=options.force)
    except deploy.Refused as error:
        print(error, file=sys.stderr)
        return 1
    compose = ["docker", "compose", "-f", str(folder / "compose.yaml")]
    # To be pasted, from any folder.
    typed = shlex.join(compose)
    start = ["up", "--detach", "--wait"]
    # Compose leaves servers alone that run already, and these have read the files before.
    if written.new:
        start.append("--force-recreate")
    print(f"{typed} {' '.join(start)}", flush=True)
    if status := subprocess.run([*compose, *start], check=False).returncode:
        print(f"Docker ended with status {status}: its own lines say why.", file=sys.stderr)
        return 1
    print("Grafana: http://localhost:3000   Prometheus: http://localhost:9090")
    print("So that runs and verdicts lead there: export OTEL_DDP_GRAFANA_URL=http://localhost:3000")
    print("Next: `otel-ddp demo`, or your own training: agents here find the collector.")
    print(f"The end of it: {typed} down")
    return 0


def _no_docker() -> str:
    """Why Docker cannot run anything here; empty if it can."""
    if shutil.which("docker") is None:
        return "Docker is not installed here."
    if _fails("compose", "version"):
        return "This Docker has no `docker compose`: install its plugin."
    if why := _fails("version", "--format", "{{.Server.Version}}"):
        return f"Docker's daemon does not answer ({why})."
    return ""


def _fails(*arguments: str) -> str:
    """The last line that this command of Docker's says as it fails; empty if it does not fail."""
    done = subprocess.run(
        ["docker", *arguments], capture_output=True, text=True, errors="replace", check=False
    )
    if not done.returncode:
        return ""
    return cell((done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1])


def _default_folder() -> Path:
    data = os.environ.get("XDG_DATA_HOME", "")
    # As the specification has it: a relative one is ignored.
    root = Path(data) if data.startswith("/") else Path.home() / ".local" / "share"
    return root / "otel-ddp" / "deploy"
