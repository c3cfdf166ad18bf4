"""Run: the object that users hold. It writes what they log into this process's journal."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from types import TracebackType
from typing import Any, Literal, NamedTuple, TypeVar, cast

from otel_ddp import catalog, containment, settings
from otel_ddp.errors import ConfigError
from otel_ddp.identity import boards, identity, pool_tasks
from otel_ddp.identity.identity import Identity
from otel_ddp.identity.strategy import Choice
from otel_ddp.journal import agent_environment, layout, place, system_requirements
from otel_ddp.journal.direction import direction as direction_of
from otel_ddp.recording import agent_start, log_records, values
from otel_ddp.recording.artifacts import record_artifact
from otel_ddp.recording.early_stop import EarlyStop
from otel_ddp.recording.log_handler import LogHandler
from otel_ddp.recording.progress import Phase, Progress
from otel_ddp.recording.recorder import Recorder
from otel_ddp.recording.spans import OpenSpan, record_event, run_facts
from otel_ddp.run import announcements, current_run, log_lines, opening, rank_handles
from otel_ddp.run.ending import Act, Ending
from otel_ddp.run.rank_handles import RankHandles

T = TypeVar("T")


class _Opened(NamedTuple):
    """A span that was entered, and the phase where it is one."""

    progress: Progress
    span: OpenSpan
    phase: Phase | None


class Run:
    """The part of one process in one launch. `otel_ddp.init` and `instrument` return it."""

    def __init__(
        self,
        arguments: Mapping[str, Any],
        *,
        joins: bool = False,
        task: pool_tasks.Task | None = None,
    ) -> None:
        """*joins*: another process has opened this run. *task*: its pool's task."""
        self._arguments = dict(arguments)
        self._joins = joins
        self._forked = False
        self._task = task
        self._identity: Identity | None = None
        self._recorder: Recorder | None = None
        self._progress: Progress | None = None
        self._place: place.Place | None = None
        self._ending = Ending()
        # As the user says: name -> where its best value lies.
        self._best: dict[str, str] = {}
        self._early_stops: dict[str, EarlyStop] = {}
        self._settled = False
        self._log_lines: LogHandler | None = None
        self._cut_settings: set[str] = set()
        # A run that came into a child by pickle or by fork opens itself at its first use. So does a
        # handle by which a process logs for another rank.
        self._opened = False
        # For a handle: the run of the process that uses it. For a run: the handles of its ranks.
        self._logs_for: Run | None = None
        self._ranks = RankHandles[Run]()

    def with_arguments(self, arguments: Mapping[str, Any]) -> Run:
        """This run, not opened yet, with the arguments of `init` on top of its own.

        In a forked child the arguments of `init` alone count. A spawned child that has only its
        variables begins in the same way.
        """
        own, self._joins = ({}, False) if self._forked else (self._arguments, self._joins)
        self._arguments = own | {k: v for k, v in arguments.items() if v is not None}
        self._identity = None
        return self

    def is_over(self, task: pool_tasks.Task | None, arguments: Mapping[str, Any]) -> bool:
        """Whether this is the run of a pool's task, and its worker does another task by now."""
        if task is None or self._task is None:
            return False
        # Comparing values of the user may raise.
        same = containment.attempt(lambda: bool(arguments == self._arguments), False)
        return task.follows(self._task, same)

    def brought_by_fork(self) -> bool:
        """Drops the parent's state in a forked child; true if the child can join this run.

        The parent's journal is mapped here too, and the child must write nothing into it. Locks
        are new: a thread of the parent may have held one, and that thread is not here.
        """
        # The child may use any of these handles.
        for each in self._ranks.all():
            each.brought_by_fork()
        joinable = not self._opened or self._recorder is not None
        if joinable and (self._opened or self._logs_for is not None):
            self._arguments, self._joins, self._forked = self._for_a_child(), True, True
        if joinable:
            self._identity = self._task = self._logs_for = None
        self._ranks = RankHandles()
        self._log_by_run()
        if self._recorder is not None:
            self._recorder.disown(partial(Run.log, self))
        self._recorder = self._progress = self._place = None
        if self._log_lines is not None:
            # Not its end: that would wait for the parent's lock.
            self._log_lines.detach()
            self._log_lines = None
        self._ending = Ending()
        self._opened, self._settled = not joinable, not joinable
        return joinable

    # -- opening

    def opened_again(self, arguments: Mapping[str, Any]) -> None:
        """A second `init` adds configuration and where best values lie; a warning names others."""
        process = self.identity
        for name, value in arguments.items():
            if value is None or name in ("config", "parallel", "best"):
                continue
            if name == "strategy":
                known, asked = self._choice.text, Choice(value).text
            else:
                known = getattr(process, name)
                asked = identity.normal(name, value)
            if asked != known:
                announcements.comes_too_late(name, known, asked)
        if arguments["config"] is not None:
            self.config(arguments["config"])
        added = opening.directions(arguments["best"])
        if added and (recorder := self._ready()) is not None:
            self._best |= added
            recorder.facts({"best": self._best.copy()})

    def open(self) -> None:
        """Reads the environment as it is now and starts the journal. Strict: this may raise."""
        self._opened = True
        if self._logs_for is not None and self._logs_for._ready() is None:
            self._settled = True
            return
        asked = dict(self._arguments)
        strategy, config = asked.pop("strategy", None), asked.pop("config", None)
        self._best = opening.directions(asked.pop("best", None))
        conf = self._settings = settings.read()
        self._choice = Choice(conf.strategy if strategy is None else strategy)
        if self._logs_for is not None:
            self._choice = self._logs_for._choice
        process = self._identity = self._resolve(asked)
        if conf.disabled:
            self._settled = True
            return
        if lacking := system_requirements.missing():
            self._settled = True
            if not process.local_rank:
                announcements.nothing_is_recorded(lacking)
            return
        process = self._identity = self._ask_group(process)
        self._exported = self._exports(process)
        self._settled = process.settled
        announcements.doubts(conf, process)
        size = conf.journal_bytes
        if self._logs_for is not None:
            size = min(size, rank_handles.JOURNAL_BYTES)
        # Before there is a journal: one that is left without a state shows no end.
        of_run = run_facts(os.environ)
        writer = opening.open_journal(conf, size, self._identity_record())
        if writer is None:
            return
        self._place = place.Place(writer.path.parent)
        recorder = self._recorder = Recorder(writer, conf)
        self._progress = Progress(recorder)
        recorder.run_span = of_run
        recorder.on_first_value = self._progress.mark_running
        recorder.check_agent = self._check_agent
        if self._logs_for is None:
            containment.count_failure = self._count_failures
            self._count_failures(0.0)
        recorder.facts(
            {
                **opening.program_facts(),
                **({} if self._logs_for is None else {"proxy": True}),
                "terms": agent_environment.digest(os.environ, offline=conf.offline),
                "sample_steps": conf.sample_steps,
                "span": recorder.run_span,
                **({"best": self._best.copy()} if self._best else {}),
                **({"baseline": conf.baseline} if conf.baseline else {}),
            }
        )
        if self._speaks_for_all():
            announcements.where_it_is_kept(conf, writer.ring_bytes)
        if self._settled:
            self._announce()
        self._check_agent(writer.created_ns)
        self._place.wake_agent()
        if config is not None:
            self.config(config)
        self._count_cut_settings(recorder)
        if conf.logs and self._logs_for is None:
            self._hook_logs(log_lines.asked(conf.logs))

    def _exports(self, process: Identity) -> bool | None:
        # Values for other ranks are exported where the process's own values are.
        return self._choice.exports(process) if self._logs_for is None else self._logs_for._exported

    def _identity_record(self) -> dict[str, Any]:
        return {
            **self.identity.to_dict(),
            "strategy": self._choice.text,
            "exported": bool(self._exported),
            "settled": self.identity.settled,
        }

    def _announce(self) -> None:
        """Let children join this run, and say what its rank means for the strategy."""
        identity.hand_down(self.identity.run, self.identity.group)
        if self._exported is None:
            announcements.exports_are_unknown(self._choice)
        announcements.main_is_elsewhere(self._choice, self.identity)

    def _speaks_for_all(self) -> bool:
        """Whether this process says what holds for all ranks."""
        if self._logs_for is not None or (pool_tasks.in_worker() and identity.parent_has_run()):
            return False
        return not self.identity.global_rank and not self.identity.local_rank

    def _ask_group(self, process: Identity) -> Identity:
        if self._logs_for is not None:
            # This handle follows the run of its process, which asks by itself.
            self._logs_for._ready()
            found = identity.of_rank(self._logs_for.identity, **self._arguments)
            return process if found == process else found
        if not opening.group_is_up():
            return process
        from otel_ddp.torch import process_group

        facts = process_group.facts(process.proposal, agree=process.wants_agreement)
        if facts is None:
            return process
        if "global_rank" in process.given and process.global_rank != facts.global_rank:
            announcements.rank_differs(process, facts)
        return identity.settle(process, facts)

    @containment.contained(default=True)
    def _settle_by_hooks(self) -> bool:
        """Asks the process group while training goes on; true once nothing is left to ask."""
        recorder = self._recorder
        if recorder is None:
            return True
        if not self._settled or self.identity.may_have_others:
            self._settle(recorder)
        _record_backend(recorder)
        if self._log_lines is not None:
            self._log_lines.attach(started=True)
        return self._settled and (not self.identity.may_have_others or opening.group_is_up())

    @containment.contained()
    def _settle(self, recorder: Recorder) -> None:
        """Asks the process group for this rank and run, if it is up by now."""
        if not self.identity.settled or self.identity.may_have_others:
            process = self._ask_group(self.identity)
            if process == self._identity:
                return
            self._identity = process
            self._settled = False
            self._log_by_run()
            self._exported = self._exports(process)
        written = recorder.identity(self._identity_record())
        # A signal handler came in the middle of a record: the next call writes the identity.
        if written is None:
            return
        if not written:
            announcements.identity_found_no_room()
        self._settled = self.identity.settled
        if self._settled:
            self._announce()
            if self._place is not None:
                self._place.wake_agent()

    def _ready(self) -> Recorder | None:
        """The recorder; None if this process records nothing."""
        if not self._opened:
            if opening.in_data_worker():
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
        """Whether this run was opened, or never will be."""
        return self._opened

    @property
    def logs_for_another_rank(self) -> bool:
        """Whether this is a handle that `for_rank` has returned."""
        return self._logs_for is not None

    @property
    def identity(self) -> Identity:
        """The identity of this process: its run, group, node and ranks."""
        if self._identity is None:
            others = ("strategy", "config", "best")
            arguments = {k: v for k, v in self._arguments.items() if k not in others}
            self._identity = self._resolve(arguments)
        return self._identity

    def _resolve(self, arguments: Mapping[str, Any]) -> Identity:
        if self._logs_for is not None:
            return identity.of_rank(self._logs_for.identity, **arguments)
        return identity.resolve(
            **arguments,
            joins=self._joins,
            in_task=self._task is not None,
            # A child of os.fork has its parent's variables too, and none of a launcher's own.
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

    @property
    def url(self) -> str:
        """The board of this run, where `OTEL_DDP_GRAFANA_URL` names a Grafana; else empty."""
        grafana = settings.read().grafana_url
        return boards.address(grafana, "Run", {"group": self.group, "run": self.run})

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
            # Further calls need nothing of this run, so they go straight to the recorder.
            vars(self)["log"] = recorder.log
        else:
            # Values are logged and the rank is still unknown: it may stay so.
            if self._exported is None:
                announcements.exports_are_unknown(self._choice)
        recorder.log(metrics, step=step, epoch=epoch, split=split)

    @containment.contained()
    def log_tensor(
        self,
        name: str,
        tensor: Any,
        *,
        step: int | None = None,
        epoch: float | None = None,
        split: str | None = None,
    ) -> None:
        """Record how the values of a tensor are spread: `run.log_tensor("fc.weight", weight)`.

        It records `fc.weight/min`, `/max`, `/mean`, `/std`, `/p05`, `/p25`, `/p50`, `/p75` and
        `/p95`. They are computed on the tensor's device, without waiting for it, and take a pass
        or two over the tensor: every hundred steps is mostly enough. Quantiles of more than 65,536
        values are those of every n-th.
        """
        recorder = self._ready()
        if recorder is None:
            return
        from otel_ddp.torch import tensor_summary

        try:
            found = tensor_summary.summary(tensor)
        except (tensor_summary.NoSummary, RuntimeError) as why:
            containment.reraise_foreign()
            text = f"{values.shown(name)} was not recorded: {str(why)[:200]}"
            recorder.refuse("value", f"tensor:{values.shown(name)}", text)
            return
        pairs = {f"{name}/{what}": value for what, value in found.items()}
        recorder.log(pairs, step=step, epoch=epoch, split=split)

    def _log_by_run(self) -> None:
        """Makes calls of `log` come to this run again, instead of straight to its recorder."""
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
        content = values.flat(mapping, hidden=self._settings.hidden_names)
        if not content and isinstance(mapping, Mapping):
            return
        if not content:
            kind = type(mapping).__name__
            recorder.refuse("value", "config", f"config expects a mapping, got {kind}")
        else:
            if left_out := recorder.config(content):
                text = f"{announcements.few(left_out)} of the configuration found no room"
                recorder.refuse("value", "config", f"{text} (OTEL_DDP_JOURNAL_BYTES)")
            if len(content) == values.MOST_SETTINGS:
                text = f"of a configuration {values.MOST_SETTINGS} settings are recorded at most"
                recorder.refuse("value", "settings", f"{text}, so what follows is left out")
            self._count_cut_settings(recorder)

    def _count_cut_settings(self, recorder: Recorder) -> None:
        """Says once which settings labels do not show in full, and counts each of them once."""
        cut = set(announcements.what_the_info_cuts(self.identity, recorder.settings))
        if new := cut - self._cut_settings:
            self._cut_settings |= new
            recorder.count(catalog.OTEL_DDP_VALUES_REFUSED, float(len(new)), why="label_cut")

    @contextlib.contextmanager
    def phase(self, name: str, *, expect_s: float | None = None) -> Iterator[None]:
        """Say what this process does: `with run.phase("checkpoint"): save()`.

        *expect_s* is how long it may take. Standing still in it is no stall for one and a half
        times as long.
        """
        opened = self._begin(name, phase=True, expect_s=expect_s)
        try:
            yield
        except BaseException as raised:
            self._end(opened, {}, raised)
            raise
        self._end(opened, {}, None)

    @contextlib.contextmanager
    def span(self, name: str, /, **attributes: Any) -> Iterator[None]:
        """Record how long something takes: `with run.span("load", shard=3): ...`."""
        opened = self._begin(name)
        try:
            yield
        except BaseException as raised:
            self._end(opened, attributes, raised)
            raise
        self._end(opened, attributes, None)

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
        trace, step = progress.trace_and_step()
        # The id of a step's trace depends on the run; a span that is not exported is no parent.
        run = self.run if self._settled and self._exported else ""
        return _Opened(progress, OpenSpan(recorder, clean, trace, step, run), entered)

    @containment.contained()
    def _end(
        self,
        opened: _Opened | None,
        attributes: Mapping[str, Any],
        raised: BaseException | None,
    ) -> None:
        if opened is None:
            return
        took_s = opened.span.leave()
        recorder, progress = self._recorder, self._progress
        # A forked child leaves the spans that its parent entered: the parent records them.
        if recorder is None or progress is not opened.progress:
            return
        # The phase first: it must end even if the span cannot be written.
        if opened.phase is not None:
            progress.end(opened.phase, took_s)
        opened.span.record(recorder, took_s, attributes, raised)

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

    def logs(
        self,
        level: str | int = "info",
        *,
        others: str | int = "warning",
        logger: str | logging.Logger | Collection[str | logging.Logger] | None = None,
    ) -> None:
        """Record what this program logs by Python's `logging`: `run.logs("info")`.

        *level* is that of rank 0, *others* that of every other rank. *logger* is a logger, its
        name, or several; `"root"` hears all of them. By default they are those of the program, not
        those of libraries. A logger still decides by its own level which lines there are.
        """
        choice = log_lines.chosen(level, others, logger)
        if self._logs_for is None and self._ready() is not None:
            self._hook_logs(choice)

    @containment.contained()
    def _hook_logs(self, choice: log_lines.Choice) -> None:
        recorder, progress = self._recorder, self._progress
        if recorder is None or progress is None:
            return
        self._unhook_logs()
        self._log_lines = log_lines.start(
            choice, recorder, progress, lambda: self.identity.global_rank == 0
        )

    @containment.contained()
    def _unhook_logs(self) -> None:
        hooked, self._log_lines = self._log_lines, None
        if hooked is not None:
            hooked.end()

    @containment.contained()
    def ended_by(self, error: BaseException) -> None:
        """Records the exception that ends this run, with its stack trace."""
        recorder, progress = self._recorder, self._progress
        # A program that calls sys.exit has said why before.
        if recorder is None or progress is None or isinstance(error, SystemExit):
            return
        content = log_records.from_exception(error) | log_lines.moment(recorder, progress)
        recorder.append(layout.EVENT, content)

    @containment.contained()
    def artifact(
        self,
        path: str | os.PathLike[str],
        *,
        name: str | None = None,
        type: str = "file",
        direction: Literal["output", "input"] = "output",
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        """Record a file or directory that came out of this run, or went into it.

        `run.artifact("out/model.pt", name="model", type="model")`. Call it once the file is
        written. It does not touch the file: the node's agent works out size and digest, and stores
        a copy where `OTEL_DDP_ARTIFACTS` says so. An address such as `s3://bucket/data` is
        recorded as it is. *name* is by default the last part of the path.
        """
        recorder = self._ready()
        if recorder is None:
            return
        try:
            record_artifact(recorder, path, name, type, direction, metadata)
        except values.Refused as why:
            recorder.refuse("value", "artifact", f"an artifact was not recorded: {why}")

    def early_stop(
        self,
        metric: str,
        value: Any,
        *,
        patience: int,
        min_delta: float = 0.0,
        direction: Literal["min", "max"] | None = None,
    ) -> bool:
        """Say after each evaluation whether to stop: `patience` of them brought nothing better.

        `if run.early_stop("val/loss", loss, patience=3): break`. The answer depends on what you
        pass alone, so it is the same where nothing is recorded. *direction* is by default that of
        `best=`, or what the name says, else `min`. Better is what differs by more than
        *min_delta*. A tensor on a device is waited for. Every rank has an answer of its own: where
        their values may differ, send that of rank 0 to all.
        """
        return containment.attempt(
            lambda: self._early_stop(metric, value, patience, min_delta, direction), False
        )

    def _early_stop(
        self, metric: str, value: Any, patience: int, min_delta: float, given: str | None
    ) -> bool:
        stop = self._early_stops.get(metric)
        if stop is None:
            way = given or direction_of(metric, self._best)
            if way not in ("min", "max"):
                way = "min"
                containment.warn_once(
                    f"early stop: {metric}",
                    'early_stop takes %r as better the lower it is: say direction="max" if not.',
                    metric,
                )
            stop = self._early_stops[metric] = EarlyStop(way, int(patience), float(min_delta))
        stopped_before = stop.stopped
        if stop.feed(float(value)) and not stopped_before:
            self._tell_early_stop(metric, stop)
        return stop.stopped

    @containment.contained()
    def _tell_early_stop(self, metric: str, stop: EarlyStop) -> None:
        recorder = self._ready()
        if recorder is None:
            return
        name, _ = values.text(metric, 200)
        about = {"monitor": name, "patience": stop.patience, "best": stop.best}
        record_event(recorder, catalog.EARLY_STOP_EVENT, about)
        if (step := recorder.current_step()) is not None:
            recorder.stamp(catalog.TRAINING_EARLY_STOP_STEP, float(step), monitor=name)

    @containment.contained()
    def describe(self, model: Any) -> None:
        """Record which model this run trains."""
        recorder = self._ready()
        if recorder is None:
            return
        from otel_ddp.torch import wrappers

        recorder.facts(wrappers.describe(model))

    @containment.contained()
    def watch(self, model: Any = None, **options: Any) -> None:
        """Measure the steps that train this model, or models that are found if none is given."""
        recorder, progress = self._ready(), self._progress
        if recorder is None or progress is None:
            return
        from otel_ddp.torch import measure

        if not measure.can_measure(model):
            return
        _record_backend(recorder)
        process = self.identity
        options.update(
            every=self._settings.sample_steps,
            leads=not process.global_rank,
            speaks=not process.local_rank,
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
        """A handle to log for another rank, whose numbers come by a queue, for example.

        `run.for_rank(3, job_type="worker").log({"loss": loss})` has the labels of that rank. Each
        rank has one handle, which ends with this run. A child that gets a handle is that rank.
        """
        found = self._for_rank(global_rank, job_type, local_rank)
        if found is None:
            found = Run({})
            found.go_silent()
        return found

    @containment.contained()
    def _for_rank(self, global_rank: Any, job_type: Any, local_rank: Any) -> Run | None:
        if self._logs_for is not None:
            return self._logs_for._for_rank(global_rank, job_type, local_rank)
        if self.is_closed:
            return None
        process = self.identity
        try:
            other = identity.of_rank(process, global_rank, job_type, local_rank)
        except ConfigError as error:
            containment.warn_once("for_rank", "Nothing is recorded by for_rank: %s", error)
            return None
        key = other.global_rank, other.job_type
        if key == (process.global_rank, process.job_type):
            return self

        def make() -> Run:
            made = Run({"global_rank": global_rank, "job_type": job_type, "local_rank": local_rank})
            made._logs_for = self
            return made

        return self._ranks.handle(key, make)

    @property
    def is_closed(self) -> bool:
        """Whether this run has ended, or never records anything."""
        return self._opened and self._recorder is None

    # -- the end

    def finish(self, state: str = "finished", *, reason: str = "") -> None:
        """End this run; wait at most 0.25 s until the agent has read the last values."""
        if state not in ("finished", "failed"):
            raise ConfigError(f'state must be "finished" or "failed", got {state!r}.')
        self.close(state, str(reason))

    @containment.contained()
    def close(self, state: str, reason: str) -> None:
        """Does what `finish` does; also called when the process ends without it."""
        self._opened = True
        recorder, progress, where = self._recorder, self._progress, self._place
        if recorder is None or progress is None or where is None:
            current_run.release(self)
            return
        # A signal handler may end the run in the middle of what its own thread records.
        if progress.defer(partial(self.close, state, reason), state):
            current_run.release(self)
            return
        self._ending.run(
            lambda: self._recorder is None,
            lambda: self._acts_at_end(state, reason, recorder, progress, where),
        )

    def _acts_at_end(
        self,
        state: str,
        reason: str,
        recorder: Recorder,
        progress: Progress,
        where: place.Place,
    ) -> list[Act]:
        acts: list[Act] = [partial(each.close, state, "") for each in self._ranks.all()]
        if not self._settled:
            acts.append(partial(self._settle, recorder))
        acts += [self._unhook_logs, partial(self._unwatch, progress), recorder.drain_copies]
        if reason:
            acts.append(partial(recorder.reason, reason))
        content = {"state": state, "time": time.time_ns()}
        # In this order: a reader of the end record finds the final progress.
        acts += [partial(progress.end_run, state), partial(recorder.append, layout.END, content)]
        # The agent reads what this process logged for other ranks later: the process goes on.
        if self._logs_for is None:
            acts.append(partial(self._wait_for_agent, recorder, where))
        release = partial(current_run.release, self)
        return [*acts, recorder.close, where.wake_agent, release, self.go_silent]

    def _wait_for_agent(self, recorder: Recorder, where: place.Place) -> None:
        if announcements.journal_was_removed(recorder.writer):
            return
        if self._settings.starts_agent:
            agent_start.ensure_agent(where)
        if self._settings.agent != "off":
            agent_start.wait_for_agent(where, recorder.writer)

    def go_silent(self) -> None:
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
            self.ended_by(error)
            self.close("failed", values.error_line(error))

    def __reduce__(self) -> tuple[Callable[..., Run], tuple[dict[str, Any]]]:
        """Pickled into a child process, a run joins the same launch there at its first use."""
        arguments = self._for_a_child()
        # Functions may not be picklable.
        return (_attach, ({k: v for k, v in arguments.items() if not callable(v)},))

    def _for_a_child(self) -> dict[str, Any]:
        """The arguments by which a child joins this run, without the parent's ranks and config."""
        if self._logs_for is not None:
            return {**self._logs_for._for_a_child(), **self._arguments}
        own = ("config", "global_rank", "local_rank", "world_size", "parallel")
        arguments = {key: value for key, value in self._arguments.items() if key not in own}
        return {**arguments, "run": self.run, "group": self.group}

    def __repr__(self) -> str:
        process = self.identity
        return f"<otel_ddp.Run {process.run!r} rank {process.label_rank} of {process.world_size}>"

    # -- every few seconds

    @containment.contained()
    def _check_agent(self, now: int) -> None:
        """Every few seconds, from a call that logs: restarts a missing agent. We have no thread."""
        recorder = self._recorder
        if recorder is None or self._place is None:
            return
        recorder.check_due_ns = now + agent_start.CHECK_EVERY_NS
        recorder.poll_copies()
        if self._log_lines is not None:
            self._log_lines.attach(started=recorder.step >= 0)
        if self.identity.may_have_others:
            self._settle(recorder)
        if announcements.journal_was_removed(recorder.writer):
            return
        if self._settings.starts_agent:
            agent_start.ensure_agent(self._place)
        if (
            self._speaks_for_all()
            and recorder.writer.overwrites_unread()
            and not self._place.agent_is_alive()
        ):
            announcements.journal_is_full(self._settings.agent)

    def _count_failures(self, more: float = 1.0) -> None:
        if self._recorder is not None:
            self._recorder.count(catalog.OTEL_DDP_HOOK_ERRORS, more)


def _attach(arguments: dict[str, Any]) -> Run:
    """Makes the run of an unpickled one."""
    return cast("Run", current_run.attach(partial(Run, arguments, joins=True)))


def _record_backend(recorder: Recorder) -> None:
    from otel_ddp.torch import process_group

    if backend := process_group.backend():
        recorder.facts({"backend": backend})
