"""What a script says of its training: values, phases, events, log lines and files."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Literal, NamedTuple, TypeVar

from otel_ddp import catalog
from otel_ddp.errors import ConfigError, containment
from otel_ddp.identity.identity import Identity
from otel_ddp.identity.strategy import Choice
from otel_ddp.journal import layout
from otel_ddp.journal.direction import direction as direction_of
from otel_ddp.recording import log_records, values
from otel_ddp.recording.artifacts import record_artifact
from otel_ddp.recording.early_stop import EarlyStop
from otel_ddp.recording.log_handler import LogHandler
from otel_ddp.recording.progress import Phase, Progress
from otel_ddp.recording.recorder import Recorder
from otel_ddp.recording.spans import OpenSpan, record_event
from otel_ddp.run import announcements, log_lines
from otel_ddp.settings import Settings

T = TypeVar("T")


class _Opened(NamedTuple):
    """A span that was entered, and the phase where it is one."""

    progress: Progress
    span: OpenSpan
    phase: Phase | None


class Statements:
    """The half of `Run` that users call while they train; the other half opens and ends it."""

    _recorder: Recorder | None
    _progress: Progress | None
    _settings: Settings
    _choice: Choice
    _settled: bool
    _exported: bool | None
    """None: the rank is not known yet."""

    def __init__(self) -> None:
        # As the user says: name -> where its best value lies.
        self._best: dict[str, str] = {}
        self._early_stops: dict[str, EarlyStop] = {}
        self._log_lines: LogHandler | None = None

    @property
    def identity(self) -> Identity:
        """The identity of this process: its run, group, node and ranks."""
        raise NotImplementedError

    @property
    def logs_for_another_rank(self) -> bool:
        """Whether this is a handle that `for_rank` has returned."""
        raise NotImplementedError

    def _ready(self) -> Recorder | None:
        """What records; None where nothing is recorded."""
        raise NotImplementedError

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
        run = self.identity.run if self._settled and self._exported else ""
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
        try:
            choice = log_lines.chosen(level, others, logger)
        except ConfigError as why:
            if not self._has_begun():
                raise
            containment.warn_once("logs", "Log lines are recorded as before: %s", why)
            return
        if not self.logs_for_another_rank and self._ready() is not None:
            self._hook_logs(choice)

    def _has_begun(self) -> bool:
        """Whether there was a step, after which nothing raises any more."""
        recorder, progress = self._recorder, self._progress
        return bool(progress and progress.steps_began) or bool(recorder and recorder.step >= 0)

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
            stop = containment.attempt(
                lambda: EarlyStop(way, int(patience), float(min_delta)), None
            )
            if stop is None:
                text = "early_stop never stops for %r: patience and min_delta must be numbers."
                containment.warn_once(f"early stop numbers: {metric}", text, metric)
                return False
            self._early_stops[metric] = stop
        number = containment.attempt(lambda: float(value), None)
        if number is None:
            text = "early_stop leaves out an evaluation of %r: its value is no number."
            containment.warn_once(f"early stop value: {metric}", text, metric)
            return stop.stopped
        stopped_before = stop.stopped
        if stop.feed(number) and not stopped_before:
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
