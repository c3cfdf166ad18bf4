"""The findings of otel-ddp doctor: real agents, real sockets, and broken installations."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from node import Node, finished
from otel_ddp import __version__
from otel_ddp.cli import doctor, main
from otel_ddp.cli.doctor import Check, Finding, Inputs, Results, examine
from otel_ddp.journal.survey import Survey
from otlp_receiver import Receiver

TRAINING = "import otel_ddp\nrun = otel_ddp.init(run='mine')\nrun.log({'loss': 1.0})\ninput()"


def found(check: Check, **inputs: Any) -> list[Finding]:
    return list(examine(Inputs(**inputs), [check]))


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
        lines = finished(node.python(code)).splitlines()

    assert lines[-1] == "0 False"
    assert [line for line in lines if line.startswith("fail")] == []
    assert any(line.startswith("ok    torch      torch ") for line in lines)


def test_a_failure_is_in_the_exit_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "CHECKS", (doctor.python, doctor.journals))
    (tmp_path / "file").touch()

    assert main(["doctor", "--dir", str(tmp_path / "file")]) == 1

    _, refused, _, sums = capsys.readouterr().out.splitlines()
    assert refused.startswith("fail  journals   OTEL_DDP_DIR or --dir must be a directory")
    assert sums == "1 failed, 0 to look at."


def test_a_named_directory_is_not_made(tmp_path: Path) -> None:
    sentence = the(found(doctor.journals, directory=str(tmp_path / "typo")), "warn")

    assert sentence == f"{tmp_path}/typo does not exist: nothing has recorded there yet"
    assert list(tmp_path.iterdir()) == []


def test_a_check_that_raises_is_a_finding_and_the_next_one_follows() -> None:
    def broken(inputs: Inputs) -> Results:
        yield "ok", "until here"
        raise KeyError("what")

    findings = list(examine(Inputs(), [broken, doctor.python]))

    assert [each.subject for each in findings] == ["broken", "broken", "python"]
    assert findings[0].sentence == "until here"
    assert findings[1] == Finding("fail", "broken", "could not be checked: KeyError: 'what'")


# --- the installation


def test_a_torch_that_is_too_old_or_missing_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    described = tmp_path / "torch-2.3.1.dist-info"
    described.mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    (described / "METADATA").write_text("Name: torch\nVersion: 2.3.1\n")

    old = found(doctor.torch)
    monkeypatch.setattr(sys, "path", [])
    missing = found(doctor.torch)

    assert "torch 2.4 or" in the(old, "warn")
    assert "pip install 'torch>=2.4'" in the(missing, "warn")


def test_each_variable_that_a_training_would_refuse_is_a_failure() -> None:
    wrong = {"OTEL_DDP_AGENT": "maybe", "OTEL_DDP_LEAD": "b", "OTEL_DDP_STRATEGY": "foo"}

    said = [each for each in found(doctor.variables, env=wrong) if each.level == "fail"]

    assert len(said) == len(wrong)
    assert [name for name in wrong if name not in str(said)] == []


def test_that_nothing_is_recorded_is_a_warning() -> None:
    off = found(doctor.variables, env={"OTEL_SDK_DISABLED": "true"})

    assert "nothing is recorded" in the(off, "warn")


# --- the node


def inputs_with(*agents: dict[str, Any], **more: Any) -> Inputs:
    inputs = Inputs(**more)
    alive = [{"alive": True, "version": __version__, "pid": 7, **each} for each in agents]
    inputs.survey = Survey(agents=alive)
    return inputs


def of_agent(*agents: dict[str, Any]) -> list[Finding]:
    served = [{"scrape": "http://h:1", **each} for each in agents]
    return list(examine(inputs_with(*served), [doctor.agent]))


# --- the agent


def test_a_living_agent_is_well_and_one_that_is_stopped_is_not() -> None:
    with Node() as node:
        node.python(TRAINING)
        pid, place = node.agent()["pid"], node.place

        findings = found(doctor.agent, directory=str(place.directory))
        with node.agent_stopped(pid):
            os.utime(place.agent_file, (0, 0))
            stopped = found(doctor.agent, directory=str(place.directory))

    assert levels(findings) == ["ok"]
    assert findings[0].sentence.startswith(f"pid {pid}, version {__version__}; OTLP: switched off")
    assert "has not moved" in the(stopped, "warn")


@pytest.mark.parametrize(
    ("agent", "level", "words"),
    [
        ({"scrape": None}, "fail", "the agent has no endpoint"),
        ({"unseen": ["0", "3"]}, "warn", "the agent cannot see the process of rank 0, 3, so "),
        ({"remark": "port 9464 is taken"}, "warn", "port 9464 is taken"),
        ({"version": "9.9"}, "warn", f"pid 7 has version 9.9, this is {__version__}: end it"),
    ],
)
def test_what_is_wrong_with_an_agent_is_a_finding(
    agent: dict[str, Any], level: str, words: str
) -> None:
    assert words in the(of_agent(agent), level)


def test_an_agent_that_did_not_start_fails() -> None:
    inputs = inputs_with()
    inputs.survey.unserved.append({"directory": "/a", "agent_log": "no", "processes": 1})

    sentence = the(list(examine(inputs, [doctor.agent])), "fail")

    assert sentence.startswith("a process runs, but no agent has started")


# --- the collector


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as each:
        yield each


def configure(receiver: Receiver, protocol: str, **how: Any) -> str:
    url = receiver.start_grpc(**how) if protocol == "grpc" else receiver.start_http(**how)
    os.environ.update(OTEL_EXPORTER_OTLP_ENDPOINT=url, OTEL_EXPORTER_OTLP_PROTOCOL=protocol)
    return url


@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
def test_a_collector_gets_one_empty_request_of_each_signal(
    receiver: Receiver, protocol: str
) -> None:
    url = configure(receiver, protocol)
    os.environ["OTEL_EXPORTER_OTLP_HEADERS"] = "authorization=s3cret"

    findings = found(doctor.collector)

    assert set(levels(findings)) == {"ok"}
    assert [each.sentence for each in findings] == [
        f"{url} accepts {signal}" for signal in ("metrics", "traces", "logs")
    ]
    assert [each.signal for each in receiver.requests] == ["metrics", "traces", "logs"]
    assert all(not each.message.ListFields() for each in receiver.requests)
    assert receiver.requests[0].headers["authorization"] == "s3cret"
    assert "s3cret" not in str(findings)


def test_a_collector_that_takes_less_is_reported_with_its_own_words(receiver: Receiver) -> None:
    configure(receiver, "http/protobuf")
    receiver.set_mode(401, "metrics")
    receiver.set_mode(404, "traces")

    findings = found(doctor.collector)

    assert levels(findings) == ["fail", "warn", "ok"]
    assert "token rejected (OTEL_EXPORTER_OTLP_HEADERS)" in findings[0].sentence
    assert "correct OTEL_EXPORTER_OTLP_ENDPOINT" in findings[0].sentence
    assert "set OTEL_TRACES_EXPORTER=none" in findings[1].sentence
    # A collector without metrics is of no use.
    receiver.set_mode(404)
    assert levels(found(doctor.collector)) == ["fail", "warn", "warn"]


def test_a_collector_that_does_not_answer_is_not_waited_for_as_long_as_an_export(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_ANSWER_S", 2.0)
    configure(receiver, "http/protobuf")
    os.environ["OTEL_EXPORTER_OTLP_TRACES_TIMEOUT"] = "20000"
    receiver.set_mode("hang", "traces")
    began_s = time.monotonic()

    assert levels(found(doctor.collector)) == ["ok", "fail", "ok"]
    assert time.monotonic() - began_s < 15


def test_where_nothing_is_to_be_sent_no_collector_is_contacted(receiver: Receiver) -> None:
    none = found(doctor.collector)
    configure(receiver, "http/protobuf")
    os.environ.update(OTEL_DDP_AGENT="offline", OTEL_DDP_SPOOL_DIR="/a b")
    offline = found(doctor.collector)
    for name in ("METRICS", "TRACES", "LOGS"):
        os.environ[f"OTEL_{name}_EXPORTER"] = "none"
    off = found(doctor.collector)

    assert "OTEL_EXPORTER_OTLP_ENDPOINT names no collector" in the(none, "ok")
    assert "nothing is sent before `otel-ddp replay '/a b'`" in the(offline, "ok")
    assert "switched off" in the(off, "ok")
    assert receiver.attempts == []
