"""The identity of a process: its run, group, node and ranks, from arguments and launchers."""

from __future__ import annotations

import dataclasses
import operator
import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple, SupportsIndex, TypeAlias

from otel_ddp.errors import ConfigError
from otel_ddp.identity import launchers, run_names
from otel_ddp.identity.lead import Lead

# For each argument the variables that set it: first ours, then those of other trackers. The first
# variable that is set counts.
VARIABLES = {
    "group": ("OTEL_DDP_GROUP", "SWANLAB_GROUP", "WANDB_RUN_GROUP"),
    "run": ("OTEL_DDP_RUN", "SWANLAB_RUN_ID", "WANDB_RUN_ID"),
    "job_type": ("OTEL_DDP_JOB_TYPE", "SWANLAB_JOB_TYPE", "WANDB_JOB_TYPE"),
    "project": ("OTEL_DDP_PROJECT", "SWANLAB_PROJ_NAME", "WANDB_PROJECT"),
    "name": ("OTEL_DDP_NAME", "SWANLAB_NAME", "SWANLAB_EXP_NAME", "WANDB_NAME"),
    "description": ("OTEL_DDP_DESCRIPTION", "SWANLAB_DESCRIPTION", "WANDB_NOTES"),
    "tags": ("OTEL_DDP_TAGS", "SWANLAB_TAGS", "WANDB_TAGS"),
    "node": ("OTEL_DDP_NODE",),
    "global_rank": ("OTEL_DDP_RANK",),
    "local_rank": ("OTEL_DDP_LOCAL_RANK",),
    "world_size": ("OTEL_DDP_WORLD_SIZE",),
}
# Limits of texts in characters. A description may be longer than a name, but so short that the
# smallest journal holds it twice.
_LONGEST = {"description": 1000}
_LONGEST_TAGS = 1000


class GroupFacts(NamedTuple):
    """Facts about this process from the default process group."""

    global_rank: int
    world_size: int
    agreed_run: str | None
    store_host: str = ""
    lead: Lead | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Identity:
    """Who a process of a training job is, as far as that is known."""

    group: str = ""
    run: str = ""
    job_type: str = "train"
    project: str = ""
    name: str = ""
    description: str = ""
    tags: str = ""
    """The tags, sorted, with commas between them."""
    node: str = ""
    """The user's name for this node; empty if there is none."""
    host: str = ""
    pid: int = 0
    global_rank: int | None = None
    local_rank: int | None = None
    world_size: int | None = None
    local_world_size: int | None = None
    """How many ranks the launcher started on this node; None if unknown."""
    node_rank: int | None = None
    nodes: int | None = None
    launcher: str = "lone"
    settled: bool = False
    """Whether run and rank are final. If not, a process group may still change them."""
    restarts: int = 0
    given: frozenset[str] = frozenset()
    """The fields that the user has set, by argument or OTEL_DDP_*. Nothing overrides them later."""
    run_from: str = ""
    """Where `run` is from: given, launcher, inherited, parent, rendezvous, made or agreed."""
    launched_by: str = ""
    """An id of the process that launched this one. Restarted workers have the same id as before,
    even if their node ranks differ."""
    proposal: str = ""
    """A unique name of the run that this rank proposes to the others. A `run` that is derived from
    the address and port of a rendezvous is not unique: the next launch may use the same ones."""

    @property
    def may_have_others(self) -> bool:
        """Whether this lone process may become one rank of several.

        A program may start its other ranks itself, after the run was opened.
        """
        is_given = self.given & {"global_rank", "world_size"}
        return self.launcher == "lone" and self.world_size == 1 and not is_given

    @property
    def may_have_other_nodes(self) -> bool:
        """Whether other ranks may be on other nodes."""
        world, here = self.world_size, self.local_world_size
        return world != 1 and (world is None or here is None or here < world)

    @property
    def wants_agreement(self) -> bool:
        """Whether `run` is only preliminary, so that the ranks should agree on a name."""
        return self.run_from in run_names.NEGOTIABLE

    @property
    def label_rank(self) -> str:
        """The `rank` label. If the rank is unknown, the pid, as processes must not share series."""
        return f"p{self.pid}" if self.global_rank is None else str(self.global_rank)

    def to_dict(self) -> dict[str, Any]:
        """The fields, in a form for JSON."""
        return {**dataclasses.asdict(self), "given": sorted(self.given)}


def resolve(
    *,
    joins: bool = False,
    in_task: bool = False,
    env: Mapping[str, str] = os.environ,
    proc: Path = Path("/proc"),
    in_spawned_child: bool | None = None,
    make_id: Callable[[], str] = run_names.make,
    host: str | None = None,
    pid: int | None = None,
    **arguments: Any,
) -> Identity:
    """Find the identity of this process; raises ConfigError for impossible values.

    *joins*: whether the process joins the run in *arguments*, which another process has opened.
    *in_task*: whether the process runs a task of a pool, which is a run of its own. *arguments*:
    the arguments of `init` that describe the process.
    """
    # Read arguments, variables and facts of the process.
    parent = launchers.multiprocessing_parent()
    if host is None:
        # Windows lacks os.uname. Nothing is recorded there, so the host may be empty.
        host = os.uname().nodename if hasattr(os, "uname") else ""
    process = launchers.ProcessFacts(
        env=env,
        proc=proc,
        host=host,
        pid=os.getpid() if pid is None else pid,
        spawned=parent is not None if in_spawned_child is None else in_spawned_child,
        parent=parent or 0,
    )
    numbers = {
        name: _number(name, arguments.get(name), env, least=1 if name == "world_size" else 0)
        for name in ("global_rank", "local_rank", "world_size")
    }
    asked_run = arguments.get("run")
    # Each task of a pool is a run of its own, but all tasks have the same variables. So a task
    # ignores the variables that name a run.
    given_run = _text("run", asked_run, {} if in_task else env) or None
    given = frozenset(
        name for name, each in (numbers | {"run": given_run}).items() if each is not None
    )
    texts = {
        name: _text(name, arguments.get(name), env)
        for name in ("job_type", "project", "name", "description", "tags", "node", "group")
    }
    facts = launchers.LauncherFacts("pool") if in_task else launchers.read(process)

    # Decide on the ranks.
    rank = _first(numbers["global_rank"], facts.global_rank)
    world = _first(numbers["world_size"], facts.world_size)
    may_be_alone = world in (None, 1)
    alone = facts.launcher == "lone" and not rank and may_be_alone
    parents = run_names.of_parent(process, facts, 1 if alone else world)
    # If the program names another run in a multiprocessing child, the child does not belong to the
    # run of its parent.
    named = facts.launcher == "spawn" and bool(asked_run) and not joins
    named = named and given_run not in (parents.run, _text("run", None, env))
    # If such a child has no rank, it counts as the only rank, until it joins a process group.
    assumed = named and rank is None
    if alone or ((assumed or (in_task and not rank)) and may_be_alone):
        rank, world = 0, 1
        facts = facts._replace(world_size=1, local_rank=0, local_world_size=1, node_rank=0, nodes=1)
    _check_rank(rank, world, given, facts.launcher)
    local = _first(numbers["local_rank"], facts.local_rank)
    if local is None:
        master = env.get("MASTER_ADDR", "")
        local = _local_rank(rank, world, facts.node_rank, facts.nodes, master, process.host)

    # Decide on the names.
    found = run_names.find(given_run or "", process, facts, world, make_id)
    group = texts["group"]
    if in_task:
        group = group or run_names.group_of_tasks(process)
    elif named or found.run == parents.run:
        group = group or parents.group
    return Identity(
        **{**texts, "job_type": texts["job_type"] or "train", "group": group},
        run=found.run,
        host=run_names.clean(process.host),
        pid=process.pid,
        global_rank=rank,
        local_rank=local,
        world_size=world,
        local_world_size=facts.local_world_size if world == facts.world_size else None,
        node_rank=facts.node_rank,
        nodes=facts.nodes,
        launcher=facts.launcher,
        settled=found.source not in run_names.OPEN and rank is not None and not assumed,
        restarts=launchers.restarts(env),
        given=given,
        run_from=found.source,
        proposal=found.proposal or found.run,
        launched_by=run_names.launched_by(process, facts),
    )


def _first(given: int | None, found: int | None) -> int | None:
    return found if given is None else given


def settle(
    identity: Identity, facts: GroupFacts, *, env: Mapping[str, str] = os.environ
) -> Identity:
    """Complete an identity by facts of the process group. Never raises, as the training may run.

    The ranks of the group take precedence over the launcher's, as some platforms set RANK to the
    index of the node. The user's values take precedence over both. The result is final: fields that
    the group does not know stay unchanged.
    """
    given = identity.given
    master = facts.store_host or env.get("MASTER_ADDR", "")
    rank = identity.global_rank if "global_rank" in given else facts.global_rank
    world = identity.world_size if "world_size" in given else facts.world_size
    same_world = identity.world_size in (None, world)
    node_rank = identity.node_rank if same_world else None
    nodes = identity.nodes if same_world else None
    local_world = identity.local_world_size if same_world else None
    if local_world is None and _is_loopback(master):
        # No other machine can reach a loopback address: all ranks are on this node.
        local_world = world
    launcher = identity.launcher
    if launcher == "lone" and world != 1:
        launcher = "torch.distributed"

    local = identity.local_rank
    same = same_world and identity.global_rank in (None, rank)
    assumed = identity.launcher == "lone" or local == identity.global_rank
    if local is None or (not same and assumed and "local_rank" not in given):
        local = _local_rank(rank, world, node_rank, nodes, master, identity.host)

    run, run_from = identity.run, identity.run_from
    if identity.wants_agreement and world != 1 and facts.agreed_run:
        run, run_from = run_names.clean(facts.agreed_run), "agreed"
    return dataclasses.replace(
        identity,
        run=run,
        run_from=run_from,
        settled=True,
        global_rank=rank,
        local_rank=local,
        world_size=world,
        local_world_size=local_world,
        node_rank=node_rank,
        nodes=nodes,
        launcher=launcher,
    )


def _local_rank(
    rank: int | None,
    world: int | None,
    node_rank: int | None,
    nodes: int | None,
    master: str,
    host: str,
) -> int | None:
    """Derive the local rank if no launcher sets it. Assumes consecutive ranks on each node."""
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


def _text(name: str, argument: Any, env: Mapping[str, str]) -> str:
    several = name == "tags" and isinstance(argument, Collection)
    if argument is not None and not all(
        isinstance(each, str) for each in (argument if several else (argument,))
    ):
        wanted = "texts, ['baseline', 'bf16'] or 'baseline, bf16'" if name == "tags" else "text"
        raise ConfigError(f"{name} must be {wanted}, got {argument!r}.")
    # An empty argument counts as unset, because some programs pass os.environ.get("X", "").
    texts = (argument or "", *(env.get(variable, "") for variable in VARIABLES[name]))
    return next(filter(None, (normal(name, text) for text in texts)), "")


def normal(name: str, value: Any) -> Any:
    """The value of an argument or a variable in its normal form, such as sorted tags."""
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


def _number(name: str, argument: object, env: Mapping[str, str], least: int = 0) -> int | None:
    if argument is None:
        (variable,) = VARIABLES[name]
        text = env.get(variable, "").strip()
        return launchers.whole(variable, text, least, "correct or unset it") if text else None
    value = least - 1
    # Accept any integer, also of NumPy and torch, but refuse a bool, which Python counts as an int.
    if isinstance(argument, SupportsIndex) and not isinstance(argument, bool):
        value = operator.index(argument)
    if value < least:
        raise ConfigError(
            f"{name} must be a whole number, {least} or more, got {argument!r}; leave it out and "
            f"it is read from the launcher."
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


# -- the ranks whose training series leave the node

Strategy: TypeAlias = str | Callable[[Identity], bool]
WORDS = ("all", "node", "main")


class Choice:
    """A validated strategy: decides for each rank whether its series leave the node."""

    def __init__(self, strategy: Strategy) -> None:
        self._rule = None if isinstance(strategy, str) else strategy
        self.text = strategy.strip().lower() if isinstance(strategy, str) else "custom"
        if not callable(self._rule) and self.text not in WORDS:
            raise ConfigError(
                f'strategy must be "all" (every rank), "node" (local rank 0 of each node), "main" '
                f"(rank 0), or a function of the identity, got {strategy!r}. Correct the argument "
                f"or OTEL_DDP_STRATEGY, or leave both out."
            )

    def exports(self, process: Identity) -> bool | None:
        """Whether this rank's series leave the node; None while its rank is unknown."""
        if self._rule is not None:
            return bool(self._rule(process))
        if self.text == "all":
            return True
        rank = process.local_rank if self.text == "node" else process.global_rank
        return None if rank is None else rank == 0
