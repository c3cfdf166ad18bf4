"""Where a run can be looked at: on the page of its node's agent."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from urllib.parse import quote, urlencode, urlsplit

from otel_ddp import errors, files
from otel_ddp.journal.place import Place

# The agent's file begins with what is short; what follows may be long.
_BEGINNING_BYTES = 4096
_SCRAPE = re.compile(r'"scrape": "(http://[^"\\]+)/metrics"')


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

    # In a container without this user's name it raises.
    return errors.attempt(getpass.getuser, str(os.geteuid()))
