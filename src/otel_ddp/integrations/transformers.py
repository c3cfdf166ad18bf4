"""For Hugging Face's Trainer: measures each rank, and logs the Trainer's values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from transformers import TrainerCallback
from transformers.integrations import integration_utils

import otel_ddp
from otel_ddp import errors, integrations
from otel_ddp.integrations import OpenPhase, checked
from otel_ddp.torch.hooks.called import Called

# The split of the metrics of an evaluation or a prediction, by the prefix of their names.
_SPLITS = {"eval_": "val", "test_": "test"}
# Each evaluation of a single data set has this metric. With several data sets, the name of each
# metric includes the data set, so none of them has this name.
_OF_ONE_SET = "eval_runtime"
# These keys of a model's configuration are left out: they are no settings, but lists of its
# classes.
_NO_SETTINGS = frozenset({"id2label", "label2id"})


class OtelDdpCallback(TrainerCallback):  # type: ignore[misc]
    """`Trainer(..., callbacks=[OtelDdpCallback(group="finetune")])`; arguments as for `instrument`.

    An evaluation may follow the training, so the run stays open until its process ends.
    """

    _instrument: Callable[..., otel_ddp.Run] = staticmethod(otel_ddp.instrument)

    def __init__(self, **arguments: Any) -> None:
        self._arguments = checked(arguments)
        self._phase = OpenPhase()

    # -- the run

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, **more: Any
    ) -> None:
        """Like `instrument`, this raises for invalid arguments, before the first step."""
        arguments = self._arguments.copy()
        # Take the Trainer's name for the run, unless the user has opened the run before.
        if otel_ddp.current() is None and (name := getattr(args, "run_name", None)):
            arguments.setdefault("name", name)
        # Do not pass the model: it is the inner one, not the DDP, FSDP or compiled module around
        # it, which `instrument` needs.
        run = self._instrument(**arguments)
        # Do not read the loss of each rank: the Trainer logs `loss` itself, as a mean over ranks
        # and steps.
        run.watch(reads_loss=False)
        if model is not None:
            run.describe(model)
        errors.attempt(lambda: run.config(_configuration(args, model)), None)

    @errors.contained()
    def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._phase.end()

    # -- values

    @errors.contained()
    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
        # The values are means over the ranks, and the same on all ranks. So only rank 0 logs them.
        if state.is_world_process_zero:
            self._log(state, logs)

    @errors.contained()
    def on_predict(
        self, args: Any, state: Any, control: Any, metrics: Any = None, **more: Any
    ) -> None:
        self._phase.end()
        if state.is_world_process_zero:
            self._log(state, metrics)

    def _log(self, state: Any, found: Mapping[str, Any] | None) -> None:
        by_split: dict[str | None, dict[str, Any]] = {}
        for name, value in (found or {}).items():
            if isinstance(value, str) or name == "epoch":
                continue
            prefix = next((each for each in _SPLITS if name.startswith(each)), "")
            split = _SPLITS.get(prefix)
            by_split.setdefault(split, {})[name.removeprefix(prefix)] = value
        for split, values in by_split.items():
            otel_ddp.log(values, step=state.global_step, epoch=state.epoch, split=split)

    # -- evaluations and checkpoints, which the Trainer announces in its control

    @errors.contained()
    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if control.should_evaluate:
            self._phase.begin("eval")
        elif control.should_save:
            self._phase.begin("checkpoint")

    on_epoch_end = on_step_end

    @errors.contained()
    def on_prediction_step(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if self._phase.name != "eval":
            self._phase.begin("eval")

    @errors.contained()
    def on_evaluate(
        self, args: Any, state: Any, control: Any, metrics: Any = None, **more: Any
    ) -> None:
        self._phase.end()
        # The Trainer saves a checkpoint next. Should another evaluation come first, it ends this
        # phase.
        if control.should_save and _OF_ONE_SET in (metrics or ()):
            self._phase.begin("checkpoint")

    @errors.contained()
    def on_save(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._phase.end()

    # Another callback may cancel an evaluation or a checkpoint that the Trainer has announced. So
    # the next step or epoch ends the phase in any case.
    on_epoch_begin = on_step_begin = on_save


def _configuration(args: Any, model: Any) -> dict[str, Any]:
    """The settings of Trainer and model, first those of the Trainer that differ from their default.

    Empty settings are left out, because only a hundred settings fit into labels.
    """
    found: dict[str, Any] = args.to_dict()
    defaults = {name: field.default for name, field in args.__dataclass_fields__.items()}
    changed = {k: v for k, v in found.items() if k in defaults and v != defaults[k]}
    config: Any = getattr(model, "config", None)
    of_model = config.to_dict() if hasattr(config, "to_dict") else {}
    others = {k: v for k, v in found.items() if k not in changed}
    return {**changed, "model": _set(of_model), **_set(others)}


def _set(settings: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in settings.items()
        if name not in _NO_SETTINGS and value not in (None, "", [], {})
    }


# A program that imports this module can select the callback by `report_to="otel_ddp"`.
integration_utils.INTEGRATION_TO_CALLBACK["otel_ddp"] = OtelDdpCallback


# -- called by `otel-ddp run`


class _Added(OtelDdpCallback):
    """The callback that `otel-ddp run` adds to a Trainer."""

    _instrument = staticmethod(integrations.instrument)


def add_to_every_trainer() -> None:
    """Add our callback to each Trainer, unless the program has added it."""
    from transformers import Trainer

    Called(Trainer, "__init__", _add_ours)


@errors.contained()
def _add_ours(trainer: Any, *_: Any, **__: Any) -> None:
    there = trainer.callback_handler.callbacks
    if not any(isinstance(each, OtelDdpCallback) for each in there):
        trainer.add_callback(_Added())
