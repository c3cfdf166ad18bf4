"""Finds the models that a program trains, where it names none.

`training_begins` announces a training that no run measures yet. `_Announced` waits for the first
call of a model that trains, compilation or backward, and opens the run. `_Search` looks for each
model of a run, and looks again once another optimizer comes.
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
from otel_ddp.torch.hooks import compile as compile_hooks
from otel_ddp.torch.hooks import every_module
from otel_ddp.torch.hooks import model as model_hooks
from otel_ddp.torch.hooks import optimizer as optimizer_hooks
from otel_ddp.torch.hooks.called import Called, backwards
from otel_ddp.torch.inspection import CALL_MODULE, module_calls, times_called
from otel_ddp.torch.steps.open_calls import outside_of_backward
from otel_ddp.torch.steps.stepper import Search, Stepper

# A model that takes part in training is called in one of so many steps: a GAN's critic may make
# several before the generator makes one.
_STEPS = 10
# After so many searches in a row that have found none, a new optimizer begins none: a program may
# make one in each step. After twice as many, one that trains no watched model begins none either.
_MOST_IN_VAIN = 4
# Each compilation outside of modules while we search counts as so many: it was so with our hook on
# or off, and torch gives up after eight.
_COMPILED_IN_VAIN = 2
# Where no step is made, as in a program that only infers, the search ends after so many calls.
_CALLS = 5000
# After so many steps of an optimizer, and no model found, the user is warned.
_STEPS_WITHOUT_MODEL = 10

_search: _Announced | _Search | None = None


def look(begin: Callable[[], None]) -> None:
    """A training is announced: call *begin* once, right before the first call of its model."""
    global _search
    detach()
    _search = _Announced(begin)
    # The first optimizer has imported Dynamo.
    compile_hooks.listen(_before_compile, _nothing)
    # Last: from here on any thread may call a module.
    every_module.set_hook(before_any)
    every_module.put_on()


def attach(stepper: Stepper, found: Callable[[nn.Module], None]) -> None:
    """Search for the models of this process, and watch them; the first is given to *found*."""
    global _search
    search = _search
    if not isinstance(search, _Search) or search.stepper is not stepper:
        detach()
        stepper.search = _search = search = _Search(stepper, found)
    search.begin()


def begin_with_next_optimizer(begin: Callable[[], None]) -> None:
    """While models are searched for, call *begin* as soon as another optimizer is made."""
    if isinstance(_search, _Search):
        _search.next_begins = begin


def detach() -> None:
    """End the search, and leave torch as it was found."""
    global _search
    search, _search = _search, None
    if search is not None:
        search.end()


class _Announced:
    """A training is announced: the hook on all modules waits for a model that trains."""

    def __init__(self, begin: Callable[[], None]) -> None:
        self._begin = begin
        # Of a model that trains in evaluation mode, or none, or one in other processes (RPC).
        self._backwards = backwards(errors.contained()(lambda *_, **__: self._open()))

    def _open(self) -> None:
        global _search
        if _search is self:
            _search = None
            self.end()
            self._begin()

    def end(self) -> None:
        """Look no more."""
        for each in self._backwards:
            each.take_off()
        every_module.set_hook(None)
        compile_hooks.ignore(_before_compile, _nothing)

    def failed(self) -> None:
        """A hook of ours raised."""
        errors.record_failure("waiting for the training")
        detach()

    def called(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Any module is called."""
        if trains(module) and is_outermost(module):
            self._open()
            # This call is the first one of the first step.
            before_any(module, args)

    def compiling(self) -> None:
        """A graph is about to be compiled: of a model that is inside of it, no call is seen."""
        every_module.take_off()
        self._open()
        compile_hooks.began()


class _Search(Search):
    """On from the beginning, and again when another optimizer comes.

    That is, when one is made, and when one steps that trains no watched model.

    The hook on all modules is off while any thread calls a module: what that module calls is a part
    of it, pays nothing, and may be compiled.
    """

    def __init__(self, stepper: Stepper, found: Callable[[nn.Module], None]) -> None:
        super().__init__()
        self.stepper = stepper
        self._found = found
        self._reported = False
        self._steps_left = self._calls_left = 0
        self._unknown_steps = self._in_vain = 0
        self._optimizer_made = Called(Optimizer, "__init__", self._optimizer_came)
        self.next_begins: Callable[[], None] | None = None
        """Called instead of the search once another optimizer is made: a pool's next task."""
        # The thread that is inside an outermost call, 0 for none: while the hook is off, no other
        # one is seen. And the module that still has our hook for the end of its call.
        self._inside = 0
        self._marked: Callable[[], nn.Module | None] = _nothing

    def begin(self) -> None:
        """Search, for as many steps as it may take to call every model."""
        self._steps_left, self._calls_left = _STEPS, _CALLS
        self._reported = False
        if self._in_vain >= 2 * _MOST_IN_VAIN:
            return
        if not self.on:
            self.on = True
            every_module.set_hook(before_any)
        self.between_calls()

    def pause(self) -> None:
        """Do not search until another optimizer comes."""
        self.on = False
        every_module.set_hook(None)
        self._inside = 0
        self._let_go()

    def end(self) -> None:
        """Search no more."""
        self.stepper.search = Search()
        self._optimizer_made.take_off()
        self.pause()

    def failed(self) -> None:
        """A hook of ours raised."""
        self.stepper.failed("looking for the model")

    @errors.contained()
    def _optimizer_came(self, *_: Any, **__: Any) -> None:
        if self.next_begins is not None:
            self.next_begins()
        elif self.stepper.alive and not self.on and self._in_vain < _MOST_IN_VAIN:
            # A cross-validation, say: its next model is about to be called for the first time.
            self.stepper.model_comes()
            self.begin()

    def between_calls(self) -> None:
        """This thread is in no module: put the hook on, unless another thread is in one."""
        if not self.on:
            return
        compile_hooks.attach(self.stepper)
        # After Ctrl-C or sys.exit, torch calls no hook for the end of a forward. No local keeps the
        # frames: one of them is this one, and would hold them all.
        inside = self._inside
        if not (inside and times_called(sys._current_frames().get(inside), CALL_MODULE)):
            self._inside = 0
            every_module.put_on()

    def batch_wanted(self) -> None:
        """No model is known by the time that a batch is wanted."""
        self.between_calls()

    # -- calls

    def called(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """A module is called, and as far as is known by no other module."""
        self._calls_left -= 1
        if self._calls_left < 0:
            self.pause()
            return
        # This thread may have called an outer module while the hook was off for another thread.
        if not is_outermost(module):
            # What is called inside of such a module is measured, and the module itself described.
            if models.makes_steps(module) and model_hooks.add_around(module):
                optimizer_hooks.forget_others()
                self._report(module)
            return
        self._inside = get_ident()
        every_module.take_off()
        compile_hooks.attach(self.stepper)
        self._let_go()
        # Torch looks up the hooks on the module itself after its forward.
        module.register_forward_hook(_after_any, always_call=True)
        self._marked = ref(module)
        if trains(module) and self._is_whole() and self._adopt(module):
            # Torch has chosen the hooks before this forward already, so ours is called here.
            model_hooks.before_forward(module, args, _keywords(module))

    def ended(self, module: nn.Module) -> None:
        """A module with our hook has returned or raised, or a copy of such a module."""
        # Torch iterates over a copy of its hooks, but over the hooks themselves after an exception.
        if sys.exc_info()[1] is None:
            model_hooks.take_off(module, _after_any)
        if self._marked() is module and self._inside == get_ident():
            self._inside = 0
            self.between_calls()

    def _let_go(self) -> None:
        marked, self._marked = self._marked(), _nothing
        if marked is not None:
            model_hooks.take_off(marked, _after_any)

    def _is_whole(self) -> bool:
        """Whether what is called is surely no part of a watched model.

        Activation checkpointing calls parts again in a backward, DataParallel in threads.
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
        """A graph is about to be compiled: with the hook on, it would be valid with the hook alone.

        So the hook is off until a step ends: the compiling may be in the middle of a call.
        """
        if not every_module.take_off():
            return
        module = outermost_called()
        if module is None:
            self._in_vain += _COMPILED_IN_VAIN
            if self.stepper.end.has_model or self._in_vain >= 2 * _MOST_IN_VAIN:
                self.pause()
            return
        # Compiled in place, its hooks are never called: from the next call on it is measured from
        # outside.
        if _may_train(module) and self._is_whole():
            self._adopt(module)

    # -- optimizers

    def model_stepped(self) -> None:
        """The optimizer of a watched model has made a step."""
        self._steps_left -= 1
        if self._steps_left <= 0:
            self._in_vain = 0 if self._reported else self._in_vain + 1
            self.pause()
        self.between_calls()

    def unknown_optimizer_came(self) -> None:
        """An optimizer trains no watched model: a trainer may have built another model."""
        if not self.on:
            self.begin()

    def unknown_optimizer_stepped(self) -> None:
        """An optimizer has made a step that trains no watched model."""
        if not self.stepper.end.has_model:
            self._unknown_steps += 1
            # Very many calls without a step may have ended the search.
            if not self.on and self._unknown_steps < _STEPS_WITHOUT_MODEL:
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


# -- the hooks, which tell whoever searches at that moment


def before_any(module: nn.Module, args: Any = (), *_: Any) -> None:
    """The hook on all modules, while a model is looked for and none is being called."""
    if is_compiling():
        return
    if (search := _living()) is None:
        every_module.set_hook(None)
    else:
        _tell(search, search.called, module, args)


def _after_any(module: nn.Module, *_: Any) -> None:
    if not is_compiling() and isinstance(search := _living(), _Search):
        _tell(search, search.ended, module)


def _before_compile(*_: Any) -> None:
    if isinstance(search := _search, _Announced):
        _tell(search, search.compiling)


def _tell(search: _Announced | _Search, event: Callable[..., None], *args: Any) -> None:
    try:
        event(*args)
    except errors.ANY_ERROR:
        search.failed()


def _living() -> _Announced | _Search | None:
    """Who searches, unless its run is not measured any more."""
    search = _search
    return search if isinstance(search, _Announced) or (search and search.stepper.alive) else None


def is_outermost(module: nn.Module) -> bool:
    """Whether the call of this module that begins can be measured, and no module has made it."""
    if isinstance(module, ScriptModule) or torch.jit.is_tracing():
        return False
    if times_called(sys._getframe(), CALL_MODULE) <= 1:
        return not models.makes_steps(module)
    return len(_called_in_step()) == 1


def outermost_called() -> nn.Module | None:
    """The outermost of the modules that are being called in this thread."""
    called = _called_in_step()
    return called[-1] if called else None


def _called_in_step() -> list[Any]:
    """The modules that are being called in this thread, innermost first.

    Modules of which a call is a whole step are left out: a wrapper, and the module that it calls.
    """
    called = [each.get("self") for each in module_calls(sys._getframe())]
    whole_steps = []
    while called and models.makes_steps(called[-1]):
        whole_steps.append(called.pop())
    if whole_steps and called:
        # Its `forward` is called by `training_step`, and is this module's call once more. A hook on
        # the module could not tell the two from each other.
        whole_steps.append(called.pop())
    return [each for each in called if all(each is not one for one in whole_steps)]


def trains(module: nn.Module) -> bool:
    """Whether this very call may lead to a backward. A loss has no parameters to train."""
    return (
        (module.training or bool(models.unwrapped(module).training))
        and torch.is_grad_enabled()
        and _may_train(module)
    )


def _may_train(module: nn.Module) -> bool:
    # Trainers call a copy on the meta device to count the FLOPs of a step.
    return any(each.requires_grad and not each.is_meta for each in module.parameters())


def _keywords(module: nn.Module) -> Mapping[str, Any] | None:
    """The keyword arguments of a module's call, which the hook on all modules is not given."""
    calls = module_calls(sys._getframe())
    return next((call.get("kwargs") for call in calls if call.get("self") is module), None)
