"""The node around the training, and what part of it is ours: trees of many kinds of machines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agent.node.node_trees import BOOT_S, GIB, NodeTree, rows, shown, values
from golden import Golden
from otel_ddp.agent.node.host import Host
from otel_ddp.agent.node.source import Measurement
from otel_ddp.vocabulary import catalog
from otel_ddp.vocabulary.catalog import Kind


@pytest.fixture
def node(tmp_path: Path) -> NodeTree:
    return NodeTree(tmp_path)


# -- processors


def test_shares_are_of_the_time_since_the_last_read(node: NodeTree) -> None:
    node.processors(user=900, system=900, idle=900, guest=100)
    host = node.host()
    first = values(host.read(), catalog.SYSTEM_CPU_UTILIZATION)

    node.processors(
        user=940, nice=10, system=920, idle=910, iowait=8, irq=4, softirq=6, steal=2, guest=130
    )
    second = values(host.read(), catalog.SYSTEM_CPU_UTILIZATION)

    assert first == {}
    assert second == {
        "user": pytest.approx(0.40),
        "nice": pytest.approx(0.10),
        "system": pytest.approx(0.20),
        "idle": pytest.approx(0.10),
        "iowait": pytest.approx(0.08),
        "interrupt": pytest.approx(0.10),
        "steal": pytest.approx(0.02),
    }


def test_idle_time_that_goes_back_and_a_read_that_comes_too_soon_spoil_nothing(
    node: NodeTree,
) -> None:
    node.processors(user=100, idle=500)
    host = node.host()
    host.read()

    assert values(host.read(), catalog.SYSTEM_CPU_UTILIZATION) == {}
    node.processors(user=200, idle=499)
    assert values(host.read(), catalog.SYSTEM_CPU_UTILIZATION)["user"] == 1.0


# -- network


DEVICE = {"device": True}
SLAVE = {"device": True, "master": "bond0"}
BRIDGE, VLAN, BOND = ({"files": {"uevent": f"DEVTYPE={k}"}} for k in ("bridge", "vlan", "bond"))
PORT, FUNCTION = ({**DEVICE, "files": {"phys_port_name": port}} for port in ("p0", "pf0vf3"))
INNER = {name: {} for name in ("veth1", "docker0", "br-77", "cni0", "flannel.1", "tun0")}
CONTAINER = {"lo": {}, "tunl0": {}, "eth0": {}, "br0": BRIDGE, "vlan5": VLAN}


@pytest.mark.parametrize(
    ("shown", "counted"),
    [
        # A virtual interface over real ones is not counted again.
        ({"bond0": BOND, "ens1": SLAVE, "ens2": SLAVE, "ens1.1": VLAN, **INNER}, {"ens1", "ens2"}),
        # A device below another one is counted by that one.
        ({"bond0": DEVICE, "enP1": SLAVE}, {"bond0"}),
        # Representors of virtual functions are left out.
        ({"np0": PORT, "vf3": FUNCTION}, {"np0"}),
        # In a container the way out counts, also beside a device of its own.
        (CONTAINER, {"eth0"}),
        ({"eth0": {}, "net1": DEVICE, "other": {}}, {"eth0", "net1"}),
    ],
)
def test_the_interfaces_that_lead_out_of_a_node_are_counted_once(
    shown: dict[str, dict[str, Any]], counted: set[str], node: NodeTree
) -> None:
    host = node.host()
    for moved in (0, 1):
        for bit, (name, described) in enumerate(shown.items()):
            node.interface(name, counts=(moved << bit, 0), **described)
        found = values(host.read(), catalog.SYSTEM_NETWORK_IO)

    expected = sum(1 << bit for bit, name in enumerate(shown) if name in counted)
    assert found["receive"] == expected


PRESSURE = "some avg10=0.05 avg60=0.37 total={}\nfull avg10=0.00 avg60=0.00 total={}\n"


# -- all of it


def test_all_of_a_machine_is_read_and_counters_count_since_it_was_started(
    node: NodeTree, golden: Golden
) -> None:
    node.disks(3, 5)
    node.interface("lo", counts=(5, 5))
    node.interface("eth0", counts=(1000, 2000), device=True)
    # In words of four bytes.
    node.port("mlx5_0", 1, received="1000", sent="2000")
    node.port("mlx5_1", 1, received="1", sent="5000000000")
    # A node has no full stall of processors.
    for resource, totals in {"cpu": (3_000_000, 0), "memory": (10, 5), "io": (7, 2)}.items():
        node.write(f"proc/pressure/{resource}", PRESSURE.format(*totals))
    host = node.host()

    # Shares of processor time are what lies between two readings.
    host.read()
    node.processors(user=50)
    measurements = host.read()

    assert {each.metric.name for each in measurements} == rows("Host")
    golden.check(*shown(measurements))
    for each in measurements:
        counts = each.metric.kind is Kind.COUNTER
        assert each.start_ns == (BOOT_S * 1_000_000_000 if counts else 0)


def test_a_machine_that_shows_nothing_at_all_gives_nothing(tmp_path: Path) -> None:
    shown = tmp_path / "proc", tmp_path / "sys"
    host = Host(shown[0], sys=shown[1], root=tmp_path)

    assert host.read() == []


@pytest.mark.parametrize(
    ("path", "content", "lost"),
    [
        ("stat", "\0\0\0", catalog.SYSTEM_CPU_UTILIZATION),
        ("meminfo", "MemTotal\n" + "x" * 5000, catalog.SYSTEM_MEMORY_LIMIT),
        ("vmstat", "pgpgin 5\npgpgout 9e9\n", catalog.SYSTEM_DISK_IO),
        ("net/dev", "eth0: 9 1\n", catalog.SYSTEM_NETWORK_IO),
        ("pressure/io", "some total=\n", catalog.OTEL_DDP_HOST_PRESSURE),
    ],
)
def test_a_corrupt_file_costs_only_its_own_numbers(
    path: str,
    content: str,
    lost: catalog.Metric,
    node: NodeTree,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "otel_ddp.agent")
    node.disks(1, 1)
    node.interface("eth0", device=True)
    node.write("proc/pressure/io", PRESSURE.format(1, 1))
    node.write(f"proc/{path}", content)
    host = node.host()
    host.read()

    found = {each.metric.name for each in host.read()}

    family = {"meminfo": "system.memory"}.get(path, lost.name)
    # Nothing has moved since the first reading, so there is no share of processor time; no port.
    others = rows("Host") - {"system.cpu.utilization", "hw.network.io"}
    assert found == {name for name in others if not name.startswith(family)}
    # Once, though it is read again.
    assert [each.getMessage().split(" ")[0] for each in caplog.records] == [f"{node.proc}/{path}"]


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


@pytest.mark.parametrize("path", ["", "/job"], ids=["of the container", "of what limits"])
def test_pressure_is_that_of_the_cgroup(path: str, node: NodeTree) -> None:
    node.version_2(path or "/", machine=bool(path))
    node.group(path, {**of_version_2(str(8 * GIB), GIB, 0), "cpu.max": "100000 100000"})
    for resource in ("cpu", "memory", "io"):
        node.write(f"proc/pressure/{resource}", pressure(1_000_000))
    for resource in ("cpu", "memory"):
        node.group(path, {f"{resource}.pressure": pressure(2_000_000)})

    found = values(node.host().read(), catalog.OTEL_DDP_HOST_PRESSURE)

    # A container can be out of processors altogether: its quota is used up.
    own = dict.fromkeys(("cpu some", "cpu full", "memory some", "memory full"), 2.0)
    # What it does not tell is the node's.
    assert found == {**own, "io some": 1.0, "io full": 1.0}
