"""Answers the requests of a browser with the page, or its data as JSON. Opens no socket."""

from __future__ import annotations

import gzip
import re
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from otel_ddp import errors, files
from otel_ddp.history import compare, directory
from otel_ddp.history.newest_attempt import is_silent
from otel_ddp.history.page import answers, http, runs, static_files
from otel_ddp.history.page.http import Answer, Question, Refused
from otel_ddp.history.page.runs import Runs
from otel_ddp.history.reader import Unreadable
from otel_ddp.journal.survey import Survey
from otel_ddp.vocabulary.words import ENDED_STATES

# All these paths return the same page, whose script selects the view by the path.
_VIEWS = re.compile(r"/(runs|compare|now|run(/.*)?)?")
# Requests that need no histories, so they are answered even while the disk hangs.
_WITHOUT_DISK = ("now", "stacks")
# An answer is compressed if it has more bytes than this.
_PACKED_FROM = 4096
HIDDEN = (
    "This page is shown to the user of the agent and to root on this node, and to whoever has "
    "the token of OTEL_DDP_SCRAPE_TOKEN_FILE."
)
NO_TOKEN = (
    "Runs are changed with the token of OTEL_DDP_SCRAPE_TOKEN_FILE alone: type it, or set the "
    "variable for the agent."
)
# The texts of a run that a user may change, and their greatest length.
_TEXTS, _LONGEST = ("name", "tags"), 500

AskStacks = Callable[[str, str, str], list[dict[str, Any]]]
"""Takes group, run and rank (empty: all ranks); returns processes with threads and frames."""
_NOTHING = Survey()


class App:
    """The page of one folder of histories. Thread-safe."""

    def __init__(
        self,
        folder: Path,
        *,
        ours: bool = False,
        disk_hangs: Callable[[], bool] = lambda: False,
        live: Callable[[], Survey] | None = None,
        ask_stacks: AskStacks | None = None,
    ) -> None:
        """*ours*: True to read the folder only while no other user can write there.

        *disk_hangs*: returns whether the disk of the folder hangs. *live*: returns the agent's
        state; None if no agent serves the page.
        """
        self._runs = Runs(folder, ours)
        self._disk_hangs = disk_hangs
        self._live = live
        self._ask_stacks = ask_stacks
        self._ours = ours

    def answer(self, question: Question) -> Answer:
        """The answer to a request. Never raises."""
        began_s = time.thread_time()
        status, headers, body = self._answer(question)
        extra = {}
        takes = "gzip" in question.headers.get("accept-encoding", "")
        if takes and len(body) > _PACKED_FROM:
            body = gzip.compress(body, 1, mtime=0)
            extra["Content-Encoding"] = "gzip"
        # The CPU time of this answer. The page polls less often if its answers are expensive.
        extra["Server-Timing"] = f"cpu;dur={(time.thread_time() - began_s) * 1000:.1f}"
        return Answer(status, {**extra, **headers}, body)

    def _answer(self, question: Question) -> Answer:
        path = question.path
        if path.startswith("/api/"):
            try:
                return self._api(path.removeprefix("/api/"), question)
            except (Refused, Unreadable) as why:
                return http.as_json(getattr(why, "status", 500), {"error": str(why)})
        if _VIEWS.fullmatch(path):
            page, policy = static_files.served()
            kind = {"Content-Type": "text/html; charset=utf-8"}
            return Answer(200, {**kind, "Content-Security-Policy": policy}, page.encode())
        return http.as_text(404, "try /, /metrics or /healthz\n")

    # -- the API

    def _api(self, path: str, question: Question) -> Answer:
        if not question.is_private():
            raise Refused(403, HIDDEN)
        # These requests have side effects, so only our page and command may send them.
        posts = {"stacks": self._stacks, "change": self._change}
        if path in posts:
            if question.method != "POST":
                raise Refused(405, "this request takes POST")
            http.check_post(question.headers)
        elif question.method not in ("GET", "HEAD"):
            raise Refused(405, "only GET is answered here")
        # While the disk hangs, reading a history would block this thread, so none is read.
        hangs = path not in _WITHOUT_DISK and self._disk_hangs()
        if path == "runs":
            rows, faults = ([], []) if hangs else self._runs.rows()
            return http.as_json(200, self._list(rows, faults))
        if hangs:
            raise Refused(503, "The disk of the histories does not answer.")
        if path == "postmortem":
            name = question.text("name")
            text = directory.postmortem(self._runs.folder, name) if self._may_read() else None
            if text is None:
                raise Refused(404, f"there is no post-mortem {name[:200]!r}")
            return http.as_text(200, text)
        documents = {**posts, "now": self._now, "compare": self._compared}
        if path in documents:
            return http.as_json(200, documents[path](question))
        return self._of_run(path, question)

    def _of_run(self, name: str, question: Question) -> Answer:
        with self._runs.opened(question.group, question.text("run")) as run:
            if name == "run":
                found = runs.head(run, self._now_known())
            elif name == "ranks":
                found = runs.ranks(run, self._now_known())
            elif name in answers.ANSWERS:
                found = answers.ANSWERS[name](run, question)
            elif name == "postmortems":
                where = self._runs.folder, run.group, run.name
                found = {name: directory.postmortems(*where) if self._may_read() else []}
            else:
                raise Refused(404, f"there is no {name[:100]!r}")
        return http.as_json(200, found)

    def _compared(self, question: Question) -> dict[str, Any]:
        """The result of `otel-ddp compare` for two runs."""
        sides = []
        for group, run in zip(question.texts("group"), question.texts("run"), strict=False):
            with self._runs.opened(group, run) as found:
                sides.append(compare.of_run(found))
        if len(sides) != 2:
            raise Refused(400, "name two runs, each with its group")
        result = compare.compare(*sides)
        tables = [{"heads": heads, "rows": rows} for heads, rows in compare.tables(result)]
        return {**result.to_json(), "tables": tables}

    def _may_read(self) -> bool:
        """Whether the folder may be read: not if it should be ours, but others can write there."""
        return not self._ours or files.is_kept(self._runs.folder)

    def _list(self, found: list[dict[str, Any]], faults: list[str]) -> dict[str, Any]:
        live = self._now_known()
        return {
            **self._seen_by(live),
            "folder": str(self._runs.folder),
            "runs": [{**row, "verdicts": runs.verdicts(row["verdicts"])} for row in found],
            "faults": [*_not_kept(live), *faults],
        }

    def _now(self, question: Question) -> dict[str, Any]:
        live = self._now_known()
        return {
            **self._seen_by(live),
            "processes": [runs.shown(each.to_json()) for each in live.processes],
            "verdicts": runs.verdicts(live.verdicts),
            "remark": live.agent.get("remark", ""),
            "links": live.links,
            "stacks": self._ask_stacks is not None,
        }

    def _stacks(self, question: Question) -> dict[str, Any]:
        if self._ask_stacks is None:
            raise Refused(404, "no agent runs here, so no process can be asked")
        return {"processes": self._ask_stacks(*map(question.text, ("group", "run", "rank")))}

    def _change(self, question: Question) -> dict[str, Any]:
        """Rename, tag or delete a run that is over."""
        if not question.has_token:
            raise Refused(403, NO_TOKEN)
        with self._runs.opened(question.group, question.text("run")) as run:
            if run.state not in ENDED_STATES and not is_silent(run.state, run.seen_ns):
                raise Refused(409, f"{run.name} goes on: change it once it has ended")
            paths, key = run.paths, (run.group, run.name)
        if "delete" in question.query and any(e.of_run == key for e in self._now_known().processes):
            # An agent that still writes this history would restore the deleted file.
            raise Refused(409, f"the agent still writes {key[1]}: try again in five minutes")
        try:
            if "delete" in question.query:
                directory.delete(paths)
            else:
                given = [key for key in _TEXTS if key in question.query]
                directory.change(paths, {key: question.text(key)[:_LONGEST] for key in given})
        except (OSError, sqlite3.Error) as error:
            raise Refused(500, f"it cannot be changed: {error}") from None
        return {}

    @errors.contained(_NOTHING)
    def _now_known(self) -> Survey:
        return _NOTHING if self._live is None else self._live()

    def _seen_by(self, live: Survey) -> dict[str, Any]:
        """The keys that the list of runs and the view Now share."""
        return {
            "now_ns": time.time_ns(),
            "node": live.agent.get("node", ""),
            "agent": self._live is not None,
        }


def _not_kept(live: Survey) -> list[str]:
    """The reason why the agent records no history at the moment; empty if it does."""
    history = live.agent.get("history", {})
    if history.get("directory") == "":
        return ["This agent keeps no history (OTEL_DDP_HISTORY_BYTES): Now shows what runs."]
    if not history.get("problem"):
        return []
    at = time.strftime("%H:%M:%S", time.localtime((history.get("since_ns") or 0) / 1e9))
    return [f"Nothing is kept since {at}: {history['problem']}"]
