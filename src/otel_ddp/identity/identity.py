"""Who am I: group, run, job_type, node, rank and local rank, from the launcher's environment."""

from __future__ import annotations

import dataclasses
import operator
import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple, SupportsIndex

from otel_ddp.errors import ConfigError
from otel_ddp.identity import launchers, run_names
from otel_ddp.identity.run_names import INHERITED_RUN, hand_down, parent_has_run

# What names each text, where no argument does: our own variable, then those of other trackers.
_VARIABLES = {
    "group": ("OTEL_DDP_GROUP", "SWANLAB_GROUP", "WANDB_RUN_GROUP"),
    "run": ("OTEL_DDP_RUN", "SWANLAB_RUN_ID", "WANDB_RUN_ID"),
    "job_type": ("OTEL_DDP_JOB_TYPE", "SWANLAB_JOB_TYPE", "WANDB_JOB_TYPE"),
    "project": ("OTEL_DDP_PROJECT", "SWANLAB_PROJ_NAME", "WANDB_PROJECT"),
    "name": ("OTEL_DDP_NAME", "SWANLAB_NAME", "SWANLAB_EXP_NAME", "WANDB_NAME"),
    "description": ("OTEL_DDP_DESCRIPTION", "SWANLAB_DESCRIPTION", "WANDB_NOTES"),
    "tags": ("OTEL_DDP_TAGS", "SWANLAB_TAGS", "WANDB_TAGS"),
    "node": ("OTEL_DDP_NODE",),
}
# What is prose, and no name, may be longer; it has to find room in the smallest journal twice.
_LONGEST = {"description": 1000}
_LONGEST_TAGS = 1000


class GroupFacts(NamedTuple):
    """What the default process group says about this process."""

    global_rank: int
    world_size: int
    agreed_run: str | None
    store_host: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Identity:
    """One process of a training job, as far as it is known."""

    group: str = ""
    run: str = ""
    job_type: str = "train"
    project: str = ""
    name: str = ""
    description: str = ""
    tags: str = ""
    """Sorted, with commas between them."""
    node: str = ""
    """What the user called this node; empty where nobody did."""
    host: str = ""
    pid: int = 0
    global_rank: int | None = None
    local_rank: int | None = None
    world_size: int | None = None
    local_world_size: int | None = None
    """How many ranks the launcher started on this node; None where it does not say."""
    node_rank: int | None = None
    nodes: int | None = None
    launcher: str = "lone"
    run_settled: bool = False
    rank_settled: bool = False
    restarts: int = 0
    given: frozenset[str] = frozenset()
    """What the user said, by argument or OTEL_DDP_*: nothing found out later overrules it."""
    run_from: str = ""
    """given, launcher, inherited, parent, rendezvous, made or agreed."""
    launched_by: str = ""
    """Tells the process that launched this one from every other of its node: node ranks are dealt
    anew at each restart of the workers, their launcher stays."""
    proposal: str = ""
    """A name that no other launch has, for the ranks to agree on. `run` itself may be no such
    name: address and port of a rendezvous are the same the next time."""

    @property
    def settled(self) -> bool:
        """Whether neither the run nor the rank waits for a process group."""
        return self.run_settled and self.rank_settled

    @property
    def may_have_others(self) -> bool:
        """Whether it is alone only as long as no process group says otherwise.

        A program may start its other ranks by itself, after the run was opened.
        """
        said = self.given & {"global_rank", "world_size"}
        return self.launcher == "lone" and self.world_size == 1 and not said

    @property
    def wants_agreement(self) -> bool:
        """Whether a name that all ranks of a process group agree on is better than `run`."""
        return self.run_from in run_names.NEGOTIABLE

    @property
    def label_rank(self) -> str:
        """The `rank` label. Two processes that do not know theirs must not share a series."""
        return f"p{self.pid}" if self.global_rank is None else str(self.global_rank)

    def to_dict(self) -> dict[str, Any]:
        """As JSON takes it."""
        content = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        content["given"] = sorted(self.given)
        return content


def resolve(
    *,
    group: str | None = None,
    run: str | None = None,
    job_type: str | None = None,
    project: str | None = None,
    name: str | None = None,
    description: str | None = None,
    tags: str | Collection[str] | None = None,
    node: str | None = None,
    global_rank: int | None = None,
    local_rank: int | None = None,
    world_size: int | None = None,
    parallel: Mapping[str, Any] | None = None,
    joins: bool = False,
    in_task: bool = False,
    env: Mapping[str, str] = os.environ,
    process_group: GroupFacts | None = None,
    proc: Path = Path("/proc"),
    in_spawned_child: bool | None = None,
    make_id: Callable[[], str] | None = None,
    host: str | None = None,
    pid: int | None = None,
) -> Identity:
    """Find out who this process is; raises ConfigError for what cannot be.

    *joins*: *run* is one that another process has opened. *in_task*: this is the task of a pool, a
    run of its own.
    """
    parent = launchers.multiprocessing_parent()
    here = launchers.ProcessFacts(
        env=env,
        proc=proc,
        host=_host_name() if host is None else host,
        pid=os.getpid() if pid is None else pid,
        spawned=parent is not None if in_spawned_child is None else in_spawned_child,
        parent=parent or 0,
    )
    given_rank = _number("global_rank", global_rank, "OTEL_DDP_RANK", env)
    given_local = _number("local_rank", local_rank, "OTEL_DDP_LOCAL_RANK", env)
    given_world = _number("world_size", world_size, "OTEL_DDP_WORLD_SIZE", env, least=1)
    given_node = _number("node_rank", None, "OTEL_DDP_NODE_RANK", env)
    # A variable is the same for all tasks of a pool.
    given_run = _text("run", run, {} if in_task else env)
    said = {
        "global_rank": given_rank,
        "local_rank": given_local,
        "world_size": given_world,
        "node_rank": given_node,
        "run": given_run or None,
    }
    given = frozenset(key for key, value in said.items() if value is not None)

    told = _configured(
        launchers.LauncherFacts("pool") if in_task else launchers.read(here), parallel
    )
    rank = told.global_rank if given_rank is None else given_rank
    world = told.world_size if given_world is None else given_world
    if told.launcher == "lone" and not rank and world in (None, 1):
        rank, world = 0, 1
        told = told._replace(world_size=1, local_rank=0, local_world_size=1, node_rank=0, nodes=1)
    parents = run_names.of_parent(here, told, world)
    # A child of multiprocessing with a name of its own is no part of its parent's run.
    named = told.launcher == "spawn" and bool(run) and not joins
    named = named and given_run not in (parents.run, _text("run", None, env))
    # Such a child may still turn out to be one of several, in a process group.
    assumed = named and rank is None
    if (assumed or (in_task and not rank)) and world in (None, 1):
        rank, world = 0, 1
        told = told._replace(world_size=1, local_rank=0, local_world_size=1, node_rank=0, nodes=1)
    if process_group is None:
        _check_rank(rank, world, given, told.launcher if parallel is None else "parallel")
    else:
        # What a launcher said may be wrong then: the group is believed before it.
        _check_rank(given_rank, given_world, given, told.launcher)
    node_rank = told.node_rank if given_node is None else given_node
    local = told.local_rank if given_local is None else given_local
    if local is None:
        master = env.get("MASTER_ADDR", "")
        local = _local_rank(rank, world, node_rank, told.nodes, master, here.host)

    found = run_names.find(given_run, here, told, world, make_id or run_names.make)
    group = _text("group", group, env)
    if in_task:
        group = group or run_names.group_of_tasks(here)
    elif named or found.run == parents.run:
        group = group or parents.group
    identity = Identity(
        group=group,
        run=found.run,
        job_type=_text("job_type", job_type, env) or "train",
        project=_text("project", project, env),
        name=_text("name", name, env),
        description=_text("description", description, env),
        tags=_tags(tags, env),
        node=_text("node", node, env),
        host=run_names.clean(here.host),
        pid=here.pid,
        global_rank=rank,
        local_rank=local,
        world_size=world,
        local_world_size=told.local_world_size if world == told.world_size else None,
        node_rank=node_rank,
        nodes=told.nodes,
        launcher=told.launcher,
        run_settled=found.settled,
        rank_settled=rank is not None and not assumed,
        restarts=launchers.restarts(env),
        given=given,
        run_from=found.source,
        proposal=found.proposal,
        launched_by=run_names.launched_by(here, told),
    )
    return identity if process_group is None else settle(identity, process_group, env=env)


def _host_name() -> str:
    if hasattr(os, "uname"):
        return os.uname().nodename
    # Windows. Imported here: no training process needs it elsewhere.
    import socket

    return socket.gethostname()


def settle(
    identity: Identity, facts: GroupFacts, *, env: Mapping[str, str] = os.environ
) -> Identity:
    """Complete an identity with what the process group says. This may be mid-training: no raise.

    The group is believed where it disagrees with the launcher: some platforms put the node's
    index into RANK. The user's own word stands. Nothing better than a process group will come,
    so what it leaves open stays as it is and counts as settled.
    """
    given = identity.given
    rank = identity.global_rank if "global_rank" in given else facts.global_rank
    world = identity.world_size if "world_size" in given else facts.world_size
    same_world = identity.world_size in (None, world)
    node_rank = identity.node_rank if same_world or "node_rank" in given else None
    nodes = identity.nodes if same_world else None
    local_world = identity.local_world_size if same_world else None
    if local_world is None and _is_loopback(facts.store_host or env.get("MASTER_ADDR", "")):
        # No other machine can reach such an address: all ranks are here.
        local_world = world
    launcher = identity.launcher
    if launcher == "lone" and world != 1:
        launcher = "torch.distributed"

    local = identity.local_rank
    same = same_world and identity.global_rank in (None, rank)
    assumed = identity.launcher == "lone" or local == identity.global_rank
    if local is None or (not same and assumed and "local_rank" not in given):
        master = facts.store_host or env.get("MASTER_ADDR", "")
        local = _local_rank(rank, world, node_rank, nodes, master, identity.host)

    run, run_from = identity.run, identity.run_from
    if identity.wants_agreement and world != 1 and facts.agreed_run:
        run, run_from = run_names.clean(facts.agreed_run), "agreed"
    return dataclasses.replace(
        identity,
        run=run,
        run_from=run_from,
        run_settled=True,
        global_rank=rank,
        local_rank=local,
        world_size=world,
        local_world_size=local_world,
        node_rank=node_rank,
        nodes=nodes,
        launcher=launcher,
        rank_settled=True,
    )


def of_rank(
    who: Identity, global_rank: object, job_type: object = None, local_rank: object = None
) -> Identity:
    """Another rank of the same run; raises ConfigError for what cannot be."""
    advice = "pass the one that the values are of"
    rank = _number("global_rank", -1 if global_rank is None else global_rank, "", {}, advice=advice)
    local = _number("local_rank", local_rank, "", {}, advice=advice)
    return dataclasses.replace(
        who,
        job_type=_text("job_type", job_type, {}) or who.job_type,
        global_rank=rank,
        local_rank=rank if local is None and who.nodes == 1 else local,
        # It took itself for the only one, and is not.
        world_size=None if who.world_size == 1 else who.world_size,
        rank_settled=True,
        given=who.given | {"global_rank", "local_rank"},
    )


def _local_rank(
    rank: int | None,
    world: int | None,
    node_rank: int | None,
    nodes: int | None,
    master: str,
    host: str,
) -> int | None:
    """The local rank where nobody told it: certain on one node, by blocks of ranks on several."""
    if rank is None:
        return None
    if world == 1 or nodes == 1 or _is_here(master, host):
        return rank
    if world and nodes and node_rank is not None and world % nodes == 0:
        index = rank - node_rank * (world // nodes)
        return index if 0 <= index < world // nodes else None
    return None


def _is_here(master: str, host: str) -> bool:
    name = _name(master)
    own = host.lower()
    return _is_loopback(master) or (bool(name) and name in (own, own.partition(".")[0]))


def _is_loopback(master: str) -> bool:
    name = _name(master)
    return name in ("localhost", "::1", "localhost.localdomain") or name.startswith("127.")


def _name(master: str) -> str:
    return master.strip().lower().strip("[]")


def _configured(
    told: launchers.LauncherFacts, parallel: Mapping[str, Any] | None
) -> launchers.LauncherFacts:
    """What a launcher told, and a trainer's configuration where it told nothing."""
    if parallel is None:
        return told
    if not isinstance(parallel, Mapping):
        raise ConfigError(
            "parallel must be a mapping such as {'world_size': 8, 'rank': 0}, "
            f"got {type(parallel).__name__}."
        )

    def said(name: str, known: int | None, least: int = 0) -> int | None:
        if known is not None or parallel.get(name) is None:
            return known
        return _number(f"parallel[{name!r}]", parallel[name], "", {}, least)

    return told._replace(
        global_rank=said("rank", told.global_rank),
        local_rank=said("local_rank", told.local_rank),
        world_size=said("world_size", told.world_size, 1),
    )


def _text(name: str, argument: object, env: Mapping[str, str]) -> str:
    if argument is not None and not isinstance(argument, str):
        raise ConfigError(
            f"{name} must be text, got {argument!r} ({type(argument).__name__}); "
            f"pass str(...) of it."
        )
    # An empty argument counts as unset, as an empty variable does: os.environ.get("X", "").
    texts = (argument or "", *(env.get(variable, "") for variable in _VARIABLES[name]))
    return next(filter(None, (normal(name, text) for text in texts)), "")


def _tags(argument: object, env: Mapping[str, str]) -> str:
    said = list(argument) if isinstance(argument, Collection) else [argument]
    if argument is not None and not all(isinstance(each, str) for each in said):
        raise ConfigError(
            f"tags must be texts, ['baseline', 'bf16'] or 'baseline, bf16', got {argument!r}."
        )
    texts = (argument or (), *(env.get(variable, "") for variable in _VARIABLES["tags"]))
    return next(filter(None, (normal("tags", each) for each in texts)), "")


def normal(name: str, value: Any) -> Any:
    """An argument or a variable as an identity holds it."""
    if name == "tags":
        tags = value.split(",") if isinstance(value, str) else value
        joined = ""
        for tag in sorted({run_names.clean(each.replace(",", " ")) for each in tags} - {""}):
            longer = f"{joined},{tag}" if joined else tag
            if len(longer) > _LONGEST_TAGS:
                break
            joined = longer
        return joined
    if isinstance(value, str):
        return run_names.clean(value, _LONGEST.get(name, run_names.MOST_CHARACTERS))
    return value


def _number(
    name: str,
    argument: object,
    variable: str,
    env: Mapping[str, str],
    least: int = 0,
    advice: str = "leave it out and it is read from the launcher",
) -> int | None:
    if argument is None:
        text = env.get(variable, "").strip()
        return launchers.whole(variable, text, least, "correct or unset it") if text else None
    value = least - 1
    # A bool is an int to Python; numpy's and torch's integers are not, yet mean one.
    if isinstance(argument, SupportsIndex) and not isinstance(argument, bool):
        value = operator.index(argument)
    if value < least:
        raise ConfigError(
            f"{name} must be a whole number, {least} or more, got {argument!r}; {advice}."
        )
    return value


def _check_rank(rank: int | None, world: int | None, given: frozenset[str], launcher: str) -> None:
    if rank is None or world is None or rank < world:
        return
    rank_from, world_from = (
        "given as argument or OTEL_DDP_*" if name in given else f"from {launcher}"
        for name in ("global_rank", "world_size")
    )
    raise ConfigError(
        f"The global rank must be below the world size, got rank {rank} ({rank_from}) in a world "
        f"of {world} ({world_from}); ranks count from 0. Correct one of them, or leave both out."
    )


__all__ = [
    "INHERITED_RUN",
    "GroupFacts",
    "Identity",
    "hand_down",
    "of_rank",
    "parent_has_run",
    "resolve",
    "settle",
]
