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


# -- network


DEVICE = {"device": True}
SLAVE = {"device": True, "master": "bond0"}
INNER = {name: {} for name in ("lo", "ens1.1", "veth1", "docker0", "br-77", "cni0", "tun0")}


@pytest.mark.parametrize(
    ("shown", "counted"),
    [
        # A virtual interface over real ones is not counted again.
        ({"bond0": {}, "ens1": SLAVE, "ens2": SLAVE, **INNER}, {"ens1", "ens2"}),
        # A device below another one is counted by that one.
        ({"bond0": DEVICE, "enP1": SLAVE}, {"bond0"}),
        # In a container the way out counts, also beside a device of its own.
        ({"eth0": {}, "net1": DEVICE, **INNER}, {"eth0", "net1"}),
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


PRESSURE = "some avg10=0.05 avg60=0.37 total={}\nfull avg10=0.00 avg60=0.00 total={}"


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


def test_a_corrupt_file_costs_only_its_own_numbers(
    node: NodeTree, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "otel_ddp.agent")
    node.disks(1, 1)
    node.interface("eth0", device=True)
    node.write("proc/meminfo", "MemTotal\n" + "x" * 5000)
    node.write("proc/pressure/io", "some total=\n")
    host = node.host()
    host.read()

    found = {each.metric.name for each in host.read()}

    assert found == {"system.disk.io", "system.network.io"}
    # Once, though they are read again.
    unread = [each.getMessage().split(" ")[0] for each in caplog.records]
    assert unread == [f"{node.proc}/meminfo", f"{node.proc}/pressure/io"]


def memory(measurements: list[Measurement]) -> tuple[float, dict[str, float]]:
    (limit,) = values(measurements, catalog.SYSTEM_MEMORY_LIMIT).values()
    return limit, values(measurements, catalog.SYSTEM_MEMORY_USAGE)


# -- under the limit of a cgroup


def of_version_2(limit_gib: int | None, current: int, inactive: int) -> dict[str, str]:
    return {
        "memory.max": str(limit_gib * GIB) if limit_gib else "max",
        "memory.current": str(current),
        "memory.stat": f"anon 5\nfile 9\ninactive_file {inactive}\nactive_file 3",
    }


def test_memory_and_pressure_are_those_of_the_cgroup(node: NodeTree) -> None:
    node.version_2("/job")
    node.group("/job", of_version_2(8, 5 * GIB, 2 * GIB))
    for resource in ("cpu", "memory", "io"):
        node.write(f"proc/pressure/{resource}", PRESSURE.format(1_000_000, 1_000_000))
    for resource in ("cpu", "memory"):
        node.group("/job", {f"{resource}.pressure": PRESSURE.format(2_000_000, 2_000_000)})

    found = node.host().read()

    assert memory(found) == (8 * GIB, {"used": 3 * GIB, "cached": 2 * GIB, "free": 3 * GIB})
    # A cgroup can be out of processors altogether: its quota is used up.
    own = dict.fromkeys(("cpu some", "cpu full", "memory some", "memory full"), 2.0)
    # What it does not tell is the node's.
    stalled = values(found, catalog.OTEL_DDP_HOST_PRESSURE)
    assert stalled == {**own, "io some": 1.0, "io full": 1.0}


def test_the_limits_are_those_that_all_ranks_share(node: NodeTree) -> None:
    # The agent is a service with a little memory; the ranks are tasks of a job with more.
    node.version_2("/system.slice/agent")
    node.group("/system.slice/agent", of_version_2(1, GIB // 2, 0))
    node.group("/job", of_version_2(32, 5 * GIB, 2 * GIB))
    for number, limit_gib in ((71, 4), (72, 8)):
        node.group(f"/job/task{number}", of_version_2(limit_gib, 2 * GIB, GIB))
        node.write(f"proc/{number}/cgroup", f"0::/job/task{number}\n")
    node.write("proc/73/cgroup", "0::/other\n")

    def limit_of(*pids: int) -> float:
        node.pids = list(pids)
        return memory(node.host().read())[0] / GIB

    assert limit_of() == 1
    assert limit_of(71) == 4
    assert limit_of(71, 72) == 32
    # One that ended a moment ago changes nothing.
    assert limit_of(71, 72, 99) == 32
    assert limit_of(71, 73) == 64


@pytest.mark.parametrize(
    ("groups", "limit_gib", "used_gib"),
    [
        # By cgroup: its limit, and what it uses.
        ({"/user.slice/session": (None, 5)}, 64, 12),
        ({"/job/step": (None, 1), "/job": (16, 6)}, 16, 6),
        # The tightest one; of equal ones the outer, which all share.
        ({"/job/task": (8, 1), "/job": (16, 4)}, 8, 1),
        ({"/job/task": (8, 1), "/job": (8, 4)}, 8, 4),
        # Limits may be lowered at any time.
        ({"/job": (4, 5)}, 4, 5),
    ],
)
def test_the_tightest_limit_above_us_counts(
    groups: dict[str, tuple[int | None, int]], limit_gib: int, used_gib: int, node: NodeTree
) -> None:
    node.version_2(next(iter(groups)))
    for path, (limit, used) in groups.items():
        node.group(path, of_version_2(limit, used * GIB, 0))

    found, usage = memory(node.host().read())

    assert (found, usage["used"]) == (limit_gib * GIB, used_gib * GIB)
    assert usage["free"] >= 0


@pytest.mark.parametrize(("path", "top"), [("/../other", "/"), ("/docker/abcd", "/docker/abc")])
def test_an_invisible_cgroup_limits_nothing(path: str, top: str, node: NodeTree) -> None:
    node.version_2(path, top=top)
    for other in ("/other", "d", "/../other"):
        node.group(other, of_version_2(8, 5 * GIB, 0))

    assert memory(node.host().read())[0] == 64 * GIB
