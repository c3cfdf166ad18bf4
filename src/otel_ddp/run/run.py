"""Run: what the user holds. Everything it is told goes into this process's journal."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from types import TracebackType
from typing import Any, NamedTuple, TypeVar, cast

from otel_ddp import catalog, containment, settings
from otel_ddp.errors import ConfigError
from otel_ddp.identity import identity, launchers, pools
from otel_ddp.identity.git_commit import revision
from otel_ddp.identity.identity import Identity
from otel_ddp.identity.strategy import Choice
from otel_ddp.journal import agent_environment, layout, place, system
from otel_ddp.journal.writer import open_journal
from otel_ddp.recording import agent_start, values
from otel_ddp.recording.progress import Phase, Progress
from otel_ddp.recording.recorder import Recorder
from otel_ddp.recording.spans import OpenSpan, record_event
from otel_ddp.run import current_run

T = TypeVar("T")

# How long one thread waits for another that ends the same run.
_END_S = 1.0
# Each rank that a process logs for takes two descriptors and this much shared memory: few values
# come by a queue.
_MOST_RANKS = 100
_RANK_JOURNAL_BYTES = settings.MIB // 2
# What a step takes in the journal, roughly: where its time went, and a few logged values.
_STEP_BYTES = 200


class _Opened(NamedTuple):
    """A span that was entered, and the phase where it is one."""

    progress: Progress
    span: OpenSpan
    phase: Phase | None


class Run:
    """One process's part of one launch. Get it from `otel_ddp.init` or `otel_ddp.instrument`."""

    def __init__(
        self, arguments: Mapping[str, Any], *, joins: bool = False, task: pools.Task | None = None
    ) -> None:
        """*joins*: another process has opened it. *task*: of a pool, whose run this is."""
        self._arguments = dict(arguments)
        self._joins = joins
        self._forked = False
        self._task = task
        self._identity: Identity | None = None
        self._recorder: Recorder | None = None
        self._progress: Progress | None = None
        self._place: place.Place | None = None
        self._ends = threading.RLock()
        self._ending: list[Callable[[], Any]] = []
        self._settled = False
        # Until it is opened, a run that came into a child by pickle or by fork opens itself at its
        # first use; so does one by which a process logs for another rank.
        self._opened = False
        # The run of the process that logs by this one, and those by which it does so.
        self._logs_for: Run | None = None
        self._ranks: dict[tuple[int | None, str], Run] = {}

    def told(self, arguments: Mapping[str, Any]) -> Run:
        """This run, not opened yet, with what `init` was told on top of what it came with.

        A forked child begins anew instead, as a spawned one does that has nothing but variables.
        """
        came_with, self._joins = ({}, False) if self._forked else (self._arguments, self._joins)
        self._arguments = came_with | {k: v for k, v in arguments.items() if v is not None}
        self._identity = None
        return self

    def is_over(self, task: pools.Task | None, arguments: Mapping[str, Any]) -> bool:
        """Whether this is the run of a task of a pool, and the worker does another one by now."""
        if task is None or self._task is None:
            return False
        # Values of the user's own may not be comparable.
        same = containment.attempt(lambda: bool(arguments == self._arguments), False)
        return task.follows(self._task, same)

    def brought_by_fork(self) -> bool:
        """Let go of what is the parent's, in a forked child; whether this run can be joined there.

        Not a word may be written to the parent's journal, which is mapped here as well. A thread of
        the parent may have held a lock, and that thread is not here.
        """
        # Each of these may be the part that the child has been given.
        for each in list(self._ranks.values()):
            each.brought_by_fork()
        joinable = not self._opened or self._recorder is not None
        if joinable and (self._opened or self._logs_for is not None):
            self._arguments, self._joins, self._forked = self._for_a_child(), True, True
        if joinable:
            self._identity = self._task = self._logs_for = None
        self._ranks = {}
        self._log_by_run()
        if self._recorder is not None:
            self._recorder.disown(partial(Run.log, self))
        self._recorder = self._progress = self._place = None
        self._ends, self._ending = threading.RLock(), []
        self._opened, self._settled = not joinable, not joinable
        return joinable

    # -- opening

    def opened_again(self, arguments: Mapping[str, Any]) -> None:
        """What a second `init` says of this run is too late; only its configuration is added."""
        who = self.identity
        for name, value in arguments.items():
            if value is None or name in ("config", "parallel"):
                continue
            if name == "strategy":
                known, asked = self._choice.text, Choice(value).text
            else:
                known = getattr(who, name)
                asked = identity.normal(name, value)
            if asked != known:
                containment.warn_once(
                    f"again {name}",
                    "A run is open in this process, with %s=%r: %s=%r comes too late and is "
                    "ignored. Say it in the first call of init or instrument, or call finish() "
                    "before this one.",
                    *(name, known, name, asked),
                )
        if arguments["config"] is not None:
            self.config(arguments["config"])

    def open(self) -> None:
        """Read the world as it is now and start the journal. Strict: this may raise."""
        self._opened = True
        if self._logs_for is not None and self._logs_for._ready() is None:
            self._settled = True
            return
        asked = dict(self._arguments)
        strategy, config = asked.pop("strategy", None), asked.pop("config", None)
        conf = self._settings = settings.read()
        self._choice = Choice(conf.strategy if strategy is None else strategy)
        if self._logs_for is not None:
            self._choice = self._logs_for._choice
        who = self._identity = self._resolve(asked)
        if conf.disabled:
            self._settled = True
            return
        if lacking := system.missing():
            self._settled = True
            if not who.local_rank:
                containment.warn_once(
                    "system",
                    "Nothing is recorded here: this system lacks %s, which Linux has. Your script "
                    "goes on as it is, and every call of otel_ddp does nothing.",
                    lacking,
                )
            return
        who = self._identity = self._ask_group(who)
        self._exported = self._exports(who)
        self._settled = who.settled
        if who.launcher == "environment" and who.world_size is None and not who.local_rank:
            containment.warn_once(
                "world size",
                "RANK is set and WORLD_SIZE is not: this process is recorded as rank %s of an "
                "unknown number of ranks. Set WORLD_SIZE as well, as torchrun does, or open the "
                "run after init_process_group. If this process is no rank, unset RANK.",
                who.label_rank,
            )
        if conf.starts_agent and not who.local_rank:
            for doubt in settings.doubts(conf):
                containment.warn_once(doubt, "%s; `otel-ddp doctor` checks it.", doubt)
        if not who.local_rank:
            for sentence in settings.unknown():
                containment.warn_once(sentence, "%s", sentence)
        places, remark = place.find(conf.directory, offline=conf.offline)
        if remark:
            containment.warn_once("place", "%s.", remark)
        if not places:
            return
        directories = [each.directory for each in places]
        own = self._logs_for is None
        size = conf.journal_bytes if own else min(conf.journal_bytes, _RANK_JOURNAL_BYTES)
        writer, remark = open_journal(directories, size, self._told())
        if remark:
            containment.warn_once("journal", "%s.", remark)
        if writer is None:
            return
        self._place = place.Place(writer.path.parent)
        recorder = self._recorder = Recorder(writer, conf)
        self._progress = Progress(recorder)
        recorder.on_first_value = self._progress.mark_running
        recorder.check_agent = self._look_around
        if self._logs_for is None:
            containment.count_failure = self._count_failures
            self._count_failures(0.0)
        recorder.facts(
            {
                **_facts(),
                **({} if self._logs_for is None else {"proxy": True}),
                "terms": agent_environment.digest(os.environ, offline=conf.offline),
                "sample_steps": conf.sample_steps,
            }
        )
        self._say_kept(recorder)
        if self._settled:
            self._announce()
        self._look_around(writer.created_ns)
        self._place.wake_agent()
        if config is not None:
            self.config(config)
        self._say_cut(recorder)

    def _exports(self, who: Identity) -> bool | None:
        # What a process logs for others is to be seen where its own values are.
        return self._choice.exports(who) if self._logs_for is None else self._logs_for._exported

    def _told(self) -> dict[str, Any]:
        return {
            **self.identity.to_dict(),
            "strategy": self._choice.text,
            "exported": bool(self._exported),
            "settled": self.identity.settled,
        }

    def _announce(self) -> None:
        identity.hand_down(self.identity.run, self.identity.group)
        self._say_unknown()
        who = self.identity
        if self._choice.text == "main" and who.local_rank == 0 and who.global_rank:
            containment.warn_once(
                "main",
                "strategy 'main' exports rank 0 of the whole run: this is rank %d, the first of "
                "its node, and its series stay here. strategy='node' exports the first of each.",
                who.global_rank,
            )

    def _say_unknown(self) -> None:
        if self._exported is None:
            what = "LOCAL_RANK" if self._choice.text == "node" else "RANK"
            containment.warn_once(
                "strategy",
                "strategy %r needs the %s of this process, which is not known here, so its series "
                "stay on the node. Set OTEL_DDP_%s%s.",
                self._choice.text,
                what.lower().replace("_", " "),
                what,
                " or pass local_rank= to init"
                if what == "LOCAL_RANK"
                else ", or open the run after init_process_group",
            )

    def _say_kept(self, recorder: Recorder) -> None:
        """Where nothing is sent, say at the start how much is kept, and where."""
        conf = self._settings
        if not self._speaks():
            return
        if conf.offline:
            where = shlex.quote(conf.spools)
            by = settings.offline_by()
            containment.warn_once(
                "offline",
                "%s=offline: nothing is sent. What is recorded is kept in %s, %d MiB at most on "
                "each node (OTEL_DDP_SPOOL_BYTES); `otel-ddp replay %s` sends it later.%s",
                *(by or "OTEL_DDP_AGENT", where, conf.spool_bytes // settings.MIB, where),
                " OTEL_DDP_AGENT=auto, or an endpoint, has it sent at once." if by else "",
            )
        elif conf.agent == "off":
            ring_bytes = recorder.writer.ring_bytes
            containment.warn_once(
                "off",
                "OTEL_DDP_AGENT=off: no agent reads what is recorded. The journal of a process "
                "holds the last %.1f MiB (OTEL_DDP_JOURNAL_BYTES), about %d steps; what is older "
                "is overwritten. OTEL_DDP_AGENT=offline keeps everything on disk.",
                *(ring_bytes / settings.MIB, round(ring_bytes / _STEP_BYTES, -2)),
            )

    def _say_overwritten(self, recorder: Recorder, where: place.Place) -> None:
        """Say once that the journal is full, where no agent lives to read it."""
        if not self._speaks() or not recorder.writer.overwrites_unread() or where.agent_is_alive():
            return
        agent = self._settings.agent
        advice = {
            "off": "OTEL_DDP_AGENT=offline would keep them on disk",
            "external": "start `otel-ddp agent` on this node",
        }
        containment.warn_once(
            "overwritten",
            "The journal is full and no agent reads it (OTEL_DDP_AGENT=%s): the oldest records "
            "are overwritten from now on; %s.",
            *(agent, advice.get(agent, "`otel-ddp status` says why")),
        )

    def _speaks(self) -> bool:
        """Whether this process says what holds for all ranks."""
        if self._logs_for is not None or (pools.in_worker() and identity.parent_has_run()):
            return False
        return not self.identity.global_rank and not self.identity.local_rank

    def _ask_group(self, who: Identity) -> Identity:
        if self._logs_for is not None:
            # The run is the one of this process, which asks for itself.
            self._logs_for._ready()
            found = identity.of_rank(self._logs_for.identity, **self._arguments)
            return who if found == who else found
        if not _group_is_up():
            return who
        from otel_ddp.torch import process_group

        facts = process_group.facts(who.proposal, agree=who.wants_agreement)
        if facts is None:
            return who
        if "global_rank" in who.given and who.global_rank != facts.global_rank:
            containment.warn_once(
                "rank",
                "This process is rank %s by argument or OTEL_DDP_RANK, and rank %d of its process "
                "group: it is recorded as the former. Leave it out, and the group is asked.",
                *(who.global_rank, facts.global_rank),
            )
        return identity.settle(who, facts)

    @containment.contained(default=True)
    def _settle_by_hooks(self) -> bool:
        """Ask as training goes on; true once nothing is left to ask."""
        recorder = self._recorder
        if recorder is None:
            return True
        if not self._settled or self.identity.may_have_others:
            self._settle(recorder)
        _tell_backend(recorder)
        return self._settled and (not self.identity.may_have_others or _group_is_up())

    @containment.contained()
    def _settle(self, recorder: Recorder) -> None:
        """Until the process group is up, ask at each call whether it is."""
        if not self.identity.settled or self.identity.may_have_others:
            who = self._ask_group(self.identity)
            if who == self._identity:
                return
            self._identity = who
            self._settled = False
            self._log_by_run()
            self._exported = self._exports(who)
        written = recorder.identity(self._told())
        # A signal handler in the middle of a record: the next call tells it.
        if written is None:
            return
        if not written:
            containment.warn_once(
                "identity",
                "What the process group says of this process found no room in its journal, so "
                "its series keep the labels of before: set OTEL_DDP_JOURNAL_BYTES higher, or give "
                "shorter names and descriptions.",
            )
        self._settled = self.identity.settled
        if self._settled:
            self._announce()
            if self._place is not None:
                self._place.wake_agent()

    def _ready(self) -> Recorder | None:
        """What to record with, or None where this process is silent."""
        if not self._opened:
            if _in_data_worker():
                return None
            self._join()
        recorder = self._recorder
        if recorder is not None and not self._settled:
            self._settle(recorder)
        return recorder

    @containment.contained()
    def _join(self) -> None:
        current_run.join(self)

    # -- what it is

    @property
    def opened(self) -> bool:
        """Whether it was opened, or will never be."""
        return self._opened

    @property
    def logs_for_another_rank(self) -> bool:
        """Whether it is a handle that `for_rank` has given."""
        return self._logs_for is not None

    @property
    def identity(self) -> Identity:
        """Who this process is."""
        if self._identity is None:
            said = {k: v for k, v in self._arguments.items() if k not in ("strategy", "config")}
            self._identity = self._resolve(said)
        return self._identity

    def _resolve(self, said: Mapping[str, Any]) -> Identity:
        if self._logs_for is not None:
            return identity.of_rank(self._logs_for.identity, **said)
        return identity.resolve(
            **said,
            joins=self._joins,
            in_task=self._task is not None,
            # Also one that os.fork has made has the variables of its parent, not a launcher's.
            in_spawned_child=True if self._forked and self._joins else None,
        )

    @property
    def group(self) -> str:
        """What ties several processes or runs of one experiment together."""
        return self.identity.group

    @property
    def run(self) -> str:
        """The name of this launch, the same on all its ranks."""
        return self.identity.run

    @property
    def job_type(self) -> str:
        """The role of this process."""
        return self.identity.job_type

    # -- what users say

    def log(
        self,
        metrics: Mapping[str, Any],
        *,
        step: int | None = None,
        epoch: float | None = None,
        split: str | None = None,
    ) -> None:
        """Record numbers: `run.log({"loss": loss, "lr": lr}, step=step)`."""
        recorder = self._ready()
        if recorder is None:
            return
        if self._settled:
            # Further calls need nothing of this run, so they go to the recorder at once.
            vars(self)["log"] = recorder.log
        else:
            # Values are logged and the rank is still unknown: it may stay so.
            self._say_unknown()
        recorder.log(metrics, step=step, epoch=epoch, split=split)

    def _log_by_run(self) -> None:
        """Lets calls of `log` come to this run again, and not to its recorder at once."""
        vars(self).pop("log", None)

    def config(self, mapping: T) -> T:
        """Record the configuration of this run, flat or nested; returned unchanged."""
        self._config(mapping)
        return mapping

    @containment.contained()
    def _config(self, mapping: Any) -> None:
        recorder = self._ready()
        if recorder is None:
            return
        content = values.flat(mapping)
        if not content and isinstance(mapping, Mapping):
            return
        if not content:
            kind = type(mapping).__name__
            recorder.refuse("value", "config", f"config expects a mapping, got {kind}")
        else:
            if left_out := recorder.config(content):
                text = f"{_few(left_out)} of the configuration found no room"
                recorder.refuse("value", "config", f"{text} (OTEL_DDP_JOURNAL_BYTES)")
            if len(content) == values.MOST_SETTINGS:
                text = f"of a configuration {values.MOST_SETTINGS} settings are recorded at most"
                recorder.refuse("value", "settings", f"{text}, so what follows is left out")
            self._say_cut(recorder)

    def _say_cut(self, recorder: Recorder) -> None:
        """What of this run its info, whose labels are bounded, does not show in full."""
        who, longest = self.identity, catalog.LONGEST_LABEL
        if who.global_rank:
            return  # the info is rank 0's
        texts = {"description": who.description, "tags": who.tags}
        shown = islice(recorder.settings.items(), catalog.MOST_CONFIG_LABELS)
        cut = [
            name
            for name, value in (*texts.items(), *shown)
            if isinstance(value, str) and len(value) > longest
        ]
        cut += islice(recorder.settings, catalog.MOST_CONFIG_LABELS, None)
        if cut:
            containment.warn_once(
                "labels",
                "training_run_info shows %d settings and %d characters of each, so %s cannot be "
                "seen in full there: labels are bounded. The log record %s and `otel-ddp status "
                "--json` have all that is recorded, %d characters of each.",
                *(catalog.MOST_CONFIG_LABELS, longest, _few(cut), catalog.RUN_CONFIG_EVENT),
                values.LONGEST_SETTING,
            )

    @contextlib.contextmanager
    def phase(self, name: str, *, expect_s: float | None = None) -> Iterator[None]:
        """Say what this process does: `with run.phase("checkpoint"): save()`.

        *expect_s* is how long it may well take: until then, and half as long again, standing still
        in it is no stall.
        """
        opened = self._begin(name, phase=True, expect_s=expect_s)
        try:
            yield
        except BaseException as raised:
            self._end(opened, {}, type(raised).__name__)
            raise
        self._end(opened, {}, "")

    @contextlib.contextmanager
    def span(self, name: str, /, **attributes: Any) -> Iterator[None]:
        """Record how long something takes: `with run.span("load", shard=3): ...`."""
        opened = self._begin(name)
        try:
            yield
        except BaseException as raised:
            self._end(opened, attributes, type(raised).__name__)
            raise
        self._end(opened, attributes, "")

    @containment.contained()
    def _begin(self, name: Any, phase: bool = False, expect_s: Any = None) -> _Opened | None:
        recorder, progress = self._ready(), self._progress
        if recorder is None or progress is None:
            return None
        try:
            clean, _ = values.text(name, 200)
        except values.Refused as why:
            recorder.refuse("name", "span", f"a span was not recorded: {why}")
            return None
        expected = containment.attempt(lambda: float(expect_s or 0.0), 0.0)
        if not 0.0 <= expected < 1e9:
            expected = 0.0
        entered = progress.begin(clean, expected) if phase else None
        if progress.steps_began:
            # All ranks count alike, whoever of them logs.
            trace, step = f"step/{progress.step_count + 1}", progress.next_logged_number()
            return _Opened(progress, OpenSpan(recorder, clean, trace, step), entered)
        logged = recorder.step
        trace = f"step/{logged}" if logged >= 0 else f"name/{clean}"
        span = OpenSpan(recorder, clean, trace, logged if logged >= 0 else None)
        return _Opened(progress, span, entered)

    @containment.contained()
    def _end(self, opened: _Opened | None, attributes: Mapping[str, Any], error: str) -> None:
        if opened is None:
            return
        took_s = opened.span.leave()
        recorder, progress = self._recorder, self._progress
        # A forked child leaves what its parent has entered, and that is the parent's to tell.
        if recorder is None or progress is not opened.progress:
            return
        # The phase first: it must not stay open where the span cannot be written.
        if opened.phase is not None:
            progress.end(opened.phase, took_s)
        opened.span.record(recorder, took_s, attributes, error)

    @containment.contained()
    def event(self, name: str, /, **attributes: Any) -> None:
        """Record that something happened: `run.event("lr drop", factor=0.1)`."""
        recorder = self._ready()
        if recorder is None:
            return
        try:
            record_event(recorder, name, attributes)
        except values.Refused as why:
            recorder.refuse("name", "event", f"an event was not recorded: {why}")

    @containment.contained()
    def describe(self, model: Any) -> None:
        """Say what model this run trains."""
        recorder = self._ready()
        if recorder is None:
            return
        from otel_ddp.torch import wrappers

        recorder.facts(wrappers.describe(model))

    @containment.contained()
    def watch(self, model: Any = None, **options: Any) -> None:
        """Measure the steps that train this model, or, without one, the models that are found."""
        recorder, progress = self._ready(), self._progress
        if recorder is None or progress is None:
            return
        from otel_ddp.torch import measure

        if not measure.can_measure(model):
            return
        _tell_backend(recorder)
        who = self.identity
        options.update(
            every=self._settings.sample_steps,
            leads=not who.global_rank,
            speaks=not who.local_rank,
            settle=self._settle_by_hooks,
        )
        measure.start(model, progress, self.describe, **options)
        # A signal handler may have ended the run in the meantime.
        if self._progress is not progress:
            self._unwatch(progress)

    @containment.contained()
    def unwatch(self) -> None:
        """Take every hook off again."""
        if self._progress is not None:
            self._unwatch(self._progress)

    @containment.contained()
    def _unwatch(self, progress: Progress) -> None:
        if "otel_ddp.torch.measure" in sys.modules:
            from otel_ddp.torch import measure

            measure.stop(progress)

    # -- other ranks

    def for_rank(
        self, global_rank: int, *, job_type: str | None = None, local_rank: int | None = None
    ) -> Run:
        """What this process logs for another rank, whose numbers come by a queue, say.

        `run.for_rank(3, job_type="worker").log({"loss": loss})` has the labels of that rank. It is
        the same handle for the same rank, and ends with this run. A child that it is handed to is
        that rank.
        """
        found = self._for_rank(global_rank, job_type, local_rank)
        if found is None:
            found = Run({})
            found.fall_silent()
        return found

    @containment.contained()
    def _for_rank(self, global_rank: Any, job_type: Any, local_rank: Any) -> Run | None:
        if self._logs_for is not None:
            return self._logs_for._for_rank(global_rank, job_type, local_rank)
        if self.is_closed:
            return None
        who = self.identity
        try:
            other = identity.of_rank(who, global_rank, job_type, local_rank)
        except ConfigError as wrong:
            containment.warn_once("for_rank", "Nothing is recorded by for_rank: %s", wrong)
            return None
        key = other.global_rank, other.job_type
        if key == (who.global_rank, who.job_type):
            return self
        known = self._ranks.get(key)
        if known is not None and not known.is_closed:
            return known
        if known is None and len(self._ranks) >= _MOST_RANKS:
            containment.warn_once(
                "most ranks",
                "for_rank gives handles for %d ranks at most: what is logged for others is not "
                "recorded. Let them log by themselves, or log their mean.",
                _MOST_RANKS,
            )
            return None
        made = Run({"global_rank": global_rank, "job_type": job_type, "local_rank": local_rank})
        made._logs_for = self
        if known is not None:
            self._ranks[key] = made
            return made
        # Two threads may ask for the same rank at once.
        return self._ranks.setdefault(key, made)

    @property
    def is_closed(self) -> bool:
        """Whether it was opened and has ended, or was never to record anything."""
        return self._opened and self._recorder is None

    # -- the end

    def finish(self, state: str = "finished", *, reason: str = "") -> None:
        """End this run: the last values are handed to the agent, which takes at most 0.3 s."""
        if state not in ("finished", "failed"):
            raise ConfigError(f'state must be "finished" or "failed", got {state!r}.')
        self.close(state, str(reason))

    @containment.contained()
    def close(self, state: str, reason: str) -> None:
        """What `finish` does, and the end of the process where nobody called it."""
        self._opened = True
        recorder, progress, where = self._recorder, self._progress, self._place
        if recorder is None or progress is None or where is None:
            current_run.release(self)
            return
        # A signal handler that ends the run in the middle of what its own thread records.
        if progress.defer(partial(self.close, state, reason), state):
            current_run.release(self)
            return
        # Another thread that ends it is waited for, not for ever: it may need what this one has.
        if not self._ends.acquire(timeout=_END_S):
            return
        try:
            if self._recorder is None:
                return
            # A handler that comes while it is being ended does the rest of that.
            if not self._ending:
                # Of what it logs for others the agent hears in time, for this process goes on.
                last = self._logs_for is None
                self._ending += [
                    *(partial(each.close, state, "") for each in list(self._ranks.values())),
                    partial(self._settle, recorder) if not self._settled else _nothing,
                    partial(self._unwatch, progress),
                    recorder.drain_copies,
                    partial(recorder.reason, reason) if reason else _nothing,
                    partial(progress.end_run, state),
                    # After the progress: whoever has taken this record has seen the end.
                    lambda: recorder.append(layout.END, {"state": state, "time": time.time_ns()}),
                    partial(self._hand_over, recorder, where) if last else _nothing,
                    recorder.close,
                    where.wake_agent,
                    partial(current_run.release, self),
                    self.fall_silent,
                ]
            _do(self._ending)
        finally:
            self._ends.release()

    def _hand_over(self, recorder: Recorder, where: place.Place) -> None:
        if self._settings.starts_agent:
            agent_start.ensure_agent(where)
        if self._settings.agent != "off":
            agent_start.hand_over(where, recorder.writer)

    def fall_silent(self) -> None:
        """Record nothing from here on."""
        self._opened = True
        self._log_by_run()
        self._recorder = self._progress = None
        self._settled = True

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # A program may well leave through sys.exit(0).
        if error is None or (isinstance(error, SystemExit) and not error.code):
            self.close("finished", "")
        else:
            self.close("failed", values.error_line(error))

    def __reduce__(self) -> tuple[Callable[..., Run], tuple[dict[str, Any]]]:
        """Pickled into a child process, a run joins the same launch there at its first use."""
        arguments = self._for_a_child()
        # A function may not survive the journey.
        return (_attach, ({k: v for k, v in arguments.items() if not callable(v)},))

    def _for_a_child(self) -> dict[str, Any]:
        """How a child joins this run: ranks and configuration are the parent's own."""
        if self._logs_for is not None:
            return {**self._logs_for._for_a_child(), **self._arguments}
        own = ("config", "global_rank", "local_rank", "world_size", "parallel")
        arguments = {key: value for key, value in self._arguments.items() if key not in own}
        return {**arguments, "run": self.run, "group": self.group}

    def __repr__(self) -> str:
        who = self.identity
        return f"<otel_ddp.Run {who.run!r} rank {who.label_rank} of {who.world_size}>"

    # -- now and then

    @containment.contained()
    def _look_around(self, now: int) -> None:
        """Every few seconds: is the agent still there? A training process has no thread to ask."""
        recorder = self._recorder
        if recorder is None or self._place is None:
            return
        recorder.check_due_ns = now + agent_start.LOOK_EVERY_NS
        recorder.poll_copies()
        if self.identity.may_have_others:
            self._settle(recorder)
        if self._settings.starts_agent:
            agent_start.ensure_agent(self._place)
        self._say_overwritten(recorder, self._place)

    def _count_failures(self, more: float = 1.0) -> None:
        if self._recorder is not None:
            self._recorder.count(catalog.OTEL_DDP_HOOK_ERRORS, more)


def _few(names: Sequence[str]) -> str:
    """The first of many names: 'a', 'b', 'c' and 4 more."""
    first = ", ".join(values.shown(name) for name in names[:3])
    return first if len(names) <= 3 else f"{first} and {len(names) - 3} more"


def _nothing() -> None:
    pass


def _do(acts: list[Callable[[], Any]]) -> None:
    """Do and remove all of these, whatever a signal handler raises in the middle of one.

    That goes on after the last, and what it interrupted is done again. The handler may do all that
    is left by itself.
    """
    try:
        while acts:
            act = acts[0]
            act()
            if acts[:1] == [act]:
                del acts[0]
    except BaseException:
        while acts:
            act = acts[0]
            containment.attempt(act, None)
            if acts[:1] == [act]:
                del acts[0]
        raise


def _attach(arguments: dict[str, Any]) -> Run:
    """What an unpickled run becomes."""
    return cast("Run", current_run.attach(partial(Run, arguments, joins=True)))


def own_task() -> pools.Task | None:
    """The task of a pool that is a run of its own; none where a process group joins its workers."""
    return None if _group_is_up() else pools.current_task()


def _group_is_up() -> bool:
    # A process that has not imported torch.distributed has no process group.
    if "torch.distributed" not in sys.modules:
        return False
    from otel_ddp.torch import process_group

    return process_group.is_up()


def _tell_backend(recorder: Recorder) -> None:
    from otel_ddp.torch import process_group

    if backend := process_group.backend():
        recorder.facts({"backend": backend})


def _in_data_worker() -> bool:
    module = sys.modules.get("torch.utils.data")
    return module is not None and module.get_worker_info() is not None


def _facts() -> dict[str, Any]:
    """What the run's info says about this program, and whose child it is."""
    script = sys.argv[0] if sys.argv else ""
    found: dict[str, Any] = {
        "script": os.path.basename(script),
        "git_sha": revision(script) if script else "",
        "python": ".".join(map(str, sys.version_info[:3])),
    }
    if parent := launchers.multiprocessing_parent():
        found["parent"] = parent
        found["pool"] = pools.in_worker()
    torch = sys.modules.get("torch")
    if torch is not None:
        found["torch"] = str(getattr(torch, "__version__", ""))
        found["cuda"] = str(getattr(getattr(torch, "version", None), "cuda", None) or "")
    return found
