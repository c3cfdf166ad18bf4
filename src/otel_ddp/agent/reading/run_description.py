"""Everything that a run says of itself and of where it runs, by name, in the order of interest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from otel_ddp.agent.reading.git_state import GitState
from otel_ddp.journal.reader import JournalReader

TEXTS = ("project", "name", "description", "tags")
_OF_IDENTITY = ("world_size", "nodes", "strategy", "launcher")
_OF_PROGRAM = ("script", "model", "backend", "precision", "git_sha")
_OF_ENVIRONMENT = (
    *("python", "torch", "cuda", "container_image"),
    *("slurm_job_id", "slurm_job_name", "slurm_partition"),
)

# What the agent knows of its node's devices.
Devices = Callable[[], Mapping[str, Any]]


def no_devices() -> Mapping[str, Any]:
    """Where nothing is known of devices."""
    return {}


class RunDescription:
    """Of one rank 0. What the agent finds out by itself arrives a little later."""

    def __init__(self, reader: JournalReader, devices: Devices) -> None:
        self._reader = reader
        self._devices = devices
        self._git: GitState | None = None

    def texts(self) -> dict[str, Any]:
        """What the user has said about it."""
        identity = self._reader.identity
        return {key: text for key in TEXTS if (text := identity.get(key))}

    def environment(self) -> dict[str, Any]:
        """The program and where it runs; what is not known is not there."""
        identity, facts = self._reader.identity, self._reader.facts
        driver = self._devices()
        found = {
            **{key: identity.get(key) for key in _OF_IDENTITY},
            **{key: facts.get(key) for key in _OF_PROGRAM},
            "git_dirty": self._git.dirty if self._git is not None else "",
            **{key: facts.get(key) for key in _OF_ENVIRONMENT},
            "gpu_driver": driver.get("gpu_driver"),
            "gpus": _counted(driver.get("gpus") or ()),
        }
        return {key: value for key, value in found.items() if value not in (None, "")}

    def is_known(self) -> bool:
        """Whether nothing is being found out any more."""
        if self._git is None:
            facts = self._reader.facts
            if "script" not in facts:
                return True
            self._git = GitState(str(facts.get("folder") or "") if facts.get("git_sha") else "")
        return self._git.known()


def _counted(gpus: Any) -> str:
    """8 x NVIDIA H100 80GB HBM3: the node's boards, not their parts."""
    names = Counter(str(each.get("name")) for each in gpus if not each.get("parent"))
    return ", ".join(f"{count} x {name}" for name, count in names.items())
