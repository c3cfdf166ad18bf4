"""Records what a script says beside numbers: tensors and configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from otel_ddp import errors
from otel_ddp.recording import values
from otel_ddp.recording.recorder import Recorder
from otel_ddp.run import announcements


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


def config(recorder: Recorder, mapping: Any) -> None:
    """Record a configuration, flat or nested."""
    content = values.flat(mapping)
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
