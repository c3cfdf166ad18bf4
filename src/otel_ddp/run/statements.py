"""Records what a script says beside numbers: tensors, configuration and early stops."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from otel_ddp import errors
from otel_ddp.journal.values import EarlyStop
from otel_ddp.recording import values
from otel_ddp.recording.recorder import Recorder
from otel_ddp.recording.spans import record_event
from otel_ddp.run import announcements
from otel_ddp.vocabulary import catalog


def tensor(recorder: Recorder, name: str, tensor: Any, **where: Any) -> None:
    """Record how the values of a tensor are spread."""
    from otel_ddp.torch import tensor_summary

    try:
        found = tensor_summary.summary(tensor)
    except (tensor_summary.NoSummary, RuntimeError) as why:
        errors.reraise_foreign()
        text = f"{values.shown(name)} was not recorded: {str(why)[:200]}"
        recorder.totals.refuse("value", f"tensor:{values.shown(name)}", text)
        return
    recorder.log({f"{name}/{what}": value for what, value in found.items()}, **where)


def config(recorder: Recorder, mapping: Any, hidden: frozenset[str]) -> None:
    """Record a configuration, flat or nested."""
    content = values.flat(mapping, hidden=hidden)
    if not content and isinstance(mapping, Mapping):
        return
    if not content:
        kind = type(mapping).__name__
        recorder.totals.refuse("value", "config", f"config expects a mapping, got {kind}")
        return
    if left_out := recorder.documents.config(content):
        text = f"{announcements.few(left_out)} of the configuration found no room"
        recorder.totals.refuse("value", "config", f"{text} (OTEL_DDP_JOURNAL_BYTES)")
    if len(content) == values.MOST_SETTINGS:
        text = f"of a configuration {values.MOST_SETTINGS} settings are recorded at most"
        recorder.totals.refuse("value", "settings", f"{text}, so what follows is left out")


class EarlyStops:
    """The metrics of one run by which its script stops early."""

    def __init__(self) -> None:
        self._stops: dict[str, EarlyStop] = {}

    def stops(
        self,
        metric: str,
        value: Any,
        patience: int,
        min_delta: float,
        direction: str | None,
    ) -> tuple[bool, EarlyStop | None]:
        """Whether to stop after this evaluation; and what decides, if it stops by just this one."""
        stop = self._stops.get(metric)
        if stop is None:
            if direction not in ("min", "max"):
                direction = "min"
                errors.warn_once(
                    f"early stop: {metric}",
                    'early_stop takes %r as better the lower it is: say direction="max" if not.',
                    metric,
                )
            way = direction
            stop = errors.attempt(lambda: EarlyStop(way, int(patience), float(min_delta)), None)
            if stop is None:
                text = "early_stop never stops for %r: patience and min_delta must be numbers."
                errors.warn_once(f"early stop numbers: {metric}", text, metric)
                return False, None
            self._stops[metric] = stop
        stopped_before = stop.stopped
        number = errors.attempt(lambda: float(value), None)
        if number is None:
            text = "early_stop leaves out an evaluation of %r: its value is no number."
            errors.warn_once(f"early stop value: {metric}", text, metric)
        elif stop.feed(number) and not stopped_before:
            return True, stop
        return stop.stopped, None


def early_stop(recorder: Recorder, metric: str, stop: EarlyStop) -> None:
    """Record that a script stops early, and at which step."""
    name, _ = values.text(metric, values.LONGEST_NAME)
    about = {"monitor": name, "patience": stop.patience, "best": stop.best}
    record_event(recorder, catalog.EARLY_STOP_EVENT, about)
    if (step := recorder.steps.trace_and_step()[1]) is not None:
        recorder.totals.stamp(catalog.TRAINING_EARLY_STOP_STEP, float(step), monitor=name)
