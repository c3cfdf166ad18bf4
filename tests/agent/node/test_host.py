"""The node around the training: trees on disk of many kinds of machines, and the real one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agent.node.node_trees import BOOT_S, NodeTree, rows, shown, values
from golden import Golden
from otel_ddp.agent.node.host import Host
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
