"""For Hugging Face's Trainer: measures each rank, and logs what the Trainer reports."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from transformers import TrainerCallback
from transformers.integrations import integration_utils

import otel_ddp
from otel_ddp import errors
from otel_ddp.integrations import OpenPhase, after, checked
from otel_ddp.run import for_frameworks

# The prefix of what an evaluation and a prediction report -> the split of these values.
_SPLITS = {"eval_": "val", "test_": "test"}
# The metrics of an evaluation of one set alone have this name; those of several have longer ones.
_OF_ONE_SET = "eval_runtime"
# A name for each class of a data set, and no setting.
_NO_SETTINGS = frozenset({"id2label", "label2id"})


class OtelDdpCallback(TrainerCallback):  # type: ignore[misc]
    """`Trainer(..., callbacks=[OtelDdpCallback(group="finetune")])`; arguments as of `instrument`.

    The run ends with its process, since an evaluation may follow the training. Each trial of
    `hyperparameter_search` is a run of its own.
    """

    _instrument: Callable[..., otel_ddp.Run] = staticmethod(otel_ddp.instrument)

    def __init__(self, **arguments: Any) -> None:
        self._arguments = checked(arguments)
        self._phase = OpenPhase()
        self._is_open = False
        # The run in which a search has begun, and the number of its trials.
        self._searching: otel_ddp.Run | None = None
        self._trials = 0

    # -- the run

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        # Not `is_hyper_param_search`: a checkpoint of a trial brings that into another training.
        parameters = getattr(state, "trial_params", None)
        if parameters is None:
            self._open(args, more.get("model"), {})
        else:
            names: dict[str, str] = errors.attempt(self._next_trial, {})
            self._open(args, more.get("model"), names, parameters)

    def _open(
        self,
        args: Any,
        model: Any,
        names: dict[str, str],
        parameters: Mapping[str, Any] | None = None,
    ) -> None:
        """Strict, as `instrument` is: a mistake in the arguments raises before the first step."""
        self._is_open = True
        arguments = self._arguments | names
        # A run that the user has opened has its name already.
        if otel_ddp.current() is None and (name := getattr(args, "run_name", None)):
            arguments.setdefault("name", name)
        # Without a model: callbacks are given the one inside of DDP, FSDP and the compiled one.
        run = self._instrument(**arguments)
        # `loss` is the Trainer's mean over ranks and steps: that of one rank has another meaning.
        run.watch(reads_loss=False)
        if model is not None:
            run.describe(model)
        # Not all parameters of a trial are settings of the Trainer.
        first = parameters or {}
        errors.attempt(lambda: run.config({**first, **_configuration(args, model)}), None)

    def _next_trial(self) -> dict[str, str]:
        """The names of a trial. Its evaluation follows, so its run ends with the next one."""
        if self._searching is None:
            self._searching = otel_ddp.current() or self._instrument(**self._arguments)
        self._phase.end()
        # Before the name is read: at its end a run asks the process group, if it did not before.
        otel_ddp.finish()
        run, trial = self._searching.run, self._trials
        self._trials += 1
        return {"group": self._searching.group or run, "run": f"{run}-trial-{trial}"}

    def _open_without_training(self, args: Any, more: Mapping[str, Any]) -> None:
        # A Trainer that only evaluates or predicts begins no training.
        if not self._is_open:
            self._open(args, more.get("model"), {})

    @errors.contained()
    def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._phase.end()

    # -- values

    @errors.contained()
    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
        # The Trainer has computed the mean of all ranks, so it is the same on each.
        if state.is_world_process_zero:
            self._log(args, state, logs, more)

    @errors.contained()
    def on_predict(
        self, args: Any, state: Any, control: Any, metrics: Any = None, **more: Any
    ) -> None:
        self._phase.end()
        if state.is_world_process_zero:
            self._log(args, state, metrics, more)

    def _log(self, args: Any, state: Any, found: Mapping[str, Any] | None, more: Any) -> None:
        self._open_without_training(args, more)
        by_split: dict[str | None, dict[str, Any]] = {}
        for name, value in (found or {}).items():
            if isinstance(value, str) or name == "epoch":
                continue
            prefix = next((each for each in _SPLITS if name.startswith(each)), "")
            split = _SPLITS.get(prefix)
            by_split.setdefault(split, {})[name.removeprefix(prefix)] = value
        for split, values in by_split.items():
            otel_ddp.log(values, step=state.global_step, epoch=state.epoch, split=split)

    # -- evaluations and checkpoints: the Trainer announces them in its control before they begin

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
            self._open_without_training(args, more)
            self._phase.begin("eval")

    @errors.contained()
    def on_evaluate(
        self, args: Any, state: Any, control: Any, metrics: Any = None, **more: Any
    ) -> None:
        self._phase.end()
        # Where another set follows, the next phase is an evaluation once more.
        if control.should_save and _OF_ONE_SET in (metrics or ()):
            self._phase.begin("checkpoint")

    @errors.contained()
    def on_save(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._phase.end()

    # Another callback may take back what was announced.
    on_epoch_begin = on_step_begin = on_save


def _configuration(args: Any, model: Any) -> dict[str, Any]:
    """The settings of the Trainer and of the model; first those that differ from the default.

    What is not set is left out: labels have room for a hundred settings.
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


# So that `report_to="otel_ddp"` finds it, in a program that has imported this module.
integration_utils.INTEGRATION_TO_CALLBACK["otel_ddp"] = OtelDdpCallback


# -- a program without a line of ours


class _Added(OtelDdpCallback):
    """The one that a Trainer gets from `otel-ddp run`."""

    _instrument = staticmethod(for_frameworks.instrument)


def add_to_every_trainer() -> None:
    """From here on each Trainer has a callback, unless the program gives it one."""
    from transformers import Trainer

    after(Trainer, "__init__", _add_ours)


@errors.contained()
def _add_ours(trainer: Any, *_: Any, **__: Any) -> None:
    there = trainer.callback_handler.callbacks
    if not any(isinstance(each, OtelDdpCallback) for each in there):
        trainer.add_callback(_Added())
