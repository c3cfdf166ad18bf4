"""Reads the artifacts of runs, one at a time, for series and log records.

A reader process reads each artifact, so that a hanging file server or store blocks nothing else.
The stdin of this process is a file with the request; the process overwrites it with the answer.

The digest of a directory is the SHA-256 of the output of `sha256sum` for its files, sorted by name.
A symbolic link counts as a file that contains the path of its target. SECURITY.md lists the files
that the reader may read.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import subprocess
import sys
import time
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple
from urllib.parse import quote, unquote_to_bytes

from otel_ddp import errors, files
from otel_ddp.agent.reading.exports import Exports
from otel_ddp.journal.layout import EVENT
from otel_ddp.journal.parser import Document
from otel_ddp.settings import Settings
from otel_ddp.vocabulary import catalog

MOST_WAITING = 1000
# How many artifacts of a rank /metrics shows: each artifact has up to three series.
MOST_SHOWN = 100
LONGEST_S = 3600.0
_WORDS = ("name", "type", "direction", "uri")
_ROOT = str(Path(__file__).parents[2])
# Append the package's folder to the end of sys.path, so that modules in this folder shadow no other
# modules.
_CODE = f"import sys; sys.path.append({_ROOT!r}); from {__name__} import main; main()"


class _Reader:
    """A process that reads one artifact. Raises OSError if it cannot be started."""

    def __init__(self, request: dict[str, Any]) -> None:
        # Pass the request in a file: all users can see the command line, and the address of a store
        # may contain a password.
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
        """The reader's answer; None while the reader runs."""
        status = self.process.poll()
        if status is None:
            return None
        self._file.seek(0)
        return {"problem": f"its reader ended with {status}"} if status else json.load(self._file)

    def stop(self) -> None:
        """Kill the process. Waits only a second: if it hangs in a system call, it can't die."""
        self.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(1.0)
        self._file.close()


class _Artifact(NamedTuple):
    """An artifact that waits for the reader."""

    journal: Exports
    event: dict[str, Any]
    named: dict[str, str]


class Artifacts:
    """The artifacts of all processes of a node.

    The agent's loop calls every method, and no method waits for a file.
    """

    def __init__(self, conf: Settings, *, of_platform: bool) -> None:
        """*of_platform*: whether this agent runs as a service, i.e. was not started by a training
        process. Then it reads no artifacts, since it may have access to files that the user may not
        read."""
        self._reads = not of_platform
        is_directory = "://" not in conf.artifact_sink.removeprefix("file://")
        self._store = conf.artifact_sink if is_directory or not conf.offline else ""
        # The queue; the reader process works on the first artifact.
        self._waiting: list[_Artifact] = []
        self._reader: _Reader | None = None

    @errors.contained()
    def feed(self, journals: Iterable[Exports]) -> None:
        """Queue new artifacts; collect the reader's answer, and start the next reader."""
        for journal in journals:
            for document in journal.process.new.events:
                if (named := _named(document.content)) is not None:
                    self._add(_Artifact(journal, document.content, named))
        if self._reader is not None:
            if self._reader.is_late():
                # Give up all waiting artifacts too: the next one may be on the same file server, or
                # be copied to the same store, which does not answer.
                self._give_up(f"a file server or a store did not answer within {LONGEST_S:g} s")
            elif (answer := self._reader.answer()) is not None:
                self._finish(self._waiting[0], answer)
        if self._reader is None and self._waiting:
            self._start_reader(self._waiting[0])

    def _add(self, artifact: _Artifact) -> None:
        for other in [each for each in self._waiting if each.named["uri"] == artifact.named["uri"]]:
            self._finish(other, {"problem": "it was recorded again before the agent read it"})
        self._waiting.append(artifact)
        artifact.journal.unread_artifacts += 1
        if not (self._reads and artifact.named["uri"].startswith("file:///")):
            # Report the artifact without a digest: remote files are not downloaded.
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
        # An artifact replaces an older one with the same name and direction (input or output).
        slot = named["name"], named["direction"]
        journal.artifacts.pop(slot, None)
        if len(journal.artifacts) >= MOST_SHOWN:
            del journal.artifacts[next(iter(journal.artifacts))]
        journal.artifacts[slot] = {"time": event["time"], "step": event["step"], **named, **answer}
        if problem := answer.get("problem"):
            errors.warn_once(f"artifact: {problem}", "artifact %r: %s", named["name"], problem)

    def stop(self) -> None:
        """Report all waiting artifacts as not read, before the agent ends."""
        self._give_up("the agent ended before it was read")


def _named(event: dict[str, Any]) -> dict[str, str] | None:
    """The artifact that an event describes; None if the event is malformed or of another kind."""
    attributes, step = event.get("attributes"), event.get("step")
    if event.get("name") != catalog.ARTIFACT_EVENT or not isinstance(attributes, dict):
        return None
    known = ((word, attributes.get(f"artifact.{word}")) for word in _WORDS)
    named = {word: text for word, text in known if isinstance(text, str)}
    numbers = [event.get("time"), 0 if step is None else step]
    is_whole = len(named) == len(_WORDS) and all(type(each) is int for each in numbers)
    return named if is_whole else None


def _record(event: dict[str, Any], answer: dict[str, Any]) -> Document:
    """The event as a log record, with the size and digest, or with the problem of the reader."""
    said = answer.get("problem") or f"{answer['size']} bytes, sha256:{answer['digest']}"
    found = {f"artifact.{key}": value for key, value in answer.items()}
    content = {
        **event,
        "body": f"{event.get('body')}: {said}",
        "severity": "WARN" if "problem" in answer else "INFO",
        "attributes": {**event["attributes"], **found},
    }
    return Document(EVENT, content, 0)


# -- in the reader process

CHUNK_BYTES = 1 << 20
MOST_FILES = 100_000
_MOST_LINKS = 40
_LONGEST_NAME = 120
# Characters that are not escaped in names of uploaded files: every store accepts them, and fsspec
# doesn't expand them as patterns.
_SAFE = " +,=@()~"
_PATH_OF = b"/proc/self/fd/%d"
_CHANGED = "it was written to while the agent read it"


class Problem(Exception):
    """An artifact can't be read or stored; the text says why."""


class _File(NamedTuple):
    """A file or symbolic link of an artifact, as it was when the directory was listed."""

    name: bytes
    size: int
    mtime_ns: int
    inode: int
    link: bytes | None
    """The path to which a symbolic link points; None for a file."""


def main() -> None:
    """Answer the request on stdin. The reader process runs this."""
    os.setpriority(os.PRIO_PROCESS, 0, 19)
    answer = json.dumps(read(**json.load(sys.stdin))).encode()
    os.ftruncate(0, 0)
    os.pwrite(0, answer, 0)
    # Exit without waiting for the threads of the store's library: they may never end.
    os._exit(0)


def read(uri: str, store: str, run: str, name: str) -> dict[str, Any]:
    """Read an artifact, and copy it to the store if one is set.

    Returns size, digest, and the address of the copy, as far as known, and the problem if any.
    """
    try:
        tree = _Tree(unquote_to_bytes(uri.removeprefix("file://")))
        digests = {file: tree.digest(file) for file in tree.files}
        tree.check()
    except (Problem, OSError, ValueError) as error:
        return {"problem": getattr(error, "strerror", None) or str(error)}
    listing = b"".join(_line(file.name, digest) for file, digest in digests.items())
    digest = digests[tree.files[0]] if tree.is_file else sha256(listing).hexdigest()
    answer = {"size": sum(file.size for file in tree.files), "digest": digest}
    if store:
        try:
            answer["uri"] = _copy(tree, listing, store, (run, name, digest[:16]))
        except errors.ANY_ERROR as error:
            # Remove passwords from addresses in the error's text.
            why = re.sub(r"//[^/\s]*@", "//", f"{type(error).__name__}: {error}")[:200]
            answer["problem"] = f"it is not stored: {why}"
    return answer


class _Tree:
    """A file or directory, held open, so that no other file can take its place."""

    def __init__(self, path: bytes) -> None:
        self._own_name = os.path.basename(os.path.realpath(path))
        self._top = _open(path)
        self.is_file = stat.S_ISREG(os.fstat(self._top).st_mode)
        self.files = self._listed()

    def check(self) -> None:
        """Raise Problem if a file was changed, added or removed since the listing."""
        if self._listed() != self.files:
            raise Problem(_CHANGED)

    def _listed(self) -> list[_File]:
        """All files and links of the artifact, sorted by name."""
        if self.is_file:
            return [_file(self._own_name, os.fstat(self._top))]
        found: list[_File] = []
        for folder, folders, names, fd in os.fwalk(b".", dir_fd=self._top, onerror=_raise):
            for name in (*names, *folders):
                status = os.stat(name, dir_fd=fd, follow_symlinks=False)
                link = os.readlink(name, dir_fd=fd) if stat.S_ISLNK(status.st_mode) else None
                if stat.S_ISREG(status.st_mode) or link is not None:
                    found.append(_file(os.path.normpath(os.path.join(folder, name)), status, link))
                elif not stat.S_ISDIR(status.st_mode):
                    raise Problem("there is something in it that is neither file nor directory")
            if len(found) > MOST_FILES:
                raise Problem(f"there are more than {MOST_FILES} files in it")
        return sorted(found)

    def open(self, file: _File) -> BinaryIO:
        """Open one of `files`, unless a link has taken its place."""
        where = os.readlink(_PATH_OF % self._top)
        if self.is_file:
            fd = os.open(_PATH_OF % self._top, os.O_RDONLY | os.O_CLOEXEC)
        else:
            fd = files.open_private(os.fsdecode(file.name), dir_fd=self._top)
            where = os.path.join(where, file.name)
        content = open(fd, "rb", buffering=0)  # noqa: SIM115
        # Check the opened file's path: a folder in the path may have been replaced by a link.
        if os.readlink(_PATH_OF % fd) != where:
            content.close()
            raise Problem(_CHANGED)
        return content

    def digest(self, file: _File) -> str:
        """The SHA-256 of a file's content; for a symbolic link, of the path to which it points."""
        if file.link is not None:
            return sha256(file.link).hexdigest()
        seen, count = sha256(), 0
        with self.open(file) as content:
            while count <= file.size and (chunk := content.read(CHUNK_BYTES)):
                count += len(chunk)
                seen.update(chunk)
        return seen.hexdigest()


def _open(path: bytes) -> int:
    for _ in range(_MOST_LINKS):
        found = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
        status = os.fstat(found)
        if not stat.S_ISLNK(status.st_mode):
            break
        if status.st_uid not in (0, os.geteuid()):
            # Don't follow a link of another user, who could make us read and upload any of our own
            # files.
            raise Problem(f"it is a link of user {status.st_uid}, which is not followed")
        path = os.path.join(os.path.dirname(path), os.readlink(b"", dir_fd=found))
    if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
        raise Problem("it is neither a file nor a directory")
    return os.open(_PATH_OF % found, os.O_RDONLY | os.O_CLOEXEC)


def _file(name: bytes, status: os.stat_result, link: bytes | None = None) -> _File:
    size = status.st_size if link is None else 0
    return _File(name, size, status.st_mtime_ns, status.st_ino, link)


def _raise(error: OSError) -> None:
    raise error


def _line(name: bytes, digest: str) -> bytes:
    """The line that `sha256sum` would write for a file. It escapes some characters of the name."""
    escaped = name.replace(b"\\", b"\\\\").replace(b"\n", b"\\n").replace(b"\r", b"\\r")
    return (b"\\" if escaped != name else b"") + digest.encode() + b"  " + escaped + b"\n"


def _copy(tree: _Tree, listing: bytes, store: str, words: Iterable[str]) -> str:
    """Upload the files, and then the list of their digests; returns the address of the copy.

    *words*: the names of the copy's folders in the store, outermost first.
    """
    # Import fsspec only here, since few agents upload copies.
    from fsspec.core import url_to_fs

    system, root = url_to_fs(store)
    # Escape the names of the folders, so that they can't form a path out of the store.
    plain = [quote(word.strip("."), _SAFE)[:_LONGEST_NAME] or "_" for word in words]
    base = path = "/".join([root.rstrip("/"), *plain])
    for file in tree.files:
        if file.link is None:
            path = f"{base}/{quote(file.name, f'{_SAFE}/')}"
            system.makedirs(path.rpartition("/")[0], exist_ok=True)
            with tree.open(file) as content:
                system.put_file(os.fsdecode(_PATH_OF % content.fileno()), path)
    tree.check()
    # Upload the list last: its presence shows that the copy is complete.
    system.pipe_file(f"{base}.sha256", listing)
    return str(system.unstrip_protocol(path if tree.is_file else base))
