"""A script with our lines in it on a system that lacks what recording needs, in real processes."""

from __future__ import annotations

import subprocess
import sys

import pytest

import commands
import warm
from conftest import Here

FCNTL = "import sys\nsys.modules['fcntl'] = None\n"
FALLOCATE = "import os\ndel os.posix_fallocate\n"
# What Windows lacks of it besides. The standard library is told that there is no fork at all.
WINDOWS = """
for name in ("fork", "register_at_fork", "uname", "geteuid", "mkfifo", "pread", "pwrite",
             "O_CLOEXEC", "O_NOFOLLOW", "O_NONBLOCK"):
    delattr(os, name)
"""
TORCH = "import torch\n"

SCRIPT = """
import pickle
import otel_ddp
with otel_ddp.init(group="g", run="r", config={"lr": 0.1}) as run:
    otel_ddp.log({"loss": 1.0}, step=1)
    run.log({"loss": object()}, step="x")
    with run.phase("eval"), otel_ddp.span("inner", shard=1), otel_ddp.phase("checkpoint"):
        otel_ddp.event("now")
    assert otel_ddp.config({"seed": 1}) == {"seed": 1}
    assert list(otel_ddp.data([1, 2])) == [1, 2]
    assert pickle.loads(pickle.dumps(run)) is run
    assert (run.run, run.group, run.identity.global_rank) == ("r", "g", 0), run
assert otel_ddp.current() is None
"""
MODEL = """
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
otel_ddp.instrument(model, optimizer=optimizer)
for batch in otel_ddp.data(torch.utils.data.DataLoader(torch.ones(4, 2), batch_size=2)):
    model(batch).sum().backward()
    optimizer.step()
otel_ddp.uninstrument()
otel_ddp.finish()
"""
SAID = (
    "Nothing is recorded here: this system lacks {}, which Linux has. Your script goes on as it "
    "is, and every call of otel_ddp does nothing."
)


def python(*code: str) -> subprocess.CompletedProcess[str]:
    executable = warm.python().executable if TORCH in code else sys.executable
    return commands.run(executable, "-c", "\n".join(code))


@pytest.mark.parametrize(
    ("code", "lacking"),
    [
        ((FALLOCATE, SCRIPT), "os.posix_fallocate"),
        (
            (TORCH, FCNTL, FALLOCATE, WINDOWS, SCRIPT, MODEL),
            "fcntl, os.posix_fallocate, os.register_at_fork, os.mkfifo, os.pread, os.geteuid",
        ),
    ],
)
def test_on_a_system_that_lacks_something_a_run_records_nothing_and_warns_once(
    code: tuple[str, ...], lacking: str, place: Here
) -> None:
    done = python(*code)

    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert done.stderr.splitlines() == [SAID.format(lacking)]
    assert list(place.directory.iterdir()) == []


def test_a_command_there_says_a_sentence() -> None:
    cli = "from otel_ddp.cli import main\nsys.exit(main(['status']))"

    done = python(FCNTL, FALLOCATE, WINDOWS, cli)

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines() == [
        "otel-ddp status needs Linux: this system lacks fcntl, os.posix_fallocate, "
        "os.register_at_fork, os.mkfifo, os.pread, os.geteuid, so nothing is recorded here, and "
        "there is nothing to show."
    ]


def test_a_command_that_is_to_be_measured_there_runs_as_it_is() -> None:
    cli = (
        "from otel_ddp.cli import main\nmain(['run', '--', 'sh', '-c', 'echo $PYTHONPATH; exit 7'])"
    )

    done = python(FCNTL, cli)

    assert (done.returncode, "startup" in done.stdout) == (7, False)
    assert done.stderr == "otel-ddp run: this system lacks fcntl, so nothing is recorded\n"
