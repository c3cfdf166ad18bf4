"""Finds the models that a program trains, if it does not pass them to `instrument`.

`_Announced` waits for the first sign of training (a model's call, a compilation or a backward), and
opens the run. `_Search` finds each model of a run, and searches again when another optimizer
appears.
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

# A search ends after this many optimizer steps. One step would be too few: a GAN's critic may make
# several steps before the generator is first called.
_STEPS = 10
# After this many searches in a row without a model, a newly created optimizer starts no search, as
# a program may create one in each step. After twice as many, no search starts at all.
_MOST_FRUITLESS = 4
# A compilation outside of any module counts as this many searches without a model, so the search
# ends soon: each switch of our hook makes Dynamo recompile, which it does at most eight times.
_COMPILED_FRUITLESS = 2
# A search also ends after this many module calls, as a program may make no steps (inference).
_CALLS = 5000
# Warn if no model is found within this many optimizer steps.
_STEPS_WITHOUT_MODEL = 10

_search: _Announced | _Search | None = None


def look(begin: Callable[[], None]) -> None:
    """Wait for training, and call *begin* once, right before the model's first call."""
    global _search
    detach()
    _search = _Announced(begin)
    # Dynamo is imported by now: creating an optimizer imports it.
    runtime.listen(_before_compile, _nothing)
    # These hooks go on last, as any thread may call a module from now on.
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
    """If this process searches for models, call *begin* as soon as another optimizer is created."""
    if isinstance(_search, _Search):
        _search.next_begins = begin


def detach() -> None:
    """End the search, and restore torch."""
    global _search
    search, _search = _search, None
    if search is not None:
        search.end()


class _Announced:
    """Waits for the first call of a model in training, with a hook on all modules."""

    def __init__(self, begin: Callable[[], None]) -> None:
        self._begin = begin
        # A backward also announces training: the hook on modules misses a model in evaluation mode
        # or in another process (RPC), and parameters outside of any module.
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
        """A hook raised: stop waiting."""
        errors.record_failure("waiting for the training")
        detach()

    def called(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """A module is called: open the run if this is the outermost call of a model in training."""
        if trains(module) and is_outermost(module):
            self._open()
            # The search that *begin* has started must see this call: the first step begins here.
            before_any(module, args)

    def compiling(self) -> None:
        """A compilation begins: open the run now, as hooks do not see calls inside a graph."""
        model_hooks.take_off_all()
        self._open()
        runtime.compiling()


class _Search:
    """Searches for models at first, and again when another optimizer is created or steps.

    The hook on all modules is off while any thread is inside a module, as modules called by another
    module are no candidates. So the hook neither slows them down nor disturbs their compilation.
    """

    def __init__(self, stepper: Stepper, found: Callable[[nn.Module], None]) -> None:
        self.stepper = stepper
        self._found = found
        self._reported = False
        self._steps_left = self._calls_left = 0
        self._unknown_steps = self._fruitless = 0
        self._optimizer_made = Called(Optimizer, "__init__", self._optimizer_came)
        # If set, the creation of an optimizer calls this instead of starting a search: in a pool's
        # worker, the optimizer belongs to the next task, which is another run.
        self.next_begins: Callable[[], None] | None = None
        # The thread that is inside an outermost call, or 0. The hook is off until this call ends,
        # so calls in other threads are not seen.
        self._calling_thread = 0
        # The module of this call; our forward hook on it reports the call's end.
        self._hooked_module: Callable[[], nn.Module | None] = _nothing

    def begin(self) -> None:
        """Start a search; it lasts long enough for every model to be called."""
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
        self._unhook()

    def end(self) -> None:
        """Stop searching for good."""
        self.stepper.search = None
        self._optimizer_made.take_off()
        self.pause()

    def failed(self) -> None:
        """A hook raised: the stepper counts failures, and stops measuring after a few."""
        self.stepper.failed("looking for the model")

    @errors.contained()
    def _optimizer_came(self, *_: Any, **__: Any) -> None:
        stepper = self.stepper
        if self.next_begins is not None:
            self.next_begins()
        elif stepper.alive and not stepper.searching and self._fruitless < _MOST_FRUITLESS:
            # A new optimizer announces a new model, which is called next, as in a cross-validation.
            stepper.model_comes()
            self.begin()

    def between_calls(self) -> None:
        """Put the hook on, unless another thread is in a module (the current one is not)."""
        if not self.stepper.searching:
            return
        runtime.attach(self.stepper)
        # Look at the other thread's stack rather than only at `_calling_thread`: after Ctrl-C or
        # sys.exit in a forward, torch calls no hook that resets it. Keep the frames in no local
        # variable: they include this function's frame, which would make a reference cycle.
        inside = self._calling_thread
        if not (inside and times_called(sys._current_frames().get(inside), CALL_MODULE)):
            self._calling_thread = 0
            model_hooks.put_on_all()

    # -- calls

    def called(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """A module is called, and the hook is on, so probably no other module calls it."""
        self._calls_left -= 1
        if self._calls_left < 0:
            self.pause()
            return
        # An outer module may be calling this one, if its call began while the hook was off.
        if not is_outermost(module):
            # If a call of this module is a whole training step, do not watch it but the modules
            # inside it. The module itself is only used to describe the run.
            if models.makes_steps(module) and model_hooks.add_around(module):
                optimizer_hooks.forget_others()
                self._report(module)
            return
        self._calling_thread = get_ident()
        model_hooks.take_off_all()
        runtime.attach(self.stepper)
        self._unhook()
        # This hook already runs at the end of the current call: torch looks up a module's forward
        # hooks only after the forward.
        module.register_forward_hook(_after_any, always_call=True)
        self._hooked_module = ref(module)
        if trains(module) and self._is_outside_watched() and self._adopt(module):
            # Torch has already collected the pre-hooks of this call, so it won't call our new one.
            model_hooks.before_forward(module, args, _kwargs_of(module))

    def ended(self, module: nn.Module) -> None:
        """A module with our hook, or a copy of one, has returned or raised."""
        # Do not remove the hook after an exception: torch then iterates over the dictionary of
        # hooks itself, which must not change meanwhile. Otherwise it iterates over a copy.
        if sys.exc_info()[1] is None:
            model_hooks.take_off(module, _after_any)
        if self._hooked_module() is module and self._calling_thread == get_ident():
            self._calling_thread = 0
            self.between_calls()

    def _unhook(self) -> None:
        marked, self._hooked_module = self._hooked_module(), _nothing
        if marked is not None:
            model_hooks.take_off(marked, _after_any)

    def _is_outside_watched(self) -> bool:
        """Whether the called module is certainly not a part of a watched model.

        Parts of models are also called without the whole model: by activation checkpointing during
        backward, and by DataParallel, which calls replicas in other threads.
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
        """A compilation begins: take the hook off, as its graph gets a guard on global hooks.

        The hook stays off until a step ends, as the compilation may be in the middle of a call.
        """
        if not model_hooks.take_off_all():
            return
        module = outermost_called()
        if module is None:
            self._fruitless += _COMPILED_FRUITLESS
            if self.stepper.end.has_model or self._fruitless >= 2 * _MOST_FRUITLESS:
                self.pause()
            return
        # A model compiled in place never runs its hooks: from its next call on, `_CompiledInPlace`
        # measures it.
        if _may_train(module) and self._is_outside_watched():
            self._adopt(module)

    # -- optimizers

    def model_stepped(self) -> None:
        """The optimizer of a watched model has made a step."""
        self._steps_left -= 1
        if self._steps_left <= 0:
            self._fruitless = 0 if self._reported else self._fruitless + 1
            self.pause()
        self.between_calls()

    def unknown_optimizer_came(self) -> None:
        """An optimizer that trains no watched model begins a step: there may be a new model."""
        if not self.stepper.searching:
            self.begin()

    def unknown_optimizer_stepped(self) -> None:
        """An optimizer that trains no watched model has made a step."""
        if not self.stepper.end.has_model:
            self._unknown_steps += 1
            # Search again: after `_CALLS` module calls without a step, a search ends.
            if not self.stepper.searching and self._unknown_steps < _STEPS_WITHOUT_MODEL:
                self.begin()
            if self._unknown_steps == _STEPS_WITHOUT_MODEL:
                self._warn()
        self.between_calls()

    def _warn(self) -> None:
        errors.warn_once(
            "discovery",
            "In %d optimizer steps no call of a model in training was seen, so no steps are "
            "measured: name the model by otel_ddp.instrument(model), after wrapping and compiling "
            "it. If the whole step is compiled, compile only the model instead.",
            _STEPS_WITHOUT_MODEL,
        )


def _nothing(*_: Any) -> None:
    pass


# -- the hooks, which call the current search


def before_any(module: nn.Module, args: Any = (), *_: Any) -> None:
    """The hook on all modules, which is on while models are searched for and none is called."""
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
    """Whether this module's call can be measured, and no other module makes it."""
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

    If a wrapper's call is a whole step, the wrapper and the module inside it are left out.
    """
    called = [each.get("self") for each in module_calls(sys._getframe())]
    whole_steps = []
    while called and models.makes_steps(called[-1]):
        whole_steps.append(called.pop())
    if whole_steps and called:
        # The wrapper calls the module inside to run `training_step`, which calls the module's
        # `forward` again: a hook on this module could not distinguish the two calls.
        whole_steps.append(called.pop())
    return [each for each in called if all(each is not one for one in whole_steps)]


def trains(module: nn.Module) -> bool:
    """Whether this call may lead to a backward; False for loss modules: they have no parameters."""
    return (
        (module.training or bool(models.unwrapped(module).training))
        and torch.is_grad_enabled()
        and _may_train(module)
    )


def _may_train(module: nn.Module) -> bool:
    # Ignore parameters on the meta device: trainers call a copy of the model there to count FLOPs.
    return any(each.requires_grad and not each.is_meta for each in module.parameters())


def _kwargs_of(module: nn.Module) -> Mapping[str, Any] | None:
    """The keyword arguments of a module's call, from the stack: global hooks don't get them."""
    calls = module_calls(sys._getframe())
    return next((call.get("kwargs") for call in calls if call.get("self") is module), None)
