"""Records what a program logs to W&B, SwanLab, MLflow, and TensorBoard's writers.

Functions of the trackers are wrapped. The original runs first, and its result or exception goes to
the program unchanged. Then its arguments are recorded in the run of this process.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

from otel_ddp import errors, integrations

# A framework -> our integration, which records what the framework logs.
_FRAMEWORKS = {
    "lightning": "lightning",
    "pytorch_lightning": "lightning",
    "transformers": "transformers",
}
# Framework modules that only pass values on to a tracker: the code that calls them counts as the
# caller. Fabric is included because it has no callbacks.
_LOGGERS = (
    "lightning.fabric.",
    "lightning.pytorch.loggers.",
    "lightning_fabric.",
    "lightning_utilities.core.rank_zero.",
    "pytorch_lightning.loggers.",
)
# An argument of `init` -> the trackers' arguments with the same meaning.
_NAMES = {
    "project": ("project",),
    "group": ("group",),
    "job_type": ("job_type",),
    "name": ("name", "run_name", "experiment_name", "experiment"),
    "description": ("description", "notes"),
    "tags": ("tags",),
}


class Call(NamedTuple):
    """A call of a tracker's function that has returned."""

    given: dict[str, Any]
    """The arguments by name."""
    result: Any
    is_inner: bool
    """Whether the tracker itself made the call, and not the program."""
    is_recorded: bool
    """Whether a framework or another tracker made the call, and is itself recorded."""


_Record = Callable[[Call], None]

# The owner and the attribute of each function that is wrapped.
_wrapped: set[tuple[Any, str]] = set()
# Runs that the program has opened with `mirror=True`.
_mirrors: WeakSet[Any] = WeakSet()
# A run that a tracker has named -> the pid of the process in which it did. A forked child inherits
# this entry, but its own tracker may name the run again.
_named: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
# The tracker's run -> the step of its next values.
_next_steps: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
# Our run -> the folder of the first TensorBoard writer that logged.
_first_folders: WeakKeyDictionary[Any, str] = WeakKeyDictionary()


def listen() -> None:
    """Wrap the functions of all trackers that are imported."""
    for tracker, functions in TRACKERS.items():
        for path, (names, record) in functions.items():
            *parents, name = path.split(".")
            owner = sys.modules.get(tracker)
            for each in parents:
                owner = getattr(owner, each, None)
            # Another version of the tracker may lack the function.
            function = None if owner is None else getattr(owner, name, None)
            if function is not None and (owner, name) not in _wrapped:
                _wrapped.add((owner, name))
                setattr(owner, name, _wrap(tracker, function, names.split(), record))


@errors.contained()
def mirror(run: Any) -> None:
    """Record in this run, which the program has opened, what the program logs to its trackers."""
    from otel_ddp.integrations.launch.startup import sitecustomize

    _mirrors.add(run)
    listen()
    sitecustomize.install(set(TRACKERS))
    # Record the configuration of a tracker's run that is already open.
    wandb, swanlab = sys.modules.get("wandb"), sys.modules.get("swanlab")
    for theirs in (getattr(wandb, "run", None), getattr(swanlab, "run", None)):
        if theirs is not None:
            run.config(dict(theirs.config.items()))
    if wandb is not None and wandb.run is not None:
        # `wandb.log` is a method that was bound before `Run.log` was wrapped: bind it again.
        vars(wandb).update(log=wandb.run.log)


def _wrap(tracker: str, function: Callable[..., Any], names: list[str], record: _Record) -> Any:
    """Wrap a function: each call is then recorded by *record*.

    *names*: the names of its positional arguments.
    """

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        # The caller's frame; None if this function is the target of a thread.
        frame = sys._getframe().f_back
        _record(tracker, record, frame, {**dict(zip(names, args, strict=False)), **kwargs}, result)
        return result

    return wrapper


@errors.contained()
def _record(
    tracker: str, record: _Record, frame: FrameType | None, given: dict[str, Any], result: Any
) -> None:
    is_inner = False
    while (caller := _module(frame)).startswith(f"{tracker}.") and frame is not None:
        is_inner, frame = True, frame.f_back
    while caller.startswith(_LOGGERS) and frame is not None:
        frame = frame.f_back
        caller = _module(frame)
    package = caller.partition(".")[0]
    ours = f"{__package__}.{_FRAMEWORKS[package]}" if package in _FRAMEWORKS else ""
    record(Call(given, result, is_inner, package in TRACKERS or ours in sys.modules))


def _module(frame: FrameType | None) -> str:
    return "" if frame is None else f"{frame.f_globals.get('__name__')}."


def _run_of(call: Call, *, begins: bool = False, opens: bool = True) -> Any:
    """The run that records this call; None if none does.

    A program that does not call otel_ddp gets a run at its first call of a tracker.
    """
    if call.is_recorded and not begins:
        return None
    # Imported here: a program that only imports a tracker does not need it.
    from otel_ddp.run import current_run

    run: Any = current_run.current() or current_run.inherited()
    if run is None and not opens:
        return None
    if run is None or (begins and run.was_automatic):
        run = integrations.init()
    if begins and run.tracker_outcome and run.was_automatic and run.identity.world_size == 1:
        state, reason = run.tracker_outcome
        run.finish(state, reason=reason)
        run = integrations.init(again=True)
    elif begins:
        run.tracker_outcome = None
    records = (run.was_automatic or run in _mirrors) and not run.is_closed
    return run if records else None


# -- runs


def _begin(call: Call) -> None:
    from otel_ddp.identity.identity import VARIABLES
    from otel_ddp.run import api

    run = _run_of(call, begins=True)
    if run is None:
        return
    # MLflow's run has no configuration; instead its tags, a mapping, are recorded.
    has_config = hasattr(call.result, "config")
    config = call.result.config if has_config else call.given.pop("tags", None)
    if config and not call.is_recorded:
        run.config(dict(config.items()))
    if not run.was_automatic or _named.get(run) == os.getpid():
        return
    _named[run] = os.getpid()
    arguments: dict[str, Any] = {}
    for name, names in _NAMES.items():
        value = next(filter(None, map(call.given.get, names)), None)
        if value and not os.environ.get(VARIABLES[name][0]):
            arguments[name] = value if name == "tags" else str(value)
    if run.identity.world_size != 1 and "group" in arguments:
        # Mostly rank 0 alone uses a tracker: with the tracker's group it would leave the other
        # ranks' run.
        run.config({"group": arguments.pop("group")})
    api.init(**arguments)
    # Still automatic, as only a tracker has named the run: the program may open its own run later.
    run.was_automatic = True


def _end(call: Call) -> None:
    from otel_ddp.recording import values

    given = call.given
    run = _run_of(call, opens=False)
    mlflow = sys.modules.get("mlflow")
    # If a nested MLflow run has ended, its parent is still open, so our run goes on.
    if run is None or (mlflow is not None and mlflow.active_run() is not None):
        return
    error, state = given.get("error"), given.get("status") or given.get("state")
    reason = ""
    if isinstance(error, BaseException):
        reason = values.error_line(error)
    elif given.get("exit_code"):
        reason = f"exit code {given['exit_code']}"
    elif state not in (None, "success", "FINISHED"):
        reason = str(error or state)
    # The run stays open for later values, until another one begins or the process ends.
    run.tracker_outcome = ("failed", reason) if reason else ("finished", "")


# -- values and settings


def _log(
    call: Call, data: Any, step: Any, joint: str = ".", prefix: str = "", split: Any = None
) -> None:
    numbers = dict(_numbers(data, joint, prefix))
    if numbers and (run := _run_of(call)) is not None:
        run.log_beside(numbers, step, split=split)


def _numbers(data: Mapping[Any, Any], joint: str, prefix: str) -> Iterator[tuple[str, Any]]:
    """The numbers of a nested mapping with joined names, without pictures, tables and texts."""
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


def _step(call: Call, commits: bool) -> Any:
    """The step at which the tracker plots these values: given, or from the tracker's own count."""
    run, given = call.given["run"], call.given.get("step")
    if (following := _next_steps.get(run)) is None:
        following = errors.attempt(lambda: int(run.starting_step), 0)
    step = following if given is None else given
    # An earlier step does not reset the tracker's count.
    _next_steps[run] = max(following, step + commits)
    return step


def _wandb_log(call: Call) -> None:
    commit = call.given.get("commit")
    commits = call.given.get("step") is None if commit is None else bool(commit)
    _log(call, call.given["data"], _step(call, commits))


def _swanlab_log(call: Call) -> None:
    _log(call, call.given["data"], _step(call, True), "/")


def _mlflow_log(call: Call) -> None:
    given = call.given
    data = given["metrics"] if "metrics" in given else {given["key"]: given["value"]}
    _log(call, data, given.get("step"))


def _config(call: Call) -> None:
    given = call.given
    whole = [given[name] for name in ("params", "tags", "hparam_dict") if name in given]
    if (run := _run_of(call)) is not None:
        run.config(whole[0] if whole else {given["key"]: given["value"]})


def _config_changed(call: Call) -> None:
    # Before a tracker's first run, and between two of its runs, the settings belong to no run.
    run = _run_of(call, opens=False)
    if run is not None and run.tracker_outcome is None:
        run.config(dict(call.given["config"].items()))


# -- TensorBoard's writers


def _write(call: Call) -> None:
    from otel_ddp.recording.values import split_in

    given = call.given
    tag, value = given.get("tag"), given.get("scalar_value")
    if (run := _run_of(call)) is not None:
        # `add_hparams` writes with an inner writer, whose folder gives neither prefix nor split.
        prefix, split = _prefix_and_split(run, None if call.is_inner else given["writer"])
        # A split in the tag takes precedence.
        split = split_in(str(tag)) or split
        _log(call, {tag: value}, given.get("global_step"), "/", prefix, split or None)


def _prefix_and_split(run: Any, writer: Any) -> tuple[str, str]:
    """The prefix and the split of a writer's values, which distinguish it from other writers.

    The split is the last part of its folder, as in `runs/x/val`. The first folder has no prefix.
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


_WRITER: dict[str, tuple[str, _Record]] = {
    "SummaryWriter.add_scalar": ("writer tag scalar_value global_step", _write),
    "SummaryWriter.add_hparams": ("writer hparam_dict", _config),
}
_SWANLAB_CONFIG = "sdk.internal.run.components.config.Config"

TRACKERS: dict[str, dict[str, tuple[str, _Record]]] = {
    "wandb": {
        "init": ("entity project", _begin),
        "Run.log": ("run data step commit", _wandb_log),
        "Run.finish": ("run exit_code", _end),
        "Run.__exit__": ("run kind error", _end),
        "Config.update": ("config", _config_changed),
        "Config.setdefaults": ("config", _config_changed),
        "Config.__setitem__": ("config", _config_changed),
        "Config.__setattr__": ("config", _config_changed),
        # W&B's run in the mode "disabled".
        "sdk.lib.noop_run.NoopRun.log": ("run data step commit", _wandb_log),
        "sdk.lib.noop_run.NoopRun.finish": ("run exit_code", _end),
    },
    "swanlab": {
        "init": ("", _begin),
        "Run.log": ("run data step", _swanlab_log),
        "Run.finish": ("run state error", _end),
        f"{_SWANLAB_CONFIG}.update": ("config", _config_changed),
        f"{_SWANLAB_CONFIG}.__setitem__": ("config", _config_changed),
    },
    "mlflow": {
        "start_run": ("run_id experiment_id run_name", _begin),
        "end_run": ("status", _end),
        "ActiveRun.__exit__": ("run kind error", _end),
        "log_metric": ("key value step", _mlflow_log),
        "log_metrics": ("metrics step", _mlflow_log),
        "log_param": ("key value", _config),
        "log_params": ("params", _config),
        "set_tag": ("key value", _config),
        "set_tags": ("tags", _config),
    },
    "torch.utils.tensorboard": _WRITER,
    "tensorboardX": _WRITER,
}
"""For each tracker's module: the functions to wrap, the names of their positional arguments, and
our function that records a call."""
