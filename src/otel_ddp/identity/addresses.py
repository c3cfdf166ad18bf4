"""Finds the address at which the node's agent serves a run's page, and a tunnel to it."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from urllib.parse import quote, urlencode, urlsplit

from otel_ddp import errors, files
from otel_ddp.journal.place import Place

# Read only this many bytes of the file that the agent publishes: its address is near the beginning.
_BEGINNING_BYTES = 4096
_SCRAPE = re.compile(r'"scrape": "(http://[^"\\]+)/metrics"')


def page(place: Place) -> str:
    """The base address at which the agent serves its page; empty if no agent serves one."""
    if not place.agent_is_alive():
        return ""
    try:
        beginning = files.read_own(place.agent_file, _BEGINNING_BYTES)
    except OSError:
        return ""
    found = _SCRAPE.search(beginning.decode(errors="replace"))
    return found[1].replace("//127.0.0.1:", "//localhost:") if found else ""


def page_of_run(page: str, run: str, group: str = "") -> str:
    """The address of a run's page; without a group, that of the newest run with this name."""
    of_group = f"?{urlencode({'group': group})}" if group else ""
    return f"{page}/run/{quote(run, safe='')}{of_group}"


def tunnel(page: str, env: Mapping[str, str]) -> str:
    """The ssh command by which a user who is logged in by ssh can open the page on their machine.

    Empty if the user is not logged in by ssh.
    """
    parts = urlsplit(page)
    words = env.get("SSH_CONNECTION", "").split()
    if len(words) != 4 or parts.hostname not in ("localhost", "::1"):
        return ""
    _, _, came_to, port = words
    forward = f"ssh -L {parts.port}:localhost:{parts.port}"
    if env.get("SLURM_JOB_ID"):
        # A job inherits the SSH_CONNECTION of the login node on which it was submitted. So the
        # tunnel to this node leads through the login node.
        return f"{forward} -J {_user()}@{came_to}:{port} {_user()}@{socket.gethostname()}"
    at = "" if port == "22" else f"-p {port} "
    return f"{forward} {at}{_user()}@{came_to}"


def _user() -> str:
    # Imported here, as only a user who is logged in by ssh needs it.
    import getpass

    # `getuser` raises in a container whose user database lacks this user.
    return errors.attempt(getpass.getuser, str(os.geteuid()))
