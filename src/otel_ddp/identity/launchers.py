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
    """The pid of the process that started this one by multiprocessing; 0: look it up in /proc."""


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
    """The variables that the launcher sets for this process, but that it does not have itself."""


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
    """A variable besides the rank that the launcher sets for its processes, but lacks itself."""


# torch.distributed.launch sets the same variables since PyTorch 1.9, and counts as torchrun.
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
# A program may set the variables of these launchers itself, for a child that it starts by
# multiprocessing.
_OWN = ("environment", "kubernetes")
# These variables are set by DeepSpeed, Accelerate, Lightning, Kubeflow's PyTorchJob, Volcano's
# pytorch plugin, and shell loops. Their other variables are not used: PET_* are arguments of
# torchrun, and VC_TASK_INDEX and JOB_COMPLETION_INDEX are indices within only a part of the job.
_ENVIRONMENT = _Variables("environment", "RANK", ("WORLD_SIZE",), "LOCAL_RANK", "LOCAL_WORLD_SIZE")
# OMPI_COMM_WORLD_NODE_RANK is not used: it is no node rank, but the index of a process on its node.
_OPENMPI = _Variables(
    "openmpi",
    "OMPI_COMM_WORLD_RANK",
    ("OMPI_COMM_WORLD_SIZE",),
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
)
# MPICH and Intel MPI, if both PMI_RANK and MPI_LOCALRANKID are set: srun sets only PMI_RANK.
_HYDRA = _Variables("hydra", "PMI_RANK", ("PMI_SIZE",), "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
_SLURM = _Variables(
    "slurm",
    "SLURM_PROCID",
    # Prefer the number of tasks that srun started in this step. SLURM_NTASKS may be the number that
    # sbatch requested for the job.
    ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
    "SLURM_LOCALID",
    node_rank="SLURM_NODEID",
    nodes=("SLURM_STEP_NUM_NODES", "SLURM_NNODES"),
    marker="SLURM_STEP_ID",
)

MPI = frozenset({"openmpi", "hydra"})


def read(process: ProcessFacts) -> LauncherFacts:
    """The facts from the innermost launcher.

    An outer launcher, such as srun around torchrun, adds the facts that the innermost one does not
    set, if both have the same rank and world size.
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
            continue  # ignore an outer launcher with invalid variables
        if (outer.global_rank, outer.world_size) == (facts.global_rank, facts.world_size):
            gaps: dict[str, Any] = {
                key: getattr(outer, key) for key, value in facts._asdict().items() if value is None
            }
            facts = facts._replace(**gaps)
    return facts


def _is_torchruns_own(process: ProcessFacts, innermost: _Variables) -> bool:
    # torchrun may start its workers by multiprocessing, and sets RANK for each worker. A child that
    # a worker starts has the RANK that its parent, the worker, was given.
    return innermost.launcher == "torchrun" and not parent_was_given(process, "RANK")


def restarts(env: Mapping[str, str]) -> int:
    """How often torchrun and Slurm have restarted this launch."""
    names = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
    # An invalid count counts as 0. No training should fail to start because of it.
    return sum(_digits(env.get(name, "").strip()) or 0 for name in names)


def slurm_step(env: Mapping[str, str]) -> str:
    """`<job>.<step>` if srun started this process as a task, else empty.

    Processes that a batch script or an interactive shell starts are no tasks, but have the
    variables of a task, with SLURM_PROCID=0. They differ: below a batch script there is no step, or
    a reserved one (4294967280 and above), and below a shell there is SLURM_PTY_PORT.
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
    """The pid of the process that started this one by multiprocessing; None if there is none."""
    # If the module is not imported, this process is no multiprocessing child.
    module = sys.modules.get("multiprocessing")
    parent = None if module is None else module.parent_process()
    # Do not use os.getppid(): it may be the pid of multiprocessing's fork server.
    return None if parent is None else parent.pid or 0


def parent_was_given(process: ProcessFacts, name: str) -> bool:
    """Whether our parent was itself started with our value of a variable.

    If not, the parent has set the value for us.
    """
    theirs = _environ(process.proc, process.parent or _parent(process.proc, process.pid))
    return process.env.get(name, "") == theirs.get(name, "")


def launcher_process(process: ProcessFacts, markers: tuple[str, ...]) -> tuple[str, ...]:
    """Identifies the process that launched us; no other process of this node ever has the same id.

    The launcher is our first ancestor that lacks the variables *markers*. Other ancestors, such as
    a shell between the launcher and us (`mpirun sh -c ...`), have the same variables as we.
    """
    ours = {name: process.env[name] for name in markers if process.env.get(name)}
    pid = _parent(process.proc, process.pid)
    for _ in range(_MOST_ANCESTORS if ours else 0):
        theirs = _environ(process.proc, pid)
        above = _parent(process.proc, pid)
        if above < 1 or any(theirs.get(name) != value for name, value in ours.items()):
            break
        pid = above
    # The boot id is included, as another process may have the same pid and start time after a
    # reboot.
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
    # For the processes that it starts, Lightning sets LOCAL_RANK and WORLD_SIZE, but no RANK.
    localised = bool(env.get("LOCAL_RANK")) and bool(env.get("WORLD_SIZE"))
    if ranked and env.get("TORCHELASTIC_RUN_ID"):
        yield _TORCHRUN
    elif localised:
        yield _ENVIRONMENT
    # MPI comes before Slurm. In a Slurm job, mpirun starts a daemon on each other node by srun, and
    # all processes of a daemon have the daemon's SLURM_PROCID, which is not their rank.
    for variables in (_OPENMPI, _HYDRA):
        if env.get(variables.global_rank) and env.get(variables.local_rank):
            yield variables
    if ranked and not localised:
        # RANK may have been set by a platform: it is then the index of the pod. So a launcher
        # inside the pod, as above, comes before it.
        pod = bool(env.get("KUBERNETES_SERVICE_HOST"))
        yield _ENVIRONMENT._replace(launcher="kubernetes" if pod else "environment")
    if slurm_step(env):
        yield _SLURM
    # RANK without WORLD_SIZE, as a shell loop or a platform may set it, comes last. If it is no
    # number, it belongs to another program.
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
        # With --virtual-local-rank, torchrun sets LOCAL_RANK to 0 for all ranks, each of which sees
        # a single GPU. So derive the real local rank.
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
    """The facts of a multiprocessing child.

    It inherits its parent's variables, but only those about the node apply to it: the ranks are the
    parent's. But if RANK or LOCAL_RANK is another one than the parent was started with, the parent
    has set it for the child.
    """
    if candidates[0].launcher in _OWN:
        own = _facts_of(candidates[0], process.env)
        if not all(parent_was_given(process, name) for name in ("RANK", "LOCAL_RANK")):
            return own._replace(launcher="spawn", markers=())
    for variables in candidates:
        try:
            outer = _facts_of(variables, process.env)
        except ConfigError:
            continue  # ignore invalid variables, which are not meant for this process
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
