"""What otel-ddp doctor finds: real agents, real sockets, and installations that are broken."""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import otel_ddp
from conftest import Here
from node import Node, finished
from nvml_boards import Boards, a100_mig, h100, standin_library
from otel_ddp import __version__, settings
from otel_ddp.agent.export.otlp.outcome import Outcome
from otel_ddp.agent.export.otlp.variables import Route
from otel_ddp.cli import doctor, main
from otel_ddp.cli.doctor import DoctorInputs, Finding, examine, installation, port_protocol
from otel_ddp.errors import ConfigError
from otlp_receiver import Receiver

# Its package has the check itself under this name.
checks_of_the_collector = importlib.import_module("otel_ddp.cli.doctor.collector")

PROTOCOLS = pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
TRAINING = "import otel_ddp\nrun = otel_ddp.init(run='mine')\nrun.log({'loss': 1.0})\ninput()"

Check = Callable[[DoctorInputs], Iterator[Finding]]


def found(check: Check, **inputs: Any) -> list[Finding]:
    return list(examine(DoctorInputs(**inputs), [check]))


def levels(findings: list[Finding]) -> list[str]:
    return [each.level for each in findings]


def the(findings: list[Finding], level: str) -> str:
    """The one sentence of this level."""
    (sentence,) = (each.sentence for each in findings if each.level == level)
    return sentence


# --- the whole


def test_a_machine_without_a_gpu_is_healthy_and_that_is_one_sentence() -> None:
    if Path("/dev/nvidiactl").exists():
        pytest.skip("there is a GPU")
    code = (
        "import sys\n"
        "from otel_ddp.cli import main\n"
        "status = main(['doctor'])\n"
        "print(status, 'torch' in sys.modules)"
    )
    with Node() as node:
        told = finished(node.python(code)).splitlines()

    assert told[-1] == "0 False"
    assert [line for line in told if line.startswith("fail")] == []
    (gpus,) = (line for line in told if line.split()[1:2] == ["gpus"])
    assert gpus.startswith("ok    gpus         There is no NVIDIA driver library")
    assert any(line.startswith("ok    torch        torch ") for line in told)
    # Said while it is waited for, not among the answers.
    assert any(line.startswith("importing torch") for line in told)


def test_the_same_for_programs_and_what_failed_is_the_exit_status(
    place: Here, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "CHECKS", (doctor.python, doctor.journals))

    healthy = main(["doctor", "--json"]), json.loads(capsys.readouterr().out)
    place.directory.chmod(0o777)
    broken = main(["doctor", "--json"]), json.loads(capsys.readouterr().out)

    assert (healthy[0], healthy[1]["ok"]) == (0, True)
    assert (broken[0], broken[1]["ok"]) == (1, False)
    assert broken[1]["findings"][-1]["level"] == "fail"
    assert broken[1]["findings"][-1]["subject"] == "journals"


def test_a_check_that_raises_is_a_finding_and_the_next_one_follows() -> None:
    def broken(inputs: DoctorInputs) -> Iterator[Finding]:
        yield Finding("ok", "broken", "until here")
        raise KeyError("what")

    told = list(examine(DoctorInputs(), [broken, doctor.python]))

    assert [each.subject for each in told] == ["broken", "broken", "python"]
    assert told[0].sentence == "until here"
    assert told[1] == Finding("fail", "broken", "could not be checked: KeyError: 'what'")


def test_nothing_in_a_sentence_reaches_the_terminal_but_text(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "CHECKS", (doctor.variables,))
    os.environ["OTEL_DDP_\x1b[2J"] = "1"

    main(["doctor"])

    assert "\x1b" not in capsys.readouterr().out


# --- the installation


def test_a_package_that_cannot_be_imported_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)

    told = found(doctor.packages)

    assert "nvidia-ml-py" in the(told, "fail")
    assert "--force-reinstall 'nvidia-ml-py'" in the(told, "fail")
    assert "nvidia-ml-py" not in the(told, "ok")
    assert "prometheus-client" in the(told, "ok")


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("raise ImportError('libcudart.so.13: cannot open')", "libcudart.so.13: cannot open"),
        ("import os; os.abort()", "died of signal 6"),
        ("print('hello'); raise SystemExit(0)", "failed (it printed nothing)"),
    ],
)
def test_a_broken_torch_breaks_nothing_else(
    code: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)

    told = list(examine(DoctorInputs(), [doctor.torch, doctor.python]))

    assert levels(told) == ["fail", "ok"]
    assert why in told[0].sentence


def test_no_torch_at_all_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)

    assert "not installed" in the(found(doctor.torch), "warn")


@pytest.mark.parametrize(
    ("said", "level", "words"),
    [
        ({"build": "CPU only", "backends": ["gloo"]}, "warn", "uses none of the GPUs"),
        ({"build": "CUDA 13.2", "backends": ["gloo"]}, "warn", "without nccl"),
        ({"build": "CPU only", "backends": []}, "warn", "cannot train on several ranks"),
        ({"build": "CUDA 13.2", "backends": ["nccl"]}, "ok", "CUDA 13.2, backends: nccl"),
        ({"build": "CUDA 12.1", "backends": ["nccl"], "version": "2.3.1"}, "warn", "torch 2.4 or"),
    ],
)
def test_a_torch_that_does_not_suit_the_machine_is_said(
    said: dict[str, Any], level: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = json.dumps({"version": "2.9", **said})
    monkeypatch.setattr(installation, "_TORCH", f"print({told!r})")
    inputs = DoctorInputs()
    inputs.nvml = {"devices": [["0", "NVIDIA H100"]]}

    assert words in the(list(examine(inputs, [doctor.torch])), level)


def test_a_variable_with_a_slip_of_the_pen_is_named_with_the_one_that_is_meant() -> None:
    os.environ.update(
        OTEL_DDP_GROPU="a", OTEL_DDP_INHERITED_RUN="1:x", OTEL_DDP_RUN="b", OTEL_DDP_XYZZY="c"
    )

    told = found(doctor.variables)

    assert [each.sentence for each in told if each.level == "warn"] == [
        "OTEL_DDP_GROPU is not known and has no effect: is OTEL_DDP_GROUP meant?",
        "OTEL_DDP_XYZZY is not known and has no effect: docs/settings.md lists those that there "
        "are",
    ]
    assert "OTEL_DDP_RUN" in the(told, "ok")


def test_a_setting_that_means_nothing_is_said_and_the_others_hold() -> None:
    os.environ.update(
        OTEL_DDP_STALL_TIMEOUT_S="soon", OTEL_DDP_AGENT="maybe", OTEL_DDP_JOURNAL_BYTES="4M"
    )
    inputs = DoctorInputs()

    told = list(examine(inputs, [doctor.variables]))

    assert levels(told) == ["fail", "fail", "ok"]
    assert told[0].sentence.startswith("OTEL_DDP_AGENT must be one of auto, offline, external, off")
    assert told[1].sentence.startswith("OTEL_DDP_STALL_TIMEOUT_S must be a number of seconds")
    assert inputs.conf.journal_bytes == 4 << 20


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"OTEL_DDP_STRATEGY": "foo"}, "strategy must be"),
        ({"OTEL_DDP_STRATEGY": "1.5"}, "strategy must be"),
        ({"OTEL_DDP_RANK": "abc"}, "OTEL_DDP_RANK must be"),
        ({"OTEL_DDP_WORLD_SIZE": "0"}, "OTEL_DDP_WORLD_SIZE must be"),
        ({"RANK": "7", "WORLD_SIZE": "4"}, "The global rank must be below the world size"),
    ],
)
def test_what_stops_a_training_at_its_start_is_found_before(
    variables: dict[str, str], words: str
) -> None:
    os.environ.update(variables)

    assert the(found(doctor.variables), "fail").startswith(words)
    with pytest.raises(ConfigError, match=words):
        otel_ddp.init()


def test_a_standard_variable_that_is_passed_over_is_said_among_the_findings(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(settings, "_said", set())
    os.environ["OTEL_EXPORTER_PROMETHEUS_PORT"] = "many"

    told = found(doctor.variables)

    assert "OTEL_EXPORTER_PROMETHEUS_PORT" in the(told, "warn")
    assert the(told, "warn").endswith("the default, 9464, is used.")
    assert capsys.readouterr().err == ""


def test_each_signal_that_is_switched_off_is_among_what_is_set() -> None:
    os.environ.update(dict.fromkeys(("OTEL_TRACES_EXPORTER", "OTEL_LOGS_EXPORTER"), "none"))

    assert the(found(doctor.variables), "ok") == "set: OTEL_LOGS_EXPORTER, OTEL_TRACES_EXPORTER"


def test_an_attribute_that_is_no_pair_is_a_finding_and_nothing_else(
    receiver: Receiver, capfd: pytest.CaptureFixture[str]
) -> None:
    configure(receiver, "http/protobuf")
    os.environ["OTEL_RESOURCE_ATTRIBUTES"] = "a=b,s3cret, "

    told = found(doctor.variables) + found(doctor.collector)

    assert the(told, "warn") == (
        "OTEL_RESOURCE_ATTRIBUTES: entry 2 is not key=value and is left out; in a value, a comma "
        "is %2C"
    )
    assert capfd.readouterr().err == ""
    assert "s3cret" not in str(told)


def test_what_opentelemetry_complains_of_is_a_finding(capfd: pytest.CaptureFixture[str]) -> None:
    def check(inputs: DoctorInputs) -> Iterator[Finding]:
        logging.getLogger("opentelemetry.sdk.something").warning("odd: %s", 7)
        yield from ()

    assert found(check) == [Finding("warn", "check", "odd: 7")]
    assert capfd.readouterr().err == ""


def test_a_token_is_not_shown() -> None:
    os.environ["OTEL_EXPORTER_OTLP_HEADERS"] = "authorization=s3cret"

    told = found(doctor.variables)

    assert "OTEL_EXPORTER_OTLP_HEADERS" in the(told, "ok")
    assert "s3cret" not in str(told)


# --- the node


@pytest.fixture
def shown(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Boards:
    boards = Boards(tmp_path)
    os.environ.update(boards.environment(standin_library(tmp_path_factory)))
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "NVIDIA_VISIBLE_DEVICES"):
        os.environ.pop(name, None)
    return boards


def test_every_gpu_is_named(shown: Boards) -> None:
    boards = [h100(index) for index in range(8)]
    shown.write(boards)
    os.environ["CUDA_VISIBLE_DEVICES"] = "3,1"

    told = found(doctor.gpus)

    assert levels(told) == ["ok", "ok"]
    assert told[0].sentence == (
        f"NVIDIA driver 550.54.14, 8 GPUs: {boards[0].name} (0, 1, 2, 3, 4, 5, 6, 7)"
    )
    assert told[1].sentence.startswith("CUDA_VISIBLE_DEVICES=3,1 shows GPU 3, 1 to")


def test_parts_of_a_board_are_not_counted_as_boards(shown: Boards) -> None:
    shown.write([a100_mig(), h100(1)])

    sentence = the(found(doctor.gpus), "ok")

    assert "2 GPUs and 2 MIG instances: " in sentence
    assert "MIG 1g.5gb (0:1)" in sentence


def test_a_variable_that_hides_all_gpus_is_a_warning(shown: Boards) -> None:
    shown.write([h100()])
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"

    assert "shows no GPU" in the(found(doctor.gpus), "warn")


def children() -> set[str]:
    """The process ids of our own."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if stat.read_text().rpartition(")")[2].split()[1] == str(os.getpid()):
                found.add(stat.parent.name)
    return found


def test_a_driver_that_hangs_does_not_hold_the_doctor_up(shown: Boards) -> None:
    shown.write([h100()], hang=1)
    before = children()

    told = list(examine(DoctorInputs(nvml_s=0.5), [doctor.gpus, doctor.python]))

    assert levels(told) == ["fail", "ok"]
    assert "has not ended within 0.5 s" in told[0].sentence
    assert children() == before


def test_gpus_that_are_here_without_their_library_are_a_warning(
    shown: Boards, tmp_path: Path
) -> None:
    shown.write([], init=9)
    os.environ["NVIDIA_DRIVER_CAPABILITIES"] = "compute,video"

    without = found(doctor.gpus, dev=tmp_path)
    (tmp_path / "nvidiactl").touch()
    here = found(doctor.gpus, dev=tmp_path)

    assert levels(without) == ["ok"]
    assert levels(here) == ["warn", "warn"]
    assert "modprobe nvidia" in here[0].sentence
    assert "add `utility`" in here[1].sentence


def gpu(index: int, **labels: str) -> dict[str, Any]:
    return {"index": str(index), "name": "NVIDIA H100", "labels": labels, "processes": 0}


def inputs_with(*agents: dict[str, Any]) -> DoctorInputs:
    inputs = DoctorInputs()
    alive = [{"alive": True, "version": __version__, "pid": 7, **each} for each in agents]
    inputs.survey = {"agents": alive, "processes": []}
    inputs.nvml = {"missing": "none here"}
    return inputs


def test_each_gpu_is_told_with_who_uses_it() -> None:
    remark = "rank 1 also holds 300 MiB on GPU 0 (which rank 0 uses)"
    gpus = [gpu(0, run="a", rank="0"), gpu(1, run="a"), gpu(2, node="n")]

    told = list(examine(inputs_with({"gpus": gpus, "gpu_remarks": [remark]}), [doctor.owners]))

    assert the(told, "ok") == "GPU 0: rank 0, GPU 1: shared by run a, GPU 2: free"
    assert the(told, "warn") == remark


def test_an_agent_that_sees_no_gpu_where_there_is_one_is_told_of() -> None:
    missing = {"gpus": [], "gpu_remarks": ["There is no NVIDIA driver library here."]}
    inputs = inputs_with(missing)

    without = list(examine(inputs, [doctor.owners]))
    inputs.nvml = {"devices": [["0", "NVIDIA H100"]]}
    with_one = list(examine(inputs, [doctor.owners]))

    assert without == []
    assert "the agent shows no GPU" in with_one[0].sentence
    assert levels(with_one) == ["warn", "warn"]


@pytest.mark.parametrize("odd", [None, "text", 7, [7], {"a": 1}, [{"labels": 7}]], ids=repr)
def test_what_an_agent_never_wrote_stops_nothing(odd: Any) -> None:
    names = ("pid", "version", "scrape", "export", "remark", "gpus", "gpu_remarks")
    inputs = inputs_with(dict.fromkeys(names, odd))

    told = list(examine(inputs, [doctor.agent, doctor.owners, doctor.endpoint]))

    assert "could not be checked" not in str(told)
    assert told[-1].level == "fail"


def test_a_directory_that_others_can_enter_is_refused_with_the_cure(place: Here) -> None:
    place.directory.chmod(0o777)

    told = found(doctor.journals)

    assert f"(mode 0777): chmod 700 {place.directory}" in the(told, "fail")
    assert the(told, "fail").endswith("name another directory in OTEL_DDP_DIR")


def test_a_directory_of_our_own_making_that_is_open_will_be_closed(tmp_path: Path) -> None:
    own = tmp_path / "otel_ddp"
    own.mkdir()
    own.chmod(0o755)
    inputs = DoctorInputs()
    inputs.place = own

    told = list(examine(inputs, [doctor.journals]))

    assert any("the next process that starts closes it" in each.sentence for each in told)
    assert "fail" not in levels(told)
    assert not any("private" in each.sentence for each in told)
    assert own.stat().st_mode & 0o777 == 0o755


def test_a_directory_that_is_not_there_yet_is_not_made_by_looking(tmp_path: Path) -> None:
    told = found(doctor.journals, directory=str(tmp_path / "a" / "b"))

    assert "does not exist yet, and can be made" in told[0].sentence
    assert "fail" not in levels(told)
    assert list(tmp_path.iterdir()) == []


def test_a_file_or_a_link_where_the_directory_should_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path)

    for name in ("file", "link"):
        told = found(doctor.journals, directory=str(tmp_path / name))
        assert "is no directory" in the(told, "fail")
        assert the(told, "fail").endswith("name another directory with --dir")
    told = found(doctor.journals, directory=str(tmp_path / "file" / "below"))
    assert "cannot be written to (Not a directory)" in the(told, "fail")


def test_too_little_room_for_a_journal_fails(place: Here) -> None:
    os.environ["OTEL_DDP_JOURNAL_BYTES"] = "1000000G"

    assert "set OTEL_DDP_JOURNAL_BYTES lower" in the(found(doctor.journals), "fail")


def test_spool_and_post_mortems_that_find_no_place_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o755)
    os.environ["OTEL_DDP_SPOOL_DIR"] = str(tmp_path / "file")
    os.environ["OTEL_DDP_POSTMORTEM_DIR"] = str(tmp_path / "open")

    told = found(doctor.directories)

    assert [(each.level, each.subject) for each in told] == [
        ("fail", "spool"),
        ("fail", "post-mortem"),
    ]
    assert told[0].sentence.endswith("name another directory in OTEL_DDP_SPOOL_DIR")
    assert "(mode 0755)" in told[1].sentence


# --- the agent and its endpoint


def test_a_living_agent_answers() -> None:
    checks = [doctor.agent, doctor.endpoint, doctor.processes]
    with Node() as node:
        node.python(TRAINING)
        pid, scrape = node.agent()["pid"], node.agent()["scrape"]
        inputs = DoctorInputs(str(node.place.directory))

        told = list(examine(inputs, checks))

    assert levels(told)[:3] == ["ok", "ok", "ok"]
    assert told[0].sentence.startswith(f"pid {pid}, version {__version__}; OTLP: switched off")
    assert told[1].sentence.startswith(f"{scrape} answers with ")
    assert told[2].sentence == "/proc shows the processes of all users"


def test_ranks_that_the_agent_cannot_see_are_named() -> None:
    told = list(examine(inputs_with({"unseen": ["0", "3"]}), [doctor.processes]))

    assert the(told, "warn").startswith("the agent cannot see the process of rank 0, 3, so ")
    assert the(told, "warn").endswith(
        "it runs in another container; let them share process ids (shareProcessNamespace, hostPID, "
        "--pid=host)"
    )
    assert levels(list(examine(inputs_with({"unseen": []}), [doctor.processes])))[0] == "ok"


def test_a_directory_that_several_nodes_share_is_told_of() -> None:
    inputs = inputs_with({"unseen": ["1"]})
    inputs.host = "node-0"
    inputs.survey["processes"] = [
        {"host": host, "state": state}
        for host, state in (("node-0", "running"), ("node-1", "running"), ("node-2", "killed"))
    ]

    told = the(list(examine(inputs, [doctor.processes])), "warn")

    assert f"of several hosts (node-0, node-1) write to {inputs.place}. If these are nodes" in told
    assert "OTEL_DDP_DIR must name a directory that each node has for itself" in told


def test_two_processes_on_one_seat_are_told_of() -> None:
    inputs = inputs_with({})
    inputs.survey["doubled"] = [{"run": "sweep", "rank": 0, "pids": [7, 8]}]

    told = the(list(examine(inputs, [doctor.processes])), "warn")

    assert told.startswith("pids 7 and 8 all report as rank 0 of run sweep")


def test_an_agent_that_is_stopped_fails_within_the_time_limit() -> None:
    with Node() as node:
        node.python(TRAINING)
        pid = node.agent()["pid"]
        os.kill(pid, signal.SIGSTOP)
        try:
            told = found(doctor.endpoint, directory=str(node.place.directory), answer_s=0.3)
        finally:
            os.kill(pid, signal.SIGCONT)

    assert "does not answer (no answer in time)" in the(told, "fail")


@pytest.mark.parametrize(
    ("here", "how"), [(7, "with `kill 7`"), (8, "where it runs"), (0, "where it runs")]
)
def test_an_agent_of_another_version_and_its_remark_are_warnings(here: int, how: str) -> None:
    inputs = inputs_with({"version": "9.9", "remark": "port 9464 is taken", "pid_here": here})

    told = list(examine(inputs, [doctor.agent]))

    assert levels(told) == ["warn", "warn"]
    assert f"has version 9.9, this is {__version__}: end it {how}, and" in told[0].sentence
    assert told[1].sentence == "port 9464 is taken"


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"HTTP/1.0 404 no\r\n\r\n", "answers 404: does it belong to another program?"),
        (b"HTTP/1.0 200 ok\r\n\r\n{}}{ 1 2 3 4", "cannot be read"),
        (b"nonsense\r\n\r\n", "does not answer"),
    ],
)
def test_an_endpoint_that_is_somebody_elses_fails(answer: bytes, words: str) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        subprocess.Popen(
            [sys.executable, "-c", _SERVE, answer.hex()], stdin=server.fileno()
        ) as process,
    ):
        inputs = inputs_with({"scrape": f"http://127.0.0.1:{server.getsockname()[1]}/metrics"})

        told = list(examine(inputs, [doctor.endpoint]))
        process.kill()

    assert words in the(told, "fail")


_SERVE = """
import socket, sys
server = socket.socket(fileno=0)
while True:
    connection, _ = server.accept()
    connection.recv(4096)
    connection.sendall(bytes.fromhex(sys.argv[1]))
    connection.close()
"""


@pytest.mark.parametrize(
    ("mode", "level", "words"),
    [
        ("auto", "ok", "a training process starts one"),
        ("offline", "ok", "which sends nothing"),
        ("external", "warn", "start `otel-ddp agent`"),
        ("off", "warn", "nothing is exported"),
    ],
)
def test_where_no_agent_runs_it_is_said_who_starts_one(
    place: Here, mode: str, level: str, words: str
) -> None:
    os.environ["OTEL_DDP_AGENT"] = mode

    assert words in the(found(doctor.agent), level)


@pytest.mark.parametrize(
    ("mode", "level"), [("auto", "fail"), ("offline", "fail"), ("external", "warn")]
)
def test_an_agent_that_did_not_come_up_fails(mode: str, level: str) -> None:
    os.environ["OTEL_DDP_AGENT"] = mode
    inputs = inputs_with()
    inputs.survey["unserved"] = [{"directory": "/a", "agent_log": "no", "processes": 1}]

    told = the(list(examine(inputs, [doctor.agent])), level)

    assert told.startswith("a process runs, but no agent has started") == (level == "fail")


def test_a_port_that_is_taken_is_a_warning_and_a_strange_address_a_failure(place: Here) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        os.environ["OTEL_EXPORTER_PROMETHEUS_PORT"] = str(taken.getsockname()[1])
        told = found(doctor.endpoint)
    free = found(doctor.endpoint)
    os.environ["OTEL_EXPORTER_PROMETHEUS_HOST"] = "203.0.113.7"
    strange = found(doctor.endpoint)

    assert "the next free port" in the(told, "warn")
    assert levels(free) == ["ok"]
    assert "correct OTEL_EXPORTER_PROMETHEUS_HOST" in the(strange, "fail")


# --- the collector


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as each:
        yield each


def configure(receiver: Receiver, protocol: str, **how: Any) -> str:
    url = receiver.start_grpc(**how) if protocol == "grpc" else receiver.start_http(**how)
    os.environ.update(OTEL_EXPORTER_OTLP_ENDPOINT=url, OTEL_EXPORTER_OTLP_PROTOCOL=protocol)
    return url


@PROTOCOLS
def test_a_collector_gets_one_empty_request_of_each_signal(
    receiver: Receiver, protocol: str
) -> None:
    url = configure(receiver, protocol)
    os.environ["OTEL_EXPORTER_OTLP_HEADERS"] = "authorization=s3cret"

    told = found(doctor.collector)

    assert set(levels(told)) == {"ok"}
    assert told[0].sentence == f"{url} accepts metrics, traces and logs"
    assert [each.subject for each in told[1:]] == ([] if protocol == "grpc" else ["clocks"])
    assert [each.signal for each in receiver.requests] == ["metrics", "traces", "logs"]
    assert all(not each.message.ListFields() for each in receiver.requests)
    assert receiver.requests[0].headers["authorization"] == "s3cret"
    assert "s3cret" not in str(told)


@PROTOCOLS
@pytest.mark.parametrize(
    ("mode", "words"),
    [
        (401, "token rejected (OTEL_EXPORTER_OTLP_HEADERS); renew the token"),
        (403, "token rejected"),
        (404, "are not taken there; the server there is no OTLP receiver: correct the host"),
        (503, "cannot be sent"),
    ],
)
def test_what_a_collector_refuses_is_said_with_the_cure(
    receiver: Receiver, protocol: str, mode: int, words: str
) -> None:
    configure(receiver, protocol)
    receiver.set_mode(mode)

    failures = [each for each in found(doctor.collector) if each.level == "fail"]

    assert failures
    assert all(words in each.sentence for each in failures)
    assert receiver.attempts == ["metrics", "traces", "logs"]


class Site(BaseHTTPRequestHandler):
    """A program that speaks HTTP, and not OTLP."""

    status = 404
    healthy = "I am fine."

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.healthy.encode())

    def do_POST(self) -> None:
        self.send_response(self.status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """A test's output is not the place."""


@contextlib.contextmanager
def site(status: int = 404, healthy: str = Site.healthy) -> Iterator[str]:
    kind = type("Told", (Site,), {"status": status, "healthy": healthy})
    with ThreadingHTTPServer(("127.0.0.1", 0), kind) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def fails(url: str, protocol: str, **more: str) -> str:
    """The one failure of all signals."""
    more = {"ENDPOINT": url, "PROTOCOL": protocol, **more}
    os.environ.update({f"OTEL_EXPORTER_OTLP_{name}": text for name, text in more.items()})
    sentence = the(found(doctor.collector), "fail")
    assert sentence.startswith("metrics, traces and logs cannot be sent: ")
    return sentence.removeprefix("metrics, traces and logs cannot be sent: ")


@pytest.mark.parametrize("status", [404, 405, 501])
def test_a_program_that_is_no_collector_is_named_once_with_what_to_look_at(status: int) -> None:
    with site(status) as url:
        said = fails(url, "http/protobuf")

    assert said.startswith(f"{status} from {url}")
    assert said.endswith(
        "the server there is no OTLP receiver: correct the host, the port (usually 4318 for "
        "http/protobuf, 4317 for grpc) or the path in OTEL_EXPORTER_OTLP_ENDPOINT"
    )


def test_a_prometheus_is_told_to_take_metrics_only_and_where() -> None:
    with site(healthy="Prometheus Server is Healthy.\n") as url:
        said = fails(url, "http/protobuf")

    assert said.endswith(
        "a Prometheus answers there, which accepts metrics only: start it with "
        f"--web.enable-otlp-receiver, set OTEL_EXPORTER_OTLP_ENDPOINT={url}/api/v1/otlp, set "
        "OTEL_TRACES_EXPORTER=none, set OTEL_LOGS_EXPORTER=none"
    )


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
@pytest.mark.parametrize("scheme", ["", "https://"])
def test_grpc_without_tls_wants_http_in_its_address(
    receiver: Receiver, scheme: str, host: str
) -> None:
    address = receiver.start_grpc().replace("http://127.0.0.1", scheme + host)

    said = fails(address, "grpc")

    assert said == (
        f"{address} speaks gRPC without TLS; begin OTEL_EXPORTER_OTLP_ENDPOINT with http://"
    )


def test_the_other_protocol_is_named_with_the_variable(receiver: Receiver) -> None:
    http, grpc = receiver.start_http(), receiver.start_grpc()

    assert fails(http, "grpc") == (
        f"{http} speaks HTTP, not gRPC; set OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf, or name "
        "its port for gRPC"
    )
    assert fails(http.removeprefix("http://"), "grpc").endswith(
        "PROTOCOL=http/protobuf, and begin OTEL_EXPORTER_OTLP_ENDPOINT with http://, or name its "
        "port for gRPC"
    )
    assert fails(grpc, "http/protobuf") == (
        f"{grpc} speaks gRPC, not HTTP; set OTEL_EXPORTER_OTLP_PROTOCOL=grpc"
    )


def test_a_signal_with_an_address_of_its_own_is_advised_of_its_own_variable(
    receiver: Receiver,
) -> None:
    configure(receiver, "http/protobuf")
    os.environ["OTEL_EXPORTER_OTLP_METRICS_ENDPOINT"] = receiver.start_grpc()

    told = found(doctor.collector)

    assert the(told, "fail").startswith("metrics cannot be sent: ")
    assert the(told, "fail").endswith(
        " speaks gRPC, not HTTP; set OTEL_EXPORTER_OTLP_PROTOCOL=grpc"
    )
    with site(405) as url:
        os.environ["OTEL_EXPORTER_OTLP_METRICS_ENDPOINT"] = url
        assert the(found(doctor.collector), "fail").endswith("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT")


def test_of_a_name_with_two_addresses_the_one_that_answered_counts() -> None:
    # Which of them gRPC tells of is left to chance, for each signal anew.
    route = Route("localhost:4317", "grpc", "E", "P")
    nobody = Outcome("retry", "connection refused by localhost:4317")
    broken = Outcome("retry", "TLS to localhost:4317 failed: certificate verify failed")

    failures = checks_of_the_collector._failures(
        {"metrics": nobody, "traces": broken, "logs": nobody},
        dict.fromkeys(("metrics", "traces", "logs"), route),
    )

    assert failures == {(route, broken.why): ["metrics", "traces", "logs"]}


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (b"HTTP/1.0 400 no\r\n\r\nClient sent an HTTP request to an HTTPS server.\n", ""),
        (b"HTTP/1.1 404 no\r\n\r\n", "HTTP"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", ""),
        (b"\0\0\0\4\0\0\0\0\0", "gRPC"),
        (b"", ""),
    ],
)
def test_what_a_port_speaks_is_known_by_its_first_words(answer: bytes, expected: str) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        subprocess.Popen(
            [sys.executable, "-c", _SERVE, answer.hex()], stdin=server.fileno()
        ) as process,
    ):
        said = port_protocol.protocol_of(f"127.0.0.1:{server.getsockname()[1]}", 5.0)
        process.kill()

    assert said == expected


def test_a_port_that_says_nothing_costs_the_time_limit_and_an_odd_one_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert port_protocol.protocol_of(f"http://127.0.0.1:{silent.getsockname()[1]}", 0.05) == ""
    assert port_protocol.protocol_of("http://127.0.0.1:many", 5.0) == ""
    assert port_protocol.protocol_of("", 5.0) == ""


@PROTOCOLS
def test_a_collector_without_traces_is_a_warning(receiver: Receiver, protocol: str) -> None:
    configure(receiver, protocol)
    receiver.set_mode(404, "traces")

    told = found(doctor.collector)

    assert told[0].sentence.endswith("accepts metrics and logs")
    assert "traces cannot be sent" in the(told, "warn")
    assert "OTEL_TRACES_EXPORTER=none" in the(told, "warn")


@PROTOCOLS
def test_a_collector_that_is_not_there_is_refused_in_one_sentence(
    receiver: Receiver, protocol: str
) -> None:
    url = configure(receiver, protocol)
    receiver.close()

    told = found(doctor.collector)

    assert the(told, "fail").startswith(
        f"metrics, traces and logs cannot be sent: connection refused by {url}; nothing listens"
    )
    assert len(told) == 1


@PROTOCOLS
def test_a_collector_that_never_answers_costs_the_time_limit(
    receiver: Receiver, protocol: str
) -> None:
    configure(receiver, protocol)
    os.environ["OTEL_EXPORTER_OTLP_METRICS_TIMEOUT"] = "8000"
    receiver.set_mode("hang")

    told = found(doctor.collector, answer_s=0.3)

    assert "no answer from" in the(told, "fail")
    assert "within 0.3 s; the address is not routed" in the(told, "fail")


@PROTOCOLS
def test_tls_where_the_collector_has_none_is_named(receiver: Receiver, protocol: str) -> None:
    url = configure(receiver, protocol)
    os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = url.replace("http:", "https:")

    told = found(doctor.collector)

    assert levels(told) == ["fail"]
    assert "TLS" in told[0].sentence
    assert "with http://" in told[0].sentence


def test_a_certificate_that_has_expired_is_named(receiver: Receiver, tmp_path: Path) -> None:
    certificate, key = tmp_path / "certificate", tmp_path / "key"
    request, config = tmp_path / "request", tmp_path / "config"
    (tmp_path / "index").touch()
    (tmp_path / "serial").write_text("01")
    config.write_text(_AUTHORITY.format(tmp_path))
    for command in (
        f"req -new -newkey rsa:2048 -nodes -subj /CN=old -keyout {key} -out {request}",
        f"ca -batch -selfsign -config {config} -keyfile {key} -in {request} -out {certificate} "
        "-notext -startdate 20200101000000Z -enddate 20200102000000Z",
    ):
        subprocess.run(["openssl", *command.split()], check=True, capture_output=True)
    configure(receiver, "http/protobuf", tls=(certificate, key))
    os.environ["OTEL_EXPORTER_OTLP_CERTIFICATE"] = str(certificate)

    told = found(doctor.collector)

    assert "certificate has expired; renew the collector's certificate" in the(told, "fail")


_AUTHORITY = """
[ca]
default_ca = own
[own]
database = {0}/index
serial = {0}/serial
new_certs_dir = {0}
default_md = sha256
policy = any
x509_extensions = names
[any]
commonName = supplied
[names]
subjectAltName = IP:127.0.0.1
"""


def test_a_collector_of_another_time_is_a_warning(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def an_hour_ago(self: Any, timestamp: float | None = None) -> str:
        import time

        return formatdate(time.time() - 3600, usegmt=True)

    monkeypatch.setattr(BaseHTTPRequestHandler, "date_time_string", an_hour_ago)
    configure(receiver, "http/protobuf")

    told = found(doctor.collector)

    assert levels(told) == ["ok", "warn"]
    assert told[1].subject == "clocks"
    assert " s behind ours" in told[1].sentence
    assert 3598 <= int(told[1].sentence.split(" s behind")[0].split()[-1]) <= 3602


def test_no_collector_and_one_that_is_switched_off_are_fine() -> None:
    # With gRPC nobody looks at loopback's port, where one may happen to be.
    os.environ["OTEL_EXPORTER_OTLP_PROTOCOL"] = "grpc"
    none = found(doctor.collector)
    for name in ("METRICS", "TRACES", "LOGS"):
        os.environ[f"OTEL_{name}_EXPORTER"] = "none"
    off = found(doctor.collector)

    assert "none is configured" in the(none, "ok")
    assert "switched off" in the(off, "ok")


def test_offline_no_collector_is_asked(receiver: Receiver) -> None:
    configure(receiver, "http/protobuf")
    os.environ.update(OTEL_DDP_AGENT="offline", OTEL_DDP_SPOOL_DIR="/a b")

    told = found(doctor.collector)

    assert "nothing is sent before `otel-ddp replay '/a b'`" in the(told, "ok")
    assert receiver.attempts == []


def test_a_damaged_header_is_said_without_its_text(receiver: Receiver) -> None:
    configure(receiver, "http/protobuf")
    os.environ["OTEL_EXPORTER_OTLP_HEADERS"] = "s3cret"

    told = found(doctor.collector)

    assert "entry 1 is not name=value" in the(told, "warn")
    assert "s3cret" not in str(told)
