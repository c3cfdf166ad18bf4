"""Reads the files of artifacts, one after the other, and stores copies: in a thread of its own."""

from __future__ import annotations

import contextlib
import os
import posixpath
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection
from hashlib import blake2s, sha256
from urllib.parse import quote

from otel_ddp.agent.artifacts import digest, files
from otel_ddp.agent.artifacts.artifact import COMPLETE, INCOMPLETE, Artifact
from otel_ddp.agent.artifacts.digest import Content, Part
from otel_ddp.agent.artifacts.files import MOST_FILES, CannotRead
from otel_ddp.agent.artifacts.pace import Pace, Stopped
from otel_ddp.agent.artifacts.sink import CannotStore, Sink
from otel_ddp.agent.artifacts.work_list import WorkList
from otel_ddp.agent.kept_thread import KeptThread
from otel_ddp.errors import containment

# A file that is not there yet, or is still written to: two and a half minutes in all.
READ_AGAIN_S = (5.0, 10.0, 20.0, 40.0, 80.0)
# A store that does not take it: half an hour in all.
STORE_AGAIN_S = (5.0, 10.0, 20.0, 40.0, 80.0, *(160.0,) * 10)
# What is remembered of artifacts: so many, and so many files in them, at some 300 bytes each.
_MOST_KNOWN = 64
_MOST_KNOWN_PARTS = MOST_FILES
_LONGEST_PART = 120


class Worker:
    """One an agent. A file server that does not answer holds up this thread alone."""

    def __init__(
        self,
        work: WorkList,
        pace: Pace,
        roots: Collection[str] | None,
        make_sink: Callable[[], Sink] | None,
    ) -> None:
        """*roots*: as for `files.opened`. *make_sink*: called in the thread, as it may block."""
        self._work = work
        self._pace = pace
        self._roots = roots
        self._make_sink = make_sink
        self._sink: Sink | None = None
        # By signature: ranks may tell of the same files, and a store may want them again.
        self._known: OrderedDict[bytes, Content] = OrderedDict()
        self.thread = KeptThread("artifacts", self._run)

    def stop(self) -> None:
        """End soon; what is not done stays for the next agent."""
        self._pace.stopping.set()
        self._work.news.set()
        self.thread.join(1.0)

    def _run(self) -> None:
        # Of this thread alone.
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        while True:
            # In this order: `stop` does it the other way round.
            self._work.news.clear()
            if self._pace.stopping.is_set():
                return
            artifact = self._work.next()
            if artifact is None:
                self._work.news.wait(self._work.due_in_s())
                continue
            with contextlib.suppress(Stopped):
                self.work_on(artifact)

    def work_on(self, artifact: Artifact) -> None:
        """Read it, store it, and say how that ended."""
        artifact.began_ns = artifact.began_ns or time.time_ns()
        try:
            self._read(artifact)
        except CannotRead as why:
            self._failed(artifact, str(why), why.again, READ_AGAIN_S)
        except CannotStore as why:
            self._failed(artifact, f"it is not stored: {why}", why.again, STORE_AGAIN_S)
        except (Stopped, MemoryError):
            raise
        except containment.ANY_ERROR as error:
            containment.record_failure("reading an artifact")
            self._work.finish(artifact, INCOMPLETE, f"{type(error).__name__}: {error}")
        else:
            self._work.finish(artifact, COMPLETE)

    def _failed(
        self, artifact: Artifact, why: str, again: bool, waits_s: tuple[float, ...]
    ) -> None:
        if again and artifact.attempts < len(waits_s):
            self._work.postpone(artifact, why, waits_s[artifact.attempts])
            return
        told = artifact.told
        run = dict(told.labels).get("run", "")
        text = "the artifact %r of run %s is not complete: %s"
        containment.warn_once(f"artifact: {why}", text, told.name, run, why)
        self._work.finish(artifact, INCOMPLETE, why)

    def _read(self, artifact: Artifact) -> None:
        path = files.path_of(artifact.told.uri)
        if path is None:
            return
        with files.opened(path, self._roots) as top:
            content = self._content(top)
            artifact.size, artifact.digest = content.size, content.digest
            if self._make_sink is not None and artifact.told.direction == "output":
                artifact.stored_uri = self._store(artifact, path, top, content)

    def _content(self, top: int) -> Content:
        found = files.listed(top)
        name = files.signature(found)
        content = self._known.get(name)
        if content is None:
            content = self._known[name] = digest.content_of(top, found, self._pace)
            self._forget()
        return content

    def _forget(self) -> None:
        """Keep what is remembered small; the last one stays."""
        known = self._known
        parts = sum(len(each.parts) for each in known.values())
        while len(known) > 1 and (len(known) > _MOST_KNOWN or parts > _MOST_KNOWN_PARTS):
            parts -= len(known.popitem(last=False)[1].parts)

    # -- storing

    def _store(self, artifact: Artifact, path: bytes, top: int, content: Content) -> str:
        """Store every file, and the list of a directory's last: with it the copy is whole."""
        assert self._make_sink is not None
        if self._sink is None:
            self._sink = self._make_sink()
        sink = self._sink
        told = artifact.told
        words = dict(told.labels).get("run", ""), told.name, content.digest[:16]
        base = posixpath.join(*map(plain, words))
        if len(content.parts) == 1 and not content.parts[0].name:
            key = posixpath.join(base, plain(os.path.basename(os.path.realpath(path))))
            self._store_file(sink, key, top, content.parts[0])
            return sink.uri(key)
        for part in content.parts:
            if not part.is_link:
                key = posixpath.join(base, *map(plain, part.name.split(b"/")))
                self._store_file(sink, key, top, part)
        self._store_list(sink, f"{base}.sha256", digest.lines(content.parts))
        return sink.uri(base)

    def _store_file(self, sink: Sink, key: str, top: int, part: Part) -> None:
        # The digest is in the name, so an object that is there is this one.
        if sink.size(key) == part.size:
            return
        upload = sink.upload(key)
        try:
            at, seen = 0, sha256()
            for chunk in digest.chunks(top, part.name, part.size, self._pace):
                seen.update(chunk)
                left = chunk[: max(0, upload.written - at)]
                if left and not upload.holds(at, left):
                    upload.discard()
                    raise CannotStore("what an earlier attempt left is damaged, and is removed")
                new = chunk[max(0, upload.written - at) :] if upload.written > at else chunk
                at += len(chunk)
                if new:
                    upload.write(new)
            if seen.hexdigest() != part.digest or upload.written > at:
                upload.discard()
                raise CannotRead("it was written to while the agent stored it", again=True)
            upload.commit()
        finally:
            upload.leave()
        if sink.size(key) != part.size:
            raise CannotStore("the store has another size of it")

    def _store_list(self, sink: Sink, key: str, lines: bytes) -> None:
        if sink.size(key) == len(lines):
            return
        upload = sink.upload(key)
        try:
            upload.write(lines[upload.written :])
            upload.commit()
        finally:
            upload.leave()


def plain(word: str | bytes) -> str:
    """A part of a key: letters that every store takes, and not too many."""
    text = quote(word, safe=" +,=@()~")
    if not text.strip("."):
        text = text.replace(".", "%2E") or "%"
    if len(text) > _LONGEST_PART:
        text = f"{text[: _LONGEST_PART - 9]}~{blake2s(text.encode(), digest_size=4).hexdigest()}"
    return text
