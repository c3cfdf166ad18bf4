"""Measures a program that has no line of ours, below `otel-ddp run`.

`startup/sitecustomize.py` calls `imported` once torch or a framework has been imported.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from importlib import import_module
from pathlib import Path

from otel_ddp import errors

FOLDER = str(Path(__file__).with_name("startup"))

_done: set[str] = set()


def add_to_path(env: MutableMapping[str, str]) -> None:
    """Every Python that is started with these variables waits for torch."""
    before = env.get("PYTHONPATH", "")
    others = [each for each in before.split(os.pathsep) if each != FOLDER]
    # An empty entry is the working directory. An empty variable is none at all.
    env["PYTHONPATH"] = os.pathsep.join([FOLDER, *others]) if before else FOLDER


@errors.contained()
def imported(name: str, call: str) -> None:
    """Call this function of the integrations: a module of this name has been imported."""
    if name in _done:
        return
    # A program may take torch out of `sys.modules`, and import it again.
    if name != "torch":
        _done.add(name)
    module, _, function = call.rpartition(".")
    getattr(import_module(f"otel_ddp.integrations.{module}"), function)()


def wait_for_training() -> None:
    """Measure this process from the first step on, unless the program asks for that by itself."""
    try:
        from otel_ddp.torch import training_begins
    except ImportError:
        # Another module of this name, or a torch that is years too old.
        errors.reraise_foreign()
        return
    training_begins.wait(_measure)


def _measure() -> None:
    from otel_ddp.run import for_frameworks, opening
    from otel_ddp.torch import discovery

    if opening.in_data_worker():
        # A copy of a process that is about to train; a data set may call models, too.
        return
    for_frameworks.instrument()
    if opening.in_pool_worker():
        # A pool's worker may train again: its next task is the next run.
        discovery.begin_with_next_optimizer(_measure)
