"""The processes of this node: found by their journals, read, let go when all is in safe hands."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import resource
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from otel_ddp import containment
from otel_ddp.agent import node_status
from otel_ddp.agent.ledger import Labels, Ledger
from otel_ddp.agent.node.sampling import Rank
from otel_ddp.agent.reading.journal_feed import JournalFeed
from otel_ddp.agent.reading.node_names import NodeNames
from otel_ddp.agent.verdicts.judge import Judge
from otel_ddp.agent.verdicts.silent_ranks import SilentRanks
from otel_ddp.diagnosis.facts import run_of
from otel_ddp.journal import layout
from otel_ddp.journal.place import Place, lock_holder
from otel_ddp.journal.reader import Document, JournalReader, Unopened, Unreadable

log = logging.getLogger("otel_ddp.agent")

Mark = tuple[int, int, int]
Marks = dict[Path, Mark]

_HIDDEN_S = 60.0
_MOST_ENDED = 500
# Of the last ones that ended: all of this is written anew every few seconds.
_MOST_PROSE = 20
# For who scrapes, for the collector, and for what is written: without them nothing leaves.
_SPARE_FILES = 32


class Ended(NamedTuple):
    """What is left of a process whose journal is gone: its series, and what is said of it."""

    labels: Labels
    created_ns: int
    ended_at: float
    described: dict[str, Any]


class Journals:
    """Called from the agent's loop alone, but for `commit`."""

    def __init__(self, place: Place, ledger: Ledger, own_name: str, judge: Judge) -> None:
        self._place = place
        self.judge = judge
        self._ledger = ledger
        self._names = NodeNames(place.nodes_file, own_name, living=self._living)
        self.silent = SilentRanks()
        self._journals: dict[Path, JournalFeed] = {}
        self._ended: list[Ended] = []
        self._committed: Marks = {}
        self._handed: Marks = {}
        self._bad: dict[Path, str] = {}
        self._waiting: dict[Path, Unopened] = {}

    def _living(self) -> Iterator[Mapping[str, Any]]:
        # Asked of the lock: what was last seen of it may be a tick old.
        return (
            each.who
            for each in list(self._journals.values())
            if each.ended_at is None and each.reader.writer_lives()
        )

    # -- finding and reading

    def look(self) -> None:
        """Find the journals that are new, and those that could not be opened before."""
        bad = {path: why for path, why in self._bad.items() if os.path.exists(path)}
        waiting: dict[Path, Unopened] = {}
        # Where no file is left, the place itself cannot be looked through.
        for path in dict.fromkeys((*self._place.journals(), *self._waiting)):
            if path in self._journals or path in bad:
                continue
            try:
                reader = self._open(path)
            except Unopened as why:
                if os.path.exists(path):
                    waiting[path] = why
            except Unreadable as why:
                bad[path] = str(why)
                log.warning("%s", why)
            else:
                self._journals[path] = JournalFeed(
                    reader, self._ledger, self._names.name, self.judge.parents.have_ended
                )
        self._bad, self._waiting = bad, waiting
        if said := self.remark():
            containment.warn_once("too many files", "%s", said)
        for each in waiting.values():
            if each.errno != errno.EMFILE:
                text = "%s; this journal is tried again until it can be read"
                containment.warn_once(f"journal {each.errno}", text, each)

    def _open(self, path: Path) -> JournalReader:
        # Two files a process: its journal, and the handle that tells of its death.
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = 2 * (len(self._journals) + 1) + _SPARE_FILES
        if most != resource.RLIM_INFINITY and wanted > most:
            raise Unopened(path, OSError(errno.EMFILE, os.strerror(errno.EMFILE)))
        return JournalReader(path)

    def sweep(self) -> None:
        """Remove what a process left that was killed while it made its journal."""
        for path in self._place.directory.glob(f".*{layout.SUFFIX}"):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > _HIDDEN_S and lock_holder(path) is None:
                    path.unlink()

    def take(self) -> None:
        """Read what is new into the ledger."""
        before = {path for path, journal in self._journals.items() if journal.gone_ns}
        for journal in self._journals.values():
            self._take_one(journal)
        self.judge.parents.watch(self._journals.values())
        if any(journal.gone_ns and path not in before for path, journal in self._journals.items()):
            # Who was asked before the dead one, and still lives, was not the first.
            for journal in self._journals.values():
                if not journal.gone_ns and journal.reader.writer_lives():
                    journal.seen_alive_ns = time.time_ns()
        self.judge.poll(self._journals.values())

    @containment.contained()
    def _take_one(self, journal: JournalFeed) -> None:
        # Asked before reading: what a process wrote before it died is then surely read.
        now_ns = time.time_ns()
        alive = journal.reader.writer_lives()
        if not alive and not journal.gone_ns:
            # It was alive when it was last asked, and dead by now; in between it died.
            journal.gone_ns = time.time_ns()
        with self._ledger.lock:
            journal.take(now_ns, alive)

    def documents(self) -> list[tuple[Labels, str, list[Document]]]:
        """The spans and events that were read since the last time, and the verdicts."""
        taken = self.judge.flush_documents()
        for journal in self._journals.values():
            if journal.documents:
                taken.append((journal.labels, journal.project, journal.documents))
                journal.documents = []
        return taken

    # -- safe hands

    def marks(self) -> Marks:
        """How far each journal is read."""
        return {path: journal.reader.mark() for path, journal in self._journals.items()}

    def commit(self, marks: Marks) -> None:
        """What was read up to here is in safe hands.

        Called by the delivery's threads as well; batches settle in order, so marks only grow.
        """
        for path, mark in marks.items():
            journal = self._journals.get(path)
            before = self._committed.get(path)
            if journal is not None and (before is None or before[0] <= mark[0]) and before != mark:
                self._committed[path] = mark
                journal.reader.commit(*mark)

    def somebody_waits(self) -> bool:
        """Whether a process has ended whose last values nobody has been given yet."""
        return any(
            journal.ended_at is not None
            and mark not in (self._committed.get(path), self._handed.get(path))
            for path, journal in self._journals.items()
            for mark in [journal.reader.mark()]
        )

    def handed(self, marks: Marks) -> None:
        """These marks were given to the delivery in a hurry: once is enough."""
        self._handed.update(marks)

    # -- standing

    def stand(self) -> None:
        """Bring the series of states and totals up to date."""
        now_ns = time.time_ns()
        newest: dict[Labels, int] = {}
        for labels, created_ns in self._seats():
            newest[labels] = max(created_ns, newest.get(labels, 0))
        with self._ledger.lock:
            for journal in self._journals.values():
                self._stand_one(
                    journal, now_ns, newest[journal.labels] == journal.reader.created_ns
                )
            self.judge.update_series(now_ns)
        self.silent.poll(self._journals.values(), now_ns)

    def _seats(self) -> Iterator[tuple[Labels, int]]:
        for journal in self._journals.values():
            yield journal.labels, journal.reader.created_ns
        for ended in self._ended:
            yield ended.labels, ended.created_ns

    @containment.contained()
    def _stand_one(self, journal: JournalFeed, now_ns: int, leads: bool) -> None:
        journal.stand(now_ns, leads)

    # -- letting go

    def release(self, tell: Callable[[], None]) -> None:
        """Give the memory of dead processes back: shared memory belongs to the living.

        *tell* writes down what is known of them, before their journals go.
        """
        done = [path for path, journal in self._journals.items() if self._is_done(path, journal)]
        if done:
            # Once more, so that their series say how they ended.
            self.stand()
        for path in done:
            journal = self._journals.pop(path)
            self._committed.pop(path, None)
            self._handed.pop(path, None)
            ended_at = journal.ended_at or 0.0
            described = {**journal.describe(), **node_status.prose(journal.reader)}
            self._ended.append(
                Ended(journal.labels, journal.reader.created_ns, ended_at, described)
            )
            journal.reader.close()
        if done:
            tell()
        for path in done:
            path.unlink(missing_ok=True)
            for suffix in layout.BESIDE:
                path.with_suffix(suffix).unlink(missing_ok=True)

    def _is_done(self, path: Path, journal: JournalFeed) -> bool:
        reader = journal.reader
        return (
            journal.ended_at is not None
            and reader.drained()
            and self._committed.get(path) == reader.mark()
            # A process that is being taken over still looks for its mark.
            and not reader.writer_lives()
        )

    def retire(self, linger_s: float) -> None:
        """Forget the series of what ended long ago."""
        now = time.monotonic()
        old = [each for each in self._ended if now - each.ended_at >= linger_s]
        self._ended = [each for each in self._ended if now - each.ended_at < linger_s]
        held = {labels for labels, _ in self._seats()}
        with self._ledger.lock:
            for each in old:
                if each.labels and each.labels not in held:
                    self._ledger.drop(each.labels)
        self.judge.retire({run_of(labels) for labels in held})

    # -- what there is

    def any_alive(self) -> bool:
        """Whether a process of this node is still at work."""
        return any(journal.ended_at is None for journal in self._journals.values())

    def ranks(self) -> list[Rank]:
        """Those that are at work, as far as sampling has to know them."""
        return [
            Rank(each.labels, each.pid, each.reader.start_ticks, each.reader.facts)
            for each in self._journals.values()
            if each.labels and each.ended_at is None and not each.is_proxy
        ]

    def pids(self) -> set[int]:
        """Of all that have a journal, also of those whose run is over and that live on."""
        return {each.pid for each in self._journals.values()} - {0}

    def empty(self) -> bool:
        """Whether nothing is left to read, to hand over or to show."""
        return not self._journals and not self._ended

    def terms(self) -> set[str]:
        """Under which terms for their agent the living processes were started."""
        return {
            str(journal.reader.facts.get("terms") or "")
            for journal in self._journals.values()
            if journal.ended_at is None
        }

    def unreadable(self) -> list[str]:
        """Why the journals that are there and are not read are not."""
        return [*self._bad.values(), *map(str, self._waiting.values())]

    def remark(self) -> str:
        """What to do where there are more processes than we may have files open."""
        count = sum(each.errno == errno.EMFILE for each in self._waiting.values())
        if not count:
            return ""
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return (
            f"{count} of the journals wait until others have ended: the agent may have {most} "
            "files open. Raise that limit (ulimit -n, docker --ulimit nofile, LimitNOFILE) where "
            "the training, or the agent, is started"
        )

    def nodes(self) -> dict[str, str]:
        """The node label of each journal."""
        return {
            path.name: dict(journal.labels)["node"]
            for path, journal in self._journals.items()
            if journal.labels
        }

    def ended(self) -> list[dict[str, Any]]:
        """What is said of the processes whose journals are gone."""
        told = [each.described for each in self._ended[-_MOST_ENDED:]]
        older = [{**each, "description": "", "config": {}} for each in told[:-_MOST_PROSE]]
        return [*older, *told[-_MOST_PROSE:]]

    def described(self) -> list[dict[str, Any]]:
        """What is said of every process."""
        return [*self.ended(), *(each.describe() for each in list(self._journals.values()))]
