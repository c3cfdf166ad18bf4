"""Opens the journal of a new run, and collects facts about its program, job and pool task."""

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
# Apptainer, Singularity and Slurm put the image's name in these variables. In Docker and Kubernetes
# a container does not know its image.
_IMAGES = ("APPTAINER_CONTAINER", "SINGULARITY_CONTAINER", "SLURM_CONTAINER")


def open_journal(conf: Settings, identity: dict[str, Any]) -> JournalWriter | None:
    """The journal of this process, in the best directory with room; None if there is none."""
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
    """The argument `best`, checked: name of a value -> direction in which it improves."""
    if best is None:
        return {}
    found = dict(best) if isinstance(best, Mapping) else {"": best}
    if not all(name and isinstance(name, str) and found[name] in catalog.BEST for name in found):
        raise ConfigError(
            f'best must map names to "min", "max" or "none", as in {{"wer": "min"}}; got {best!r}.'
        )
    return found


class LeadSearch:
    """Looks up which agent leads the run (judges all its ranks), in the process group's store."""

    def __init__(self, conf: Settings | None = None) -> None:
        # Whether the store is still to be asked for the lead.
        self.is_sought = conf is not None and conf.lead != "off"
        self._found: Lead | None = None
        self._has_answer = False

    def is_due(self, *, has_synced: bool) -> bool:
        """Whether to ask the store now. *has_synced*: a step has ended, so all ranks have begun
        one."""
        # Ask again only after that step: rank 0 may not have published its addresses before.
        return self.is_sought and (has_synced or not self._has_answer)

    def take(self, group: GroupFacts, *, has_synced: bool) -> None:
        """Take over the lead from an answer of the process group's store."""
        self._found = group.lead or self._found
        # Other ranks ask again after the first step: rank 0 may publish its addresses last, but
        # does so before its first step ends.
        self.is_sought &= group.lead is not None and group.global_rank != 0 and not has_synced
        self._has_answer = True

    def facts(self) -> dict[str, Any]:
        """The fact for the journal, if the lead is known."""
        return {} if self._found is None else {lead.FACT: self._found.as_json()}


def in_data_worker() -> bool:
    """Whether this process is a worker of a data loader."""
    module = sys.modules.get("torch.utils.data")
    return module is not None and module.get_worker_info() is not None


def job_facts(env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The job and the container of this program, from environment variables.

    No other environment variables are recorded here.
    """
    found = {name: env.get(variable, "") for name, variable in _JOB.items()}
    images = (env.get(variable, "") for variable in _IMAGES)
    found["container_image"] = next(filter(None, images), "")
    return {name: clean(value) for name, value in found.items() if value}


def program_facts() -> dict[str, Any]:
    """Facts about this program, and the process that started it."""
    script = sys.argv[0] if sys.argv else ""
    # Catch errors, as the working directory may be gone. With `-c` and in an interactive Python
    # there is no script.
    folder = errors.attempt(lambda: os.path.dirname(os.path.abspath(script)), "")
    folder = folder if script and script != "-c" else ""
    found: dict[str, Any] = {
        # With the script's directory, as several runs may have a `train.py`.
        "script": os.path.join(os.path.basename(folder), os.path.basename(script)),
        "git_sha": revision(script) if script else "",
        "python": ".".join(map(str, sys.version_info[:3])),
        **job_facts(),
    }
    if parent := launchers.multiprocessing_parent():
        found["parent"] = parent
        found["pool"] = in_pool_worker()
    torch = sys.modules.get("torch")
    if torch is not None:
        found["torch"] = str(getattr(torch, "__version__", ""))
        # If another thread is importing torch, `torch.version` may not be there yet.
        version = sys.modules.get("torch.version")
        found["device_runtime"] = "" if version is None else device_runtime(vars(version))
    return found


# -- tasks of process pools: a worker runs one task after another

# Module and name of the function in which a pool's workers wait for tasks -> the names of its
# variables that hold the task.
_LOOPS = {
    ("multiprocessing.pool", "worker"): ("job", "i"),
    ("concurrent.futures.process", "_process_worker"): ("call_item",),
}


class Task(NamedTuple):
    """Identifies a task of a pool, and the point in it from which our code was called."""

    number: tuple[object, ...]
    """The pool's number of the task. One task may contain several calls of the user's function."""
    calls: tuple[tuple[CodeType, int], ...]
    """The stack from the pool to us: code objects and positions of the current instruction."""


def in_pool_worker() -> bool:
    """Whether this code runs in a worker of a process pool."""
    return _find_task()[0] is not None


def current_task() -> Task | None:
    """The task that calls us, if it should be a separate run; None outside of pools.

    Also None in a worker's initializer, and if the workers form a process group: then they are
    ranks of one run.
    """
    loop, calls = _find_task()
    if loop is None or process_group.is_up():
        return None
    known = loop.f_locals
    held = [known.get(name) for name in _LOOPS[_function(loop)]]
    # Before Python 3.13, `f_locals` is a copy that the frame keeps: clear it, so that it does not
    # keep the task's arguments alive.
    if type(known) is dict:
        known.clear()
    if None in held:
        return None
    numbers = (getattr(each, "work_id", each) for each in held)
    return Task(tuple(numbers), tuple(calls))


def _find_task() -> tuple[FrameType | None, list[tuple[CodeType, int]]]:
    calls: list[tuple[CodeType, int]] = []
    # Look only on the main thread: thread pools use the same functions, but in one process.
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


# -- the commit of the script, from git's files without running git

_SHA = re.compile(r"[0-9a-f]{40,64}")
_MOST_BYTES = 1_000_000


def revision(script: str) -> str:
    """The commit of the script's directory; empty if unknown."""
    try:
        first = Path(script).resolve().parent
        git = next(each / ".git" for each in (first, *first.parents) if (each / ".git").exists())
        if git.is_file():
            # In a worktree or a submodule, `.git` is a file with the path of git's directory.
            git = git.parent / _text(git).removeprefix("gitdir:").strip()
        common = git / _text(git / "commondir")
        head = _text(git / "HEAD")
        name = head.removeprefix("ref:").strip()
        packed = (line.split(" ") for line in _text(common / "packed-refs").splitlines())
        known = [head, _text(common / name), *(line[0] for line in packed if line[-1] == name)]
        return next(filter(_SHA.fullmatch, known), "")
    except (OSError, ValueError, RuntimeError, StopIteration):
        return ""


def _text(path: Path) -> str:
    if not path.is_file():
        return ""
    with path.open(encoding="utf-8", errors="replace") as file:
        return file.read(_MOST_BYTES).strip()
