"""Finds and reads the journals of this node, and deletes them once they are exported."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from otel_ddp import errors, files
from otel_ddp.agent.ledger import Labels, Ledger
from otel_ddp.agent.reading.documents import Devices
from otel_ddp.agent.reading.exports import Exports
from otel_ddp.agent.reading.logged_values import summaries_of
from otel_ddp.agent.reading.process import Host, Process
from otel_ddp.journal import layout
from otel_ddp.journal.parser import Document, Unreadable
from otel_ddp.journal.place import Place
from otel_ddp.journal.process_state import ProcessState, table
from otel_ddp.journal.reader import JournalReader
from otel_ddp.journal.survey import last_of_agent

log = logging.getLogger("otel_ddp.agent")

Mark = tuple[int, int, int]
Marks = dict[Path, Mark]

_MOST_ENDED = 500
# How many ended processes keep their long texts in the agent's file. The agent rewrites this file
# often, so it has to stay small.
_MOST_LONG_TEXTS = 20
_NO_TEXTS: dict[str, Any] = {"description": "", "config": {}, "summary": []}


class Rank(NamedTuple):
    """A living rank: what the code that reads the node's metrics needs to know of it."""

    labels: Labels
    pid: int
    """The pid in the agent's namespace; 0 if unknown."""
    start_ticks: int
    facts: Mapping[str, Any]


class Ended(NamedTuple):
    """An ended process whose journal is closed."""

    labels: Labels
    ended_at: float
    process: ProcessState


class Journals:
    """The journals of a node.

    Only the agent's loop calls the methods, except for `processes`, `describe` and `unreadable`,
    which threads of the endpoint call too.
    """

    def __init__(
        self,
        place: Place,
        ledger: Ledger,
        own_name: str,
        host: Callable[[JournalReader], Host] = Host,
        *,
        keeps_found: bool = False,
        devices: Devices = dict,
    ) -> None:
        """*keeps_found*: do not delete the journals of processes that ended before this agent
        started, since they may be a user's copies. *host*: makes a process's `Host`, which knows
        what only its node can know. *devices*: see `Process`."""
        self._place = place
        self._ledger = ledger
        self._host = host
        self._devices = devices
        self._names = NodeNames(place.nodes_file, own_name, living=self._living_identities)
        # Load the summaries that the previous agent has stored, since the values that it has
        # committed are not read again.
        self._summaries = summaries_of(last_of_agent(place).processes)
        self._journals: dict[Path, Exports] = {}
        self._ended: list[Ended] = []
        self._delivered: Marks = {}
        self._committed: Marks = {}
        self._keep_before_ns = time.time_ns() if keeps_found else 0
        self._kept: set[Path] = set()
        # For each unreadable journal, why it is unreadable.
        self._unread: dict[Path, str] = {}
        self._has_place = True

    def _living_identities(self) -> Iterator[Mapping[str, Any]]:
        # Check each journal's lock now: a process may have died since the last poll.
        return (
            each.process.identity
            for each in list(self._journals.values())
            if each.process.is_at_work and each.reader.writer_is_alive()
        )

    # -- finding and reading

    def find(self) -> None:
        """Open new journals, and retry unreadable ones."""
        if not self._has_place:
            return
        unread = dict[Path, str]()
        # Without a free file descriptor the directory cannot be listed. So retry the journals that
        # were unreadable before, even if they are not listed.
        for path in dict.fromkeys((*self._place.journals(), *self._unread)):
            if path in self._journals or path in self._kept:
                continue
            try:
                reader = JournalReader(path)
            except Unreadable as error:
                if os.path.exists(path):
                    unread[path] = str(error)
            else:
                process = Process(self._host(reader), self._names.name, self._devices)
                self._journals[path] = Exports(reader, process, self._ledger, self._summaries)
                if reader.created_ns < self._keep_before_ns and not reader.writer_is_alive():
                    self._kept.add(path)
        for path, why in unread.items():
            if self._unread.get(path) != why:
                log.warning("%s; it is tried again until it can be read", why)
        self._unread = unread

    def any_removed(self) -> bool:
        """Whether the file of an open journal was removed, so that only this agent can read it."""
        return any(each.reader.was_removed() for each in self._journals.values())

    def leave_place(self) -> None:
        """Close all journals that are still in the directory, which belongs to another agent
        now."""
        self._has_place = self._ledger.reports_ends = False
        for path, journal in list(self._journals.items()):
            reader = journal.reader
            if not reader.was_removed():
                del self._journals[path]
                self._delivered.pop(path, None)
                self._committed.pop(path, None)
                with self._ledger.lock:
                    self._ledger.drop(journal.process.labels)
                reader.close()

    def poll(self) -> None:
        """Read new records into the ledger."""
        before = sum(1 for each in self.processes() if each.life.gone_ns)
        for journal in self._journals.values():
            self._poll(journal)
        if sum(1 for each in self.processes() if each.life.gone_ns) > before:
            # A process has died. Note that the others were seen alive after its death, so that none
            # of them seems to have died first.
            for journal in self._journals.values():
                life = journal.process.life
                if not life.gone_ns and journal.reader.writer_is_alive():
                    life.seen_alive_ns = time.time_ns()

    @errors.contained()
    def _poll(self, journal: Exports) -> None:
        # Read the clock first, then the lock, then the journal. If the lock is free, the process
        # has written its last record, so the journal is read to its end. If the lock is held, the
        # process was still alive at the time that was read.
        now_ns = time.time_ns()
        process = journal.process.poll(now_ns, journal.reader.writer_is_alive())
        with self._ledger.lock:
            journal.feed(process)

    def flush_documents(self) -> list[tuple[Labels, str, list[Document]]]:
        """Take the spans and events that were added since the last call."""
        return [
            (journal.process.labels, journal.process.project, taken)
            for journal in self._journals.values()
            if (taken := journal.take_documents())
        ]

    # -- delivered offsets

    def marks(self) -> Marks:
        """The read offset of each journal."""
        return {path: each.reader.bookmark() for path, each in self._journals.items()}

    def deliver(self, marks: Marks) -> None:
        """Note that records up to these offsets are delivered or on disk."""
        self._delivered |= {path: mark for path, mark in marks.items() if path in self._journals}

    def commit(self, marks: Marks) -> None:
        """Store these offsets, at which the next agent resumes reading.

        Call it only when the histories have all records before the offsets.
        """
        for path, mark in marks.items():
            journal = self._journals.get(path)
            if journal is not None and self._committed.get(path) != mark:
                self._committed[path] = mark
                journal.reader.commit(*mark)

    def has_undelivered_end(self) -> bool:
        """Whether an ended process has records that are not delivered or on disk."""
        return any(
            not each.process.is_at_work and self._delivered.get(path) != each.reader.bookmark()
            for path, each in self._journals.items()
        )

    # -- series

    def update_series(self, now_ns: int) -> None:
        """Update states and totals in the ledger. The caller holds the ledger's lock."""
        newest: dict[Labels, int] = {}
        for labels, created_ns in self._all_labels():
            newest[labels] = max(created_ns, newest.get(labels, 0))
        for journal in self._journals.values():
            process = journal.process
            journal.update_series(now_ns, is_newest=newest[process.labels] == process.began_ns)

    def _all_labels(self) -> Iterator[tuple[Labels, int]]:
        """The labels of each process with series, and the creation time of its journal."""
        for each in self.processes():
            yield each.labels, each.began_ns
        for ended in self._ended:
            yield ended.labels, ended.process.started_ns

    # -- the end of a journal

    def done(self) -> list[Path]:
        """The journals of dead processes that are read and exported completely."""
        return [path for path, journal in self._journals.items() if self._is_done(path, journal)]

    def _is_done(self, path: Path, journal: Exports) -> bool:
        reader = journal.reader
        return (
            not journal.process.is_at_work
            and not journal.documents
            and not journal.unread_artifacts
            and reader.drained()
            and self._committed.get(path) == reader.bookmark()
            # A process that has recorded its end may still wait for the commit of its offset, so
            # its journal stays until the process is dead.
            and not reader.writer_is_alive()
        )

    def close(self, done: Collection[Path]) -> None:
        """Close journals, and keep the descriptions of their processes."""
        for path in done:
            journal = self._journals.pop(path)
            process = journal.process
            self._delivered.pop(path, None)
            self._committed.pop(path, None)
            described = process.describe_in_full()
            self._ended.append(Ended(process.labels, process.ended_at or 0.0, described))
            journal.reader.close()

    def delete(self, done: Collection[Path]) -> None:
        """Delete the files of closed journals."""
        for path in set(done) - self._kept:
            files.remove(path, *map(path.with_suffix, layout.COMPANION_SUFFIXES))

    def forget_ended(self, linger_s: float) -> None:
        """Drop the series of processes that ended at least *linger_s* ago."""
        now = time.monotonic()
        old = [each for each in self._ended if now - each.ended_at >= linger_s]
        self._ended = [each for each in self._ended if now - each.ended_at < linger_s]
        in_use = self.labels()
        with self._ledger.lock:
            for each in old:
                if each.labels and each.labels not in in_use:
                    self._ledger.drop(each.labels)
                    self._summaries.pop(each.labels, None)

    # -- queries

    def exports(self) -> Collection[Exports]:
        """The exports of open journals."""
        return self._journals.values()

    def processes(self) -> list[Process]:
        """The processes of open journals."""
        # Iterate over a copy: threads of the endpoint call this while the loop may change the dict.
        return [each.process for each in list(self._journals.values())]

    def labels(self) -> set[Labels]:
        """The labels of each process with series."""
        return {labels for labels, _ in self._all_labels()}

    def ended_runs(self) -> set[str]:
        """The runs with an ended process that still has series."""
        ended = [each.labels for each in self._ended]
        ended += [each.labels for each in self.processes() if not each.is_at_work]
        return {dict(labels).get("run", "") for labels in ended if labels}

    def any_alive(self) -> bool:
        """Whether a process of this node lives."""
        return any(each.is_at_work for each in self.processes())

    def is_empty(self) -> bool:
        """Whether no process is left to read or show."""
        return not self._journals and not self._ended

    def ranks(self) -> list[Rank]:
        """The living ranks."""
        return [
            Rank(each.labels, each.pid, each.reader.start_ticks, each.reader.facts)
            for each in self.processes()
            if each.labels and each.is_at_work
        ]

    def pids(self) -> set[int]:
        """The pids of processes with a journal, also of processes that outlive their run."""
        return {each.pid for each in self.processes()} - {0}

    def environments(self) -> set[str]:
        """Digests of the OTEL_* variables with which the living processes were started."""
        return {str(each.fact("terms") or "") for each in self.processes() if each.is_at_work}

    # -- for `status`

    def unreadable(self) -> list[str]:
        """One sentence for each unreadable journal, which says why."""
        return list(self._unread.values())

    def describe(self) -> list[ProcessState]:
        """All processes, living and ended, with their descriptions, configurations and values."""
        living = (each.describe_in_full() for each in self.processes())
        ended = [each.process for each in self._ended[-_MOST_ENDED:]]
        older, newer = ended[:-_MOST_LONG_TEXTS], ended[-_MOST_LONG_TEXTS:]
        return table((replace(each, **_NO_TEXTS) for each in older), newer, living)


# -- the names of nodes: by host, and distinct if two nodes of one run share a host

_MOST_RUNS = 200


class NodeNames:
    """The names of nodes, stored in a file for the next agent."""

    def __init__(
        self,
        file: Path,
        own_name: str,
        living: Callable[[], Iterable[Mapping[str, Any]]] = lambda: (),
    ) -> None:
        """*living*: the identities of all living processes, including the process whose node is to
        be named."""
        self._file = file
        self._own_name = own_name
        self._living = living
        self._runs: dict[str, dict[str, str]] = files.read_mapping(file)

    def name(self, identity: Mapping[str, Any]) -> str:
        """The node label of a process."""
        if explicit := str(identity.get("node") or ""):
            return explicit
        host, rank = self._host(identity), identity.get("node_rank")
        if rank is None:
            return host
        names = self._runs.setdefault(_run(identity), {})
        key = f"{host}/{rank}"
        if key not in names:
            names[key] = self._fresh(identity, names.values())
            self._write()
        return names[key]

    def _fresh(self, identity: Mapping[str, Any], taken: Collection[str]) -> str:
        """A new name for the node of a process.

        If several nodes of a run share a host, the lowest node rank gets the plain host name, in
        whatever order the journals are read.
        """
        host, rank = self._host(identity), identity["node_rank"]
        before = any(
            each.get("node_rank") is not None and each["node_rank"] < rank
            for each in self._living()
            if not each.get("node") and (_run(each), self._host(each)) == (_run(identity), host)
        )
        return f"{host}-{rank}" if before or host in taken else host

    def _host(self, identity: Mapping[str, Any]) -> str:
        return self._own_name or str(identity.get("host") or "") or "unknown"

    def _write(self) -> None:
        for run in list(self._runs)[:-_MOST_RUNS]:
            del self._runs[run]
        # If the tmpfs is full, the names cannot be stored: the next agent may choose other names.
        with contextlib.suppress(OSError):
            files.replace(self._file, json.dumps(self._runs))


def _run(identity: Mapping[str, Any]) -> str:
    """Group and run as one string, since keys of JSON objects are strings."""
    return json.dumps([str(identity.get("group") or ""), str(identity.get("run"))])
