"""Secrets that a program hands over, or has about it, are found nowhere that they should not be."""

from __future__ import annotations

import json
import sys
import urllib.request
from pathlib import Path

from node import Node, until
from otel_ddp.journal import layout
from otlp_receiver import Receiver

CANARY = "canary7x"
PROGRAM = f"""
import argparse, sys
import otel_ddp
from otel_ddp.identity import lead

parser = argparse.ArgumentParser()
parser.add_argument("--api_key")
parser.add_argument("--data")
parser.add_argument("--token")
config = {{
    "argv": sys.argv,
    "pairs": [("token", "{CANARY}13")],
    "command": "curl -u me:{CANARY}14 -H 'X-Token: {CANARY}15' --secret {CANARY}16",
    "store": "SharedAccessSignature={CANARY}17",
    **vars(parser.parse_args()),
    "db": {{"password": "{CANARY}1", "url": "postgres://me:{CANARY}2@db/x"}},
    "secrets": ["{CANARY}3"],
    "lr": 0.25,
}}
rank = {{"global_rank": 0, "local_rank": 0, "world_size": 2}}
with otel_ddp.init(group="g", run="canaries", config=config, **rank) as run:
    # As ranks on two nodes have agreed on it: for the agent of the node, and for nobody else.
    agreed = lead.propose(["192.0.2.9"]).as_json()
    run._records.recorder.documents.facts({{lead.FACT: agreed}})
    print(agreed["secret"], flush=True)
    run.log({{"loss": 0.5}}, step=1)
    otel_ddp.event("upload", to="https://me:{CANARY}4@host/x", token="{CANARY}5")
    with run.span("load", path="s3://me:{CANARY}6@bucket/x"):
        pass
    said = r'password="a\\"{CANARY}12" argv: ' + str(sys.argv)
    run.alert("login with --password {CANARY}11 failed", said)
    try:
        # The traceback quotes this line.
        int("x", **dict(password="{CANARY}18"))
    except TypeError:
        raise RuntimeError(
            "refused by https://me:{CANARY}7@host/x?sig={CANARY}8, password={CANARY}9"
        )
"""


def everything(node: Node, receiver: Receiver) -> str:
    """All that is shown, sent and kept of a run that has failed, but for its journals."""
    until(lambda: node.value("training_state") == 3.0, "the end to be told")
    until(lambda: any((node.root / "history").glob("postmortem-*.json")), "the post-mortem")
    until(lambda: node.page("runs")["runs"], "the history")
    endpoint = node.agent()["scrape"].removesuffix("/metrics")
    shown = [
        urllib.request.urlopen(endpoint + path, timeout=300).read().decode()
        for path in ("/metrics", "/", "/healthz")
    ]
    shown += [str(node.page(path, run="canaries", group="g")) for path in ("runs", "run", "now")]
    report = ["report", "g/canaries", "--out", str(node.root / "report")]
    shown += [
        node.run(f"from otel_ddp.cli import main; main({command})")
        for command in (["status"], ["status", "--json"], report)
    ]
    shown.append(json.dumps(node.agent()))
    node.stop_agent()
    shown += [str(each) for each in (*receiver.points(), *receiver.spans(), *receiver.logs())]
    # The agent's file and log, the spool, histories, post-mortems, the report.
    files = [path.read_bytes() for path in node.root.rglob("*") if path.is_file()]
    kept = [each.decode("latin-1") for each in files if not each.startswith(layout.MAGIC)]
    return "\n".join([*shown, *kept])


def test_neither_secrets_of_a_program_nor_that_of_a_lead_leave_the_node(
    tmp_path: Path,
) -> None:
    with Receiver() as receiver, Node(MY_TOKEN=f"{CANARY}-env") as node:
        node.export_to(receiver.start_http())
        node.env["OTEL_EXPORTER_OTLP_HEADERS"] = f"authorization=Bearer%20{CANARY}-header"
        arguments = ("--api_key", f"{CANARY}-key", "--data", f"https://me:{CANARY}-data@host/x")
        # A file, of which a traceback quotes the lines.
        program = tmp_path / "program.py"
        program.write_text(PROGRAM)
        process = node.start(sys.executable, program, *arguments, "--token", f"{CANARY}-token")
        secret = process.communicate(timeout=300)[0].partition("\n")[0]
        journals = [path.read_bytes().decode("latin-1") for path in node.place.journals()]

        found = everything(node, receiver)

    assert process.returncode == 1
    # What is looked through is what it should be.
    for word in ("[hidden]", "config_lr", "refused by https://host/x", "s3://bucket/x", "login"):
        assert word in found, word
    assert CANARY not in "\n".join([*journals, found])
    assert len(secret) == 64
    for hidden in (secret, bytes.fromhex(secret).decode("latin-1")):
        assert hidden not in found
