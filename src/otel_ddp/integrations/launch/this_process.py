"""Does in this process what `otel-ddp run` does in those that it starts."""

from __future__ import annotations

import sys

from otel_ddp.integrations import launch
from otel_ddp.integrations.launch.startup import sitecustomize


def begin() -> None:
    """Do what each import so far calls for, and wait for the others."""
    for name, call in sitecustomize.NAMES.items():
        if name in sys.modules:
            launch.imported(name, call)
    sitecustomize.install()


def end() -> None:
    """Wait no longer, and measure no more steps. The callbacks of Trainers stay."""
    from otel_ddp.run import api

    sitecustomize.uninstall()
    if "torch" in sys.modules:
        from otel_ddp.torch import training_begins

        training_begins.stop()
    api.uninstrument()
