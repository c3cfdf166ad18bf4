"""What part of the node is ours: containers, and jobs with limits."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.node.node_trees import GIB, NodeTree, values
from otel_ddp.agent.node.host import Host
from otel_ddp.agent.node.source import Measurement
from otel_ddp.vocabulary import catalog


@pytest.fixture
def node(tmp_path: Path) -> NodeTree:
    return NodeTree(tmp_path)


def memory(measurements: list[Measurement]) -> tuple[float, dict[str, float]]:
    (limit,) = values(measurements, catalog.SYSTEM_MEMORY_LIMIT).values()
    return limit, values(measurements, catalog.SYSTEM_MEMORY_USAGE)


def shares(measurements: list[Measurement]) -> dict[str, float]:
    return values(measurements, catalog.SYSTEM_CPU_UTILIZATION)


# -- memory


def of_version_2(limit: str, current: int, inactive: int) -> dict[str, str]:
    return {
        "memory.max": limit,
        "memory.current": str(current),
        "memory.stat": f"anon 5\nfile 9\ninactive_file {inactive}\nactive_file 3",
    }


@pytest.mark.parametrize("limit_gib", [8, None])
def test_a_container_has_its_own_memory_and_limit(limit_gib: int | None, node: NodeTree) -> None:
    node.version_2("/", machine=False)
    limit_text = str(limit_gib * GIB) if limit_gib else "max"
    node.group("", of_version_2(limit_text, 5 * GIB, 2 * GIB))
    host = node.host()

    limit, usage = memory(host.read())

    # Without a limit, what it does not use of the node's counts as free.
    assert limit == (limit_gib or 64) * GIB
    assert usage == {"used": 3 * GIB, "cached": 2 * GIB, "free": limit - 5 * GIB}


def test_a_session_without_a_limit_is_no_container(node: NodeTree) -> None:
    node.version_2("/user.slice/session")
    node.group("/user.slice/session", of_version_2("max", 5 * GIB, 2 * GIB))

    limit, usage = memory(node.host().read())

    assert (limit, usage["used"], usage["buffers"]) == (64 * GIB, 12 * GIB, GIB)


def test_the_limits_are_those_that_all_ranks_share(node: NodeTree) -> None:
    # The agent is a service with a little memory; the ranks are tasks of a job with more.
    node.version_2("/system.slice/agent")
    node.group("/system.slice/agent", of_version_2(str(GIB), GIB // 2, 0))
    node.group("/job", of_version_2(str(32 * GIB), 5 * GIB, 2 * GIB))
    for number, limit_gib in ((71, 4), (72, 8)):
        node.group(f"/job/task{number}", of_version_2(str(limit_gib * GIB), 2 * GIB, GIB))
        node.write(f"proc/{number}/cgroup", f"0::/job/task{number}\n")
    node.write("proc/73/cgroup", "0::/other\n")

    def limit_of(*pids: int | str) -> float:
        host = Host(node.proc, sys=node.sys, root=node.root, clock=node.clock, pids=lambda: pids)
        return memory(host.read())[0]

    assert limit_of("self") == GIB
    assert limit_of(71) == 4 * GIB
    assert limit_of(71, 72) == 32 * GIB
    # One that ended a moment ago changes nothing.
    assert limit_of(71, 72, 99) == 32 * GIB
    assert limit_of(71, 73) == 64 * GIB


@pytest.mark.parametrize(
    ("groups", "limit_gib", "used_gib"),
    [
        # By cgroup: its limit, and what it uses.
        ({"/job": ("8", 5)}, 8, 5),
        ({"/job/step": ("max", 1), "/job": ("16", 6)}, 16, 6),
        # The tightest one; of equal ones the outer, which all share.
        ({"/job/task": ("8", 1), "/job": ("16", 4)}, 8, 1),
        ({"/job/task": ("8", 1), "/job": ("8", 4)}, 8, 4),
    ],
)
def test_the_tightest_limit_above_us_counts(
    groups: dict[str, tuple[str, int]], limit_gib: int, used_gib: int, node: NodeTree
) -> None:
    node.version_2(next(iter(groups)))
    for path, (limit, used) in groups.items():
        text = limit if limit == "max" else str(int(limit) * GIB)
        node.group(path, of_version_2(text, used * GIB, 0))

    host = node.host()
    found, usage = memory(host.read())

    assert (found, usage["used"]) == (limit_gib * GIB, used_gib * GIB)
    # Limits may change at any time.
    node.group(next(iter(groups)), {"memory.max": str(3 * GIB)})
    assert memory(host.read())[0] == 3 * GIB


def test_memory_beyond_a_lowered_limit_leaves_nothing_free(node: NodeTree) -> None:
    node.version_2("/job")
    node.group("/job", of_version_2(str(4 * GIB), 5 * GIB, 6 * GIB))

    usage = memory(node.host().read())[1]

    # The kernel may update the cache later than the charge for it.
    assert usage == {"used": 0, "cached": 5 * GIB, "free": 0}


@pytest.mark.parametrize(("path", "top"), [("/../other", "/"), ("/docker/abcd", "/docker/abc")])
def test_an_invisible_cgroup_limits_nothing(path: str, top: str, node: NodeTree) -> None:
    node.version_2(path, top=top)
    for other in ("/other", "d", "/../other"):
        node.group(other, of_version_2(str(8 * GIB), 5 * GIB, 0))

    assert memory(node.host().read())[0] == 64 * GIB


# -- processors


def used_since(
    node: NodeTree, path: str, *, user_s: float, system_s: float, since_s: float
) -> None:
    """Let time pass; the cgroup of version 2 has used this much of it."""
    node.clock.now += since_s
    content = f"usage_usec 1\nuser_usec {user_s * 1e6:.0f}\nsystem_usec {system_s * 1e6:.0f}"
    node.group(path, {"cpu.stat": content})


@pytest.mark.parametrize(
    ("groups", "used_s", "expected"),
    [
        # Of 10 s: by quota, by set, and the tighter one of both.
        ({"/job": {"cpu.max": "250000 100000"}}, (12.5, 5), (0.5, 0.2, 0.3)),
        ({"/job": {"cpuset.cpus.effective": "0,2-3"}}, (10, 0), (1 / 3, 0, 2 / 3)),
        (
            {
                "/job/task": {"cpu.max": "300000 100000"},
                "/job": {"cpu.max": "max 100000", "cpuset.cpus.effective": "2-3"},
            },
            *((10, 0), (0.5, 0, 0.5)),
        ),
        # A quota is exceeded for a moment; a container has all processors.
        ({"/job": {"cpu.max": "100000 100000"}}, (8.4, 2.1), (0.8, 0.2, 0)),
        ({"": {"cpu.max": "max 100000"}}, (10, 10), (0.25, 0.25, 0.5)),
        # What limits nothing leaves the node's own times.
        ({"/job": {"cpuset.cpus.effective": "0-3"}}, (10, 0), None),
    ],
)
def test_shares_are_of_the_processors_that_we_may_use(
    groups: dict[str, dict[str, str]],
    used_s: tuple[float, float],
    expected: tuple[float, float, float] | None,
    node: NodeTree,
) -> None:
    node.version_2(next(iter(groups)) or "/", machine="" not in groups)
    for path, files in groups.items():
        node.group(path, files)
        used_since(node, path, user_s=100, system_s=50, since_s=0)
    host = node.host()
    first = shares(host.read())

    for path in groups:
        used_since(node, path, user_s=100 + used_s[0], system_s=50 + used_s[1], since_s=0)
    node.clock.now += 10
    node.processors(user=75, idle=25)
    found = shares(host.read())

    assert first == {}
    if expected is None:
        assert found["user"] == 0.75
    else:
        assert (found["user"], found["system"], found["idle"]) == pytest.approx(expected)
        assert len(found) == 3


def test_after_another_cgroup_limits_shares_begin_anew(node: NodeTree) -> None:
    node.version_2("/job")
    used_since(node, "/job", user_s=5, system_s=0, since_s=0)
    host = node.host()
    host.read()

    node.group("/job", {"cpu.max": "100000 100000"})
    node.clock.now += 10

    assert shares(host.read()) == {}


def test_a_corrupt_quota_is_none(node: NodeTree) -> None:
    node.version_2("/job")
    node.group("/job", {"cpu.max": "much 100000"})
    host = node.host()
    host.read()

    node.processors(user=75, idle=25)

    assert shares(host.read())["user"] == 0.75


# -- pressure


def pressure(total_us: int) -> str:
    return f"some avg10=0.00 total={total_us}\nfull avg10=0.00 total={total_us}"


def test_pressure_is_that_of_the_container(node: NodeTree) -> None:
    node.version_2("/", machine=False)
    for resource in ("cpu", "memory", "io"):
        node.write(f"proc/pressure/{resource}", pressure(1_000_000))
    for resource in ("cpu", "memory"):
        node.group("", {f"{resource}.pressure": pressure(2_000_000)})

    found = values(node.host().read(), catalog.OTEL_DDP_HOST_PRESSURE)

    # A container can be out of processors altogether: its quota is used up.
    own = dict.fromkeys(("cpu some", "cpu full", "memory some", "memory full"), 2.0)
    # What it does not tell is the node's.
    assert found == {**own, "io some": 1.0, "io full": 1.0}


def test_pressure_is_that_of_the_cgroup_that_limits(node: NodeTree) -> None:
    node.version_2("/job")
    node.group("/job", of_version_2(str(8 * GIB), GIB, 0))
    node.write("proc/pressure/memory", pressure(1_000_000))
    node.group("/job", {"memory.pressure": pressure(2_000_000)})

    found = values(node.host().read(), catalog.OTEL_DDP_HOST_PRESSURE)

    assert found["memory some"] == 2.0
