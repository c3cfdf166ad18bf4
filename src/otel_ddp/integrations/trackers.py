"""Hears what a program tells its trackers: W&B, SwanLab, MLflow, and TensorBoard's writers.

A tracker's function is called first, just as the program called it, and what it returns or raises
goes to the program. Then its arguments are recorded in the run of this process.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

from otel_ddp import errors

# A framework -> our integration of it, which records what the framework logs.
_FRAMEWORKS = {
    "accelerate": "accelerate",
    "lightning": "lightning",
    "lightning_fabric": "lightning",
    "pytorch_lightning": "lightning",
    "transformers": "transformers",
}
# Modules of a framework that only pass on what their caller tells a tracker.
_LOGGERS = tuple(
    f"{each}."
    for each in (
        *("accelerate.tracking", "lightning_utilities.core.rank_zero", "pytorch_lightning.loggers"),
        *("lightning.fabric.loggers", "lightning.pytorch.loggers", "lightning_fabric.loggers"),
    )
)
# Our names of a run -> those that trackers give to the same.
_NAMES = {
    "project": ("project",),
    "group": ("group",),
    "job_type": ("job_type",),
    "name": ("name", "run_name", "experiment_name", "experiment"),
    "description": ("description", "notes"),
    "tags": ("tags",),
}


class Call(NamedTuple):
    """A call of a tracker that has returned."""

    result: Any
    is_inner: bool
    """Whether the tracker made it itself."""
    is_recorded: bool
    """Whether its values are recorded without it: a framework or another tracker made it."""


# What has been replaced, by owner and attribute.
_replaced: set[tuple[Any, str]] = set()
# Runs that the program has opened, and that mirror its trackers.
_mirrors: WeakSet[Any] = WeakSet()
# By run with a tracker's names: the process. A child's run is the object of its parent's.
_named: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
# By run: the runs of W&B and SwanLab that are open in it, as a program may have several at once.
_open: WeakKeyDictionary[Any, WeakSet[Any]] = WeakKeyDictionary()
# By the tracker's run: the step of the next values.
_next_steps: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
# By run: the folder of the first writer that has logged.
_first_folders: WeakKeyDictionary[Any, str] = WeakKeyDictionary()


def listen() -> None:
    """Hear the trackers that have been imported by now."""
    for tracker, records in TRACKERS.items():
        for path, record in records.items():
            *parents, name = path.split(".")
            owner = sys.modules.get(tracker)
            for each in parents:
                owner = getattr(owner, each, None)
            # Another version may lack it.
            function = None if owner is None else getattr(owner, name, None)
            if function is not None and (owner, name) not in _replaced:
                _replaced.add((owner, name))
                setattr(owner, name, _heard(tracker, function, record))


@errors.contained()
def mirror(run: Any) -> None:
    """From here on this run, which the program has opened, records what its trackers are told."""
    from otel_ddp.integrations.launch.startup import sitecustomize

    _mirrors.add(run)
    listen()
    sitecustomize.install(set(TRACKERS))
    # Theirs may have begun before.
    wandb, swanlab = sys.modules.get("wandb"), sys.modules.get("swanlab")
    for theirs in (getattr(wandb, "run", None), getattr(swanlab, "run", None)):
        if theirs is not None:
            run.config(dict(theirs.config.items()))
    if wandb is not None and wandb.run is not None:
        # W&B's module keeps methods of its run.
        vars(wandb).update(log=wandb.run.log, alert=wandb.run.alert)


def _heard(tracker: str, function: Callable[..., Any], record: Callable[..., None]) -> Any:
    @functools.wraps(function)
    def heard(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        # Where a thread begins with this very function, there is no frame.
        _record(tracker, record, result, sys._getframe().f_back, args, kwargs)
        return result

    return heard


@errors.contained()
def _record(
    tracker: str,
    record: Callable[..., None],
    result: Any,
    frame: FrameType | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    is_inner = False
    while (caller := _module(frame)).startswith(f"{tracker}.") and frame is not None:
        is_inner, frame = True, frame.f_back
    while caller.startswith(_LOGGERS) and frame is not None:
        frame = frame.f_back
        caller = _module(frame)
    package = caller.partition(".")[0]
    ours = f"{__package__}.{_FRAMEWORKS[package]}" if package in _FRAMEWORKS else ""
    is_recorded = package in TRACKERS or ours in sys.modules
    record(Call(result, is_inner, is_recorded), *args, **kwargs)


def _module(frame: FrameType | None) -> str:
    return "" if frame is None else f"{frame.f_globals.get('__name__')}."


def _run_of(call: Call, *, begins: bool = False, opens: bool = True) -> Any:
    """The run that records this call; None if none does.

    A program without a line of ours has one as soon as it tells a tracker something.
    """
    if call.is_recorded and not begins:
        return None
    # Here: a program that only imports a tracker imports no more of ours than this file.
    from otel_ddp.run import current_run, for_frameworks

    run: Any = current_run.current() or current_run.inherited()
    if run is None and not opens:
        return None
    if run is None or (begins and run.was_unasked):
        run = for_frameworks.init()
    if begins and run.told_end and run.was_unasked and run.identity.world_size == 1:
        state, reason = run.told_end
        run.finish(state, reason=reason)
        run = for_frameworks.init(again=True)
    elif begins:
        run.told_end = None
    hears = (run.was_unasked or run in _mirrors) and not run.is_closed
    return run if hears else None


# -- runs


def _begin(call: Call, given: Mapping[str, Any], config: Any, theirs: Any = None) -> None:
    from otel_ddp.identity.identity import VARIABLES
    from otel_ddp.run import api

    run = _run_of(call, begins=True)
    if run is None:
        return
    if theirs is not None:
        _open.setdefault(run, WeakSet()).add(theirs)
    if config and not call.is_recorded:
        run.config(dict(config.items()))
    if not run.was_unasked or _named.get(run) == os.getpid():
        return
    _named[run] = os.getpid()
    said: dict[str, Any] = {}
    for name, theirs in _NAMES.items():
        value = next(filter(None, map(given.get, theirs)), None)
        if value and not os.environ.get(VARIABLES[name][0]):
            said[name] = value if name == "tags" else str(value)
    if run.identity.world_size != 1 and "group" in said:
        # Mostly rank 0 alone says it: its run would be another one than that of the other ranks.
        run.config({"group": said.pop("group")})
    api.init(**said)
    # The program has said this to the tracker, not to us.
    run.was_unasked = True


def _wandb_init(call: Call, entity: Any = None, project: Any = None, *_: Any, **given: Any) -> None:
    _begin(call, {**given, "project": project}, call.result.config, call.result)


def _swanlab_init(call: Call, **given: Any) -> None:
    _begin(call, given, call.result.config, call.result)


def _mlflow_start(
    call: Call,
    run_id: Any = None,
    experiment_id: Any = None,
    run_name: Any = None,
    *_: Any,
    tags: Any = None,
    **given: Any,
) -> None:
    _begin(call, {**given, "run_name": run_name}, tags)


def _end(call: Call, theirs: Any, failed: Any, reason: Any) -> None:
    for opened in _open.values():
        if theirs in opened:
            opened.discard(theirs)
    run = _run_of(call, opens=False)
    mlflow = sys.modules.get("mlflow")
    # One that was nested, or one of several at once, leaves another one open.
    if run is None or _open.get(run) or (mlflow is not None and mlflow.active_run() is not None):
        return
    # What follows still belongs to this run, until another one begins or the process ends.
    run.told_end = ("failed", str(reason)) if failed else ("finished", "")


def _wandb_finish(call: Call, theirs: Any, exit_code: Any = 0, *_: Any, **__: Any) -> None:
    _end(call, theirs, exit_code, f"exit code {exit_code}")


def _swanlab_finish(
    call: Call, theirs: Any, state: Any = "success", error: Any = "", *_: Any, **__: Any
) -> None:
    _end(call, theirs, state != "success", error or state)


def _mlflow_end(call: Call, status: Any = "FINISHED") -> None:
    _end(call, None, status != "FINISHED", status)


def _exit(call: Call, theirs: Any, kind: Any, error: Any, *_: Any) -> None:
    from otel_ddp.recording import values

    _end(call, theirs, kind, values.error_line(error) if error else "")


# -- what is said in them


def _log(
    call: Call, data: Any, step: Any, joint: str = ".", prefix: str = "", split: Any = None
) -> None:
    numbers = dict(_numbers(data, joint, prefix))
    if numbers and (run := _run_of(call)) is not None:
        run.log_beside(numbers, step, split=split)


def _numbers(data: Mapping[Any, Any], joint: str, prefix: str) -> Iterator[tuple[str, Any]]:
    """The numbers among pictures, tables and texts, in one level of names."""
    from otel_ddp.recording import values

    for name, value in data.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, joint, f"{prefix}{name}{joint}")
        elif values.is_device_tensor(value):
            yield f"{prefix}{name}", value
        else:
            try:
                yield f"{prefix}{name}", values.number(value)
            except values.Refused:
                continue


def _step(run: Any, given: Any, commits: bool) -> Any:
    """The step under which the tracker draws these values: it counts, where none is given."""
    if (after := _next_steps.get(run)) is None:
        after = errors.attempt(lambda: int(run.starting_step), 0)
    step = after if given is None else given
    # An earlier step leaves the tracker's count as it is.
    _next_steps[run] = max(after, step + commits)
    return step


def _wandb_log(
    call: Call, run: Any, data: Any, step: Any = None, commit: Any = None, *_: Any, **__: Any
) -> None:
    commits = step is None if commit is None else bool(commit)
    _log(call, data, _step(run, step, commits))


def _swanlab_log(call: Call, run: Any, data: Any, step: Any = None) -> None:
    _log(call, data, _step(run, step, True), "/")


def _mlflow_log(call: Call, key: Any, value: Any, step: Any = None, *_: Any, **__: Any) -> None:
    _log(call, {key: value}, step)


def _mlflow_log_all(call: Call, metrics: Any, step: Any = None, *_: Any, **__: Any) -> None:
    _log(call, metrics, step)


def _mlflow_set(call: Call, key: Any, value: Any, *_: Any, **__: Any) -> None:
    _config(call, {key: value})


def _config(call: Call, config: Mapping[str, Any], *_: Any, **__: Any) -> None:
    if (run := _run_of(call)) is not None:
        run.config(config)


def _changed(call: Call, config: Mapping[str, Any], *_: Any, **__: Any) -> None:
    # Before their run begins, and while the next one does, it is no run's.
    run = _run_of(call, opens=False)
    if run is not None and run.told_end is None:
        run.config(dict(config.items()))


def _alert(
    call: Call, _: Any, title: Any, text: Any = "", level: Any = None, *__: Any, **___: Any
) -> None:
    if (run := _run_of(call)) is not None:
        run.alert(title, text, str(getattr(level, "value", level) or "info").lower())


# -- TensorBoard's writers


def _scalar(
    call: Call,
    writer: Any,
    tag: Any,
    scalar_value: Any,
    global_step: Any = None,
    *_: Any,
    **__: Any,
) -> None:
    _write(call, writer, {tag: scalar_value}, global_step)


def _scalars(
    call: Call,
    writer: Any,
    main_tag: Any,
    tag_scalar_dict: Any,
    global_step: Any = None,
    *_: Any,
    **__: Any,
) -> None:
    _write(call, writer, {main_tag: tag_scalar_dict}, global_step)


def _write(call: Call, writer: Any, values: Mapping[Any, Any], step: Any) -> None:
    from otel_ddp.recording.values import split_in

    if (run := _run_of(call)) is not None:
        # For the results of hyperparameters a writer makes another one, in a folder of its own.
        prefix, split = _place(run, None if call.is_inner else writer)
        # A tag may name its split itself.
        _log(call, values, step, "/", prefix, split_in(str(*values)) or split or None)


def _place(run: Any, writer: Any) -> tuple[str, str]:
    """What names the values of this writer apart from those of others: a prefix, and a split.

    The split is the last part of its folder, as of `runs/x/val`. The first folder has no prefix.
    """
    from otel_ddp.recording.values import known_split

    folder = getattr(writer, "log_dir", None) or getattr(writer, "logdir", None)
    if not folder:
        return "", ""
    folder = os.path.abspath(folder)
    above, last = os.path.split(folder)
    if split := known_split(last):
        folder = above
    first = _first_folders.setdefault(run, folder)
    if folder == first:
        return "", split
    apart = os.path.relpath(folder, os.path.commonpath([first, folder]))
    return f"{os.path.basename(folder) if apart == os.curdir else apart}/", split


def _hparams(call: Call, _: Any, hparam_dict: Any, *__: Any, **___: Any) -> None:
    _config(call, hparam_dict)


_WRITER: dict[str, Callable[..., None]] = {
    "SummaryWriter.add_scalar": _scalar,
    "SummaryWriter.add_scalars": _scalars,
    "SummaryWriter.add_hparams": _hparams,
}
_SWANLAB_CONFIG = "sdk.internal.run.components.config.Config"

TRACKERS: dict[str, dict[str, Callable[..., None]]] = {
    "wandb": {
        "init": _wandb_init,
        "Run.log": _wandb_log,
        "Run.alert": _alert,
        "Run.finish": _wandb_finish,
        "Run.__exit__": _exit,
        "Config.update": _changed,
        "Config.setdefaults": _changed,
        "Config.__setitem__": _changed,
        "Config.__setattr__": _changed,
        # The run of the mode "disabled".
        "sdk.lib.noop_run.NoopRun.log": _wandb_log,
        "sdk.lib.noop_run.NoopRun.alert": _alert,
        "sdk.lib.noop_run.NoopRun.finish": _wandb_finish,
    },
    "swanlab": {
        "init": _swanlab_init,
        "Run.log": _swanlab_log,
        "Run.finish": _swanlab_finish,
        f"{_SWANLAB_CONFIG}.update": _changed,
        f"{_SWANLAB_CONFIG}.__setitem__": _changed,
    },
    "mlflow": {
        "start_run": _mlflow_start,
        "end_run": _mlflow_end,
        "ActiveRun.__exit__": _exit,
        "log_metric": _mlflow_log,
        "log_metrics": _mlflow_log_all,
        "log_param": _mlflow_set,
        "log_params": _config,
        "set_tag": _mlflow_set,
        "set_tags": _config,
    },
    "torch.utils.tensorboard": _WRITER,
    "tensorboardX": _WRITER,
}
"""For each tracker, by the name of its module: what of it is heard, and what records that."""
