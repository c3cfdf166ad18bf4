"""Answers a browser: the page's files, and what they ask for as JSON or CSV. Knows no server."""

from __future__ import annotations

import gzip
import re
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from otel_ddp import errors, files
from otel_ddp.history import beside, changes, compare
from otel_ddp.history.newest_attempt import is_silent
from otel_ddp.history.page import answers, guard, runs, static_files
from otel_ddp.history.page.exchange import (
    Answer,
    Question,
    Refused,
    as_csv,
    as_html,
    as_json,
    as_text,
)
from otel_ddp.history.page.runs import Runs
from otel_ddp.history.reader import Unreadable
from otel_ddp.journal.survey import Survey
from otel_ddp.vocabulary.words import ENDED_STATES

# The views of the page: which one it is, its script reads from the address.
_VIEWS = re.compile(r"/(runs|compare|now|run(/.*)?)?")
# Asked of the agent alone; all else lies on the disk of the histories.
_WITHOUT_DISK = ("now", "stacks")
_PACKED_FROM = 4096
HIDDEN = (
    "This page is shown to the user of the agent and to root on this node, and to whoever has "
    "the token of OTEL_DDP_SCRAPE_TOKEN_FILE."
)
NO_TOKEN = (
    "Runs are changed with the token of OTEL_DDP_SCRAPE_TOKEN_FILE alone: type it, or set the "
    "variable for the agent."
)
# The texts of a run that a person may change, and their longest length.
_TEXTS, _LONGEST = ("name", "tags"), 500

AskStacks = Callable[[str, str, str], list[dict[str, Any]]]
"""Group, run and rank (empty: all ranks); each process with its threads and their frames."""
# In one table.
_MOST_RUNS = 50
_NOTHING = Survey()


class App:
    """Of one folder of histories. Called from several threads."""

    def __init__(
        self,
        folder: Path,
        *,
        ours: bool = False,
        disk_hangs: Callable[[], bool] | None = None,
        live: Callable[[], Survey] | None = None,
        ask_stacks: AskStacks | None = None,
    ) -> None:
        """*live*: None where there is no agent, but a folder alone.

        *ours*: the folder is read only while it is closed to other users; else whatever is there.
        *disk_hangs*: whether a thread that reads the folder may wait for long.
        """
        self._runs = Runs(folder, ours)
        self._disk_hangs = disk_hangs
        self._live = live
        self._ask_stacks = ask_stacks
        self._folder, self._ours = folder, ours

    def answer(self, question: Question) -> Answer:
        """The answer, whatever is asked; raises nothing."""
        path = question.path
        of_disk = path.startswith("/api/") and path.removeprefix("/api/") not in _WITHOUT_DISK
        # What is being read as a disk begins to hang waits in its thread; no more does.
        if of_disk and self._disk_hangs is not None and self._disk_hangs():
            if path == "/api/runs":
                return as_json(200, self._list([], []))
            return as_json(503, {"error": "The disk of the histories does not answer."})
        return self._timed_answer(question)

    def _timed_answer(self, question: Question) -> Answer:
        began_s = time.thread_time()
        status, headers, body = self._answer(question)
        extra = {}
        takes = "gzip" in question.headers.get("accept-encoding", "")
        if takes and len(body) > _PACKED_FROM:
            body = gzip.compress(body, 1, mtime=0)
            extra["Content-Encoding"] = "gzip"
        # The page asks less often where its answers are dear.
        extra["Server-Timing"] = f"cpu;dur={(time.thread_time() - began_s) * 1000:.1f}"
        return Answer(status, {**extra, **headers}, body)

    def _answer(self, question: Question) -> Answer:
        path = question.path
        if path.startswith("/api/"):
            try:
                return self._api(path.removeprefix("/api/"), question)
            except Refused as why:
                return as_json(why.status, {"error": str(why)})
            except Unreadable as why:
                return as_json(500, {"error": str(why)})
        if _VIEWS.fullmatch(path):
            page, policy = static_files.served()
            return as_html(page, policy)
        return as_text(404, "try /, /metrics or /healthz\n")

    # -- the API

    def _api(self, path: str, question: Question) -> Answer:
        if not question.is_private():
            raise Refused(403, HIDDEN)
        if path == "stacks":
            return as_json(200, self._stacks(question))
        if path == "change":
            return as_json(200, self._change(question))
        if question.method not in ("GET", "HEAD"):
            raise Refused(405, "only GET is answered here")
        name = path.removesuffix(".csv")
        if path == "runs":
            return as_json(200, self._list(*self._runs.rows()))
        if path == "postmortem":
            if (text := beside.postmortem(self._folders(), question.text("name"))) is None:
                raise Refused(404, f"there is no post-mortem {question.text('name')[:200]!r}")
            return as_text(200, text)
        own = {"now": self._now, "compare": self._compared}
        if path in own:
            return as_json(200, own[path](question))
        return self._of_run(name, question) if path == name else self._table(name, question)

    def _of_run(self, name: str, question: Question) -> Answer:
        with self._runs.opened(question.group, question.text("run")) as run:
            if name == "run":
                found = runs.head(run, self._now_known())
            elif name == "ranks":
                found = runs.ranks(run, self._now_known())
            elif name in answers.ANSWERS:
                found = answers.ANSWERS[name](run, question)
            elif name == "postmortems":
                found = {name: beside.postmortems(self._folders(), run.group, run.name)}
            else:
                raise Refused(404, f"there is no {name[:100]!r}")
        return as_json(200, found)

    def _table(self, name: str, question: Question) -> Answer:
        """Of one run, or of several with the run before each row."""
        if name not in ("steps", "values", "node"):
            raise Refused(404, f"{name[:100]!r} is no table")
        asked, found = question.of_each_run(), list[dict[str, Any]]()
        for each in asked[:_MOST_RUNS]:
            with self._runs.opened(each.group, run := each.text("run")) as opened:
                told = answers.ANSWERS[name](opened, each)
            those = [{"columns": told["columns"]}] if name == "steps" else told["series"]
            found += [{"run": run, **row} for row in those] if len(asked) > 1 else those
        return as_csv(found)

    def _compared(self, question: Question) -> dict[str, Any]:
        """What `otel-ddp compare` says of two runs."""
        sides = []
        for each in question.of_each_run()[:2]:
            with self._runs.opened(each.group, each.text("run")) as found:
                sides.append(compare.of_run(found))
        if len(sides) < 2:
            raise Refused(400, "name two runs")
        told = compare.compare(*sides)
        return {**told.to_json(), "tables": [each._asdict() for each in compare.tables(told)]}

    def _folders(self) -> list[Path]:
        """Where post-mortems may lie."""
        return [self._folder] if not self._ours or files.is_kept(self._folder) else []

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
        self._check_asked(question)
        if self._ask_stacks is None:
            raise Refused(404, "no agent runs here, so no process can be asked")
        return {"processes": self._ask_stacks(*map(question.text, ("group", "run", "rank")))}

    def _change(self, question: Question) -> dict[str, Any]:
        """Rename, tag or delete a run that is over."""
        self._check_asked(question)
        if not question.has_token:
            raise Refused(403, NO_TOKEN)
        with self._runs.opened(question.group, question.text("run")) as run:
            if run.state not in ENDED_STATES and not is_silent(run.state, run.seen_ns):
                raise Refused(409, f"{run.name} goes on: change it once it has ended")
            paths, key = run.paths, (run.group, run.name)
        if "delete" in question.query and any(e.of_run == key for e in self._now_known().processes):
            # It would make the file again.
            raise Refused(409, f"the agent still writes {key[1]}: try again in five minutes")
        try:
            if "delete" in question.query:
                changes.delete(paths)
            else:
                given = [key for key in _TEXTS if key in question.query]
                changes.describe(paths, {key: question.text(key)[:_LONGEST] for key in given})
        except (OSError, sqlite3.Error) as error:
            raise Refused(500, f"it cannot be changed: {error}") from None
        return {}

    def _check_asked(self, question: Question) -> None:
        """Only our own page and commands, and their user, ask for what changes anything."""
        if question.method != "POST":
            raise Refused(405, "this is asked with POST")
        guard.check_asked(question.headers)

    @errors.contained(_NOTHING)
    def _now_known(self) -> Survey:
        return _NOTHING if self._live is None else self._live()

    def _seen_by(self, live: Survey) -> dict[str, Any]:
        """What stands above every list."""
        return {
            "now_ns": time.time_ns(),
            "node": live.agent.get("node", ""),
            "agent": self._live is not None,
        }


def _not_kept(live: Survey) -> list[str]:
    """A sentence where the agent cannot keep anything at this moment."""
    history = live.agent.get("history", {})
    if history.get("directory") == "":
        return ["This agent keeps no history (OTEL_DDP_HISTORY_BYTES): Now shows what runs."]
    if not history.get("problem"):
        return []
    at = time.strftime("%H:%M:%S", time.localtime((history.get("since_ns") or 0) / 1e9))
    return [f"Nothing is kept since {at}: {history['problem']}"]
