"""What a run finds when it opens: a place for its journal, its program, and its caller."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

from otel_ddp import errors
from otel_ddp.errors import ConfigError
from otel_ddp.identity import launchers, pool_tasks
from otel_ddp.identity.git_commit import revision
from otel_ddp.identity.run_names import clean
from otel_ddp.journal import place, writer
from otel_ddp.journal.writer import JournalWriter
from otel_ddp.settings import Settings
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
    opened, remark = writer.open_journal(directories, conf.journal_bytes, identity)
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


def own_task() -> pool_tasks.Task | None:
    """The task of a pool that is a run of its own; None if a process group joins the workers."""
    return None if group_is_up() else pool_tasks.current_task()


def group_is_up() -> bool:
    """Whether this process is in a process group."""
    # A process that has not imported torch.distributed has no process group.
    if "torch.distributed" not in sys.modules:
        return False
    from otel_ddp.torch import process_group

    return process_group.is_up()


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
    resource = dict(
        pair.partition("=")[::2] for pair in env.get("OTEL_RESOURCE_ATTRIBUTES", "").split(",")
    )
    found["container_image"] = next(filter(None, images), resource.get("container.image.name", ""))
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
        # For the agent alone, which asks git about it.
        "folder": folder,
        "python": ".".join(map(str, sys.version_info[:3])),
        **surroundings(),
    }
    if parent := launchers.multiprocessing_parent():
        found["parent"] = parent
        found["pool"] = pool_tasks.in_worker()
    torch = sys.modules.get("torch")
    if torch is not None:
        found["torch"] = str(getattr(torch, "__version__", ""))
        found["cuda"] = str(getattr(getattr(torch, "version", None), "cuda", None) or "")
    return found
