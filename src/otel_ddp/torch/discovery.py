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

# A search ends after this many optimizer steps. Not after one: a GAN's critic may make several
# steps before the generator is called.
_STEPS = 10
# After this many fruitless searches in a row, a new optimizer starts no further search: a program
# may create an optimizer in each step. After twice as many, no optimizer starts a search.
_MOST_FRUITLESS = 4
# A compilation outside of modules counts as this many fruitless searches: each change of our hook
# makes Dynamo recompile, and Dynamo stops compiling a function after eight recompilations.
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

    The hook on all modules is off while any thread is in a module: inner modules are not
    candidates. So the hook costs them nothing and does not disturb their compilation.
    """

    def __init__(self, stepper: Stepper, found: Callable[[nn.Module], None]) -> None:
        self.stepper = stepper
        self._found = found
        self._reported = False
        self._steps_left = self._calls_left = 0
        self._unknown_steps = self._fruitless = 0
        self._optimizer_made = Called(Optimizer, "__init__", self._optimizer_came)
        # If set, a new optimizer calls this instead of starting a search: in a pool's worker, it
        # belongs to the next task, which is another run.
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
        """A hook raised: the stepper counts failures, and stops after some."""
        self.stepper.failed("looking for the model")

    @errors.contained()
    def _optimizer_came(self, *_: Any, **__: Any) -> None:
        stepper = self.stepper
        if self.next_begins is not None:
            self.next_begins()
        elif stepper.alive and not stepper.searching and self._fruitless < _MOST_FRUITLESS:
            # The next model is about to be called, as in a cross-validation.
            stepper.model_comes()
            self.begin()

    def between_calls(self) -> None:
        """Put the hook on, unless another thread is in a module. This thread is in none."""
        if not self.stepper.searching:
            return
        runtime.attach(self.stepper)
        # Look at the other thread's stack: after Ctrl-C or sys.exit in a forward, torch calls no
        # hook that resets `_calling_thread`. No local variable holds the frames: they include this
        # one, which would make a reference cycle.
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
            # If a call of this module is a whole step, watch its inner modules instead; the module
            # itself only describes the run.
            if models.makes_steps(module) and model_hooks.add_around(module):
                optimizer_hooks.forget_others()
                self._report(module)
            return
        self._calling_thread = get_ident()
        model_hooks.take_off_all()
        runtime.attach(self.stepper)
        self._unhook()
        # The hook runs in this very call: torch looks up a module's forward hooks after forward.
        module.register_forward_hook(_after_any, always_call=True)
        self._hooked_module = ref(module)
        if trains(module) and self._is_outside_watched() and self._adopt(module):
            # Torch has already collected the pre-hooks of this call, so call our new one directly.
            model_hooks.before_forward(module, args, _kwargs_of(module))

    def ended(self, module: nn.Module) -> None:
        """A module with our hook, or a copy of one, has returned or raised."""
        # After an exception torch iterates over the hooks themselves, which must not change then;
        # otherwise over a copy.
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

        Activation checkpointing calls parts during backward, DataParallel replicas in threads.
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
        """A compilation begins: take the hook off, as the graph has a guard on global hooks.

        It stays off until a step ends: the compilation may be in the middle of a call.
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
            # Search again: `_CALLS` calls without a step may have ended the search.
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

    Modules whose call is a whole step are left out: a wrapper, and the module inside it.
    """
    called = [each.get("self") for each in module_calls(sys._getframe())]
    whole_steps = []
    while called and models.makes_steps(called[-1]):
        whole_steps.append(called.pop())
    if whole_steps and called:
        # The module inside is called for `training_step`, which calls its `forward` again: a hook
        # on this module could not distinguish the two calls.
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
    # Not on the meta device: trainers call a copy of the model there to count FLOPs.
    return any(each.requires_grad and not each.is_meta for each in module.parameters())


def _kwargs_of(module: nn.Module) -> Mapping[str, Any] | None:
    """The keyword arguments of a module's call, from the stack: torch passes global hooks none."""
    calls = module_calls(sys._getframe())
    return next((call.get("kwargs") for call in calls if call.get("self") is module), None)
