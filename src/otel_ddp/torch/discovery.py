"""Finds the models that a program trains, where it names none."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from threading import get_ident
from types import FrameType
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.compiler import is_compiling
from torch.jit import ScriptModule

from otel_ddp import containment
from otel_ddp.torch.hooks import compile as compile_hooks
from otel_ddp.torch.hooks import every_module
from otel_ddp.torch.hooks import model as model_hooks
from otel_ddp.torch.hooks import optimizer as optimizer_hooks
from otel_ddp.torch.stepper import Stepper, calls

# A model that takes part in training is called in one of so many steps: a GAN's critic may make
# several before the generator makes one.
_STEPS = 10
# Where no step is made, as in a program that only infers, the search ends after so many calls.
_CALLS = 5000
# Programs whose layers are called one by one, from a function, are measured by some of them.
_MOST_MODELS = 16
# After so many steps of an optimizer, and no model seen, a person is told what to do.
_STEPS_UNSEEN = 10
_CALL_MODULE = nn.Module._wrapped_call_impl.__code__
# Private; without it, what a checkpoint computes again is taken for calls of the loop.
_current_backward: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", lambda: -1)

_search: _Search | None = None


def attach(stepper: Stepper, found: Callable[[nn.Module], None]) -> None:
    """Look for the models of this process, and watch them; *found* is told of the first."""
    global _search
    if _search is None or _search.stepper is not stepper:
        detach()
        _search = _Search(stepper, found)
        optimizer_hooks.tell(_search)
    _search.begin()


def detach() -> None:
    """Look no more."""
    global _search
    search, _search = _search, None
    optimizer_hooks.tell(None)
    if search is not None:
        search.rest()


class _Search:
    """On from the beginning, and again when an optimizer steps that has no model of ours.

    The hook on every module is off while any thread calls one: what that one calls is a part of it,
    pays nothing, and may be compiled.
    """

    def __init__(self, stepper: Stepper, found: Callable[[nn.Module], None]) -> None:
        self.stepper = stepper
        self.on = False
        self._found = found
        self._told = False
        self._steps_left = self._calls_left = 0
        self._models = self._unseen = 0
        # The threads that are inside an outermost call; and of each thread, the module that still
        # has our hook for the end of its call.
        self._inside: set[int] = set()
        self._marked: dict[int, ref[nn.Module]] = {}
        stepper.before_model = self.between_calls
        stepper.before_compile = self.compiling

    def begin(self) -> None:
        """Look, for as many steps as it may take to call every model."""
        self._steps_left, self._calls_left = _STEPS, _CALLS
        self._told = False
        self._models = 0
        if not self.on:
            self.on = True
            every_module.expect(_before_any)
        self.between_calls()

    def rest(self) -> None:
        """Look no more until another optimizer comes."""
        self.on = False
        every_module.expect(None)
        self._inside.clear()
        for thread in list(self._marked):
            self._let_go(thread)

    def between_calls(self) -> None:
        """This thread calls no module; the hook is for when no other one does either."""
        if not self.on:
            return
        compile_hooks.attach(self.stepper)
        if self._inside:
            # Ctrl-C or sys.exit in a forward tells no end.
            frames = sys._current_frames()
            for thread in list(self._inside):
                if not calls(frames.get(thread), _CALL_MODULE):
                    self._inside.discard(thread)
        if not self._inside:
            every_module.put_on()

    # -- calls

    def called(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """A module is called, from no other one as far as is known."""
        self._calls_left -= 1
        if self._calls_left < 0:
            self.rest()
            return
        if isinstance(module, ScriptModule) or torch.jit.is_tracing():
            return
        # One that this thread has begun to call while the hook was off for another thread.
        if calls(sys._getframe(), _CALL_MODULE) > 1:
            return
        thread = get_ident()
        self._inside.add(thread)
        every_module.take_off()
        compile_hooks.attach(self.stepper)
        self._let_go(thread)
        # Hooks on the module itself are looked up after its forward.
        module.register_forward_hook(_after_any, always_call=True)
        self._marked[thread] = ref(module)
        if _trains(module) and self._is_whole() and self._adopt(module):
            # Torch has already chosen the hooks that it calls before this forward.
            model_hooks.call_began(module, args, _keywords(module))

    def ended(self, module: nn.Module) -> None:
        """A module has returned or raised that carries the hook of a call, or is a copy of one."""
        # Torch goes over a copy of its hooks, but over the hooks themselves where forward raised.
        returned = sys.exc_info()[1] is None
        thread = get_ident()
        marked = self._marked.get(thread)
        if marked is None or marked() is not module:
            if returned and all(each() is not module for each in list(self._marked.values())):
                model_hooks.take_off(module, _after_any)
            return
        if returned:
            self._let_go(thread)
        self._inside.discard(thread)
        self.between_calls()

    def _let_go(self, thread: int) -> None:
        marked = self._marked.pop(thread, _no_module)
        module = marked()
        # Two threads may call one module.
        if module is not None and all(each() is not module for each in list(self._marked.values())):
            model_hooks.take_off(module, _after_any)

    def _is_whole(self) -> bool:
        """Whether what is called is surely no part of a watched model.

        Activation checkpointing calls parts again in a backward, DataParallel in threads.
        """
        return _current_backward() == -1 and not self.stepper.in_forward_elsewhere()

    def _adopt(self, module: nn.Module) -> bool:
        if self._models >= _MOST_MODELS or not model_hooks.attach(module, self.stepper, found=True):
            return False
        self._models += 1
        optimizer_hooks.ask_again()
        self.stepper.another_model()
        model_hooks.watch_compiled()
        if not self._told:
            self._told = True
            self._found(module)
        return True

    # -- compilation

    def compiling(self) -> None:
        """A graph is about to be compiled: without the hook, or it would be valid with it alone.

        It stays off until a step is made, for what is compiled may be in the middle of a call.
        """
        if not every_module.take_off():
            return
        module = _outermost(sys._getframe())
        # Compiled in place, its hooks are never called: from the next call on it is watched from
        # around.
        if module is not None and _may_train(module) and self._is_whole():
            self._adopt(module)

    # -- optimizers

    def stepped(self) -> None:
        """A model that is watched has made a step."""
        self._steps_left -= 1
        if self._steps_left <= 0:
            self.rest()
        self.between_calls()

    def another_optimizer(self) -> None:
        """An optimizer steps that has no model of ours: a trainer may have built another one."""
        if self.stepper.has_model or not self.on:
            self.begin()

    def stepped_unseen(self) -> None:
        """An optimizer has made a step, and no model of ours has a part in it."""
        if self.stepper.has_model:
            self.between_calls()
            return
        self._unseen += 1
        # Calls without a step, of another kind, may have ended the search.
        if not self.on and self._unseen < _STEPS_UNSEEN:
            self.begin()
        self.between_calls()
        if self._unseen == _STEPS_UNSEEN:
            containment.warn_once(
                "discovery",
                "instrument() was given no model, and in %d steps of an optimizer none was seen "
                "that is called and trains, so no steps are measured: pass the model, "
                "instrument(model), after whatever wraps or compiles it.",
                _STEPS_UNSEEN,
            )


def _before_any(module: nn.Module, args: Any = (), *_: Any) -> None:
    if is_compiling():
        return
    search = _search
    if search is None or not search.stepper.alive:
        every_module.expect(None)
        return
    try:
        search.called(module, args)
    except containment.ANY_ERROR:
        search.stepper.failed("looking for the model")


def _after_any(module: nn.Module, *_: Any) -> None:
    if is_compiling():
        return
    search = _search
    if search is None or not search.stepper.alive:
        return
    try:
        search.ended(module)
    except containment.ANY_ERROR:
        search.stepper.failed("looking for the model")


def _trains(module: nn.Module) -> bool:
    """Whether this very call may lead to a backward. A loss has nothing that is trained."""
    inside = module.module if isinstance(module, nn.parallel.DistributedDataParallel) else module
    return (
        (module.training or bool(inside.training))
        and torch.is_grad_enabled()
        and _may_train(module)
    )


def _may_train(module: nn.Module) -> bool:
    return any(each.requires_grad for each in module.parameters())


def _keywords(module: nn.Module) -> Mapping[str, Any] | None:
    """What a module is called with by name, which the hook on every module is not given."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is _CALL_MODULE and frame.f_locals.get("self") is module:
            return frame.f_locals.get("kwargs")
        frame = frame.f_back
    return None


def _outermost(frame: FrameType | None) -> nn.Module | None:
    """The module of all those being called that is called first."""
    found: Any = None
    while frame is not None:
        if frame.f_code is _CALL_MODULE:
            found = frame.f_locals.get("self")
        frame = frame.f_back
    return found


def _no_module() -> None:
    pass
