"""otel-ddp stacks: shows the Python stacks of ranks, without stopping them.

Ranks of this node answer without an agent. Ranks of other nodes are asked through this node's
agent, if it leads the run, i.e. judges its ranks on all nodes.
"""

from __future__ import annotations

import argparse
import http.client
from collections.abc import Collection, Iterator, Mapping
from typing import Any
from urllib.parse import urlencode, urlsplit

from otel_ddp import files, plain, settings
from otel_ddp.agent.judge.answers import AskedProcess, ask
from otel_ddp.agent.serve.server import NoToken, find_token
from otel_ddp.cli.command import add_directory_option, cell, find_places, show
from otel_ddp.history.page.http import ASKED
from otel_ddp.identity import addresses
from otel_ddp.journal.place import Place
from otel_ddp.journal.process_state import ProcessState
from otel_ddp.journal.survey import survey

# How long to wait for the stacks of a rank on another node.
_ELSEWHERE_S = 15.0
_MOST_BYTES = 64 * 1024 * 1024

SCHEMA = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--rank",
        type=int,
        action="append",
        help="only this rank; may be given several times. On rank 0's node also a rank of another "
        "node, of which only the training thread is shown",
    )
    parser.add_argument("--json", action="store_true", help="the same as JSON, for programs")
    add_directory_option(parser)


def run(options: argparse.Namespace) -> int:
    found = document(options.dir, options.rank or ())
    rows = found["processes"]
    status = show(found, lines(found), as_json=options.json)
    return status or (0 if rows and not any(each["why"] for each in rows) else 1)


def document(directory: str, ranks: Collection[int]) -> dict[str, Any]:
    """The stacks of these ranks, or of all processes of this node; raises ConfigError."""
    conf, places, missing = find_places(directory)
    rows = [*map(_row_here, ask((path for each in places for path in each.journals()), ranks))]
    if elsewhere := {*ranks} - {each["rank"] for each in rows}:
        rows += _of_other_nodes(conf, places, elsewhere)
    which = "no such rank" if ranks else "no rank"
    why = f"{which} runs on this node" + (f": {missing}" if missing else "")
    return {
        "schema": SCHEMA,
        "processes": rows,
        "why": "" if rows else why,
        "look": [] if rows else survey(places).looks(),
    }


def _row(
    process: AskedProcess | ProcessState, node: str, answer: Mapping[str, Any], **more: str
) -> dict[str, Any]:
    """The answer on one process, as JSON. *node*: the node of the process; empty for this node."""
    return {
        "group": str(process.group or ""),
        "run": str(process.run or ""),
        "node": node,
        "rank": process.rank,
        "pid": process.pid,
        "state": "",
        "why": str(answer.get("why") or ""),
        "advice": "",
        "threads": plain.list_of(dict, answer.get("threads")),
        **more,
    }


def _row_here(process: AskedProcess) -> dict[str, Any]:
    advice = ""
    # Recommend py-spy only if the kernel confirms that this process lives. Otherwise its pid may
    # belong to another process by now.
    if process.why_no_answer and process.evidence.kernel:
        advice = (
            f"from outside: `py-spy dump --nonblocking --pid {process.pid}` (pip install py-spy), "
            "as root, or in a container with the capability SYS_PTRACE"
        )
    return _row(process, "", process.to_json(), state=process.state, advice=advice)


def _of_other_nodes(
    conf: settings.Settings, places: list[Place], ranks: Collection[int]
) -> Iterator[dict[str, Any]]:
    headers = {ASKED: "page", **_credentials(conf.scrape_token_file)}
    for place in places:
        living = [each for each in survey([place]).processes if not each.ended]
        for each in living:
            if each.rank not in ranks or (place.directory / each.journal).exists():
                continue
            query = {"group": each.group, "run": each.run, "rank": str(each.rank)}
            found = _ask_agent(place, f"/api/stacks?{urlencode(query)}", headers)
            if isinstance(found, str):
                yield _row(each, each.node, {"why": found})
                continue
            rows = plain.list_of(dict, found.get("processes"))
            own = (row for row in rows if row.get("rank") == each.rank)
            yield _row(each, each.node, next(own, {"why": "no answer"}))


def _credentials(named: str) -> Mapping[str, str]:
    """The header with the token of OTEL_DDP_SCRAPE_TOKEN_FILE."""
    try:
        token = find_token(named, "127.0.0.1").decode()
    except (NoToken, ValueError):
        token = ""  # the agent reports the problem with the file
    return {"Authorization": f"Bearer {token}"} if token else {}


def _ask_agent(place: Place, path: str, headers: Mapping[str, str]) -> Mapping[str, Any] | str:
    """The answer of the agent that serves this place, or a sentence on why there is none.

    Does not use urllib: it could send the request to a proxy, and the token to another server to
    which the answer redirects.
    """
    if not place.agent_is_alive():
        return "no agent runs here"
    if not (base := addresses.page(place)):
        return "the agent has no endpoint: `otel-ddp doctor` says why"
    connection = http.client.HTTPConnection(urlsplit(base).netloc, timeout=_ELSEWHERE_S)
    try:
        connection.request("POST", path, headers=dict(headers))
        answer = connection.getresponse()
        status, body = answer.status, answer.read(_MOST_BYTES)
        found = files.parse_json(body) if status == http.client.OK else None
    except (OSError, http.client.HTTPException, ValueError) as error:
        return f"the agent at {base} does not answer ({error})"
    finally:
        connection.close()
    if status == http.client.UNAUTHORIZED:
        return f"{base} wants a token: set OTEL_DDP_SCRAPE_TOKEN_FILE as its agent has it"
    if not isinstance(found, dict):
        return f"the agent at {base} answers {status}: is it of another version?"
    return found


def lines(found: Mapping[str, Any]) -> Iterator[str]:
    """The document as lines for a terminal."""
    for each in found["processes"]:
        yield (
            f"rank {cell(each['rank'], '?')}, run {cell(each['run'])}"
            + (f", group {cell(each['group'])}" if each["group"] else "")
            + f", pid {each['pid']}"
            + (f" on {cell(each['node'])}" if each["node"] else "")
            + (f": {each['state']}" if each["state"] else "")
        )
        for thread in each["threads"]:
            yield f"  thread {cell(thread.get('name'), '?')}"
            for frame in plain.list_of(dict, thread.get("frames")):
                at = f"{cell(frame.get('file'))}:{cell(frame.get('line'))}"
                yield f"    {cell(frame.get('function'))} ({at})"
        yield from (f"  {cell(each[key])}" for key in ("why", "advice") if each[key])
        yield ""
    yield from filter(None, (cell(why) for why in (found["why"], *found["look"])))
