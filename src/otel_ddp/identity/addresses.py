"""Where a run can be looked at: on the page of its node's agent, and on boards in Grafana."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from urllib.parse import quote, urlencode, urlsplit, urlunsplit

from otel_ddp import files
from otel_ddp.journal.place import Place

# The agent's file begins with what is short; what follows may be long.
_BEGINNING_BYTES = 4096
_SCRAPE = re.compile(r'"scrape": "(http://[^"\\]+)/metrics"')
# As in deploy/grafana/dashboards, by their titles.
BOARDS = {
    "Runs": "otel-ddp-runs",
    "Run": "otel-ddp-run",
    "Ranks": "otel-ddp-ranks",
    "GPUs & nodes": "otel-ddp-gpus",
    "Compare": "otel-ddp-compare",
    "Fleet": "otel-ddp-fleet",
    "Goodput": "otel-ddp-goodput",
    "Pipeline": "otel-ddp-pipeline",
}
# A board begins this long before what it is to show.
_BEFORE_S = 600


def page(place: Place) -> str:
    """The address of the living agent's endpoint; empty where none lives, or it has none."""
    if not place.agent_is_alive():
        return ""
    try:
        beginning = files.read_own(place.agent_file, _BEGINNING_BYTES)
    except OSError:
        return ""
    found = _SCRAPE.search(beginning.decode(errors="replace"))
    return found[1].replace("//127.0.0.1:", "//localhost:") if found else ""


def page_of_run(page: str, run: str, group: str = "") -> str:
    """The page of a run; without its group, of the newest one of this name."""
    of_group = f"?{urlencode({'group': group})}" if group else ""
    return f"{page}/run/{quote(run, safe='')}{of_group}"


def tunnel(page: str, env: Mapping[str, str]) -> str:
    """The command that brings the page to whoever came here by ssh; empty for others."""
    parts = urlsplit(page)
    words = env.get("SSH_CONNECTION", "").split()
    if len(words) != 4 or parts.hostname not in ("localhost", "::1"):
        return ""
    _, _, came_to, port = words
    here = f"{_user()}@{came_to}"
    through = ""
    if env.get("SLURM_JOB_ID"):
        # The job has the variable of the machine on which it was submitted.
        here, through = f"{_user()}@{socket.gethostname()}", f"-J {here} "
        if port != "22":
            through, port = f"-J {_user()}@{came_to}:{port} ", "22"
    at = "" if port == "22" else f"-p {port} "
    return f"ssh -L {parts.port}:localhost:{parts.port} {through}{at}{here}"


def _user() -> str:
    # Imported here: few starts are told a tunnel.
    import getpass

    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.geteuid())  # a container without this user's name


def board(grafana: str, title: str, labels: Mapping[str, str], since_ns: int = 0) -> str:
    """Where a board shows this run, from that time on; empty where no Grafana is named."""
    if not grafana:
        return ""
    parts = urlsplit(grafana)
    chosen = {f"var-{name}": labels.get(name, "") for name in ("group", "run")}
    if since_ns:
        chosen |= {"from": str(since_ns // 10**6 - _BEFORE_S * 1000), "to": "now"}
    # It may name an organisation: ?orgId=2
    query = "&".join(filter(None, (parts.query, urlencode(chosen))))
    path = f"{parts.path.rstrip('/')}/d/{BOARDS[title]}"
    return urlunsplit((parts.scheme, parts.netloc, path, query, ""))
