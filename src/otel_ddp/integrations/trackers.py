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

# For each framework our integration, which records what the framework logs.
_FRAMEWORKS = {
    "lightning": "lightning",
    "pytorch_lightning": "lightning",
    "transformers": "transformers",
}
# These modules of frameworks only pass values on to a tracker, so the code that calls them counts
# as the caller of the tracker. Fabric is one of them, since it has no callbacks for an integration.
_LOGGERS = (
    "lightning.fabric.",
    "lightning.pytorch.loggers.",
    "lightning_fabric.",
    "lightning_utilities.core.rank_zero.",
    "pytorch_lightning.loggers.",
)
# For each argument of `init`, the arguments of trackers with the same meaning.
_NAMES = {
    "project": ("project",),
    "group": ("group",),
    "job_type": ("job_type",),
    "name": ("name", "run_name", "experiment_name", "experiment"),
    "description": ("description", "notes"),
    "tags": ("tags",),
}


class Call(NamedTuple):
    """A finished call of a tracker's function."""

    given: dict[str, Any]
    """The arguments by name."""
    result: Any
    is_inner: bool
    """Whether the tracker itself made the call, and not the program."""
    is_recorded: bool
    """Whether a framework or another tracker made the call, and its values are recorded anyway."""


_Record = Callable[[Call], None]

# The functions that are wrapped already: for each, its module or class, and its name there.
_wrapped: set[tuple[Any, str]] = set()
# Runs that the program has opened with `mirror=True`.
_mirrors: WeakSet[Any] = WeakSet()
# For each run of ours that took its name from a tracker, the pid of the process. A forked child
# inherits the entry with its parent's pid, and may take the name from its own tracker.
_named: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
# For each run of a tracker, the step of its next values.
_next_steps: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
# For each run of ours, the folder of the TensorBoard writer that logged first.
_first_folders: WeakKeyDictionary[Any, str] = WeakKeyDictionary()


def listen() -> None:
    """Wrap the functions of all trackers that are imported."""
    for tracker, functions in TRACKERS.items():
        for path, (names, record) in functions.items():
            *parents, name = path.split(".")
            owner = sys.modules.get(tracker)
            for each in parents:
                owner = getattr(owner, each, None)
            # The installed version of the tracker may lack the function.
            function = None if owner is None else getattr(owner, name, None)
            if function is not None and (owner, name) not in _wrapped:
                _wrapped.add((owner, name))
                setattr(owner, name, _wrap(tracker, function, names.split(), record))


@errors.contained()
def mirror(run: Any) -> None:
    """From now on, record in *run*, which the program has opened, what it logs to its trackers."""
    from otel_ddp.integrations.launch.startup import sitecustomize

    _mirrors.add(run)
    listen()
    sitecustomize.install(set(TRACKERS))
    # A tracker's run may be open already: record its configuration.
    wandb, swanlab = sys.modules.get("wandb"), sys.modules.get("swanlab")
    for theirs in (getattr(wandb, "run", None), getattr(swanlab, "run", None)):
        if theirs is not None:
            run.config(dict(theirs.config.items()))
    if wandb is not None and wandb.run is not None:
        # When W&B opened its run, it set `wandb.log` to the method of the run, which was not
        # wrapped yet. So set it again.
        vars(wandb).update(log=wandb.run.log)


def _wrap(tracker: str, function: Callable[..., Any], names: list[str], record: _Record) -> Any:
    """Wrap a function, so that *record* records each call.

    *names*: the names of the positional arguments of the function.
    """

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        # The frame of the caller. It is None if a thread calls this function directly.
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
    """Our run in which to record this call; None if the call is not to be recorded.

    *begins*: whether the call begins a run of the tracker. *opens*: whether to open a run if there
    is none, as at the first call of a tracker in a program that does not call otel_ddp.
    """
    if call.is_recorded and not begins:
        return None
    # Imported here, since a program that only imports a tracker does not need it.
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
    # MLflow's run has no configuration. Its tags are a mapping, so record them as the
    # configuration.
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
        # Mostly only rank 0 uses a tracker. If it took the tracker's group, its run would no longer
        # be that of the other ranks. So only record the group as a setting.
        run.config({"group": arguments.pop("group")})
    api.init(**arguments)
    # `api.init` marks the run as the program's own. But only a tracker has named it, and the
    # program may still open a run itself.
    run.was_automatic = True


def _end(call: Call) -> None:
    from otel_ddp.recording import values

    given = call.given
    run = _run_of(call, opens=False)
    mlflow = sys.modules.get("mlflow")
    # If MLflow still has an active run, only a run nested in it has ended, so our run goes on.
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
    # Our run stays open for later values, until the tracker begins another run or the process ends.
    # It then ends with this outcome.
    run.tracker_outcome = ("failed", reason) if reason else ("finished", "")


# -- values and settings


def _log(
    call: Call, data: Any, step: Any, joint: str = ".", prefix: str = "", split: Any = None
) -> None:
    numbers = dict(_numbers(data, joint, prefix))
    if numbers and (run := _run_of(call)) is not None:
        run.log_beside(numbers, step, split=split)


def _numbers(data: Mapping[Any, Any], joint: str, prefix: str) -> Iterator[tuple[str, Any]]:
    """The numbers in a nested mapping. Other values, such as pictures and texts, are left out.

    The name of a number is *prefix* and its keys, joined by *joint*.
    """
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
    """The step at which the tracker plots these values: the given one, or the tracker's count.

    *commits*: whether the tracker's count goes on to the next step after this call.
    """
    run, given = call.given["run"], call.given.get("step")
    if (following := _next_steps.get(run)) is None:
        following = errors.attempt(lambda: int(run.starting_step), 0)
    step = following if given is None else given
    # The tracker's count never goes back, even if the given step is an earlier one.
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
    # Settings that change while the tracker has no open run belong to no run, and are not recorded.
    run = _run_of(call, opens=False)
    if run is not None and run.tracker_outcome is None:
        run.config(dict(call.given["config"].items()))


# -- TensorBoard's writers


def _write(call: Call) -> None:
    from otel_ddp.recording.values import split_in

    given = call.given
    tag, value = given.get("tag"), given.get("scalar_value")
    if (run := _run_of(call)) is not None:
        # If TensorBoard itself made the call, it was `add_hparams`, which uses a temporary writer.
        # Its folder says nothing about prefix and split.
        prefix, split = _prefix_and_split(run, None if call.is_inner else given["writer"])
        # If the tag has a split too, as in `val/loss`, it takes precedence over that of the folder.
        split = split_in(str(tag)) or split
        _log(call, {tag: value}, given.get("global_step"), "/", prefix, split or None)


def _prefix_and_split(run: Any, writer: Any) -> tuple[str, str]:
    """The prefix and the split for the values of a writer, which come from its folder.

    If the folder ends with a split, as in `runs/x/val`, this is the split. The prefix is the rest
    of the folder, relative to the folder that logged first, which has no prefix itself.
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
        # The class of W&B's runs in its mode "disabled".
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
