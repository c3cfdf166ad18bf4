"""Who a process is, told by environments written down here and a /proc tree on disk."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from otel_ddp.errors import ConfigError
from otel_ddp.identity import run_names
from otel_ddp.identity.identity import GroupFacts, Identity, resolve, settle
from otel_ddp.identity.run_names import hand_down, readable

PID = 4000
LAUNCHER = 3000

# As brisk-otter-4k7d2.
READABLE = r"[a-z]+-[a-z]+-[2-9b-df-hjkmnp-tv-z]{5}"


def grow_proc(root: Path, *, boot: str = "boot-1", started: int = 777, pids: Any = (PID,)) -> Path:
    """A /proc with the given workers, all children of one launcher, itself a child of init."""
    (root / "sys/kernel/random").mkdir(parents=True)
    (root / "sys/kernel/random/boot_id").write_text(f"{boot}\n")
    add_process(root, LAUNCHER, parent=1, started=started)
    for pid in pids:
        add_process(root, pid, parent=LAUNCHER)
    return root


def add_process(
    root: Path, pid: int, *, parent: int, started: int = 1, env: dict[str, str] | None = None
) -> None:
    directory = root / str(pid)
    directory.mkdir()
    middle = " ".join("0" for _ in range(17))
    (directory / "stat").write_text(f"{pid} (a (b) c) S {parent} {middle} {started} 0 0\n")
    pairs = [f"{name}={value}\0" for name, value in (env or {}).items()]
    (directory / "environ").write_bytes("".join(pairs).encode())


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    return grow_proc(tmp_path / "proc")


def child_of(root: Path, env: dict[str, str] | None = None) -> Path:
    """A /proc with a child, of a process that has this environment."""
    proc = grow_proc(root, pids=())
    add_process(proc, 3500, parent=LAUNCHER, env=env)
    add_process(proc, PID, parent=3500)
    return proc


def place(me: Identity) -> tuple[Any, ...]:
    return me.global_rank, me.local_rank, me.world_size, me.node_rank, me.nodes


def who(env: dict[str, str], proc: Path = Path("/nowhere"), **more: Any) -> Identity:
    more.setdefault("in_spawned_child", False)
    more.setdefault("make_id", lambda: "made-here")
    more.setdefault("host", "alpha")
    more.setdefault("pid", PID)
    return resolve(env=env, proc=proc, **more)


# torchrun makes such an id where it is given none.
WITH_ID = {"TORCHELASTIC_RUN_ID": "05360be9-527f-4101-87ed-1d6b080d95ad"}
MADE_NAME, OF_STEP = ("earnest-ibis-mg6vr", "launcher"), ("slurm-812.3", "launcher")
OF_PARENT = {run_names.INHERITED_RUN: "17:parents"}
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "RANK": "1",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "0",
    "GROUP_WORLD_SIZE": "1",
    "MASTER_ADDR": "alpha",
    "MASTER_PORT": "29500",
}
TORCHRUN_ON_TWO_NODES = TORCHRUN | {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
}
SLURM = {
    "SLURM_JOB_ID": "812",
    "SLURM_STEP_ID": "3",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "64",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_NNODES": "16",
    "SLURM_STEP_NUM_NODES": "2",
}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "PMIX_RANK": "5",
    "PMIX_NAMESPACE": "prterun-alpha-77@1",
}
HYDRA = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
BY_HAND = {
    "RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "beta",
    "MASTER_PORT": "29500",
}
POD = {
    "KUBERNETES_SERVICE_HOST": "10.0.0.1",
    "RANK": "1",
    "WORLD_SIZE": "4",
    "MASTER_ADDR": "job-master-0",
    "MASTER_PORT": "23456",
}

PLACES = {
    # launcher, global rank, local rank, world size, node rank, nodes
    "lone": ({}, ("lone", 0, 0, 1, 0, 1)),
    "torchrun": (TORCHRUN, ("torchrun", 1, 1, 2, 0, 1)),
    "torchrun on two nodes": (TORCHRUN_ON_TWO_NODES, ("torchrun", 3, 1, 4, 1, 2)),
    "torchrun, virtual": (TORCHRUN | {"LOCAL_RANK": "0"}, ("torchrun", 1, 1, 2, 0, 1)),
    "torchrun in slurm": (SLURM | TORCHRUN_ON_TWO_NODES, ("torchrun", 3, 1, 4, 1, 2)),
    "slurm": (SLURM, ("slurm", 5, 1, 8, 1, 2)),
    "openmpi": (OPENMPI, ("openmpi", 5, 1, 8, None, 2)),
    "openmpi's daemon by srun": (SLURM | OPENMPI, ("openmpi", 5, 1, 8, 1, 2)),
    "hydra": (HYDRA, ("hydra", 5, 1, 8, None, 2)),
    "by hand": (BY_HAND, ("environment", 1, 1, 4, None, None)),
    "a local rank only": (
        {"LOCAL_RANK": "1", "WORLD_SIZE": "4"},
        ("environment", None, 1, 4, None, None),
    ),
    "pod": (POD, ("kubernetes", 1, None, 4, None, None)),
    "batch script": (
        {"SLURM_JOB_ID": "812", "SLURM_PROCID": "0", "SLURM_NTASKS": "8"},
        ("lone", 0, 0, 1, 0, 1),
    ),
    "interactive step": (SLURM | {"SLURM_STEP_ID": "4294967290"}, ("lone", 0, 0, 1, 0, 1)),
    "srun --pty bash": (SLURM | {"SLURM_PTY_PORT": "39933"}, ("lone", 0, 0, 1, 0, 1)),
    "RANK without WORLD_SIZE": ({"RANK": "7"}, ("environment", 7, None, None, None, None)),
    "a RANK of another program": ({"RANK": "captain"}, ("lone", 0, 0, 1, 0, 1)),
}


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        (TORCHRUN_ON_TWO_NODES, 2),
        (SLURM, None),
        (SLURM | {"SLURM_STEP_NUM_NODES": "1"}, 8),
        (TORCHRUN_ON_TWO_NODES | {"OTEL_DDP_WORLD_SIZE": "8"}, None),
    ],
)
def test_how_many_ranks_are_on_this_node_is_known_where_the_launcher_says_so(
    env: dict[str, str], expected: int | None
) -> None:
    assert expected == who(env).local_world_size


@pytest.mark.parametrize("case", PLACES)
def test_the_launchers_variables_give_the_ranks_of_a_process(case: str) -> None:
    env, expected = PLACES[case]

    me = who(env)

    assert expected == (me.launcher, *place(me))


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        (TORCHRUN | {"TORCHELASTIC_RUN_ID": "nightly-7"}, ("nightly-7", "launcher")),
        # The same when a node joins; and two of them in one step of Slurm are two runs.
        (TORCHRUN | WITH_ID, MADE_NAME),
        (TORCHRUN_ON_TWO_NODES | WITH_ID, MADE_NAME),
        (SLURM | TORCHRUN | {"SLURM_STEP_NUM_TASKS": "2"}, ("clever-gull-zbrs3", "launcher")),
        (SLURM, OF_STEP),
        (SLURM | TORCHRUN_ON_TWO_NODES | {"SLURM_STEP_NUM_TASKS": "2"}, OF_STEP),
        (BY_HAND | {"OTEL_DDP_RUN": "mine"}, ("mine", "given")),
        (BY_HAND | OF_PARENT, ("parents", "inherited")),
        (SLURM | OF_PARENT, OF_STEP),
        (OF_PARENT | {"OTEL_DDP_RANK": "2"}, ("parents", "inherited")),
        (OF_PARENT, ("made-here", "made")),
        (OF_PARENT | {"RANK": "0", "WORLD_SIZE": "1"}, ("made-here", "made")),
        ({run_names.INHERITED_RUN: f"{PID}:own"}, ("made-here", "made")),
    ],
)
def test_the_run_is_named_by_the_first_that_knows(
    env: dict[str, str], expected: tuple[str, str]
) -> None:
    me = who(env)

    assert expected == (me.run, me.run_from)
    assert me.settled


def test_an_argument_wins_over_our_variable_and_that_over_the_launcher() -> None:
    env = TORCHRUN | {"OTEL_DDP_RANK": "2", "OTEL_DDP_WORLD_SIZE": "8", "OTEL_DDP_RUN": "variable"}

    me = who(env, global_rank=3, run="argument")

    assert (me.global_rank, me.world_size, me.local_rank, me.run) == (3, 8, 1, "argument")
    assert frozenset({"global_rank", "world_size", "run"}) == me.given


def test_our_variables_name_everything() -> None:
    names = ("GROUP", "JOB_TYPE", "PROJECT", "NAME", "DESCRIPTION", "NODE")
    env = {f"OTEL_DDP_{name}": name.lower() for name in names}

    me = who(env)

    values = (me.group, me.job_type, me.project, me.name, me.description, me.node)
    assert values == ("group", "job_type", "project", "name", "description", "node")


@pytest.mark.parametrize(
    "env",
    [
        {
            "SWANLAB_GROUP": "g",
            "SWANLAB_JOB_TYPE": "eval",
            "SWANLAB_PROJ_NAME": "p",
            "SWANLAB_NAME": "n",
            "SWANLAB_DESCRIPTION": "d",
            "SWANLAB_RUN_ID": "r",
            "SWANLAB_TAGS": "b, a",
            "WANDB_RUN_ID": "not read either",
            "WANDB_RUN_GROUP": "not read, SwanLab's is set",
        },
        {
            "WANDB_RUN_GROUP": "g",
            "WANDB_JOB_TYPE": "eval",
            "WANDB_PROJECT": "p",
            "SWANLAB_EXP_NAME": "n",
            "WANDB_NAME": "not read, SwanLab's is set",
            "WANDB_NOTES": "d",
            "WANDB_RUN_ID": "r",
            "WANDB_TAGS": "b,a,",
            "SWANLAB_GROUP": "",
        },
    ],
)
def test_names_set_for_another_tracker_are_read_last(env: dict[str, str]) -> None:
    there = who(env)
    ours = {"OTEL_DDP_GROUP": "ours", "OTEL_DDP_RUN": "mine", "OTEL_DDP_TAGS": "c"}
    overruled = who(env | ours, job_type="train")

    values = (there.group, there.job_type, there.project, there.name, there.description)
    assert values == ("g", "eval", "p", "n", "d")
    assert (there.run, there.run_from, there.settled, there.tags) == ("r", "given", True, "a,b")
    assert (overruled.group, overruled.job_type) == ("ours", "train")
    assert (overruled.run, overruled.tags) == ("mine", "c")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["bf16", "baseline", "bf16"], "baseline,bf16"),
        ({"a,b", " c\n"}, "a b,c"),
        ("baseline, bf16", "baseline,bf16"),
        ([], "from the variable"),
    ],
)
def test_tags_are_a_list_or_one_text(given: Any, expected: str) -> None:
    assert expected == who({"OTEL_DDP_TAGS": "from the variable"}, tags=given).tags


def test_names_are_one_line_of_valid_text_of_bounded_length() -> None:
    me = who(
        {},
        group=" a\nb\x00c\u2028d\udcff ",
        job_type="",
        name="x" * 5000,
        project="e\ud800",
        description=2000 * "x",
    )

    assert (me.group, me.job_type, me.name) == ("a b c d\ufffd", "train", "x" * 200)
    assert (me.project, me.description) == ("e\ufffd", 1000 * "x")


BAD = {
    "rank of no number": ({}, {"global_rank": "two"}, "global_rank must be a whole number.*'two'"),
    "negative rank": ({}, {"global_rank": -1}, "global_rank .*0 or more, got -1"),
    "rank beyond world": ({}, {"global_rank": 5, "world_size": 4}, "rank 5 .* world of 4 "),
    "launcher's nonsense": (TORCHRUN | {"RANK": "abc"}, {}, "RANK must be .*'abc'"),
    "launcher's world": (TORCHRUN | {"RANK": "2"}, {}, "rank 2 .* world of 2 "),
    "our nonsense": ({"OTEL_DDP_RANK": "1.5"}, {}, "OTEL_DDP_RANK must .*'1.5'"),
    "group of no text": ({}, {"group": 7}, "group must be text, got 7"),
    "tags of no text": ({}, {"tags": ["a", 7]}, r"tags must be texts, .*got \['a', 7\]"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_is_refused_with_a_reason(case: str) -> None:
    env, arguments, message = BAD[case]

    with pytest.raises(ConfigError, match=message):
        who(env, **arguments)


def test_restarts_of_torchrun_and_of_slurm_add_up() -> None:
    env = SLURM | TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "2", "SLURM_RESTART_COUNT": "1"}

    assert who(env).restarts == 3


def test_workers_of_one_torchrun_share_a_run_that_no_other_launch_has(tmp_path: Path) -> None:
    first = grow_proc(tmp_path / "first", pids=(PID, PID + 1))
    later = grow_proc(tmp_path / "later", started=888)
    rebooted = grow_proc(tmp_path / "rebooted", boot="boot-2")

    rank_0 = who(TORCHRUN | {"RANK": "0", "LOCAL_RANK": "0"}, first)
    rank_1 = who(TORCHRUN, first, pid=PID + 1)

    assert re.fullmatch(READABLE, rank_0.run)
    assert rank_0.run == rank_1.run
    assert (rank_0.settled, rank_0.wants_agreement) == (True, False)
    assert len({rank_0.run, who(TORCHRUN, later).run, who(TORCHRUN, rebooted).run}) == 3
    assert rank_0.run != who(TORCHRUN, first, host="beta").run


def test_mpi_gives_ranks_on_several_nodes_their_run() -> None:
    here = who(OPENMPI)
    there = who(OPENMPI | {"OMPI_COMM_WORLD_RANK": "2"}, host="beta", pid=99)
    again = who(OPENMPI | {"PMIX_NAMESPACE": "prterun-alpha-78@1"})

    assert here.run == there.run
    assert here.run != again.run
    assert here.settled


def test_a_torchrun_on_several_nodes_without_an_id_waits_for_the_store(proc: Path) -> None:
    me = who(TORCHRUN_ON_TWO_NODES, proc)
    other_node = who(TORCHRUN_ON_TWO_NODES | {"RANK": "0"}, host="beta")

    assert me.run == other_node.run
    assert (me.run_from, me.settled, me.global_rank) == ("rendezvous", False, 3)
    assert me.wants_agreement
    assert me.proposal not in (me.run, other_node.proposal)


def test_ranks_started_by_hand_wait_for_the_store() -> None:
    me = who(BY_HAND)

    assert (me.settled, me.global_rank, me.run_from) == (False, 1, "rendezvous")
    assert me.run == who(BY_HAND | {"RANK": "0"}, host="beta").run
    assert me.run != who(BY_HAND | {"MASTER_PORT": "29501"}).run


def test_a_rank_given_without_any_launcher_is_one_of_several() -> None:
    me = who({"OTEL_DDP_RANK": "2", "OTEL_DDP_WORLD_SIZE": "4"})
    alone = who({}, global_rank=0)

    assert (*place(me)[:3], me.settled) == (2, None, 4, False)
    assert (*place(alone)[:3], alone.settled) == (0, 0, 1, True)


def test_a_spawned_child_shares_its_parents_run_and_does_not_know_its_rank_yet(
    tmp_path: Path,
) -> None:
    proc = grow_proc(tmp_path, pids=(PID, PID + 1))

    me = who({}, proc, in_spawned_child=True)
    sibling = who({}, proc, in_spawned_child=True, pid=PID + 1)

    assert me.run == sibling.run
    assert (me.launcher, *place(me)[:3]) == ("spawn", None, None, None)
    assert not me.settled
    assert (me.label_rank, sibling.label_rank) == ("p4000", "p4001")


def test_a_spawned_child_knows_the_rank_that_was_set_for_it(tmp_path: Path) -> None:
    proc = child_of(tmp_path, POD)

    the_parents = who(POD, proc, in_spawned_child=True)
    its_own = who(POD | {"RANK": "3", "LOCAL_RANK": "1"}, proc, in_spawned_child=True)

    assert (the_parents.global_rank, the_parents.settled) == (None, False)
    assert (its_own.global_rank, its_own.local_rank) == (3, 1)
    assert the_parents.run == its_own.run


def test_the_child_of_a_torchrun_worker_joins_its_run_and_not_its_rank(tmp_path: Path) -> None:
    opened = {run_names.INHERITED_RUN: "3500:parents:g"}

    child = who(TORCHRUN | opened, child_of(tmp_path, TORCHRUN), in_spawned_child=True)

    assert (child.run, child.group, child.launcher) == ("parents", "g", "spawn")
    assert (child.global_rank, child.local_rank, child.settled) == (None, None, False)


@pytest.mark.parametrize(
    ("env", "group"),
    [
        ({run_names.INHERITED_RUN: "3500:parents:g"}, "g"),
        ({run_names.INHERITED_RUN: "3500:parents:"}, "parents"),
        ({run_names.INHERITED_RUN: "3500:parents:g", "OTEL_DDP_GROUP": "mine"}, "mine"),
        ({"OTEL_DDP_RUN": "all"}, "all"),
        (SLURM | {run_names.INHERITED_RUN: "3500:parents:g"}, "g"),
    ],
)
def test_a_task_of_a_pool_is_a_run_of_its_own_in_the_group_of_its_parent(
    env: dict[str, str], group: str, proc: Path
) -> None:
    me = who(env, proc, in_spawned_child=True, in_task=True)

    assert (me.run, me.group, me.launcher) == ("made-here", group, "pool")
    assert (me.global_rank, me.local_rank, me.world_size, me.settled) == (0, 0, 1, True)


def test_tasks_of_a_pool_without_any_name_share_a_group_that_no_other_pool_has(
    tmp_path: Path,
) -> None:
    proc = grow_proc(tmp_path, pids=(PID, PID + 1))
    add_process(proc, 3500, parent=1)
    add_process(proc, PID + 2, parent=3500)

    tasks = (who({}, proc, in_spawned_child=True, in_task=True, pid=PID + n) for n in range(3))
    one, two, other = (each.group for each in tasks)

    assert one == two != other
    assert re.fullmatch("pool-[0-9a-f]{10}", one)


def test_a_child_with_a_run_of_its_own_is_its_only_rank_until_a_process_group_says_otherwise(
    tmp_path: Path,
) -> None:
    proc = child_of(tmp_path)
    opened = {run_names.INHERITED_RUN: "3500:parents:g"}

    own = who(opened, proc, in_spawned_child=True, run="own")
    up = settle(own, GroupFacts(3, 4, None, "alpha"), env={})

    assert (own.run, own.group, own.settled, *place(own)[:3]) == ("own", "g", False, 0, 0, 1)
    # With a rank it is one of several, and does not know of how many.
    given = who(opened, proc, in_spawned_child=True, run="own", global_rank=0)
    assert (given.global_rank, given.world_size, given.settled) == (0, None, True)
    assert (*place(up)[:3], up.settled) == (3, 3, 4, True)
    for part in (
        who(opened, proc, in_spawned_child=True, run="parents"),
        who(opened, proc, in_spawned_child=True, run="own", joins=True),
        who(opened | {"OTEL_DDP_RUN": "own"}, proc, in_spawned_child=True, run="own"),
    ):
        assert (part.global_rank, part.world_size) == (None, None)


def test_children_spawned_by_slurm_tasks_share_the_step_and_not_the_tasks_rank() -> None:
    env = SLURM | {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0"}

    me = who(env, in_spawned_child=True)
    up = settle(me, GroupFacts(6, 8, None, "alpha-0"), env={})

    assert (me.run, me.settled, me.global_rank) == ("slurm-812.3", False, None)
    assert place(up) == (6, 2, 8, 1, 2)


def test_a_process_group_completes_a_spawned_child(proc: Path) -> None:
    me = who({}, proc, in_spawned_child=True)

    up = settle(me, GroupFacts(1, 2, "agreed-on", "127.0.0.1"), env={})

    assert (up.run, *place(up)[:3], up.settled) == ("agreed-on", 1, 1, 2, True)
    assert (me.pid, "spawn", False) == (up.pid, up.launcher, up.wants_agreement)


@pytest.mark.parametrize(
    ("master", "local_rank", "local_world_size"),
    [
        ("localhost", 1, 2),
        ("127.0.1.1", 1, 2),
        # Other machines can reach that one, and may be part of it.
        ("ALPHA", 1, None),
        ("beta", None, None),
    ],
)
def test_a_rendezvous_on_this_machine_makes_the_local_rank_the_rank(
    master: str, local_rank: int | None, local_world_size: int | None
) -> None:
    me = who({}, in_spawned_child=True, host="alpha.cluster")

    for up in (
        settle(me, GroupFacts(1, 2, None), env={"MASTER_ADDR": master}),
        settle(me, GroupFacts(1, 2, None, master), env={}),
    ):
        assert (up.local_rank, up.local_world_size) == (local_rank, local_world_size)


def test_a_live_process_group_is_believed_before_the_launcher() -> None:
    facts = GroupFacts(9, 16, "agreed-on")

    me = settle(who(POD), facts, env=POD)

    assert (me.global_rank, me.world_size, me.local_rank, me.nodes) == (9, 16, None, None)
    assert (me.run, me.settled) == ("agreed-on", True)


def test_a_process_group_does_not_overrule_the_user() -> None:
    facts = GroupFacts(1, 2, "agreed-on")

    env = {"OTEL_DDP_RANK": "5", "OTEL_DDP_LOCAL_RANK": "3"}
    me = settle(who(env, world_size=8, run="mine"), facts, env=env)

    assert (me.global_rank, me.local_rank, me.world_size, me.run) == (5, 3, 8, "mine")


def test_a_process_group_does_not_rename_what_the_launcher_named() -> None:
    me = settle(who(SLURM), GroupFacts(5, 8, "agreed-on"), env=SLURM)

    assert (me.run, me.local_rank) == ("slurm-812.3", 1)


def test_a_lone_process_that_turns_out_to_be_one_of_many_joins_the_common_run() -> None:
    me = who({})

    up = settle(me, GroupFacts(1, 2, "agreed-on", "10.0.0.7"), env={})
    alone = settle(me, GroupFacts(0, 1, "agreed-on"), env={})

    assert (up.run, up.launcher) == ("agreed-on", "torch.distributed")
    assert (place(up)[:2], up.nodes) == ((1, None), None)
    assert (alone.run, alone.launcher, place(alone)[:2]) == ("made-here", "lone", (0, 0))


def test_a_run_is_handed_down_to_ranks_in_other_processes_only(proc: Path) -> None:
    env: dict[str, str] = {}

    hand_down("the-run: 100% \u5b9e", "a:group", env)

    assert env[run_names.INHERITED_RUN].isascii()
    child = who(env, proc, in_spawned_child=True)
    rank = who(BY_HAND | env, proc)
    script = who(env, proc)
    same = who(env, proc, pid=os.getpid())
    assert (child.run, rank.run) == ("the-run: 100% \u5b9e", "the-run: 100% \u5b9e")
    assert (child.group, rank.group, script.group) == ("a:group", "a:group", "")
    assert (script.run, same.run) == ("made-here", "made-here")


@pytest.mark.parametrize("spawned", [False, True])
def test_a_sweeps_trial_and_its_children_have_a_run_of_their_own(
    spawned: bool, tmp_path: Path
) -> None:
    sweep = {run_names.INHERITED_RUN: "17:sweep"}
    proc = grow_proc(tmp_path, pids=())
    for trial in (3500, 3600):
        add_process(proc, trial, parent=LAUNCHER, env=sweep)
        add_process(proc, trial + 1, parent=trial, env=sweep)

    names = (str(name) for name in range(9))
    runs = [
        who(sweep, proc, pid=trial + spawned, in_spawned_child=spawned, make_id=lambda: next(names))
        for trial in (3500, 3600)
    ]

    assert len({"sweep", *(each.run for each in runs)}) == 3


def test_a_readable_name_is_that_of_its_bytes_and_uses_all_of_them() -> None:
    assert readable(bytes(16)) == readable(bytes(16)) == "able-adder-22222"
    found = {readable(number.to_bytes(16, "big")) for number in range(20_000)}
    assert len(found) == 20_000


def test_a_lone_process_may_have_others_unless_the_user_says_that_it_has_none() -> None:
    assert who({}).may_have_others
    assert not who({}, world_size=1).may_have_others
    assert not who({"OTEL_DDP_RANK": "0"}).may_have_others
    assert not who(SLURM).may_have_others
    assert not settle(who({}), GroupFacts(0, 2, None), env={}).may_have_others
