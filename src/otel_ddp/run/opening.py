"""What a run finds when it opens: a place for its journal, its program, and its caller."""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

from otel_ddp import errors
from otel_ddp.errors import ConfigError
from otel_ddp.identity import launchers, lead
from otel_ddp.identity.identity import GroupFacts
from otel_ddp.identity.lead import Lead
from otel_ddp.identity.run_names import clean
from otel_ddp.journal import place
from otel_ddp.journal.writer import JournalWriter
from otel_ddp.settings import Settings
from otel_ddp.torch import process_group
from otel_ddp.torch.models import device_runtime
from otel_ddp.vocabulary import catalog

_JOB = {
    "slurm_job_id": "SLURM_JOB_ID",
    "slurm_job_name": "SLURM_JOB_NAME",
    "slurm_partition": "SLURM_JOB_PARTITION",
}
# Of Apptainer, its predecessor, and Slurm; Docker and Kubernetes tell a container no image.
_IMAGES = ("APPTAINER_CONTAINER", "SINGULARITY_CONTAINER", "SLURM_CONTAINER")


def open_journal(conf: Settings, identity: dict[str, Any]) -> JournalWriter | None:
    """The journal of this process, in the best place that has room; None if there is no room."""
    places, remark = place.find(conf.directory, offline=conf.offline)
    if remark:
        errors.warn_once("place", "%s.", remark)
    if not places:
        return None
    directories = [each.directory for each in places]
    opened, remark = place.open_journal(directories, conf.journal_bytes, identity)
    if remark:
        errors.warn_once("journal", "%s.", remark)
    return opened


def directions(best: Any) -> dict[str, str]:
    """What the argument `best` says: where the best value of each name lies."""
    if best is None:
        return {}
    found = dict(best) if isinstance(best, Mapping) else {"": best}
    if not all(name and isinstance(name, str) and found[name] in catalog.BEST for name in found):
        raise ConfigError(
            f'best must map names to "min", "max" or "none", as in {{"wer": "min"}}; got {best!r}.'
        )
    return found


class LeadSearch:
    """Finds out where the agent is that leads a run, by the process group."""

    def __init__(self, conf: Settings | None = None) -> None:
        self.is_sought = conf is not None and conf.lead != "off"
        """Whether the process group may still tell more of it."""
        self._found: Lead | None = None
        self._was_told = False

    def is_due(self, *, has_synced: bool) -> bool:
        """Whether to ask now. *has_synced*: a step has ended, so each rank has begun one."""
        # In between a rank that is not the first would ask in vain.
        return self.is_sought and (has_synced or not self._was_told)

    def heard(self, group: GroupFacts, *, has_synced: bool) -> None:
        """What the process group has said."""
        self._found = group.lead or self._found
        # Rank 0 may come last to say where it is, but before its first step ends.
        self.is_sought &= group.lead is not None and group.global_rank != 0 and not has_synced
        self._was_told = True

    def facts(self) -> dict[str, Any]:
        """The fact for the journal, if the lead is known."""
        return {} if self._found is None else {lead.FACT: self._found.as_json()}


def in_data_worker() -> bool:
    """Whether this process is a worker of a data loader."""
    module = sys.modules.get("torch.utils.data")
    return module is not None and module.get_worker_info() is not None


def surroundings(env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The job and the container that this program runs in, where their variables say so.

    No other variable of the environment is recorded.
    """
    found = {name: env.get(variable, "") for name, variable in _JOB.items()}
    images = (env.get(variable, "") for variable in _IMAGES)
    found["container_image"] = next(filter(None, images), "")
    return {name: clean(value) for name, value in found.items() if value}


def program_facts() -> dict[str, Any]:
    """What the run's info says about this program, and the process that started it."""
    script = sys.argv[0] if sys.argv else ""
    # The working directory may be gone. `-c` and an interactive Python have no folder.
    folder = errors.attempt(lambda: os.path.dirname(os.path.abspath(script)), "")
    folder = folder if script and script != "-c" else ""
    found: dict[str, Any] = {
        # With the last folder: of two runs, both may be of a `train.py`.
        "script": os.path.join(os.path.basename(folder), os.path.basename(script)),
        "git_sha": revision(script) if script else "",
        "python": ".".join(map(str, sys.version_info[:3])),
        **surroundings(),
    }
    if parent := launchers.multiprocessing_parent():
        found["parent"] = parent
        found["pool"] = in_pool_worker()
    torch = sys.modules.get("torch")
    if torch is not None:
        found["torch"] = str(getattr(torch, "__version__", ""))
        # A thread may be about to import torch.
        version = sys.modules.get("torch.version")
        found["device_runtime"] = "" if version is None else device_runtime(vars(version))
    return found


# -- the task of a process pool that calls us: a worker does one task after the other

# The functions in which workers wait for tasks, and their variables that hold a task.
_LOOPS = {
    ("multiprocessing.pool", "worker"): ("job", "i"),
    ("concurrent.futures.process", "_process_worker"): ("call_item",),
}


class Task(NamedTuple):
    """One task, as far as it can be distinguished from others."""

    number: tuple[object, ...]
    """The pool's number of it. A pool may give out several calls of a function as one task."""
    calls: tuple[tuple[CodeType, int], ...]
    """The calls that lead from the pool to us, and the position of the next call in each."""


def in_pool_worker() -> bool:
    """Whether this process is a pool's worker, and the pool calls us."""
    return _find_task()[0] is not None


def current_task() -> Task | None:
    """The task that calls us and is a run of its own; None outside of pools.

    It is none in a worker's initializer, nor where a process group joins the workers.
    """
    loop, calls = _find_task()
    if loop is None or process_group.is_up():
        return None
    known = loop.f_locals
    held = [known.get(name) for name in _LOOPS[_function(loop)]]
    # Before Python 3.13 this is a copy that the frame keeps, together with the task's arguments.
    if type(known) is dict:
        known.clear()
    if None in held:
        return None
    numbers = (getattr(each, "work_id", each) for each in held)
    return Task(tuple(numbers), tuple(calls))


def _find_task() -> tuple[FrameType | None, list[tuple[CodeType, int]]]:
    calls: list[tuple[CodeType, int]] = []
    # Pools of threads use the same functions, and a thread is no process of its own.
    is_beside = threading.current_thread() is not threading.main_thread()
    if is_beside or launchers.multiprocessing_parent() is None:
        return None, calls
    frame: FrameType | None = sys._getframe()
    while frame is not None and _function(frame) not in _LOOPS:
        calls.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return frame, calls


def _function(frame: FrameType) -> tuple[str, str]:
    return str(frame.f_globals.get("__name__")), frame.f_code.co_name


# -- the commit of the script, read from git's files without running git

_SHA = re.compile(r"[0-9a-f]{40,64}")
_MOST_BYTES = 1_000_000


def revision(script: str) -> str:
    """The commit of the script's folder; empty if that is unknown."""
    try:
        first = Path(script).resolve().parent
        for folder in (first, *first.parents):
            if (git := folder / ".git").exists():
                return _head(_directory(git))
    except (OSError, ValueError, RuntimeError):
        pass
    return ""


def _directory(git: Path) -> Path:
    if git.is_dir():
        return git
    # In a worktree or a submodule, `.git` is a file that names the directory.
    return git.parent / _text(git).removeprefix("gitdir:").strip()


def _head(directory: Path) -> str:
    head = _text(directory / "HEAD")
    if not head.startswith("ref:"):
        return head if _SHA.fullmatch(head) else ""
    name = head.removeprefix("ref:").strip()
    common = directory
    if (link := directory / "commondir").is_file():
        common = directory / _text(link)
    for each in (directory / name, common / name):
        if each.is_file() and _SHA.fullmatch(found := _text(each)):
            return found
    for line in _text(common / "packed-refs").splitlines():
        sha, _, packed = line.partition(" ")
        if packed == name and _SHA.fullmatch(sha):
            return sha
    return ""


def _text(path: Path) -> str:
    if not path.is_file():
        return ""
    with path.open(encoding="utf-8", errors="replace") as file:
        return file.read(_MOST_BYTES).strip()
