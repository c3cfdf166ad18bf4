"""Learns when a process begins to train, so that a program needs no line of ours.

Two things announce a training: the making of an optimizer, and a backward. Only then does a hook
on all modules look for the first call of a model that trains. So a program that never trains has
two functions of torch's replaced, and nothing else.

Some models train in evaluation mode, and of a function that is compiled no call of a module is
seen. There the training begins with the second step of an optimizer. Where the step is compiled as
well, or made by a DistributedOptimizer, it begins with the third backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.compiler import is_compiling
from torch.optim import Optimizer

from otel_ddp import errors
from otel_ddp.torch.hooks import every_module
from otel_ddp.torch.hooks.called import Called, backwards
from otel_ddp.torch.models import too_old

# One more than optimizers get: a model that trains in evaluation mode is found by its optimizer.
_BACKWARDS = 3

_waiting: _Waiting | None = None


def wait(begin: Callable[[], None]) -> None:
    """Call *begin* once, right before the first call of a model that trains."""
    global _waiting
    stop()
    _waiting = _Waiting(begin)


def wait_for_next(begin: Callable[[], None]) -> None:
    """Call *begin* as soon as another optimizer is made."""
    global _waiting
    stop()
    _waiting = _Waiting(begin, at_once=True)


def stop() -> None:
    """Wait no longer, and leave torch as it was found."""
    global _waiting
    waiting, _waiting = _waiting, None
    if waiting is not None:
        waiting.end(begins=False)


class _Waiting:
    """First for an announcement, then for the call of a model that trains."""

    def __init__(self, begin: Callable[[], None], at_once: bool = False) -> None:
        self._begin = begin
        self._at_once = at_once
        self._looks = False
        self._optimizer_made = Called(Optimizer, "__init__", self._announced)
        self._backwards = [] if at_once else backwards(self._backward_done)
        self._done = 0
        self._training_mode: Called | None = None
        self.stepped = False

    def begin(self) -> None:
        """The first step has come."""
        global _waiting
        _waiting = None
        self.end(begins=True)
        self._begin()

    def end(self, begins: bool) -> None:
        """Take everything off. *begins*: what measures steps takes over the hooks of optimizers."""
        for each in (self._optimizer_made, *self._backwards):
            each.take_off()
        if self._training_mode is not None:
            self._training_mode.take_off()
        if self._looks:
            from otel_ddp.torch.hooks import compile as compile_hooks
            from otel_ddp.torch.hooks import optimizer as optimizer_hooks

            optimizer_hooks.tell_of_steps(None)
            if not begins:
                optimizer_hooks.take_off_unused()
            every_module.set_hook(None)
            compile_hooks.ignore(_before_compile, _after_compile)

    @errors.contained()
    def _announced(self, *_: Any, **__: Any) -> None:
        if _waiting is not self or self._looks:
            return
        if remark := too_old(torch.__version__):
            errors.warn_once("torch", "%s.", remark[0].upper() + remark[1:])
            stop()
            return
        if self._at_once:
            self.begin()
            return
        for each in (self._optimizer_made, *self._backwards):
            each.take_off()
        # Imported here: a process that never trains has no need of them.
        from otel_ddp.torch.hooks import compile as compile_hooks
        from otel_ddp.torch.hooks import optimizer as optimizer_hooks

        self._looks = True
        optimizer_hooks.tell_of_steps(self._optimizer_stepped)
        # The first optimizer has imported Dynamo.
        compile_hooks.listen(_before_compile, _after_compile)
        self._backwards = backwards(self._backward_done)
        self._look()

    @errors.contained()
    def _backward_done(self, *_: Any, **__: Any) -> None:
        self._done += 1
        if self._done == 1:
            self._announced()
        elif self._done == _BACKWARDS and _waiting is self:
            self.begin()

    @errors.contained()
    def _optimizer_stepped(self) -> None:
        if self.stepped and _waiting is self:
            self.begin()
        self.stepped = True

    def _look(self) -> None:
        every_module.set_hook(_before_any)
        every_module.put_on()

    def _rest(self) -> None:
        """Do not look until a model is put into training mode."""
        every_module.set_hook(None)
        if self._training_mode is None:
            self._training_mode = Called(nn.Module, "train", self._mode_set)

    @errors.contained()
    def _mode_set(self, module: nn.Module, mode: bool = True) -> None:
        mode_set = self._training_mode
        if mode and mode_set is not None and _waiting is self:
            self._training_mode = None
            mode_set.take_off()
            self._look()

    # -- hooks

    def called(self, module: nn.Module, args: Any) -> None:
        """Any module is called."""
        from otel_ddp.torch import discovery

        if discovery.trains(module) and discovery.is_outermost(module):
            self.begin()
            # This call is the first one of the first step.
            discovery.before_any(module, args)

    def compiling(self) -> None:
        """A graph is about to be compiled: with the hook on, it would be valid with it alone."""
        from otel_ddp.torch import discovery
        from otel_ddp.torch.hooks import compile as compile_hooks

        every_module.take_off()
        module = discovery.outermost_called()
        if module is not None and discovery.trains(module):
            self.begin()
            compile_hooks.began()
        elif module is not None:
            self._rest()

    def compiled(self) -> None:
        """A graph has been compiled."""
        every_module.put_on()


def _before_any(module: nn.Module, args: Any = (), *_: Any) -> None:
    if not is_compiling():
        _tell("called", module, args)


def _before_compile(*_: Any) -> None:
    _tell("compiling")


def _after_compile(*_: Any) -> None:
    _tell("compiled")


def _tell(event: str, *args: Any) -> None:
    waiting = _waiting
    if waiting is None:
        return
    try:
        getattr(waiting, event)(*args)
    except errors.ANY_ERROR:
        errors.record_failure("waiting for the training")
        stop()
