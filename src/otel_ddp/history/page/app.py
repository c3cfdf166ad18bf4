"""Answers a browser: the page's files, and what they ask for as JSON or CSV. Knows no server."""

from __future__ import annotations

import gzip
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from otel_ddp import files
from otel_ddp.errors import containment
from otel_ddp.history import postmortems
from otel_ddp.history.page import events, guard, head, profiles, steps, values
from otel_ddp.history.page.exchange import (
    PACKED,
    Answer,
    Question,
    Refused,
    as_csv,
    as_json,
    as_text,
)
from otel_ddp.history.page.runs import Runs, listed, mapping, whole
from otel_ddp.history.page.static_files import INDEX, PLOTLY, StaticFiles
from otel_ddp.history.reader import History, Unreadable

# The views of the page: which one it is, its script reads from the address.
_VIEWS = re.compile(r"/(runs|compare|now|run(/.*)?)?")
_PACKED_FROM = 4096
_LOOK_EVERY_S = 0.25
HIDDEN = (
    "Ended runs, log lines, sentences of verdicts, configuration, stacks and post-mortems are "
    "hidden: they are shown to the user of the agent and to root on this node, and to those whom "
    "OTEL_DDP_WEB_CONFIG admits by its token."
)

Live = Callable[[], Mapping[str, Any]]
"""What an agent knows at this moment: as `otel-ddp status --json` describes it."""
AskStacks = Callable[[str, str, str], list[dict[str, Any]]]
"""Group, run and rank (empty: all ranks); each process with its threads and their frames."""


class App:
    """Of one folder of histories. Called from several threads."""

    def __init__(
        self,
        folder: Path,
        *,
        ours: bool = False,
        disk_hangs: Callable[[], bool] = lambda: False,
        live: Live | None = None,
        ask_stacks: AskStacks | None = None,
        postmortem_folders: Sequence[Path] = (),
        profile_folder: Path | None = None,
    ) -> None:
        """*live*: None where there is no agent, but a folder alone.

        *ours*: the folder is read only while it is closed to other users; else whatever is there.
        *disk_hangs*: whether a thread that reads the folder may wait for long.
        *profile_folder*: None for where `otel-ddp profile` writes without `--out`.
        """
        self._runs = Runs(folder, ours)
        self._disk_hangs = disk_hangs
        self._live = live
        self._ask_stacks = ask_stacks
        self._postmortem_folders = (*postmortem_folders, *([folder] if ours else []))
        self._others_folders = [] if ours else [folder]
        self._profile_folder = profile_folder
        self._files = StaticFiles()

    def answer(
        self,
        method: str,
        target: str,
        headers: Mapping[str, str],
        is_private: Callable[[], bool],
    ) -> Answer:
        """*target* is the path with its query, as the guard lets it through.

        *headers* has small letters.
        """

        def answer() -> Answer:
            return self._timed_answer(method, target, headers, is_private)

        found: list[Answer] = []
        thread = threading.Thread(target=lambda: found.append(answer()), daemon=True)
        if not self._disk_hangs():
            try:
                thread.start()
            except RuntimeError:
                return answer()  # too few threads for a moment
            while thread.is_alive() and not self._disk_hangs():
                thread.join(_LOOK_EVERY_S)
        # A thread that waits for the disk is left behind: now that the disk is known to hang, the
        # same question is answered without it.
        return found[0] if found else answer()

    def _timed_answer(
        self,
        method: str,
        target: str,
        headers: Mapping[str, str],
        is_private: Callable[[], bool],
    ) -> Answer:
        began_s = time.thread_time()
        given = self._answer(method, target, headers, is_private)
        extra = {}
        body = given.body
        packs = not given.headers.keys() & {"Content-Encoding", "ETag"}
        packs = packs and given.headers.get("Content-Type") != PACKED
        if packs and len(body) > _PACKED_FROM and "gzip" in headers.get("accept-encoding", ""):
            body = gzip.compress(body, 1, mtime=0)
            extra["Content-Encoding"] = "gzip"
        # The page asks less often where its answers are dear.
        extra["Server-Timing"] = f"cpu;dur={(time.thread_time() - began_s) * 1000:.1f}"
        return Answer(given.status, {**extra, **given.headers}, body)

    def _answer(
        self,
        method: str,
        target: str,
        headers: Mapping[str, str],
        is_private: Callable[[], bool],
    ) -> Answer:
        try:
            parts = urlsplit(target)
            query = parse_qs(parts.query, keep_blank_values=True, max_num_fields=1000)
        except ValueError:
            return as_text(400, "the address cannot be read\n")
        path = parts.path
        is_api = path.startswith("/api/")
        try:
            if is_api:
                question = Question(method, path[5:], query, headers, is_private)
                return self._api(question)
            return self._file(path, headers)
        except Refused as why:
            if is_api:
                return as_json(why.status, {"error": str(why)})
            return as_text(why.status, f"{why}\n")
        except Unreadable as why:
            return as_json(500, {"error": str(why)})

    def _file(self, path: str, headers: Mapping[str, str]) -> Answer:
        if _VIEWS.fullmatch(path):
            return self._files.answer(INDEX, headers)
        if path.startswith("/static/"):
            return self._files.answer(path.removeprefix("/static/"), headers)
        if path.startswith("/lib/") and path.endswith(f"/{PLOTLY}"):
            return self._files.answer(PLOTLY, headers, for_a_year=True)
        return as_text(404, "try /, /metrics or /healthz\n")

    # -- the API

    def _api(self, question: Question) -> Answer:
        path, as_table = question.path.removesuffix(".csv"), question.path.endswith(".csv")
        if path == "stacks":
            return self._stacks(question)
        if question.method not in ("GET", "HEAD"):
            raise Refused(405, "only GET is answered here")
        if path == "runs":
            return as_json(200, self._list(question))
        if path == "now":
            return as_json(200, self._now(question))
        if self._disk_hangs():
            raise Refused(503, "The disk of the histories does not answer.")
        if path == "postmortem":
            self._check_private(question)
            return self._postmortem(question.text("name"))
        group = question.text("group") if "group" in question.query else None
        group = self._shown_group(question, group)
        with self._runs.opened(group, question.text("run")) as histories:
            if path == "trace":
                self._check_private(question)
                return profiles.trace(*_named(histories), question, self._profile_folder)
            found = self._of_run(path, histories, question)
        if as_table:
            if path == "steps":
                return as_csv([{"rank": "mean", "columns": found["columns"]}, *found["ranks"]])
            if path in ("values", "node"):
                return as_csv(found["series"])
            raise Refused(404, f"{path} is no table")
        return as_json(200, found)

    def _of_run(self, path: str, histories: list[History], question: Question) -> dict[str, Any]:
        if path == "run":
            return head.head(histories, self._ask_live(), question.is_private())
        if path == "names":
            node = values.names(histories, "node") + values.names(histories, "counter")
            return {
                "values": values.names(histories, "value"),
                "node": [{"name": name, **values.described(name)} for name in node],
            }
        if path == "values":
            return values.columns_of(histories, question, "value")
        if path == "node":
            return values.columns_of(histories, question, "node", "counter")
        if path == "steps":
            return steps.grid(histories, question)
        if path == "events":
            self._check_private(question)
            return events.table(histories, question)
        if path == "postmortems":
            self._check_private(question)
            return {
                "postmortems": [
                    {"name": each.name, "written_ns": each.written_ns, "sentence": each.sentence}
                    for each in postmortems.of_run(self._folders(), *_named(histories))
                ]
            }
        if path == "profiles":
            self._check_private(question)
            return profiles.table(*_named(histories), self._profile_folder)
        raise Refused(404, f"there is no {path[:100]!r}")

    def _folders(self) -> list[Path]:
        """Where post-mortems may lie."""
        return [*filter(files.is_kept, self._postmortem_folders), *self._others_folders]

    def _postmortem(self, name: str) -> Answer:
        if (text := postmortems.text(self._folders(), name)) is None:
            raise Refused(404, f"there is no post-mortem {name[:200]!r}")
        return as_text(200, text)

    def _list(self, question: Question) -> dict[str, Any]:
        live, private = self._ask_live(), question.is_private()
        # A thread that touches a disk that hangs does not come back.
        rows, faults = ([], []) if self._disk_hangs() else self._runs.rows()
        rows = [{**row, "verdicts": head.verdicts(row["verdicts"], private)} for row in rows]
        if not private:
            shown = _runs_of(live)
            rows = [row for row in rows if (row["group"], row["run"]) in shown]
        return {
            "now_ns": time.time_ns(),
            "node": str(mapping(live).get("node") or ""),
            "agent": live is not None,
            "folder": str(self._runs.folder) if private else "",
            "hidden": "" if private else HIDDEN,
            "runs": rows,
            "faults": [*_not_kept(live), *faults] if private else [],
        }

    def _now(self, question: Question) -> dict[str, Any]:
        live, private = self._ask_live(), question.is_private()
        return {
            "now_ns": time.time_ns(),
            "agent": live is not None,
            "hidden": "" if private else HIDDEN,
            "node": str(mapping(live).get("node") or ""),
            "version": str(mapping(live).get("version") or ""),
            "processes": head.processes(live, private),
            "verdicts": head.verdicts(listed(mapping(live).get("verdicts")), private),
            "remark": str(mapping(live).get("remark") or "") if private else "",
            "stacks": private and self._ask_stacks is not None,
        }

    def _stacks(self, question: Question) -> Answer:
        if question.method != "POST":
            raise Refused(405, "stacks are asked for with POST")
        guard.check_asked(question.headers)
        self._check_private(question)
        if self._ask_stacks is None:
            raise Refused(404, "no agent runs here, so no process can be asked")
        group, run, rank = (question.text(name) for name in ("group", "run", "rank"))
        return as_json(200, {"processes": self._ask_stacks(group, run, rank)})

    def _check_private(self, question: Question) -> None:
        if not question.is_private():
            raise Refused(403, HIDDEN)

    def _shown_group(self, question: Question, group: str | None) -> str | None:
        """Others see of runs what /metrics tells: those which the agent knows at this moment."""
        if question.is_private():
            return group
        run = question.text("run")
        for each in sorted(_runs_of(self._ask_live())):
            if each[1] == run and group in (None, each[0]):
                return each[0]
        raise Refused(403, HIDDEN)

    @containment.contained()
    def _ask_live(self) -> Mapping[str, Any] | None:
        return None if self._live is None else self._live()


def _named(histories: Sequence[History]) -> tuple[str, str]:
    """Its group and its name, whatever the request has left out."""
    about = histories[0].about
    return str(about.get("group") or ""), str(about.get("run") or "")


def _not_kept(live: Mapping[str, Any] | None) -> list[str]:
    """A sentence where the agent cannot keep anything at this moment."""
    history = mapping(mapping(live).get("history"))
    if history.get("directory") == "":
        return ["This agent keeps no history (OTEL_DDP_HISTORY_BYTES): Now shows what runs."]
    if not history.get("problem"):
        return []
    at = time.strftime("%H:%M:%S", time.localtime(whole(history.get("since_ns")) / 1e9))
    return [f"Nothing is kept since {at}: {history['problem']}"]


def _runs_of(live: Mapping[str, Any] | None) -> set[tuple[str, str]]:
    return {each.of_run for each in head.living(live)}
