"""An artifact of a process that has ended, and of an agent that was killed while it read it."""

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
    run.artifact("s3://bucket/data", type="dataset", direction="input")
"""


def attributes(record: Any) -> dict[str, Any]:
    return {
        pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in record.attributes
    }


def test_the_next_agent_reads_stores_and_tells_of_what_the_killed_one_left() -> None:
    content = b"weights"
    digest = sha256(content).hexdigest()
    with Node() as node, Receiver() as receiver:
        node.export_to(receiver.start_http())
        stored = node.root / "store"
        code = f"import os; os.chdir({str(node.root)!r}){TOLD}"
        # The first agent waits for a file that is not there yet.
        node.run(code, OTEL_DDP_ARTIFACTS=str(stored))
        assert receiver.wait_for(lambda r: told(r).keys() == {"file waiting", "s3 complete"})
        node.kill_agent()
        assert not stored.exists()
        (node.root / "model.pt").write_bytes(content)

        again = "import otel_ddp; otel_ddp.init(run='next').finish()"
        node.run(again, OTEL_DDP_ARTIFACTS=str(stored))
        until(lambda: node.value("otel_ddp_artifacts_waiting") == 0, "all to be read")
        size = node.series("training_artifact_size_bytes")
        # Only series of ranks that this agent knows, and those of what it has read.
        assert [(found["name"], value) for found, value in size] == [("model.pt", len(content))]
        assert receiver.wait_for(lambda r: "file complete" in told(r) and saved(r) != [])
        found = told(receiver)
        first, data, last = (found[how] for how in ("file waiting", "s3 complete", "file complete"))
        (span,) = saved(receiver)
        spans = {each.name: each for each in receiver.spans()}

    where = f"file://{node.root}/model.pt"
    copy = f"r/model.pt/{digest[:16]}/model.pt"
    assert (first["artifact.state"], first["artifact.uri"]) == ("waiting", where)
    assert (data["artifact.state"], data["artifact.uri"]) == ("complete", "s3://bucket/data")
    assert "artifact.digest" not in data
    assert (
        last.items()
        >= {
            "artifact.state": "complete",
            "artifact.name": "model.pt",
            "artifact.type": "model",
            "artifact.direction": "output",
            "artifact.size": len(content),
            "artifact.digest": f"sha256:{digest}",
            "artifact.uri": f"file://{stored}/{copy}",
            "artifact.origin": where,
            "artifact.metadata.loss": 0.5,
            "step": 7,
            "run": "r",
            "rank": "0",
        }.items()
    )
    assert span.parent_span_id == spans["save"].span_id
    assert span.trace_id == spans["save"].trace_id
    assert attributes(span)["artifact.digest"] == f"sha256:{digest}"


def told(receiver: Receiver) -> dict[str, dict[str, Any]]:
    """Where it lies, and its state; a record that was not committed comes again."""
    records = [each for each in receiver.logs() if each.event_name == catalog.ARTIFACT_EVENT]
    found = map(attributes, records)
    return {
        f"{each['artifact.uri'].partition(':')[0]} {each['artifact.state']}": each for each in found
    }


def saved(receiver: Receiver) -> list[Any]:
    return [each for each in receiver.spans() if each.name == catalog.ARTIFACT_EVENT]
