"""Reads the variables of launchers, and finds the launcher's process."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from otel_ddp import files
from otel_ddp.errors import ConfigError

_MOST_ANCESTORS = 16


class ProcessFacts(NamedTuple):
    """This process and its environment."""

    env: Mapping[str, str]
    proc: Path
    host: str
    pid: int
    spawned: bool
    parent: int = 0
    """The process that called multiprocessing to start this one; 0: use the parent from /proc."""


class LauncherFacts(NamedTuple):
    """Facts about this process from a launcher's variables."""

    launcher: str
    global_rank: int | None = None
    world_size: int | None = None
    local_rank: int | None = None
    local_world_size: int | None = None
    node_rank: int | None = None
    nodes: int | None = None
    markers: tuple[str, ...] = ()
    """Variables that the launcher sets for this process, but does not have itself."""


class _Variables(NamedTuple):
    """The variables of a launcher.

    If a field has several names, the first one that is set counts.
    """

    launcher: str
    global_rank: str
    world_size: tuple[str, ...] = ()
    local_rank: str = ""
    local_world_size: str = ""
    node_rank: str = ""
    nodes: tuple[str, ...] = ()
    marker: str = ""
    """A variable that, like the rank, is set in started processes, but not in the launcher."""


# Since PyTorch 1.9, torch.distributed.launch is torchrun and sets the same variables.
_TORCHRUN = _Variables(
    "torchrun",
    "RANK",
    ("WORLD_SIZE",),
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    ("GROUP_WORLD_SIZE",),
    "TORCHELASTIC_RUN_ID",
)
# Launchers whose variables a multiprocessing parent may set for one of its children.
_OWN = ("environment", "kubernetes")
# DeepSpeed, Accelerate, Lightning, Kubeflow's PyTorchJob, Volcano's pytorch plugin, a shell loop.
# Their other variables are not used: PET_* are torchrun's arguments, and VC_TASK_INDEX and
# JOB_COMPLETION_INDEX count only within a part of the job.
_ENVIRONMENT = _Variables("environment", "RANK", ("WORLD_SIZE",), "LOCAL_RANK", "LOCAL_WORLD_SIZE")
# OMPI_COMM_WORLD_NODE_RANK is not used: it is the process's index on its node, not the node's.
_OPENMPI = _Variables(
    "openmpi",
    "OMPI_COMM_WORLD_RANK",
    ("OMPI_COMM_WORLD_SIZE",),
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
)
# MPICH and Intel MPI. srun also sets PMI_RANK, but not MPI_LOCALRANKID, so both must be set.
_HYDRA = _Variables("hydra", "PMI_RANK", ("PMI_SIZE",), "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
_SLURM = _Variables(
    "slurm",
    "SLURM_PROCID",
    # SLURM_NTASKS may be the number that sbatch requested; the step's variable has the number
    # started.
    ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
    "SLURM_LOCALID",
    node_rank="SLURM_NODEID",
    nodes=("SLURM_STEP_NUM_NODES", "SLURM_NNODES"),
    marker="SLURM_STEP_ID",
)

MPI = frozenset({"openmpi", "hydra"})


def read(process: ProcessFacts) -> LauncherFacts:
    """The facts from the innermost launcher.

    Facts that it does not set are taken from outer launchers with the same rank and world size.
    """
    candidates = list(_candidates(process.env))
    if process.spawned and candidates and not _is_torchruns_own(process, candidates[0]):
        return _spawned(process, candidates)
    if not candidates:
        return LauncherFacts("spawn" if process.spawned else "lone")
    facts = _facts_of(candidates[0], process.env)
    for variables in candidates[1:]:
        try:
            outer = _facts_of(variables, process.env)
        except ConfigError:
            continue  # an invalid outer launcher is ignored
        if (outer.global_rank, outer.world_size) == (facts.global_rank, facts.world_size):
            gaps: dict[str, Any] = {
                key: getattr(outer, key) for key, value in facts._asdict().items() if value is None
            }
            facts = facts._replace(**gaps)
    return facts


def _is_torchruns_own(process: ProcessFacts, innermost: _Variables) -> bool:
    # torchrun may start its workers by multiprocessing. A child of a worker has the worker's RANK.
    return innermost.launcher == "torchrun" and not parent_was_given(process, "RANK")


def restarts(env: Mapping[str, str]) -> int:
    """How often torchrun and Slurm have restarted this launch."""
    names = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
    # An invalid count is ignored rather than refused.
    return sum(_digits(env.get(name, "").strip()) or 0 for name in names)


def slurm_step(env: Mapping[str, str]) -> str:
    """`<job>.<step>` if srun started this process as a task, else empty.

    A batch script and an interactive shell have SLURM_PROCID=0 and the requested SLURM_NTASKS, but
    processes started from them are no tasks: a batch script has no step or a reserved one
    (4294967280 and above), a shell has a terminal's port.
    """
    job = env.get("SLURM_JOB_ID") or env.get("SLURM_JOBID") or ""
    step = env.get("SLURM_STEP_ID") or env.get("SLURM_STEPID") or ""
    if not job or not env.get("SLURM_PROCID") or env.get("SLURM_PTY_PORT"):
        return ""
    if not (step.isascii() and step.isdecimal() and int(step[:20]) < 4294967280):
        return ""
    return f"{job}.{step}"


def slurm_tasks(env: Mapping[str, str]) -> int | None:
    """The number of tasks of this Slurm step; None if it is unknown or invalid."""
    return _digits(next((env[name] for name in _SLURM.world_size if env.get(name)), ""))


def multiprocessing_parent() -> int | None:
    """The process that started this one by multiprocessing; None if there is none."""
    # In a multiprocessing child, the module is always imported.
    module = sys.modules.get("multiprocessing")
    parent = None if module is None else module.parent_process()
    # Do not use os.getppid(), which may be the pid of the fork server.
    return None if parent is None else parent.pid or 0


def parent_was_given(process: ProcessFacts, name: str) -> bool:
    """Whether our parent was started with our value of a variable, so it did not set the value for
    us."""
    theirs = _environ(process.proc, process.parent or _parent(process.proc, process.pid))
    return process.env.get(name, "") == theirs.get(name, "")


def launcher_process(process: ProcessFacts, markers: tuple[str, ...]) -> tuple[str, ...]:
    """Identifies the process that launched us, uniquely on this node for all time.

    A shell between the launcher and us (`mpirun sh -c ...`) has our variables. The launcher is the
    first ancestor without them.
    """
    ours = {name: process.env[name] for name in markers if process.env.get(name)}
    pid = _parent(process.proc, process.pid)
    for _ in range(_MOST_ANCESTORS if ours else 0):
        theirs = _environ(process.proc, pid)
        above = _parent(process.proc, pid)
        if above < 1 or any(theirs.get(name) != value for name, value in ours.items()):
            break
        pid = above
    # Includes the boot id: after a reboot, another process may have the same pid and start time.
    stat = files.stat_fields(process.proc / str(pid))
    started = stat[19] if len(stat) > 19 else ""
    return "process", _boot_id(process.proc), process.host, str(pid), started


def whole(variable: str, text: str, least: int, advice: str) -> int:
    """The number in a variable; raises ConfigError if it is invalid."""
    value = _digits(text)
    if value is None or value < least:
        raise ConfigError(
            f"{variable} must be a whole number, {least} or more, got {text!r}; {advice}."
        )
    return value


def _candidates(env: Mapping[str, str]) -> Iterator[_Variables]:
    """The launchers that started this process, innermost first."""
    ranked = bool(env.get("RANK")) and bool(env.get("WORLD_SIZE"))
    # Lightning sets only a local rank for its processes, and derives the rest.
    localised = bool(env.get("LOCAL_RANK")) and bool(env.get("WORLD_SIZE"))
    if ranked and env.get("TORCHELASTIC_RUN_ID"):
        yield _TORCHRUN
    elif localised:
        yield _ENVIRONMENT
    # mpirun in a Slurm job starts its daemons by srun: except on the first node, its processes have
    # the daemon's SLURM_PROCID. So MPI comes before Slurm.
    for variables in (_OPENMPI, _HYDRA):
        if env.get(variables.global_rank) and env.get(variables.local_rank):
            yield variables
    if ranked and not localised:
        # A platform's RANK is the pod's index, unless a launcher in the pod has set another.
        pod = bool(env.get("KUBERNETES_SERVICE_HOST"))
        yield _ENVIRONMENT._replace(launcher="kubernetes" if pod else "environment")
    if slurm_step(env):
        yield _SLURM
    # Last: RANK without WORLD_SIZE, from a shell loop or a platform. A RANK that is no number
    # belongs to another program.
    if not env.get("WORLD_SIZE") and _digits(env.get("RANK", "").strip()) is not None:
        yield _ENVIRONMENT


def _facts_of(variables: _Variables, env: Mapping[str, str]) -> LauncherFacts:
    rank = _first(env, (variables.global_rank,))
    world = _first(env, variables.world_size, 1)
    local = _first(env, (variables.local_rank,))
    local_world = _first(env, (variables.local_world_size,), 1)
    node_rank = _first(env, (variables.node_rank,))
    nodes = _first(env, variables.nodes, 1)
    if nodes is None and world and local_world and world % local_world == 0:
        nodes = world // local_world
    if nodes == 1:
        local_world = local_world or world
        node_rank = node_rank or 0
    if variables is _TORCHRUN and local == 0 and rank and local_world and nodes:
        # With --virtual-local-rank each rank sees a single GPU, and LOCAL_RANK is 0 for all ranks.
        local = rank % local_world if world == local_world * nodes else 0
    return LauncherFacts(
        launcher=variables.launcher,
        global_rank=rank,
        world_size=world,
        local_rank=local,
        local_world_size=local_world,
        node_rank=node_rank,
        nodes=nodes,
        markers=tuple(name for name in (variables.global_rank, variables.marker) if name),
    )


def _spawned(process: ProcessFacts, candidates: list[_Variables]) -> LauncherFacts:
    """The facts of a multiprocessing child. Of the variables that it inherits, only those about the
    node apply to it.

    But if RANK or LOCAL_RANK differs from the parent's initial value, the parent has set it for the
    child.
    """
    if candidates[0].launcher in _OWN:
        own = _facts_of(candidates[0], process.env)
        if not all(parent_was_given(process, name) for name in ("RANK", "LOCAL_RANK")):
            return own._replace(launcher="spawn", markers=())
    for variables in candidates:
        try:
            outer = _facts_of(variables, process.env)
        except ConfigError:
            continue  # invalid, but not meant for this process
        if outer.nodes is not None:
            return LauncherFacts("spawn", node_rank=outer.node_rank, nodes=outer.nodes)
    return LauncherFacts("spawn")


def _first(env: Mapping[str, str], names: tuple[str, ...], least: int = 0) -> int | None:
    for name in names:
        if name and (text := env.get(name, "").strip()):
            return whole(name, text, least, "its launcher sets it: correct or unset it")
    return None


def _digits(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else None


def _parent(proc: Path, pid: int) -> int:
    stat = files.stat_fields(proc / str(pid))
    if len(stat) > 1 and stat[1].isdecimal():
        return int(stat[1])
    return os.getppid() if pid == os.getpid() else 0


def _environ(proc: Path, pid: int) -> dict[str, str]:
    try:
        content = (proc / str(pid) / "environ").read_bytes()
    except OSError:
        return {}
    pairs = (entry.partition(b"=") for entry in content.split(b"\0"))
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}


def _boot_id(proc: Path) -> str:
    try:
        return (proc / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
