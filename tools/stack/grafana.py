"""Runs a Grafana that is installed on this machine, with the deployed data sources and boards."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from tools.stack.server import Server, environment

_DEPLOYED = Path(__file__).parents[2] / "deploy" / "grafana"
_BOARDS_IN_A_CONTAINER = "/var/lib/grafana/dashboards"


def found() -> Path | None:
    """Its binary: the one named in GRAFANA, or that on the PATH."""
    binary = os.environ.get("GRAFANA") or shutil.which("grafana")
    return Path(binary).resolve() if binary else None


def server(
    binary: Path, folder: Path, port: int, prometheus: str, loki: str = "http://127.0.0.1:3100"
) -> tuple[Server, str]:
    """Grafana over these servers, with its data in *folder*, for anybody on this machine."""
    home = binary.parents[1]
    if not (home / "conf" / "defaults.ini").is_file():
        # Where distributions keep what belongs to it.
        home = Path("/usr/share/grafana")
    url = f"http://127.0.0.1:{port}"
    settings = {
        "SERVER_HTTP_ADDR": "127.0.0.1",
        "SERVER_HTTP_PORT": str(port),
        "AUTH_ANONYMOUS_ENABLED": "true",
        # No usage statistics are sent.
        "ANALYTICS_REPORTING_ENABLED": "false",
        "ANALYTICS_CHECK_FOR_UPDATES": "false",
        "ANALYTICS_CHECK_FOR_PLUGIN_UPDATES": "false",
        "PLUGINS_PREINSTALL_DISABLED": "true",
        "PLUGINS_PUBLIC_KEY_RETRIEVAL_DISABLED": "true",
        "PATHS_DATA": str(folder),
        "PATHS_LOGS": str(folder / "log"),
        "PATHS_PLUGINS": str(folder / "plugins"),
        "PATHS_PROVISIONING": str(_provisioning(folder / "provisioning")),
    }
    started = Server(
        "Grafana",
        [str(binary), "server", "--homepath", str(home)],
        ready=f"{url}/api/health",
        log=folder.with_name("grafana.log"),
        env={
            # No Tempo is started here: a user who has one names its address.
            "TEMPO_URL": "http://127.0.0.1:3200",
            **environment(),
            "PROMETHEUS_URL": prometheus,
            "LOKI_URL": loki,
            **{f"GF_{name}": value for name, value in settings.items()},
        },
    )
    return started, url


def _provisioning(folder: Path) -> Path:
    """The deployed data sources and boards; those lie elsewhere than in a container."""
    provisioning = copied(_DEPLOYED / "provisioning", folder)
    boards = provisioning / "dashboards" / "otel-ddp.yaml"
    here = str(_DEPLOYED / "dashboards")
    boards.write_text(boards.read_text().replace(_BOARDS_IN_A_CONTAINER, here))
    return provisioning


def copied(deployed: Path, folder: Path) -> Path:
    """A fresh copy that may be changed."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(deployed, folder)
    return folder
