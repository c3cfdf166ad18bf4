"""Names the nodes: by host, and distinctly if two nodes of one run share a host."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from otel_ddp import files

_MOST_RUNS = 200


class NodeNames:
    """Keeps the names in a file, so that an agent that starts again gives the same names."""

    def __init__(
        self,
        file: Path,
        own_name: str,
        living: Callable[[], Iterable[Mapping[str, Any]]] = lambda: (),
    ) -> None:
        """*living*: the identities of all living processes, including the one to name."""
        self._file = file
        self._own_name = own_name
        self._living = living
        self._runs = _read(file)

    def name(self, identity: Mapping[str, Any]) -> str:
        """The node label of a process."""
        if explicit := str(identity.get("node") or ""):
            return explicit
        host, rank = self._host(identity), identity.get("node_rank")
        if rank is None:
            return host
        names = self._runs.setdefault(_run(identity), {})
        # A launcher is one node, whatever node rank its workers get after a restart.
        key = f"{host}/{rank}"
        launcher = f"by {identity.get('launched_by') or key}"
        if launcher not in names:
            # A new launcher with a node rank that was here before is that node again. A launcher
            # whose ranks are in several groups is one node in all of them.
            elsewhere = (run[launcher] for run in self._runs.values() if launcher in run)
            again = names.get(key) or next(
                (name for name in elsewhere if name not in names.values()), None
            )
            names[launcher] = names[key] = again or self._fresh(identity, names.values())
            self._write()
        return names[launcher]

    def _fresh(self, identity: Mapping[str, Any], taken: Collection[str]) -> str:
        """The host's own name is that of its first node, whichever is read first."""
        host, rank = self._host(identity), identity["node_rank"]
        before = any(
            each.get("node_rank") is not None and each["node_rank"] < rank
            for each in self._living()
            if not each.get("node") and (_run(each), self._host(each)) == (_run(identity), host)
        )
        return f"{host}-{rank}" if before or host in taken else host

    def _host(self, identity: Mapping[str, Any]) -> str:
        return self._own_name or str(identity.get("host") or "") or "unknown"

    def _write(self) -> None:
        for run in list(self._runs)[:-_MOST_RUNS]:
            del self._runs[run]
        # A full tmpfs: the names hold until the agent is started again.
        with contextlib.suppress(OSError):
            files.replace(self._file, json.dumps(self._runs))


def _run(identity: Mapping[str, Any]) -> str:
    """The run, as a key of JSON."""
    return json.dumps([str(identity.get("group") or ""), str(identity.get("run"))])


def _read(file: Path) -> dict[str, dict[str, str]]:
    """The names in the file; none if it is damaged."""
    return {
        run: {key: name for key, name in names.items() if name and isinstance(name, str)}
        for run, names in files.read_mapping(file).items()
        if isinstance(names, dict)
    }
