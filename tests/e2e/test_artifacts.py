"""An artifact of a process that has ended: read and stored by the agent, which stays for it."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

from node import Node, until
from otel_ddp.vocabulary import catalog
from otlp_receiver import Receiver

TOLD = """
import otel_ddp
with otel_ddp.init(group="g", run="r", project="p") as run:
    run.log({"loss": 1.0}, step=7)
    with run.span("save"):
        run.artifact("model.pt", type="model", metadata={"loss": 0.5})
    run.artifact("gone.pt")
    run.artifact("s3://bucket/data", type="dataset", direction="input")
"""


def attributes(record: Any) -> dict[str, Any]:
    return {
        pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in record.attributes
    }


def test_an_agent_reads_and_stores_what_a_run_has_named_before_it_leaves() -> None:
    content = b"weights"
    digest = sha256(content).hexdigest()
    with Node(OTEL_DDP_LINGER_S="2") as node, Receiver() as receiver:
        node.export_to(receiver.start_http())
        stored = node.root / "store"
        (node.root / "model.pt").write_bytes(content)
        code = f"import os; os.chdir({str(node.root)!r}){TOLD}"

        node.run(code, OTEL_DDP_ARTIFACTS=str(stored))

        assert receiver.wait_for(lambda r: len(_records(r)) == 5)
        until(lambda: not node.place.agent_is_alive(), "the agent to leave")
        records = _records(receiver)
        spans = {each.name: each for each in receiver.spans()}
        assert (stored / f"r/model.pt/{digest[:16]}/model.pt").read_bytes() == content
        sizes = [point for point in receiver.points() if point.metric == "training.artifact.size"]

    named, gone, data, read, problem = sorted(records, key=_when)
    where = f"file://{node.root}/model.pt"
    assert attributes(named)["artifact.uri"] == where
    assert (
        attributes(read).items()
        >= {
            "artifact.name": "model.pt",
            "artifact.type": "model",
            "artifact.direction": "output",
            "artifact.size": len(content),
            "artifact.digest": digest,
            "artifact.uri": f"file://{stored}/r/model.pt/{digest[:16]}/model.pt",
            "artifact.metadata.loss": 0.5,
            "step": 7,
            "run": "r",
            "rank": "0",
        }.items()
    )
    assert {each.span_id for each in (named, read)} == {spans["save"].span_id}
    assert attributes(problem)["artifact.problem"] == "No such file or directory"
    assert (problem.severity_text, gone.severity_text) == ("WARN", "INFO")
    assert data.body.string_value == "input data (dataset): s3://bucket/data"
    assert {(each.attributes["name"], each.value) for each in sizes} == {("model.pt", 7.0)}


def _records(receiver: Receiver) -> list[Any]:
    return [each for each in receiver.logs() if each.event_name == catalog.ARTIFACT_EVENT]


def _when(record: Any) -> tuple[bool, int]:
    """Those of the run first, and then those of the agent."""
    found = attributes(record)
    return "artifact.digest" in found or "artifact.problem" in found, record.time_unix_nano
