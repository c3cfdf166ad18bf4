"""The programs that people bring: what arrives of each, and that it computes what it did before."""

from __future__ import annotations

import contextlib
import difflib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tools.stack.server import free_port

import warm
from node import Labels, Node, finished, until
from otel_ddp.vocabulary import catalog
from otlp_receiver import Receiver, attributes_of

EXAMPLES = Path(__file__).parents[2] / "examples"
PROGRAMS = sorted(
    path.with_name(path.name.replace("_before", "")).relative_to(EXAMPLES).as_posix()
    for path in EXAMPLES.glob("*/*_before.py")
)
MOST_CHANGED_LINES = 9

# Verdicts on how fast ranks are.
OF_PACE = ("straggler", "imbalance", "recurring")


class Value(NamedTuple):
    """A logged value as it arrived: with the step and the epoch that came with it."""

    value: float
    step: float | None
    epoch: float | None


class Launch:
    """Commands that together are one program, run to their end; and what came of them."""

    def __init__(self, *commands: Sequence[str], **env: str) -> None:
        # What the programs start has torch imported already, too.
        env |= {**warm.python().env, "CUDA_VISIBLE_DEVICES": "", "MASTER_PORT": str(free_port())}
        with Node(**env) as node:
            # Where programs leave what they save.
            node.env["OUTPUT"] = str(node.root)
            with Receiver() as receiver:
                node.export_to(receiver.start_http())
                started = [node.start(*command) for command in commands]
                self.printed = "".join(finished(each) for each in started)
                until(lambda: self._ended(node), "the end of every process to be told")
                agent = node.place.agent_pid()
                until(lambda: not _at_work(agent), "what was saved to be read")
                self.processes = node.processes()
                self.scraped = node.scrape()
                self.status = node.run("from otel_ddp.cli import main; main(['status'])")
                # It sends what it has not sent.
                node.stop_agent()
                self.points, self.spans = receiver.points(), receiver.spans()
                self.logs = [(each, attributes_of(each.attributes)) for each in receiver.logs()]
            self.postmortems = sorted((node.root / "history").glob("postmortem-*"))

    @staticmethod
    def _ended(node: Node) -> bool:
        known = node.processes()
        told = [value for _, value in node.series("training_state")]
        return (
            bool(known)
            and all(each["state"] == "finished" for each in known)
            and told == [2.0] * sum(each["exported"] for each in known)
        )

    @property
    def runs(self) -> set[tuple[str, str]]:
        return {(each["group"], each["run"]) for each in self.processes}

    def ranks(self, *, exported: bool) -> list[str]:
        """Of the processes that are exported, or of all."""
        return sorted(
            str(each["rank"]) for each in self.processes if each["exported"] or not exported
        )

    def series(self, metric: str, /, **labels: str) -> list[tuple[Labels, float]]:
        return [
            (found, value)
            for name, found, value in self.scraped
            if name == metric and labels.items() <= found.items()
        ]

    def value(self, metric: str, /, **labels: str) -> float:
        ((_, value),) = self.series(metric, **labels)
        return value

    def phases(self, rank: str) -> set[str]:
        """What this rank has spent time in."""
        found = self.series("training_phase_time_seconds_total", rank=rank, clock="host")
        return {labels["phase"] for labels, value in found if value}

    def history(self, name: str, split: str = "train", /, **labels: str) -> list[Value]:
        """All values of one name, in the order of their times."""
        wanted = {"name": name, "split": split, **labels}
        by_time: dict[str, dict[int, float]] = {"": {}, ".step": {}, ".epoch": {}}
        for point in self.points:
            what = point.metric.removeprefix("training.scalar")
            if what in by_time and wanted.items() <= point.attributes.items():
                by_time[what][point.time_ns] = point.value
        steps, epochs = by_time[".step"], by_time[".epoch"]
        return [
            Value(value, steps.get(time_ns), epochs.get(time_ns))
            for time_ns, value in sorted(by_time[""].items())
        ]

    def steps(self, name: str, split: str = "train", /, **labels: str) -> list[float | None]:
        return [each.step for each in self.history(name, split, **labels)]

    def events(self, name: str) -> list[dict[str, Any]]:
        return [attributes for record, attributes in self.logs if record.event_name == name]

    def artifacts(self) -> list[dict[str, Any]]:
        """Those that the agent has read."""
        told = self.events(catalog.ARTIFACT_EVENT)
        return [each for each in told if "artifact.digest" in each]

    def assert_well(self) -> None:
        """Nothing is told that is not so, and nothing warns; each curve goes to the right.

        But for the pace of ranks, which is not even where other tests take their cores.
        """
        warnings = [said for record, said in self.logs if record.severity_text in ("WARN", "ERROR")]
        assert [said for said in warnings if said.get("verdict") not in OF_PACE] == []
        assert self.postmortems == []
        assert "  ! " not in self.status
        assert {value for _, value in self.series("training_stalled")} <= {0.0}

        curves = {
            tuple(sorted(point.attributes.items()))
            for point in self.points
            if point.metric == "training.scalar"
        }
        assert curves
        for curve in curves:
            labels = dict(curve)
            steps = self.steps(labels.pop("name"), labels.pop("split"), **labels)
            assert None not in steps, curve
            assert steps == sorted(steps, key=float), curve


def _at_work(process: int | None) -> list[str]:
    """The children of a process that have not ended."""
    found = []
    for child in Path(f"/proc/{process}/task/{process}/children").read_text().split():
        with contextlib.suppress(OSError):
            # That of one that has ended, and was not waited for, is empty.
            found += [child] if Path(f"/proc/{child}/cmdline").read_bytes() else []
    return found


def python(program: str) -> list[str]:
    """Started as it is."""
    return [warm.python().executable, str(EXAMPLES / program)]


def torchrun(
    program: str,
    *arguments: str,
    where: tuple[str, ...] = ("--standalone", "--nproc-per-node", "2"),
    node: int = 0,
) -> list[str]:
    """Two ranks of one node, unless *where* says otherwise."""
    executable, more = warm.python(node)
    start = ("env", *(f"{name}={value}" for name, value in more.items()), executable)
    return [*start, "-m", "torch.distributed.run", *where, str(EXAMPLES / program), *arguments]


def job(program: str) -> list[list[str]]:
    """Two ranks as an operator starts them: by variables, without a launcher."""
    world = ("WORLD_SIZE=2", "MASTER_ADDR=127.0.0.1", f"MASTER_PORT={free_port()}")
    return [["env", f"RANK={rank}", *world, *python(program)] for rank in ("0", "1")]


def two_nodes(program: str) -> list[list[str]]:
    """A torchrun of one rank for each of two nodes on this machine."""
    port = str(free_port())
    where = ("--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", port)
    each = ("--nproc-per-node", "1", "--node-rank")
    return [torchrun(program, where=(*where, *each, str(node)), node=node) for node in range(2)]


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_is_under_ten_lines_from_its_start_without_tracking(program: str) -> None:
    after = EXAMPLES / program
    old = after.with_name(f"{after.stem}_before.py").read_text()

    lines = difflib.ndiff(old.splitlines(), after.read_text().splitlines())
    changed = [each for each in lines if each[0] in "+-" and each[2:].strip()]

    assert "otel_ddp" not in old
    assert 0 < len(changed) <= MOST_CHANGED_LINES


def test_processes_under_roles_of_their_own_are_one_run_with_curves() -> None:
    launch = Launch(python("from_swanlab/train.py"))

    ((group, _),) = launch.runs
    assert f"{group}: epoch 9" in launch.printed
    assert re.fullmatch("exp_[0-9a-f]{8}", group)
    roles = {str(each["rank"]): each["job_type"] for each in launch.processes}
    assert roles == {"0": "train", "1": "worker"}
    assert len(re.findall("^run ", launch.status, re.M)) == 1
    for rank, role in roles.items():
        for name in ("loss", "accuracy"):
            values = launch.history(name, rank=rank, job_type=role, group=group)
            assert [each.step for each in values] == list(range(20, 201, 20))
            assert [each.epoch for each in values] == list(range(10))
        assert launch.value("training_steps_total", rank=rank) == 200
        assert launch.value("training_scalar_epoch", name="loss", rank=rank) == 9
        assert {"forward", "backward", "optimizer"} <= launch.phases(rank)
    assert {value for _, value in launch.series("training_world_size")} == {2}
    assert [each for each in launch.spans if each.name == "step"]
    launch.assert_well()


def test_a_role_for_each_rank_of_two_nodes_is_one_run_in_the_group_of_the_variable() -> None:
    launch = Launch(*two_nodes("from_swanlab/train.py"), EXP_ID="007")

    assert {group for group, _ in launch.runs} == {"distributed_exp_007"}
    assert len(launch.runs) == 1
    assert len(re.findall("^run ", launch.status, re.M)) == 1
    labels = [labels for labels, _ in launch.series("training_scalar", name="loss")]
    assert {each["job_type"] for each in labels} == {"node_0_rank_0", "node_1_rank_1"}
    assert len({each["node"] for each in labels}) == 2
    assert [each["local_rank"] for each in labels] == ["0", "0"]
    launch.assert_well()


def test_flags_of_the_program_decide_how_many_processes_are_recorded_and_their_group() -> None:
    arguments = ("--log_strategy", "all", "--group_name", "my-experiment")

    launch = Launch(torchrun("from_wandb/train.py", *arguments))

    assert len(launch.runs) == 1
    assert launch.ranks(exported=True) == ["0", "1"]
    for rank in ("0", "1"):
        for name in ("loss", "accuracy"):
            values = launch.history(name, rank=rank, group="my-experiment")
            assert [each.step for each in values] == list(range(1, 97))
            assert [each.epoch for each in values] == sorted([0, 1, 2] * 32)
        assert {"data", "forward", "backward", "optimizer"} <= launch.phases(rank)
    assert {value for _, value in launch.series("training_world_size")} == {2}
    ((info, _),) = launch.series("training_run_info")
    assert info["config_batch_size"] == "32"
    assert info["config_log_strategy"] == info["strategy"] == "all"
    assert launch.value("training_checkpoint_duration_seconds_count", rank="0") == 1
    (artifact,) = launch.artifacts()
    assert (artifact["artifact.name"], artifact["artifact.type"]) == ("model", "model")
    assert artifact["rank"] == "0"
    assert artifact["artifact.size"] > 1000
    assert artifact["artifact.metadata.loss"] > 0
    launch.assert_well()


def test_a_launcher_that_passes_the_local_rank_is_understood() -> None:
    launcher = ("-m", "torch.distributed.launch", "--nproc-per-node", "2")
    where = ("--master-port", str(free_port()), str(EXAMPLES / "from_wandb_guide" / "train.py"))

    launch = Launch([warm.python().executable, *launcher, *where])

    assert launch.ranks(exported=True) == ["0", "1"]
    assert {group for group, _ in launch.runs} == {"DDP"}
    losses = [each for each in launch.points if each.attributes.get("name") == "loss"]
    assert {each.resource["service.name"] for each in losses} == {"guide"}
    for rank in ("0", "1"):
        values = launch.history("loss", rank=rank, local_rank=rank)
        assert [each.step for each in values] == list(range(1, 81))
        assert [each.epoch for each in values] == sorted([0, 1, 2, 3] * 20)
    launch.assert_well()


def test_what_children_log_into_a_shared_run_or_hand_to_their_parent_has_their_names() -> None:
    launch = Launch(python("from_wandb_guide/share.py"), python("from_wandb_guide/funnel.py"))

    assert len(launch.runs) == 2
    assert [each.value for each in launch.history("square", group="share")] == [1, 4, 9, 16]
    for number in (1, 2, 3):
        values = launch.history(f"worker-{number}/loss")
        assert [each.value for each in values] == [number / (step + 1) for step in range(20)]
    launch.assert_well()


def test_settings_and_types_of_values_arrive_as_they_were_named() -> None:
    launch = Launch(*job("from_em/train.py"))

    assert len(launch.runs) == 1
    assert launch.ranks(exported=True) == ["0"]
    assert launch.ranks(exported=False) == ["0", "1"]
    assert launch.steps("loss") == [10, 20, 30, 42, 52, 62, 74, 84, 94]
    for name in ("loss", "accuracy"):
        values = launch.history(name, "val")
        assert [(each.step, each.epoch) for each in values] == [(32, 1), (64, 2), (96, 3)]
        assert [(each.step, each.epoch) for each in launch.history(name, "test")] == [(96, 3)]
    ((info, _),) = launch.series("training_run_info")
    assert info["name"] == "pictures_torch_distributed"
    assert (info["config_learning_rate"], info["config_epochs"]) == ("0.002", "3")
    assert info["model"] == "Net"
    assert {"data", "forward", "backward", "optimizer", "eval"} <= launch.phases("0")
    assert launch.value("training_steps_total", rank="0") == 96
    assert launch.value("training_checkpoint_duration_seconds_count", rank="0") == 1
    assert [each["artifact.name"] for each in launch.artifacts()] == ["pictures_saved_model"]
    launch.assert_well()


def test_a_trainer_that_builds_its_model_is_measured_from_one_line() -> None:
    launch = Launch(torchrun("trainer_ddp/train.py"))

    assert {group for group, _ in launch.runs} == {"trainer"}
    assert len(launch.runs) == 1
    stopped = {each["rank"]: each["epoch"] for each in launch.events("early_stop")}
    assert stopped.keys() == {"0", "1"}
    # Both stop where rank 0 says, and before the last epoch.
    assert len(set(stopped.values())) == 1
    epochs = stopped["0"] + 1
    assert epochs < 16
    for rank in ("0", "1"):
        assert launch.value("training_steps_total", rank=rank) == 16 * epochs
        assert launch.steps("loss", rank=rank) == list(range(1, 16 * epochs + 1))
    validated = list(range(16, 16 * epochs + 1, 16))
    assert launch.steps("loss", "val") == launch.steps("loss", "val", rank="0") == validated
    assert launch.steps("loss", "test") == validated[-1:]
    assert {"data", "forward", "backward", "optimizer"} <= launch.phases("1")
    # Rank 0 alone evaluates, with the module inside of DDP.
    assert "eval" in launch.phases("0")
    assert "eval" not in launch.phases("1")
    saved = launch.value("training_checkpoint_duration_seconds_count", rank="0")
    assert saved == (epochs + 3) // 4
    ((info, _),) = launch.series("training_run_info")
    assert (info["model"], info["world_size"]) == ("Sequential", "2")
    assert info["config_training_optimizer_kwargs_lr"] == "0.03"
    assert info["config_criterion"] == "<function compute_loss>"
    launch.assert_well()
