"""For TensorBoard's writers, of torch and of tensorboardX, in a program without a line of ours."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

from otel_ddp import errors

_WRITERS = ("torch.utils.tensorboard.writer", "tensorboardX.writer")
# What these log is recorded already, by integrations of ours.
_RECORDED = {"accelerate", "lightning", "lightning_fabric", "pytorch_lightning", "transformers"}

# What has opened a run without being asked has imported it. A program that trains nothing has not,
# nor does it import more of ours than this.
_RUNS = "otel_ddp.run.for_frameworks"

_known: set[type] = set()


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
            record(runs, *args, **kwargs)
        return result

    return recorded


@errors.contained()
def _scalar(
    runs: Any, tag: Any, scalar_value: Any, global_step: Any = None, *_: Any, **__: Any
) -> None:
    runs.log_beside({tag: scalar_value}, global_step)


@errors.contained()
def _scalars(
    runs: Any,
    main_tag: Any,
    tag_scalar_dict: Mapping[Any, Any],
    global_step: Any = None,
    *_: Any,
    **__: Any,
) -> None:
    values = {f"{main_tag}/{tag}": value for tag, value in tag_scalar_dict.items()}
    runs.log_beside(values, global_step)


@errors.contained()
def _settings(runs: Any, hparam_dict: Mapping[str, Any], *_: Any, **__: Any) -> None:
    runs.configure_beside(hparam_dict)
