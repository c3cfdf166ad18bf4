"""Real processes: forked, spawned, dying; and what a training process holds."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

import otel_ddp
import warm
from conftest import Here
from node import stop_agent, until
from otel_ddp.recording import agent_start

PATIENCE_S = 300

# From Python 3.13 on multiprocessing has handled the exception before anybody is told of the end.
NO_MORE_DATA = "ValueError: no more data" if sys.version_info < (3, 13) else "exit code 1"


def start(
    code: str, folder: Path, python: str = sys.executable, **env: str
) -> subprocess.Popen[str]:
    """A Python program of its own, as a file: a spawned child imports it again."""
    script = folder / "train.py"
    script.write_text(code)
    return subprocess.Popen(
        [python, str(script)],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def run(code: str, folder: Path, python: str = sys.executable, **env: str) -> tuple[int, str, str]:
    """Exit code, output and errors of a program."""
    with start(code, folder, python, **env) as process:
        try:
            out, err = process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()
    return process.returncode, out, err


def quietly(code: str, folder: Path, python: str = sys.executable, **env: str) -> str:
    """The output of a program that ends well and says nothing on the side."""
    status, out, err = run(code, folder, python, **env)
    assert (status, err) == (0, "")
    return out


# -- the end of a process

LOG = "import sys, otel_ddp\nrun = otel_ddp.init()\nrun.log({'loss': 0.5}, step=1)\n"


@pytest.mark.parametrize("end", ["", "sys.exit(0)"])
def test_a_process_that_ends_has_finished(end: str, place: Here, tmp_path: Path) -> None:
    quietly(LOG + end, tmp_path)

    assert (place.only().state, place.only().reason) == ("finished", "")
    assert place.only().values == {"loss": 0.5}


@pytest.mark.parametrize("around", ["if True", "with run.phase('eval'), run.span('inner')"])
def test_an_uncaught_exception_is_the_reason_and_passes_untouched(
    around: str, place: Here, tmp_path: Path
) -> None:
    status, _, err = run(f"{LOG}{around}:\n    raise ValueError('no more data')", tmp_path)

    assert status == 1
    assert (place.only().state, place.only().reason) == ("failed", "ValueError: no more data")
    assert [
        "Traceback (most recent call last):",
        f'  File "{tmp_path / "train.py"}", line 5, in <module>',
        "    raise ValueError('no more data')",
        "ValueError: no more data",
    ] == err.splitlines()


def test_what_a_person_interrupts_ends_by_the_signal(place: Here, tmp_path: Path) -> None:
    status, _, err = run(f"{LOG}raise KeyboardInterrupt", tmp_path, OTEL_DDP_SAY="all")

    assert status == -signal.SIGINT
    assert "KeyboardInterrupt" in err.splitlines()
    assert (place.only().state, place.only().reason) == ("failed", "KeyboardInterrupt")


def test_what_failed_at_a_prompt_hours_ago_did_not_end_the_process(
    place: Here, tmp_path: Path
) -> None:
    quietly(LOG + "sys.ps1 = '>>> '\nsys.last_value = ValueError('earlier')", tmp_path)

    assert place.only().state == "finished"


# -- children

FORK = """
import os, sys, otel_ddp
run = otel_ddp.init(group="g", config={"lr": 0.1})
run.log({"before": 1.0}, step=1)
log = run.log  # as a callback keeps it
with run.phase("eval"):
    pid = os.fork()
    if pid == 0:
        assert otel_ddp.current() is None, "not before its first use"
        {use}
        assert otel_ddp.current() is run
        with run.span("child"):
            run.event("child")
        sys.exit(0)  # runs what the parent registered
    assert os.waitpid(pid, 0)[1] == 0
    idle = os.fork()
    if idle == 0:
        sys.exit(0)
    assert os.waitpid(idle, 0)[1] == 0
    run.log({"after": 2.0}, step=3)
"""


@pytest.mark.parametrize("use", ["log", "otel_ddp.log"])
def test_a_forked_child_joins_the_run_at_its_first_use_and_the_parent_goes_on(
    use: str, place: Here, tmp_path: Path
) -> None:
    quietly(FORK.replace("{use}", use + "({'child': 1.0}, step=2)"), tmp_path)

    # Of the child that never used it there is nothing.
    parent, child = sorted(place.read(), key=lambda each: "child" in each.values)
    assert parent.points == [("before", 1.0), ("after", 2.0)]
    assert (set(parent.spans), set(parent.events)) == ({"eval"}, set())
    assert (parent.state, parent.config) == ("finished", {"lr": 0.1})
    assert child.points == [("child", 1.0)]
    # The child leaves the phase it was forked in, too, and must not say so.
    assert (set(child.spans), set(child.events), child.config) == ({"child"}, {"child"}, {})
    assert (child.state, child.reason) == ("finished", "")
    mine, parents = ({k: each.identity[k] for k in ("run", "group")} for each in (child, parent))
    assert mine == parents
    assert child.identity["global_rank"] is None, "the parent's rank is not the child's"


FORK_AFTER_ITS_END = """
import os, sys, otel_ddp
run = otel_ddp.init()
run.finish()
if os.fork() == 0:
    run.log({"child": 1.0})
    otel_ddp.log({"child": 1.0})
    sys.exit(0)
assert os.wait()[1] == 0
"""


def test_a_forked_child_does_not_open_a_run_again_that_was_over(
    place: Here, tmp_path: Path
) -> None:
    quietly(FORK_AFTER_ITS_END, tmp_path)

    assert place.only().points == []


FORK_WHILE_LOGGING = """
import os, sys, threading, warnings, otel_ddp
warnings.simplefilter("ignore")  # newer Pythons warn about a fork with threads
run = otel_ddp.init()
inside, go = threading.Event(), threading.Event()

class Slow(dict):
    def items(self):
        inside.set()
        go.wait()
        return super().items()

def hold():
    with run._records.recorder.gate.lock:
        run.log(Slow(loss=1.0), step=1)

thread = threading.Thread(target=hold)
thread.start()
inside.wait()
pid = os.fork()
if pid == 0:
    run.log({"child": 1.0}, step=2)
    sys.exit(0)
assert os.waitpid(pid, 0)[1] == 0
go.set()
thread.join()
"""


def test_a_child_forked_while_a_thread_logs_does_not_wait_for_that_thread(
    place: Here, tmp_path: Path
) -> None:
    quietly(FORK_WHILE_LOGGING, tmp_path)

    assert sorted(each.points for each in place.read()) == [[("child", 1.0)], [("loss", 1.0)]]


FORK_WHILE_OPENING = """
import os, threading, warnings, otel_ddp
warnings.simplefilter("ignore")  # newer Pythons warn about a fork with threads
inside, go = threading.Event(), threading.Event()

def slow(who):
    inside.set()
    go.wait()
    return True

thread = threading.Thread(target=otel_ddp.init, args=(slow,))
thread.start()
inside.wait()
pid = os.fork()
if pid == 0:
    otel_ddp.init(job_type="child").finish()
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
go.set()
thread.join()
"""


def test_a_child_forked_while_a_thread_opens_a_run_may_open_its_own(
    place: Here, tmp_path: Path
) -> None:
    quietly(FORK_WHILE_OPENING, tmp_path)

    assert sorted(each.identity["job_type"] for each in place.read()) == ["child", "train"]


SPAWN = """
import multiprocessing, os, pickle, otel_ddp

def child(run, again, how):
    assert otel_ddp.current() is None, "not before its first use"
    if how == "init":
        assert otel_ddp.init(job_type="init") is run
    run.log({"pid": os.getpid()}, step=1)
    assert otel_ddp.current() is run
    other = pickle.loads(again)
    assert other is run, "one process, one run"
    other.log({"other": 1.0}, step=2)

if __name__ == "__main__":
    run = otel_ddp.init(lambda who: True, run="mine", group="g", job_type="parent",
                        global_rank=0, local_rank=0, world_size=1, config={"lr": 0.1})
    again = pickle.dumps(run)
    context = multiprocessing.get_context("spawn")
    for how in ("use", "init"):
        process = context.Process(target=child, args=(run, again, how))
        process.start()
        process.join()
        assert process.exitcode == 0
"""


def test_a_pickled_run_joins_the_launch_in_a_spawned_child_at_its_first_use(
    place: Here, tmp_path: Path
) -> None:
    quietly(SPAWN, tmp_path)

    parent, *children = sorted(place.read(), key=lambda each: each.identity["job_type"] != "parent")
    assert len(children) == 2
    for journal in children:
        assert (journal.identity["run"], journal.identity["group"]) == ("mine", "g")
        assert [("pid", float(journal.pid)), ("other", 1.0)] == journal.points
        assert journal.pid != parent.pid
        assert journal.identity["global_rank"] is None, "the parent's rank is not the child's"
        assert (journal.state, journal.config) == ("finished", {})
    assert {"parent", "init"} == {journal.identity["job_type"] for journal in children}
    assert parent.points == []


# As the guide of another tracker has it, with `{start}` and `{end}` around it.
SWEEP_IN_A_POOL = """
import multiprocessing, os, sys, concurrent.futures, otel_ddp

def do_work(n):
    for _ in range(2):
        run = otel_ddp.init(config=dict(n=n))
    assert otel_ddp.init() is run, "the same task"
    run.log(dict(this=n * n, pid=os.getpid()))

def do_otherwise(n):
    return do_work(n)

def do_named(n):
    with otel_ddp.init(run=f"n-{n}", config=dict(n=n)) as run:
        run.log(dict(this=n * n))

def main(context, how):
    # One worker takes several tasks, and several calls as one task.
    if how == "executor":
        with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
            list(pool.map(do_work, range(3)))
        return
    work = do_named if how == "named" else do_work
    pool = context.Pool(1)
    if how == "tasks":
        for n, each in enumerate((do_work, do_otherwise, do_work)):
            pool.apply(each, (n,))
    else:
        pool.map(work, range(3), chunksize=3 if how == "chunks" else 1)
    pool.close()
    pool.join()

if __name__ == "__main__":
    parent = otel_ddp.init(run="sweep", group="g") if sys.argv[2] == "parent" else None
    main(multiprocessing.get_context("{fork}"), "{how}")
"""


@pytest.mark.parametrize(
    ("fork", "how"),
    [("fork", "tasks"), ("spawn", "chunks"), ("fork", "executor"), ("forkserver", "named")],
)
def test_a_sweep_in_a_pool_is_a_run_for_each_task_in_one_group(
    fork: str, how: str, place: Here, tmp_path: Path
) -> None:
    with_parent = how in ("tasks", "named")
    code = SWEEP_IN_A_POOL.replace("{fork}", fork).replace("{how}", how)
    code = code.replace("sys.argv[2]", repr("parent" if with_parent else ""))

    quietly(code, tmp_path)

    runs = {each.identity["run"]: each for each in place.read()}
    parent = runs.pop("sweep", None)
    trials = sorted(runs.values(), key=lambda each: each.values["this"])
    assert (len(trials), len(place.journals())) == (3, 3 + with_parent)
    for n, trial in enumerate(trials):
        assert (trial.config, trial.values["this"]) == ({"n": n}, n * n)
        assert (trial.identity["global_rank"], trial.identity["world_size"]) == (0, 1)
        assert trial.state == "finished"
        # By these the agent tells a worker that its parent ends from one that dies.
        assert (trial.facts["parent"] > 1, trial.facts["pool"]) == (True, True)
    (group,) = {each.identity["group"] for each in trials}
    assert group == "g" if with_parent else group.startswith("pool-")
    assert parent is None or (parent.points, parent.state) == ([], "finished")
    if how == "named":
        assert sorted(runs) == ["n-0", "n-1", "n-2"]
    else:
        assert len({each.values["pid"] for each in trials}) == 1


BOTH_RUNS = """
import multiprocessing, otel_ddp

def child():
    own = otel_ddp.init(run="own", config={"n": 1})
    run.log({"shared": 1.0})
    own.log({"own": 1.0})
    assert otel_ddp.current() is own
    raise SystemExit(0)

if __name__ == "__main__":
    run = otel_ddp.init(run="shared", group="g")
    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join()
    assert process.exitcode == 0
"""


def test_a_child_with_a_run_of_its_own_is_its_only_rank_and_may_use_its_parents_as_well(
    place: Here, tmp_path: Path
) -> None:
    quietly(BOTH_RUNS, tmp_path)

    found = place.read()
    assert sorted((each.identity["run"], each.points, each.state) for each in found) == [
        ("own", [("own", 1.0)], "finished"),
        ("shared", [], "finished"),
        ("shared", [("shared", 1.0)], "finished"),
    ]
    [own] = [each for each in found if each.identity["run"] == "own"]
    names = ("group", "global_rank", "local_rank", "world_size")
    assert [own.identity[name] for name in names] == ["g", 0, 0, 1]
    assert own.config == {"n": 1}


TORCH = """
import sys
import torch, torch.multiprocessing, torch.utils.data as data
import otel_ddp

class Numbers(data.Dataset):
    def __init__(self, run):
        self.run = run

    def __len__(self):
        return 4

    def __getitem__(self, index):
        self.run.log({"worker": 1.0}, step=index)
        otel_ddp.log({"worker": 1.0})
        with self.run.span("worker"):
            return index

def child(index):
    otel_ddp.init(job_type="child").log({"loss": 1.0})
    raise ValueError("no more data")

if __name__ == "__main__":
    run = otel_ddp.init(job_type="parent")
    for batch in data.DataLoader(Numbers(run), num_workers=1, multiprocessing_context="fork"):
        run.log({"batch": batch}, step=int(batch))
    try:
        torch.multiprocessing.spawn(child, nprocs=1)
    except torch.multiprocessing.ProcessRaisedException:
        print("raised")
"""


def test_data_loader_workers_are_silent_and_a_child_of_torchs_spawn_fails(
    place: Here, tmp_path: Path
) -> None:
    pytest.importorskip("torch")

    python, more = warm.python()

    assert quietly(TORCH, tmp_path, python, **more) == "raised\n"

    journals = {each.identity["job_type"]: each for each in place.read()}
    assert {"parent", "child"} == set(journals)
    assert len(place.journals()) == 2
    assert journals["parent"].points == [("batch", float(step)) for step in range(4)]
    assert journals["parent"].spans == {}
    assert (journals["parent"].state, journals["child"].state) == ("finished", "failed")
    assert journals["child"].reason == NO_MORE_DATA


# -- what a training process holds

HOLDINGS = """
import json, os, sys, threading, otel_ddp
run = otel_ddp.init()
run.log({"loss": 1.0}, step=1)
links = []
for fd in os.listdir("/proc/self/fd"):
    try:
        links.append(os.readlink(f"/proc/self/fd/{fd}"))
    except OSError:
        pass
print(json.dumps({
    "threads": [thread.name for thread in threading.enumerate()],
    "tasks": len(os.listdir("/proc/self/task")),
    "sockets": [link for link in links if link.startswith("socket:")],
    "modules": list(sys.modules),
    "children": open(f"/proc/self/task/{os.getpid()}/children").read().split()
    if os.path.exists(f"/proc/self/task/{os.getpid()}/children") else [],
}), flush=True)
"""


def test_a_training_process_holds_no_thread_no_socket_and_no_child(
    place: Here, tmp_path: Path
) -> None:
    quiet = {
        "OTEL_EXPORTER_PROMETHEUS_PORT": "0",
        "OTEL_METRICS_EXPORTER": "none",
        "OTEL_DDP_SPOOL_DIR": str(tmp_path / "spool"),
    }
    try:
        status, out, err = run(HOLDINGS, tmp_path, OTEL_DDP_AGENT="auto", **quiet)
    finally:
        until(lambda: place.agent_is_alive() and place.agent_file.exists(), "the agent")
        stop_agent(place)

    held = json.loads(out)
    assert (status, err) == (0, "")
    assert (held["threads"], held["tasks"]) == (["MainThread"], 1)
    assert (held["sockets"], held["children"]) == ([], [])
    loaded = {name.split(".")[0] for name in held["modules"]}
    heavy = {"opentelemetry", "prometheus_client", "pynvml", "requests", "grpc", "torch"}
    assert set() == heavy & loaded
    assert not any(name.startswith("otel_ddp.agent.") for name in held["modules"])
    # What only an end needs: each start would wait for it.
    of_an_end = {"run.end_card", "journal.reader", "journal.process_state"}
    assert not {f"otel_ddp.{name}" for name in of_an_end} & set(held["modules"])


# -- the agent that a process starts


@pytest.mark.parametrize(
    ("executable", "frozen", "starts"),
    [
        ("/venv/bin/Python3.13t", False, True),
        ("{tmp}/link", False, True),
        ("/opt/python/trainer", False, False),
        ("/opt/dist/python3", True, False),
    ],
)
def test_a_program_that_is_no_python_is_not_started_once_more_as_an_agent(
    executable: str,
    frozen: bool,
    starts: bool,
    place: Here,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "link").symlink_to("/nowhere/python3")
    monkeypatch.setattr(sys, "executable", executable.format(tmp=tmp_path))
    monkeypatch.setattr(sys, "frozen", frozen, raising=False)

    assert agent_start.ensure_agent(place) == starts

    assert place.agent_log.exists() == starts
    assert ["run `otel-ddp agent` on this node and set" in each for each in caplog.messages] == (
        [] if starts else [True]
    )


def test_a_training_that_was_started_for_an_agent_starts_none_and_has_none_started(
    place: Here, caplog: pytest.LogCaptureFixture
) -> None:
    # As every process has it that is started for an agent: here a training began once more.
    os.environ[agent_start._MARK] = "1"

    assert not agent_start.ensure_agent(place)

    assert place.start_not_before() - time.monotonic() > 30
    assert "runs this program, whatever its arguments" in caplog.text
    assert not place.agent_log.exists()


def _has_ended(place: Here, times: int) -> bool:
    return place.agent_log.read_text().count("MemoryError") == times


def test_an_agent_that_an_error_ends_again_and_again_is_one_line_of_the_training(
    place: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho Traceback; echo MemoryError\n")
    broken.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(broken))
    # Of an earlier training's agent, of which this one knows nothing.
    place.agent_log.write_text("ImportError: long ago\n" * 20_000)

    for number, said in enumerate((0, 1, 1), start=1):
        # The one before holds the lock until its process is gone.
        until(lambda: agent_start.ensure_agent(place), "the start of the agent")
        until(partial(_has_ended, place, number), "the end of the agent")
        assert len(caplog.messages) == said
        place.delay_start(0)

    assert place.agent_log.stat().st_size < 1000
    (text,) = caplog.messages
    assert f"was ended by an error and is started again (MemoryError; {place.agent_log})" in text


def test_a_damaged_directory_gives_one_warning_and_training_goes_on(
    place: Here, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    run = otel_ddp.init()
    run.log({"loss": 0.5}, step=1)
    place.agent_log.unlink(missing_ok=True)
    place.agent_log.mkdir()

    started = []
    for _ in range(2):
        started.append(agent_start.ensure_agent(place))
        place.delay_start(0)
    run.log({"loss": 0.5}, step=2)
    run.finish()

    (said,) = caplog.records
    assert started == [False, False]
    assert said.getMessage().startswith("the node agent cannot be started (")
    assert said.exc_info is None
    assert capfd.readouterr().err == ""
