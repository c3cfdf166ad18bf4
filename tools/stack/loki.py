"""Runs a Loki that is installed on this machine, with the deployed configuration."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from tools.stack.server import Server, environment, free_port

_CONFIGURATION = Path(__file__).parents[2] / "deploy" / "compose" / "loki.yaml"
_IN_A_CONTAINER = "/loki"


def found() -> Path | None:
    """Its binary: the one named in LOKI, or that on the PATH."""
    binary = os.environ.get("LOKI") or shutil.which("loki")
    return Path(binary).resolve() if binary else None


def server(binary: Path, folder: Path, port: int) -> tuple[Server, str]:
    """Loki with its data in *folder*, on loopback."""
    folder.mkdir(parents=True, exist_ok=True)
    url = f"http://127.0.0.1:{port}"
    configuration = folder / "loki.yaml"
    text = _CONFIGURATION.read_text()
    configuration.write_text(text.replace(f" {_IN_A_CONTAINER}", f" {folder / 'data'}"))
    started = Server(
        "Loki",
        [
            *(str(binary), f"-config.file={configuration}"),
            *("-server.http-listen-address=127.0.0.1", f"-server.http-listen-port={port}"),
            # Otherwise it waits 15 s for others.
            "-ingester.min-ready-duration=0s",
            # It connects to itself over this port.
            *("-server.grpc-listen-address=127.0.0.1", f"-server.grpc-listen-port={free_port()}"),
        ],
        ready=f"{url}/ready",
        log=folder / "loki.log",
        env=environment(),
    )
    return started, url
