"""Finds the models that a program trains, if it does not pass them to `instrument`.

`_Announced` waits for the first training call of a model, compilation or backward, and opens the
run. `_Search` finds each model of a run, and searches again when another optimizer appears.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from threading import get_ident
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.compiler import is_compiling
from torch.jit import ScriptModule
from torch.optim import Optimizer

from otel_ddp import errors
from otel_ddp.torch import models
from otel_ddp.torch.hooks import model as model_hooks
from otel_ddp.torch.hooks import optimizer as optimizer_hooks
from otel_ddp.torch.hooks import runtime
from otel_ddp.torch.hooks.called import Called, backwards
from otel_ddp.torch.inspection import CALL_MODULE, module_calls, times_called
from otel_ddp.torch.steps.open_step import outside_of_backward
from otel_ddp.torch.steps.stepper import Stepper

# A model in training is called in one of so many steps; a GAN's critic may make several steps
# before the generator makes one.
_STEPS = 10
# After so many fruitless searches in a row a new optimizer starts no search, as a program may
# create one in each step. After twice as many, an unknown optimizer's step starts none either.
_MOST_FRUITLESS = 4
# A compilation outside of modules counts as so many fruitless searches: Dynamo recompiles when our
# hook changes, and gives up after eight times.
_COMPILED_FRUITLESS = 2
# A search ends after so many calls, in case no step is made, as in inference.
_CALLS = 5000
# Warn if no model is found within so many optimizer steps.
_STEPS_WITHOUT_MODEL = 10

_search: _Announced | _Search | None = None


def look(begin: Callable[[], None]) -> None:
    """Training is near: call *begin* once, right before the first call of the model."""
    global _search
    detach()
    _search = _Announced(begin)
    # Creating the first optimizer has imported Dynamo.
    runtime.listen(_before_compile, _nothing)
    # Last: from now on any thread may call a module.
    model_hooks.set_global_hook(before_any)
    model_hooks.put_on_all()


def attach(stepper: Stepper, found: Callable[[nn.Module], None]) -> None:
    """Search for the models of this process, and watch them; pass the first one to *found*."""
    global _search
    search = _search
    if not isinstance(search, _Search) or search.stepper is not stepper:
        detach()
        stepper.search = _search = search = _Search(stepper, found)
        stepper.model_not_called = _nothing
    search.begin()


def begin_with_next_optimizer(begin: Callable[[], None]) -> None:
    """During a search, call *begin* as soon as another optimizer is created."""
    if isinstance(_search, _Search):
        _search.next_begins = begin


def detach() -> None:
    """End the search, and restore torch."""
    global _search
    search, _search = _search, None
    if search is not None:
        search.end()


class _Announced:
    """Waits for a training model's call, with a hook on all modules."""

    def __init__(self, begin: Callable[[], None]) -> None:
        self._begin = begin
        # For models that train in evaluation mode or in other processes (RPC), or no module at all.
        self._backwards = backwards(errors.contained()(lambda *_, **__: self._open()))

    def _open(self) -> None:
        global _search
        if _search is self:
            _search = None
            self.end()
            self._begin()

    def end(self) -> None:
        """Stop waiting."""
        for each in self._backwards:
            each.take_off()
        model_hooks.set_global_hook(None)
        runtime.ignore(_before_compile, _nothing)

    def failed(self) -> None:
        """A hook raised."""
        errors.record_failure("waiting for the training")
        detach()

    def called(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """A module is called."""
        if trains(module) and is_outermost(module):
            self._open()
            # This call is the first one of the first step.
            before_any(module, args)

    def compiling(self) -> None:
        """A compilation begins: calls of a model inside the graph are not seen."""
        model_hooks.take_off_all()
        self._open()
        runtime.compiling()


class _Search:
    """Searches from the beginning, and again when another optimizer is created or steps.

    The hook on all modules is off while any thread is in a module: inner modules are not
    candidates, cost nothing, and may be compiled.
    """

    def __init__(self, stepper: Stepper, found: Callable[[nn.Module], None]) -> None:
        self.stepper = stepper
        self._found = found
        self._reported = False
        self._steps_left = self._calls_left = 0
        self._unknown_steps = self._fruitless = 0
        self._optimizer_made = Called(Optimizer, "__init__", self._optimizer_came)
        # If set, another optimizer calls this instead of starting a search: a pool's next task.
        self.next_begins: Callable[[], None] | None = None
        # The thread inside an outermost call, or 0: meanwhile the hook is off, and calls of other
        # threads are not seen. And that call's module, which has our hook at its end.
        self._calling_thread = 0
        self._hooked_module: Callable[[], nn.Module | None] = _nothing

    def begin(self) -> None:
        """Search for as many steps as it may take until every model is called."""
        self._steps_left, self._calls_left = _STEPS, _CALLS
        self._reported = False
        if self._fruitless >= 2 * _MOST_FRUITLESS:
            return
        if not self.stepper.searching:
            self.stepper.searching = True
            model_hooks.set_global_hook(before_any)
        self.between_calls()

    def pause(self) -> None:
        """Stop searching until another optimizer appears."""
        self.stepper.searching = False
        model_hooks.set_global_hook(None)
        self._calling_thread = 0
        self._let_go()

    def end(self) -> None:
        """Stop searching for good."""
        self.stepper.search = None
        self._optimizer_made.take_off()
        self.pause()

    def failed(self) -> None:
        """A hook raised."""
        self.stepper.failed("looking for the model")

    @errors.contained()
    def _optimizer_came(self, *_: Any, **__: Any) -> None:
        stepper = self.stepper
        if self.next_begins is not None:
            self.next_begins()
        elif stepper.alive and not stepper.searching and self._fruitless < _MOST_FRUITLESS:
            # In a cross-validation, for example, the next model is about to be called.
            stepper.model_comes()
            self.begin()

    def between_calls(self) -> None:
        """This thread is in no module: put the hook on, unless another thread is in one."""
        if not self.stepper.searching:
            return
        runtime.attach(self.stepper)
        # After Ctrl-C or sys.exit, torch calls no hook at the end of a forward. No local variable
        # holds the frames, as a frame that holds itself is a reference cycle.
        inside = self._calling_thread
        if not (inside and times_called(sys._current_frames().get(inside), CALL_MODULE)):
            self._calling_thread = 0
            model_hooks.put_on_all()

    # -- calls

    def called(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """A module is called, apparently not by another module."""
        self._calls_left -= 1
        if self._calls_left < 0:
            self.pause()
            return
        # This thread may have called an outer module while the hook was off.
        if not is_outermost(module):
            # Its inner modules are watched; the module itself only describes the run.
            if models.makes_steps(module) and model_hooks.add_around(module):
                optimizer_hooks.forget_others()
                self._report(module)
            return
        self._calling_thread = get_ident()
        model_hooks.take_off_all()
        runtime.attach(self.stepper)
        self._let_go()
        # Torch looks up the module's own hooks after its forward.
        module.register_forward_hook(_after_any, always_call=True)
        self._hooked_module = ref(module)
        if trains(module) and self._is_no_part() and self._adopt(module):
            # Torch has collected the hooks before this forward already, so call ours directly.
            model_hooks.before_forward(module, args, _kwargs_of(module))

    def ended(self, module: nn.Module) -> None:
        """A module with our hook, or a copy of one, has returned or raised."""
        # Torch iterates over a copy of its hooks, but over the original after an exception.
        if sys.exc_info()[1] is None:
            model_hooks.take_off(module, _after_any)
        if self._hooked_module() is module and self._calling_thread == get_ident():
            self._calling_thread = 0
            self.between_calls()

    def _let_go(self) -> None:
        marked, self._hooked_module = self._hooked_module(), _nothing
        if marked is not None:
            model_hooks.take_off(marked, _after_any)

    def _is_no_part(self) -> bool:
        """Whether the called module is certainly no part of a watched model.

        Checkpointing calls parts during backward, DataParallel calls replicas in threads.
        """
        return outside_of_backward() and not self.stepper.calls.forward_in_another_thread()

    def _adopt(self, module: nn.Module) -> bool:
        if not model_hooks.attach(module, self.stepper):
            return False
        optimizer_hooks.forget_others()
        self.stepper.end.model_came(found=True)
        model_hooks.watch_compiled_in_place()
        self._report(module)
        return True

    def _report(self, module: nn.Module) -> None:
        if not self._reported:
            self._reported = True
            self._found(module)

    # -- compilation

    def compiling(self) -> None:
        """A compilation begins. A graph compiled with our hook on would be valid only with it.

        So the hook is off until a step ends: the compilation may be in the middle of a call.
        """
        if not model_hooks.take_off_all():
            return
        module = outermost_called()
        if module is None:
            self._fruitless += _COMPILED_FRUITLESS
            if self.stepper.end.has_model or self._fruitless >= 2 * _MOST_FRUITLESS:
                self.pause()
            return
        # A model compiled in place never runs its hooks: measure it from outside from the next call
        # on.
        if _may_train(module) and self._is_no_part():
            self._adopt(module)

    # -- optimizers

    def model_stepped(self) -> None:
        """The optimizer of a watched model has stepped."""
        self._steps_left -= 1
        if self._steps_left <= 0:
            self._fruitless = 0 if self._reported else self._fruitless + 1
            self.pause()
        self.between_calls()

    def unknown_optimizer_came(self) -> None:
        """An optimizer of no watched model begins a step: a trainer may have built a new model."""
        if not self.stepper.searching:
            self.begin()

    def unknown_optimizer_stepped(self) -> None:
        """An optimizer of no watched model has stepped."""
        if not self.stepper.end.has_model:
            self._unknown_steps += 1
            # Very many calls without a step may have ended the search.
            if not self.stepper.searching and self._unknown_steps < _STEPS_WITHOUT_MODEL:
                self.begin()
            if self._unknown_steps == _STEPS_WITHOUT_MODEL:
                self._warn()
        self.between_calls()

    def _warn(self) -> None:
        errors.warn_once(
            "discovery",
            "In %d steps of an optimizer no model was seen that is called and trains, so no steps "
            "are measured: name the model by otel_ddp.instrument(model), after whatever wraps or "
            "compiles it. Where the whole step is compiled, compile the model in its place.",
            _STEPS_WITHOUT_MODEL,
        )


def _nothing(*_: Any) -> None:
    pass


# -- the hooks, which call the current search


def before_any(module: nn.Module, args: Any = (), *_: Any) -> None:
    """The hook on all modules, while a model is searched for and none is being called."""
    if is_compiling():
        return
    if (search := _active()) is None:
        model_hooks.set_global_hook(None)
    else:
        _notify(search, search.called, module, args)


def _after_any(module: nn.Module, *_: Any) -> None:
    if not is_compiling() and isinstance(search := _active(), _Search):
        _notify(search, search.ended, module)


def _before_compile(*_: Any) -> None:
    if isinstance(search := _search, _Announced):
        _notify(search, search.compiling)


def _notify(search: _Announced | _Search, event: Callable[..., None], *args: Any) -> None:
    try:
        event(*args)
    except errors.ANY_ERROR:
        search.failed()


def _active() -> _Announced | _Search | None:
    """The current search, unless its run is not measured any more."""
    search = _search
    return search if isinstance(search, _Announced) or (search and search.stepper.alive) else None


def is_outermost(module: nn.Module) -> bool:
    """Whether the beginning call of this module can be measured, and is made by no other module."""
    if isinstance(module, ScriptModule) or torch.jit.is_tracing():
        return False
    if times_called(sys._getframe(), CALL_MODULE) <= 1:
        return not models.makes_steps(module)
    return len(_called_in_step()) == 1


def outermost_called() -> nn.Module | None:
    """The outermost module that this thread is calling."""
    called = _called_in_step()
    return called[-1] if called else None


def _called_in_step() -> list[Any]:
    """The modules that this thread is calling, innermost first.

    Without modules whose call is a whole step: a wrapper, and the module that it calls.
    """
    called = [each.get("self") for each in module_calls(sys._getframe())]
    whole_steps = []
    while called and models.makes_steps(called[-1]):
        whole_steps.append(called.pop())
    if whole_steps and called:
        # `training_step` calls its `forward` again. A hook on the module could not distinguish the
        # two calls.
        whole_steps.append(called.pop())
    return [each for each in called if all(each is not one for one in whole_steps)]


def trains(module: nn.Module) -> bool:
    """Whether this call may lead to a backward. Losses have no parameters to train."""
    return (
        (module.training or bool(models.unwrapped(module).training))
        and torch.is_grad_enabled()
        and _may_train(module)
    )


def _may_train(module: nn.Module) -> bool:
    # Trainers call a copy on the meta device to count FLOPs.
    return any(each.requires_grad and not each.is_meta for each in module.parameters())


def _kwargs_of(module: nn.Module) -> Mapping[str, Any] | None:
    """The keyword arguments of a module's call, which the hook on all modules does not get."""
    calls = module_calls(sys._getframe())
    return next((call.get("kwargs") for call in calls if call.get("self") is module), None)
