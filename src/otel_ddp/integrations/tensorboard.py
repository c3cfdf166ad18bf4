"""For TensorBoard's writers, of torch and of tensorboardX, in a program without a line of ours."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

from otel_ddp import errors

_WRITERS = ("torch.utils.tensorboard.writer", "tensorboardX.writer")
# What these log is recorded already, by integrations of ours.
_RECORDED = {"accelerate", "lightning", "lightning_fabric", "pytorch_lightning", "transformers"}

# What has opened a run without being asked has imported it. A program that trains nothing has not,
# nor does it import more of ours than this.
_RUNS = "otel_ddp.run.for_frameworks"

_known: set[type] = set()
# By run: the folder of the first writer that has logged.
_first_folders: WeakKeyDictionary[Any, str] = WeakKeyDictionary()


def log_every_scalar() -> None:
    """From here on a SummaryWriter's scalars and hyperparameters are recorded here too."""
    for name in _WRITERS:
        kind = getattr(sys.modules.get(name), "SummaryWriter", None)
        if kind is not None and kind not in _known:
            _known.add(kind)
            for method, record in (
                ("add_scalar", _scalar),
                ("add_scalars", _scalars),
                ("add_hparams", _settings),
            ):
                setattr(kind, method, _recorded(getattr(kind, method), record))


def _recorded(method: Callable[..., Any], record: Callable[..., None]) -> Callable[..., Any]:
    @functools.wraps(method)
    def recorded(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = method(self, *args, **kwargs)
        # There is no frame where a thread begins with this very method.
        frame = sys._getframe().f_back
        caller = "" if frame is None else str(frame.f_globals.get("__name__"))
        runs = sys.modules.get(_RUNS)
        if runs is not None and caller.partition(".")[0] not in _RECORDED:
            # For the results of hyperparameters a writer makes another one, in a folder of its own.
            _record(runs.unasked(), None if caller in _WRITERS else self, record, args, kwargs)
        return result

    return recorded


@errors.contained()
def _record(run: Any, writer: Any, record: Callable[..., None], args: Any, kwargs: Any) -> None:
    if run is not None:
        record(run, *_place(run, writer), *args, **kwargs)


def _place(run: Any, writer: Any) -> tuple[str, str]:
    """What names the values of this writer apart from those of others: a prefix, and a split.

    The split is the last part of its folder, as of `runs/x/val`. The first folder has no prefix.
    """
    # Here: a program that trains nothing imports no more of ours than this file.
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


def _scalar(
    run: Any,
    prefix: str,
    split: str,
    tag: Any,
    scalar_value: Any,
    global_step: Any = None,
    *_: Any,
    **__: Any,
) -> None:
    from otel_ddp.recording.values import split_in

    # A tag may name its split itself.
    of_value = split_in(str(tag)) or split or None
    run.log_beside({f"{prefix}{tag}": scalar_value}, global_step, split=of_value)


def _scalars(
    run: Any,
    prefix: str,
    split: str,
    main_tag: Any,
    tag_scalar_dict: Mapping[Any, Any],
    global_step: Any = None,
    *_: Any,
    **__: Any,
) -> None:
    values = {f"{prefix}{main_tag}/{tag}": value for tag, value in tag_scalar_dict.items()}
    run.log_beside(values, global_step, split=split or None)


def _settings(
    run: Any, _: str, __: str, hparam_dict: Mapping[str, Any], *___: Any, **____: Any
) -> None:
    run.config(hparam_dict)
