"""deploy/slurm: the scripts, beside a real agent where they meet one."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

import commands
from deploy.files import DEPLOY, tool
from node import Node, finished, until
from otel_ddp.journal.place import Place
from shortages import locked_elsewhere

SLURM = DEPLOY / "slurm"
SCRIPTS = sorted(SLURM.iterdir())


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: str(path.name))
def test_bash_understands_a_script_of_slurms(path: Path) -> None:
    subprocess.run(["bash", "-n", path], check=True)
    if shellcheck := tool("shellcheck"):
        subprocess.run([shellcheck, "--shell=bash", path], check=True)


JOB = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NAME": "llama", "SLURM_JOB_ACCOUNT": "nlp"}


NAMED = {
    "OTEL_EXPORTER_OTLP_ENDPOINT": "https://c:4318",
    "OTEL_DDP_GROUP": "llama",
    "OTEL_DDP_PROJECT": "nlp",
    "OTEL_DDP_NAME": "llama 4711",
}


def prolog(tmp_path: Path, site: str = "", /, *, quiet: bool = True, **env: str) -> dict[str, str]:
    """What the task prolog has Slurm set."""
    (tmp_path / "site.sh").write_text(site)
    env = {"PATH": os.environ["PATH"], **JOB, **env}
    said = commands.run(SLURM / "task-prolog.sh", tmp_path / "site.sh", env=env, check=True)
    assert not (quiet and said.stderr)
    lines = said.stdout.splitlines()
    assert all(line.startswith("export ") for line in lines), lines
    return dict(line.removeprefix("export ").split("=", 1) for line in lines)


def test_a_task_is_named_after_its_job_and_what_a_user_has_set_is_left_alone(
    tmp_path: Path,
) -> None:
    own = {"WANDB_RUN_GROUP": "mine", "OTEL_DDP_PROJECT": "mine", "SWANLAB_EXP_NAME": "mine"}
    own["OTEL_EXPORTER_OTLP_METRICS_ENDPOINT"] = "http://mine:4318/v1/metrics"
    array = prolog(tmp_path, SLURM_ARRAY_JOB_ID="4700", SLURM_ARRAY_TASK_ID="3")
    of_lines = prolog(tmp_path, SLURM_JOB_NAME="a\nexport LD_PRELOAD=/tmp/x.so")

    assert prolog(tmp_path, "COLLECTOR=https://c:4318") == NAMED
    assert prolog(tmp_path, "COLLECTOR=https://c:4318", **own) == {}
    assert array["OTEL_DDP_NAME"] == "llama 4700_3"
    # A name of several lines sets nothing else.
    assert of_lines["OTEL_DDP_GROUP"] == "a export LD_PRELOAD=/tmp/x.so"
    assert set(of_lines) == {"OTEL_DDP_GROUP", "OTEL_DDP_PROJECT", "OTEL_DDP_NAME"}


def test_jobs_that_share_a_node_have_places_of_their_own(tmp_path: Path) -> None:
    said = prolog(tmp_path, "SHARED_NODES=yes")
    offline = prolog(tmp_path, "SHARED_NODES=yes", OTEL_DDP_AGENT="offline")

    assert said["OTEL_DDP_DIR"] == f"/dev/shm/otel_ddp-{os.getuid()}-job4711"
    assert said["OTEL_DDP_SPOOL_DIR"] == f"/var/tmp/otel_ddp-{os.getuid()}-job4711"
    # What an offline job keeps is not cleared away with it.
    assert "OTEL_DDP_DIR" in offline
    assert "OTEL_DDP_SPOOL_DIR" not in offline


TRAINING = "import otel_ddp; run = otel_ddp.init(); run.log({'loss': 1.0}, step=0); "


class SlurmNode(Node):
    """A node on which the agent of a job may be left over."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.place = Place(self.root / name)
        self.env["OTEL_DDP_DIR"] = str(self.place.directory)

    def epilog(self, uid: int = os.getuid()) -> None:
        """The job's end, in Slurm's eyes."""
        disk = self.root / "disk"
        disk.mkdir(exist_ok=True)
        finished(
            self.start(
                str(SLURM / "epilog.sh"),
                str(self.root),
                str(disk),
                env={"SLURM_JOB_UID": str(uid), "SLURM_JOB_ID": "4711"},
            )
        )


@pytest.mark.parametrize("place", ["offline", "job4711"], ids=["shared", "of the job"])
def test_the_epilog_ends_an_agent_that_outlived_its_job_and_clears_away_what_was_the_jobs_alone(
    place: str,
) -> None:
    is_shared = place == "offline"
    with SlurmNode(f"otel_ddp-{os.getuid()}-{place}") as node:
        node.run(TRAINING + "run.finish()")
        agent = node.agent()["pid"]
        spool = node.root / "disk" / f"otel_ddp-{os.getuid()}-job4711"
        (spool / "spool-1").mkdir(parents=True)

        node.epilog()

        until(lambda: not Path(f"/proc/{agent}/exe").exists(), "the agent's end")
        # In order: what it says of itself it has taken away, and a place is there for the next.
        assert not node.place.agent_file.exists()
        assert node.place.directory.is_dir() == is_shared
        assert not spool.exists()


def test_the_epilog_leaves_an_agent_alone_that_another_job_still_needs() -> None:
    with SlurmNode(f"otel_ddp-{os.getuid()}") as node:
        other = node.python(TRAINING + "print('up', flush=True); input(); run.finish()")
        assert other.stdout
        assert other.stdout.readline() == "up\n"
        agent = node.agent()["pid"]

        node.epilog()

        assert node.place.agent_pid() == agent
        other.communicate("\n")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_the_epilog_ends_no_process_of_another_user_in_the_place_of_this_one() -> None:
    with SlurmNode("otel_ddp-4242") as node:
        node.place.directory.mkdir(mode=0o700)
        # An agent leaves a place that is another user's by itself.
        with locked_elsewhere(node.place.agent_lock) as other:
            os.chown(node.place.directory, 4242, -1)

            node.epilog(4242)

            assert other.poll() is None


def test_the_epilog_follows_no_link(tmp_path: Path) -> None:
    with SlurmNode("elsewhere") as node:
        (tmp_path / "precious").touch()
        link = node.root / f"otel_ddp-{os.getuid()}-job4711"
        link.symlink_to(tmp_path)

        node.epilog()

        assert (tmp_path / "precious").exists()
        assert link.is_symlink()


@pytest.mark.parametrize(
    "mistake", ["set -e\nfalse", "set -u\n: $NOBODY_SET_THIS", ": $NOBODY_SET_THIS", "exit 3"]
)
def test_a_mistake_in_the_sites_file_costs_no_task_its_start(mistake: str, tmp_path: Path) -> None:
    said = prolog(tmp_path, f"COLLECTOR=https://c:4318\n{mistake}\n", quiet=False)

    assert said == NAMED
