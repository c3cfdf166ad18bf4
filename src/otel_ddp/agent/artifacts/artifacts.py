"""The artifacts that runs name: a process reads one at a time, for series and a record."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from otel_ddp import errors
from otel_ddp.agent.reading.exports import Exports
from otel_ddp.journal.layout import EVENT
from otel_ddp.journal.parser import Document
from otel_ddp.settings import Settings
from otel_ddp.vocabulary import catalog

MOST_WAITING = 1000
# Of one rank: each is up to three series.
MOST_SHOWN = 100
LONGEST_S = 3600.0
_WORDS = ("name", "type", "direction", "uri")
_ROOT = str(Path(__file__).parents[3])
# Appended: modules beside the package must not shadow others.
_CODE = f"import sys; sys.path.append({_ROOT!r}); from {__package__}.reader import main; main()"


class _Reader:
    """A process with one artifact. Raises OSError if it cannot be started."""

    def __init__(self, request: dict[str, Any]) -> None:
        # Not an argument: the address of a store may hold a password. The answer replaces it.
        self._file = open(os.memfd_create("artifact"), "w+")  # noqa: SIM115
        json.dump(request, self._file)
        self._file.seek(0)
        try:
            command = [sys.executable, "-c", _CODE]
            self.process = subprocess.Popen(command, cwd="/", stdin=self._file)
        except OSError:
            self._file.close()
            raise
        self._late_s = time.monotonic() + LONGEST_S

    def is_late(self) -> bool:
        """Whether the reader has worked for more than `LONGEST_S`."""
        return self.process.poll() is None and time.monotonic() > self._late_s

    def answer(self) -> dict[str, Any] | None:
        """None while it works."""
        status = self.process.poll()
        if status is None:
            return None
        self._file.seek(0)
        return {"problem": f"its reader ended with {status}"} if status else json.load(self._file)

    def stop(self) -> None:
        """End it. One that hangs in a system call is left behind."""
        self.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(1.0)
        self._file.close()


class _Artifact(NamedTuple):
    """One that waits."""

    journal: Exports
    event: dict[str, Any]
    named: dict[str, str]


class Artifacts:
    """One an agent. Its loop calls every method; none waits for a file."""

    def __init__(self, conf: Settings, *, of_platform: bool) -> None:
        """*of_platform*: the agent may read files that the runs' user cannot, so it reads none."""
        self._reads = not of_platform
        is_directory = "://" not in conf.artifact_sink.removeprefix("file://")
        self._store = conf.artifact_sink if is_directory or not conf.offline else ""
        # The reader has the first one.
        self._waiting: list[_Artifact] = []
        self._reader: _Reader | None = None

    @errors.contained()
    def feed(self, journals: Iterable[Exports]) -> None:
        """Take what the journals have named since the last poll, and go on with what waits."""
        for journal in journals:
            for document in journal.process.new.events:
                if (named := _named(document.content)) is not None:
                    self._add(_Artifact(journal, document.content, named))
        if self._reader is not None:
            if self._reader.is_late():
                # What comes next may lie on the same file server, or go to the same store.
                self._give_up(f"a file server or a store did not answer within {LONGEST_S:g} s")
            elif (answer := self._reader.answer()) is not None:
                self._finish(self._waiting[0], answer)
        if self._reader is None and self._waiting:
            self._start_reader(self._waiting[0])

    def _add(self, artifact: _Artifact) -> None:
        for other in [each for each in self._waiting if each.named["uri"] == artifact.named["uri"]]:
            self._finish(other, {"problem": "the next one was named before it was read"})
        self._waiting.append(artifact)
        artifact.journal.unread_artifacts += 1
        if not (self._reads and artifact.named["uri"].startswith("file:///")):
            # What lies elsewhere is not fetched.
            self._finish(artifact, {})
        elif len(self._waiting) > MOST_WAITING:
            self._finish(artifact, {"problem": f"{MOST_WAITING} others waited"})

    def _start_reader(self, artifact: _Artifact) -> None:
        named = artifact.named
        request = {
            "uri": named["uri"],
            "store": self._store if named["direction"] == "output" else "",
            "run": dict(artifact.journal.process.labels).get("run", ""),
            "name": named["name"],
        }
        try:
            self._reader = _Reader(request)
        except OSError as error:
            self._give_up(f"the agent cannot start a reader: {error.strerror}")

    def _give_up(self, problem: str) -> None:
        for each in list(self._waiting):
            self._finish(each, {"problem": problem})

    def _finish(self, artifact: _Artifact, answer: dict[str, Any]) -> None:
        if artifact is self._waiting[0] and self._reader is not None:
            self._reader.stop()
            self._reader = None
        self._waiting.remove(artifact)
        journal, event, named = artifact
        journal.unread_artifacts -= 1
        if answer and journal.is_sent:
            journal.documents.append(_record(event, answer))
        # The newest of a name and direction is shown.
        slot = named["name"], named["direction"]
        journal.artifacts.pop(slot, None)
        if len(journal.artifacts) >= MOST_SHOWN:
            del journal.artifacts[next(iter(journal.artifacts))]
        journal.artifacts[slot] = {"time": event["time"], "step": event["step"], **named, **answer}
        if problem := answer.get("problem"):
            errors.warn_once(f"artifact: {problem}", "artifact %r: %s", named["name"], problem)

    def stop(self) -> None:
        """The agent ends."""
        self._give_up("the agent ended before it was read")


def _named(event: dict[str, Any]) -> dict[str, str] | None:
    """What an event says of an artifact; None for any other. Another process has written it."""
    attributes, step = event.get("attributes"), event.get("step")
    if event.get("name") != catalog.ARTIFACT_EVENT or not isinstance(attributes, dict):
        return None
    known = ((word, attributes.get(f"artifact.{word}")) for word in _WORDS)
    named = {word: text for word, text in known if isinstance(text, str)}
    numbers = [event.get("time"), 0 if step is None else step]
    is_whole = len(named) == len(_WORDS) and all(type(each) is int for each in numbers)
    return named if is_whole else None


def _record(event: dict[str, Any], answer: dict[str, Any]) -> Document:
    """The event once more, with what the reader has found."""
    said = answer.get("problem") or f"{answer['size']} bytes, sha256:{answer['digest']}"
    found = {f"artifact.{key}": value for key, value in answer.items()}
    content = {
        **event,
        "body": f"{event.get('body')}: {said}",
        "severity": "WARN" if "problem" in answer else "INFO",
        "attributes": {**event["attributes"], **found},
    }
    return Document(EVENT, content, 0)
