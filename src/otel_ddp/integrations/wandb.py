"""For a script written for W&B or SwanLab: `from otel_ddp.integrations import wandb`.

What has no counterpart here is taken, named once in the log, and does nothing.
"""

from __future__ import annotations

import atexit
import glob
import os
import secrets
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from types import TracebackType
from typing import Any, cast

import otel_ddp
from otel_ddp import errors
from otel_ddp.run.run import silent

# The arguments of `init`, by ours.
_NAMES = {
    "project": ("project",),
    "group": ("group",),
    "job_type": ("job_type",),
    "run": ("id",),
    "name": ("name", "experiment_name"),
    "description": ("notes", "description"),
    "tags": ("tags",),
}
_OTHERS = {"config", "mode", "reinit", "resume", "settings"}
# A script that asks for these would go on with nothing, so it hears of it at once.
_MISSED = {
    "Api": "`otel-ddp runs --json`, `report` and `compare` have the values of earlier runs",
    "agent": "your script or a scheduler chooses the configurations",
    "sweep": "your script or a scheduler chooses the configurations",
}


class _Nothing:
    """What has no counterpart: it can be called, entered, iterated, and asked for more."""

    def __call__(self, *args: Any, **kwargs: Any) -> _Nothing:
        return self

    def __getattr__(self, name: str) -> _Nothing:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __enter__(self) -> _Nothing:
        return self

    def __exit__(self, *raised: object) -> None:
        return None

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __bool__(self) -> bool:
        return False


def _nothing(name: str) -> _Nothing:
    errors.warn_once(f"wandb {name}", "wandb: %s has no counterpart, so it does nothing.", name)
    return _Nothing()


class Settable(dict[str, Any]):
    """`wandb.config` or `wandb.summary`: its entries are attributes as well."""

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(name)

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        self.update({name: value})

    def update(self, given: Any = (), **more: Any) -> None:  # type: ignore[override]
        """As that of a dict; it takes a Namespace too. What is configured is recorded."""
        more.pop("allow_val_change", None)
        new = dict(given if isinstance(given, Mapping | tuple) else vars(given), **more)
        super().update(new)
        if self is config:
            otel_ddp.config(new)

    def setdefaults(self, given: Mapping[str, Any]) -> None:
        """Set what is not there yet."""
        self.update({name: value for name, value in given.items() if name not in self})

    def as_dict(self) -> dict[str, Any]:
        return dict(self)


config, summary = Settable(), Settable()


class AlertLevel:
    """What `alert` takes as its level."""

    INFO, WARN, ERROR = "INFO", "WARN", "ERROR"


class Artifact:
    """Files under a name, for `log_artifact`."""

    def __init__(self, name: str, type: str = "file", *_: Any, metadata: Any = None, **__: Any):
        self.name, self.type, self.metadata = name, type, metadata
        self.paths: list[Any] = []

    def add_file(self, path: Any, *_: Any, **__: Any) -> None:
        """Add a file, a folder, or an address."""
        self.paths.append(path)

    add_dir = add_reference = add_file

    def __getattr__(self, name: str) -> _Nothing:
        return _nothing(f"Artifact.{name}")


class Run:
    """What `wandb.init` returns: a run of ours by the names of W&B."""

    def __init__(self, ours: otel_ddp.Run) -> None:
        self._ours = ours
        self._waiting: dict[str, Any] = {}
        self._logged: dict[str, Any] = {}
        self.config, self.summary = config, summary
        self.id, self.name = ours.run, ours.identity.name or ours.run
        self.project, self.group, self.url = ours.identity.project, ours.group, ours.url
        self.step = 0

    @property
    def dir(self) -> str:
        """Where W&B keeps the files of a run."""
        path = os.path.join("wandb", self.id, "files")
        os.makedirs(path, exist_ok=True)
        return path

    @errors.contained()
    def log(self, data: Any, step: Any = None, commit: bool | None = None, **_: Any) -> None:
        """Record numbers; those of one step together, where several calls share it."""
        self._waiting |= _numbers(data)
        if step is None and commit is False:
            return
        self.step = self.step + 1 if step is None else step
        waiting, self._waiting = self._waiting, {}
        self._ours.log(waiting, step=step)
        # A tensor would keep its graph.
        self._logged |= {k: v for k, v in waiting.items() if isinstance(v, int | float)}
        dict.update(summary, self._logged)

    @errors.contained()
    def define_metric(self, name: str, summary: str = "", goal: str = "", **_: Any) -> None:
        """Say where the best value of a name lies."""
        where = {"min": "min", "minimize": "min", "max": "max", "maximize": "max"}
        if (best := where.get(goal or summary)) and "*" not in name:
            otel_ddp.init(best={name: cast("Any", best)})

    @errors.contained()
    def watch(self, models: Any, *_: Any, **__: Any) -> None:
        """Measure the steps of these models."""
        for model in _each(models):
            otel_ddp.instrument(model)

    def unwatch(self, *_: Any) -> None:
        """Nothing to do: the hooks end with the run."""

    @errors.contained()
    def alert(self, title: str, text: str = "", level: Any = "info", **_: Any) -> None:
        """Tell people something."""
        self._ours.alert(title, text, level.lower())

    @errors.contained()
    def save(self, path: Any = None, *_: Any, **__: Any) -> None:
        """Record the files of a pattern."""
        for each in glob.glob(os.fspath(path)) if path else ():
            self._ours.artifact(each)

    @errors.contained()
    def log_artifact(self, artifact: Any, name: Any = None, type: Any = "file", **_: Any) -> Any:
        """Record the files of an artifact, or one file."""
        if not isinstance(artifact, Artifact):
            path, artifact = artifact, Artifact(name or os.path.basename(artifact), type)
            artifact.add_file(path)
        for path in artifact.paths:
            one = len(artifact.paths) == 1
            named = artifact.name if one else f"{artifact.name}/{os.path.basename(path)}"
            self._ours.artifact(path, name=named, type=artifact.type, metadata=artifact.metadata)
        return artifact

    def finish(self, exit_code: int | None = None, **_: Any) -> None:
        """End this run."""
        self._flush()
        self._ours.finish("failed" if exit_code else "finished")
        _close(self)

    @errors.contained()
    def _flush(self) -> None:
        """Record what waits for more, and what the script has put into the summary."""
        own = {k: v for k, v in summary.items() if v is not self._logged.get(k)}
        self._waiting |= {f"summary/{name}": value for name, value in _numbers(own).items()}
        if self._waiting:
            self.log({})
        summary.clear()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: TracebackType | None) -> None:
        self._flush()
        self._ours.__exit__(kind, error, trace)
        _close(self)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return _nothing(name)


run: Run | None = None


def init(**given: Any) -> Run:
    """Open a run as W&B does; beside torch its steps are measured, too."""
    global run
    if run is not None and not given.get("reinit"):
        return run
    if run is not None:
        run.finish()
    for name in given.keys() - _OTHERS - {each for names in _NAMES.values() for each in names}:
        _nothing(f"init({name}=)")
    asked: dict[str, Any] = {
        our: given.get(theirs[0]) or given.get(theirs[-1]) for our, theirs in _NAMES.items()
    }
    if "disabled" in (given.get("mode"), os.environ.get("WANDB_MODE")):
        ours = silent()
    else:
        ours = (otel_ddp.instrument if "torch" in sys.modules else otel_ddp.init)(**asked)
    run = Run(ours)
    config.update(given.get("config") or {})
    atexit.register(run._flush)
    return run


def _close(ended: Run) -> None:
    global run
    atexit.unregister(ended._flush)
    config.clear()
    if run is ended:
        run = None


def _each(value: Any) -> Any:
    """Several pictures may be logged under one name."""
    return value if isinstance(value, list | tuple) else [value]


def _numbers(data: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """One level of names joined by dots, without what has no counterpart."""
    found: dict[str, Any] = {}
    for name, value in data.items():
        if isinstance(value, Mapping):
            found |= _numbers(value, f"{before}{name}.")
        elif not any(isinstance(each, _Nothing) for each in _each(value)):
            found[f"{before}{name}"] = value
    return found


class util:
    generate_id = staticmethod(partial(secrets.token_hex, 4))


def _of_the_run(name: str, *args: Any, **kwargs: Any) -> Any:
    return None if run is None else getattr(run, name)(*args, **kwargs)


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(name)
    if name in _MISSED:
        raise AttributeError(f"otel_ddp has no wandb.{name}: {_MISSED[name]}")
    return partial(_of_the_run, name) if hasattr(Run, name) else _nothing(name)
