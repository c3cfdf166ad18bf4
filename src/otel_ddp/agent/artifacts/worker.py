"""Reads the files of artifacts, one after the other, and stores copies: in a thread of its own."""

from __future__ import annotations

import contextlib
import os
import posixpath
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from hashlib import blake2s, sha256
from urllib.parse import quote

from otel_ddp import errors
from otel_ddp.agent.artifacts.content import (
    MOST_FILES,
    CannotRead,
    Content,
    Pace,
    Part,
    Stopped,
    chunks,
    content_of,
    lines,
    listed,
    opened,
    path_of,
    signature,
)
from otel_ddp.agent.artifacts.store import CannotStore, Store
from otel_ddp.agent.artifacts.work_list import COMPLETE, INCOMPLETE, Artifact, WorkList
from otel_ddp.agent.kept_thread import KeptThread

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
        make_store: Callable[[], Store] | None,
    ) -> None:
        """*roots*: as for `opened`. *make_store*: called in the thread, as it may block."""
        self._work = work
        self._pace = pace
        self._roots = roots
        self._make_store = make_store
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
        except errors.ANY_ERROR as error:
            errors.record_failure("reading an artifact")
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
        errors.warn_once(f"artifact: {why}", text, told.name, run, why)
        self._work.finish(artifact, INCOMPLETE, why)

    def _read(self, artifact: Artifact) -> None:
        path = path_of(artifact.told.uri)
        if path is None:
            return
        with opened(path, self._roots) as top:
            content = self._content(top)
            artifact.size, artifact.digest = content.size, content.digest
            if self._make_store is not None and artifact.told.direction == "output":
                artifact.stored_uri = self._stored(self._make_store(), artifact, path, top, content)

    def _content(self, top: int) -> Content:
        found = listed(top)
        name = signature(found)
        content = self._known.get(name)
        if content is None:
            content = self._known[name] = content_of(top, found, self._pace)
            self._forget()
        return content

    def _forget(self) -> None:
        """Keep what is remembered small; the last one stays."""
        known = self._known
        parts = sum(len(each.parts) for each in known.values())
        while len(known) > 1 and (len(known) > _MOST_KNOWN or parts > _MOST_KNOWN_PARTS):
            parts -= len(known.popitem(last=False)[1].parts)

    # -- storing

    def _stored(
        self, store: Store, artifact: Artifact, path: bytes, top: int, content: Content
    ) -> str:
        """Store every file, and the list of a directory's last: with it the copy is whole."""
        told = artifact.told
        words = dict(told.labels).get("run", ""), told.name, content.digest[:16]
        base = posixpath.join(*map(plain, words))
        one = os.path.basename(os.path.realpath(path))
        # The digest is in the key, so a file that is there is this one.
        key, there = base, store.sizes(base)
        for part in content.parts:
            key = posixpath.join(base, *map(plain, part.name.split(b"/") if part.name else [one]))
            if not part.is_link and there.get(key) != part.size:
                store.put(key, part.size, self._same(top, part))
        if [part.name for part in content.parts] == [b""]:
            return store.uri(key)
        listing = lines(content.parts)
        if store.size(f"{base}.sha256") != len(listing):
            store.put(f"{base}.sha256", len(listing), [listing])
        return store.uri(base)

    def _same(self, top: int, part: Part) -> Iterator[bytes]:
        """The content of a file. Raises at its end if its digest is another one by now."""
        seen = sha256()
        for chunk in chunks(top, part.name, part.size, self._pace):
            seen.update(chunk)
            yield chunk
        if seen.hexdigest() != part.digest:
            raise CannotRead("it was written to while the agent stored it", again=True)


def plain(word: str | bytes) -> str:
    """A part of a key: letters that every store takes, and not too many."""
    text = quote(word, safe=" +,=@()~")
    if not text.strip("."):
        text = text.replace(".", "%2E") or "%"
    if len(text) > _LONGEST_PART:
        text = f"{text[: _LONGEST_PART - 9]}~{blake2s(text.encode(), digest_size=4).hexdigest()}"
    return text
