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
from functools import cache, partial
from types import SimpleNamespace, TracebackType
from typing import Any, cast

import otel_ddp

# By another name: a script may catch `wandb.errors.CommError`.
from otel_ddp import errors as our_errors
from otel_ddp.run.run import silent

# The version of W&B whose calls these are.
__version__ = "0.31.0"

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
# As they are given with `init`; what a script says later comes too late.
_NAMES_OF_A_RUN = {"name", "project", "group", "job_type", "tags", "notes"}
# The values of `reinit` under which the open run goes on.
_KEEP_RUN = (None, False, "default", "return_previous")
# A script that asks for these would go on with nothing, so it hears of it at once.
_MISSED = {
    "Api": "`otel-ddp runs --json`, `report` and `compare` have the values of earlier runs",
    "agent": "your script or a scheduler chooses the configurations",
    "sweep": "your script or a scheduler chooses the configurations",
}


class _Asked(type):
    def __getattr__(cls, name: str) -> Any:
        return getattr(_Nothing(), name)


class _Nothing(metaclass=_Asked):
    """What has no counterpart: it can be called, entered, iterated, and asked for more."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

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

    def __getitem__(self, key: Any) -> _Nothing:
        return self

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def __len__(self) -> int:
        return 0

    def __str__(self) -> str:
        return ""


def _nothing(name: str) -> _Nothing:
    our_errors.warn_once(f"wandb {name}", "wandb: %s has no counterpart, so it does nothing.", name)
    return _Nothing()


@cache
def _class(name: str) -> type[_Nothing]:
    """A script may ask whether something is an `Image`, or have a class of its own under it."""
    return type(name, (_Nothing,), {})


class Error(Exception):
    """What W&B raises. A script may catch it."""


CommError = UsageError = Error
_ERRORS = ("Error", "CommError", "UsageError", "AuthenticationError", "WaitTimeoutError")
errors = SimpleNamespace(**dict.fromkeys(_ERRORS, Error))


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

    def update(  # type: ignore[override]
        self, given: Any = (), allow_val_change: Any = None, **more: Any
    ) -> None:
        """As that of a dict; it takes a Namespace too. What is configured is recorded."""
        if isinstance(given, str):
            given = _nothing("a file of settings")
        new = dict(given if hasattr(given, "__iter__") else vars(given), **more)
        super().update(new)
        if self is _config:
            otel_ddp.config(new)

    def setdefaults(self, given: Mapping[str, Any]) -> None:
        """Set what is not there yet."""
        self.update({name: value for name, value in given.items() if name not in self})

    def as_dict(self) -> dict[str, Any]:
        return dict(self)


config, summary = Settable(), Settable()
# A script may put a dictionary of its own in the place of these names.
_config, _summary = config, summary


class AlertLevel:
    """What `alert` takes as its level."""

    INFO, WARN, ERROR = "INFO", "WARN", "ERROR"


class Artifact:
    """Files under a name, for `log_artifact`."""

    def __init__(
        self,
        name: str,
        type: str = "file",
        description: str | None = None,
        metadata: Any = None,
        **_: Any,
    ) -> None:
        self.name, self.type, self.description = name, type, description
        self.metadata = {} if metadata is None else metadata
        self.paths: list[Any] = []

    def add_file(self, local_path: Any, *_: Any, **__: Any) -> None:
        """Add a file."""
        self.paths.append(local_path)

    add_dir = add_file

    def add_reference(self, uri: Any, *_: Any, **__: Any) -> None:
        """Add an address."""
        self.paths.append(uri)

    def wait(self, *_: Any, **__: Any) -> Artifact:
        """W&B waits for an upload: here is none."""
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return _nothing(f"Artifact.{name}")


class Run:
    """What `wandb.init` returns: a run of ours by the names of W&B."""

    offline = resumed = False
    sweep_id, entity, starting_step = None, "", 0

    def __init__(self, ours: otel_ddp.Run) -> None:
        self._ours = ours
        self._waiting: dict[str, Any] = {}
        self._logged: dict[str, Any] = {}
        self.config, self.summary = _config, _summary
        process = ours.identity
        self.id, self.name = process.run, process.name or process.run
        self.project, self.group, self.job_type = process.project, process.group, process.job_type
        self.tags = tuple(filter(None, process.tags.split(",")))
        self.notes, self.url = process.description, ours.url
        self.step = 0

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _NAMES_OF_A_RUN and name in vars(self):
            _nothing(f"run.{name} = ... after init")
        super().__setattr__(name, value)

    @property
    def path(self) -> str:
        return f"{self.project}/{self.id}"

    @property
    def dir(self) -> str:
        """Where W&B keeps the files of a run."""
        path = os.path.abspath(os.path.join("wandb", self.id, "files"))
        os.makedirs(path, exist_ok=True)
        return path

    @our_errors.contained()
    def log(self, data: Any, step: Any = None, commit: bool | None = None, **_: Any) -> None:
        """Record numbers; those of one step together, where several calls share it."""
        self._waiting |= _numbers(data)
        if step is None and commit is False:
            return
        self.step = self.step + 1 if step is None else step
        waiting, self._waiting = self._waiting, {}
        self._ours.log_beside(waiting, step)
        # A tensor would keep its graph.
        self._logged |= {k: v for k, v in waiting.items() if isinstance(v, int | float)}
        dict.update(_summary, self._logged)

    @our_errors.contained()
    def define_metric(self, name: str, summary: str = "", goal: str = "", **_: Any) -> None:
        """Say where the best value of a name lies."""
        where = {"min": "min", "minimize": "min", "max": "max", "maximize": "max"}
        if (best := where.get(goal or summary)) and "*" not in name:
            otel_ddp.init(best={name: cast("Any", best)})

    @our_errors.contained()
    def watch(self, models: Any, *_: Any, **__: Any) -> None:
        """Measure the steps of these models."""
        for model in _each(models):
            otel_ddp.instrument(model)

    def unwatch(self, *_: Any) -> None:
        """Nothing to do: the hooks end with the run."""

    @our_errors.contained()
    def alert(self, title: str, text: str = "", level: Any = "info", **_: Any) -> None:
        """Tell people something."""
        self._ours.alert(title, text, level.lower())

    @our_errors.contained()
    def save(self, glob_str: Any = None, *_: Any, **__: Any) -> None:
        """Record the files of a pattern."""
        for each in glob.glob(os.fspath(glob_str)) if glob_str else ():
            self._ours.artifact(each)

    def log_artifact(
        self, artifact_or_path: Any, name: Any = None, type: Any = None, *_: Any, **__: Any
    ) -> Artifact:
        """Record the files of an artifact, or one file."""
        artifact = artifact_or_path
        if not isinstance(artifact, Artifact):
            artifact = Artifact(name or os.path.basename(str(artifact)), type or "file")
            artifact.add_file(artifact_or_path)
        self._record(artifact)
        return artifact

    @our_errors.contained()
    def _record(self, artifact: Artifact) -> None:
        paths = [each for each in artifact.paths if not isinstance(each, _Nothing)]
        for path in paths:
            named = artifact.name
            if len(paths) > 1:
                named += f"/{os.path.basename(path)}"
            self._ours.artifact(path, name=named, type=artifact.type, metadata=artifact.metadata)

    def finish(self, exit_code: int | None = None, **_: Any) -> None:
        """End this run."""
        self._flush()
        self._ours.finish("failed" if exit_code else "finished")
        _close(self)

    @our_errors.contained()
    def _flush(self) -> None:
        """Record what waits for more, and what the script has put into the summary."""
        own = {k: v for k, v in _summary.items() if v is not self._logged.get(k)}
        self._waiting |= {f"summary/{name}": value for name, value in _numbers(own).items()}
        if self._waiting:
            self.log({})
        _summary.clear()

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


def init(*unnamed: Any, **given: Any) -> Run:
    """Open a run as W&B does; beside torch its steps are measured, too."""
    global run
    if run is not None and given.get("reinit") in _KEEP_RUN:
        return run
    if unnamed:
        # The first one is a team in W&B, a kind of job in older ones, a project in SwanLab.
        _nothing("an argument of init without its name")
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
    _config.update(given.get("config") or {})
    atexit.register(run._flush)
    return run


def _close(ended: Run) -> None:
    global run
    atexit.unregister(ended._flush)
    _config.clear()
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


class util(metaclass=_Asked):
    @staticmethod
    def generate_id(length: int = 8) -> str:
        """A name for a run."""
        return secrets.token_hex(length)[:length]


def _of_the_run(name: str, *args: Any, **kwargs: Any) -> Any:
    return None if run is None else getattr(run, name)(*args, **kwargs)


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(name)
    if name in _MISSED:
        raise AttributeError(f"otel_ddp has no wandb.{name}: {_MISSED[name]}")
    if hasattr(Run, name):
        return partial(_of_the_run, name)
    nothing = _nothing(name)
    return _class(name) if name[0].isupper() else nothing
