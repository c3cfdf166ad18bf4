"""Measures a program that does not call otel_ddp, started by `otel-ddp run`.

`startup/sitecustomize.py` calls `imported` after the import of torch or a framework.
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
    """Make every Python that is started with these variables import our sitecustomize."""
    before = env.get("PYTHONPATH", "")
    others = [each for each in before.split(os.pathsep) if each != FOLDER]
    # Do not join an empty variable: an empty entry of PYTHONPATH means the working directory.
    env["PYTHONPATH"] = os.pathsep.join([FOLDER, *others]) if before else FOLDER


@errors.contained()
def imported(name: str, call: str) -> None:
    """Call our function *call* for the module *name*, which the program has just imported.

    `NAMES` in sitecustomize.py lists the modules and their functions.
    """
    if name in _done:
        return
    # Call the function for torch at each import: a program may remove torch from `sys.modules`, and
    # import it again.
    if name != "torch":
        _done.add(name)
    module, _, function = call.rpartition(".")
    getattr(import_module(f"otel_ddp.integrations.{module}"), function)()


def wait_for_training() -> None:
    """Measure this process from its first step on, unless the program calls `instrument` itself."""
    try:
        from otel_ddp.torch.hooks.called import wait_for_training
    except ImportError:
        # The imported `torch` is another module of that name, or years too old.
        errors.reraise_foreign()
        return
    wait_for_training(_search)


def _search() -> None:
    # Imported here, since a process that never trains does not need these modules.
    from otel_ddp.torch import discovery, models

    if models.is_new_enough():
        discovery.look(_measure)


def _measure() -> None:
    from otel_ddp import integrations
    from otel_ddp.run import opening
    from otel_ddp.torch import discovery

    if opening.in_data_worker():
        # This process is a data loader's worker: a copy of the training process, which trains
        # nothing, but whose data set may call models.
        return
    integrations.instrument()
    if opening.in_pool_worker():
        # This process is a pool's worker. Its next task is another run, which begins as soon as
        # that task creates an optimizer.
        discovery.begin_with_next_optimizer(_measure)
