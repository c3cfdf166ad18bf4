"""The step that is open: what has begun in it, what its hooks have seen, and what ends it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import ref

import torch

from otel_ddp import errors
from otel_ddp.recording.phases import Phase
from otel_ddp.recording.progress import Progress
from otel_ddp.recording.steps import StepNumbers
from otel_ddp.torch.steps.batches import Batches
from otel_ddp.torch.steps.open_calls import OpenCalls
from otel_ddp.torch.steps.watched_model import WatchedModel

# Another optimizer ends our steps from here on, once it has stepped so often, with a backward each
# time, while ours did not.
_PATIENCE = 10
# So many steps of ours without one of another optimizer: it has gone.
_ALONE = 1000


class StepEnd:
    """Knows the optimizer whose step ends a training step: named by the user, or the first seen."""

    __slots__ = (
        *("_in_round", "_named", "_round", "_steps_of_others", "_stepped_round", "_stepped_after"),
        *("_losses", "_since_others", "_several_losses", "backwards", "has_model", "known"),
        "scaler_round",
    )

    def __init__(self) -> None:
        self.has_model = False
        """While no model is known, nothing makes a step."""
        self.backwards = 0
        """Backwards since the last step."""
        # Where there is a scaler: asks for what it keeps of its present round, which is another
        # object after each update. That is known on the host; the device is asked nothing.
        self.scaler_round: Callable[[], Any] | None = None
        self._round: Any = None
        self._stepped_round: Any = None
        self.known: dict[int, Callable[[], torch.optim.Optimizer | None]] = {}
        """The optimizer whose step ends ours, by its id. Empty while none is known; and once it has
        gone. Any further one (a GAN's second) is part of the next step, and so it is in each."""
        self._named = False
        self._steps_of_others = 0
        # Our steps since the last one of another optimizer; -1: there was none.
        self._since_others = -1
        # Since our last step: the backwards by the last step of an optimizer, and how many steps of
        # optimizers had backwards just before them. Each of these has a loss of its own.
        self._stepped_after = self._losses = 0
        self._several_losses = False
        # Whether a model that was found since our last step is trained in one round with those
        # before it, as far as is known; None: there is none.
        self._in_round: bool | None = None

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer whose step ends ours, if one is known and still there."""
        return next((known() for known in list(self.known.values())), None)

    def choose(self, optimizer: torch.optim.Optimizer, named: bool = False) -> None:
        """From here on this optimizer's step ends ours. *named*: the user has named it."""
        self._named = named
        known: dict[int, Any] = {}
        # Weakly: its state may be most of the memory of a device. The callback is no function of
        # Python's: what a signal handler raises in one is lost.
        known[id(optimizer)] = errors.attempt(
            lambda: ref(optimizer, partial(known.pop, id(optimizer))), lambda: None
        )
        self.known = known

    def model_came(self, found: bool = False) -> None:
        """A model has come, or come again: it may have another optimizer than the last one.

        *found*: it was not named, and comes in the place of others, or in one round with them.
        """
        self.has_model = True
        if found and self.optimizer is not None:
            self._in_round = False
        elif not self._named:
            self.known = {}

    def model_called(self) -> None:
        """A model is called that was known before the last one was found."""
        if self._in_round is not None:
            self._in_round = True

    def ended_by(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the step that this optimizer has finished ends ours."""
        self._losses += self.backwards > self._stepped_after
        self._stepped_after = self.backwards
        if id(optimizer) not in self.known:
            self._steps_of_others += 1
            self._since_others = 0
            if self._in_round is False and not self._named:
                # Its model has come in the place of others, and so has it: those may step no more.
                self._since_others = -1
                self.choose(optimizer)
            elif min(self.backwards, self._steps_of_others) < _PATIENCE or self._named:
                return False
            else:
                self.choose(optimizer)
        if self.scaler_round is not None:
            self._stepped_round = self.scaler_round()
        return True

    def is_of(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether this optimizer ends our steps."""
        return id(optimizer) in self.known

    def only_optimizer(self) -> Callable[[], torch.optim.Optimizer | None] | None:
        """Asks for the optimizer whose step ends ours, if that one and no scaler makes steps."""
        alone = not self.others_step() and self._in_round is None and self.scaler_round is None
        return next(iter(self.known.values()), None) if alone else None

    def others_step(self) -> bool:
        """Whether another optimizer makes steps between ours."""
        return 0 <= self._since_others < _ALONE

    def has_several_losses(self) -> bool:
        """Whether optimizers step between ours, each after a backward: there are several losses."""
        return self._several_losses and self.others_step()

    def scaler_skipped(self) -> bool:
        """Whether the scaler has ended a round since the last call, and left our step out of it."""
        if self.scaler_round is None:
            return False
        before, self._round = self._round, self.scaler_round()
        now = self._round
        return self.backwards > 0 and before is not now and before is not self._stepped_round

    def step_ended(self) -> None:
        """A training step has ended."""
        self._since_others += self._since_others >= 0
        self._several_losses |= self._losses > 1
        self.backwards = self._steps_of_others = self._stepped_after = self._losses = 0
        self._in_round = None


def is_infinity(found: Any) -> bool:
    """Whether this `found_inf` has made a fused optimizer leave the weights alone."""
    # On a device it is not known yet, and must not be waited for.
    return isinstance(found, torch.Tensor) and found.device.type == "cpu" and bool(found.item())


def steps_made(optimizer: torch.optim.Optimizer) -> int:
    """How many steps an optimizer's own state counts, those before a checkpoint too; 1 at least.

    Adam and its like count. A count on a device is not read: that would wait for the device.
    """
    count: Any = next((state["step"] for state in optimizer.state.values() if "step" in state), 1)
    on_host = type(count) is torch.Tensor and count.device.type == "cpu" and count.numel() == 1
    return max(1, int(count)) if on_host or isinstance(count, int) else 1


class Seen:
    """What was seen at all. Capabilities are read off it."""

    __slots__ = ("_before", "_steps", "compiles", "float16", "loads")

    def __init__(self, steps: StepNumbers) -> None:
        self._steps = steps
        self._before = steps.count, steps.forwards, steps.micro_batches
        self.loads = 0
        self.compiles = self.float16 = False

    @property
    def steps(self) -> int:
        """The steps since these hooks are on."""
        return self._steps.count - self._before[0]

    @property
    def forwards(self) -> int:
        """The training forwards since then."""
        return self._steps.forwards - self._before[1]

    @property
    def backwards(self) -> int:
        """The backwards since then."""
        return self._steps.micro_batches - self._before[2]


class Search:
    """The search for models, which follows what the hooks see. This one searches for none."""

    on = False

    def batch_wanted(self) -> None:
        """A loader is asked for a batch, and no model is known."""

    def compiling(self) -> None:
        """A graph is about to be compiled."""

    def model_stepped(self) -> None:
        """The optimizer of a watched model has made a step."""

    def model_not_called(self) -> None:
        """A step has ended, and no call of a watched model was seen."""

    def unknown_optimizer_came(self) -> None:
        """An optimizer trains no watched model."""

    def unknown_optimizer_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """It has made a step."""


class OpenStep:
    """Begins and ends steps; `end` decides what ends one."""

    __slots__ = (
        *(
            "_steps",
            "_wrap_hooks",
            "batches",
            "calls",
            "closure",
            "end",
            "evaluated",
            "progress",
        ),
        *("optimizer", "optimizing", "sampled", "search", "seen"),
        "stepped_in_backward",
    )

    def __init__(
        self, progress: Progress, calls: OpenCalls, wrap_hooks: Callable[[], None]
    ) -> None:
        """*wrap_hooks*: makes the hooks as the step that begins needs them."""
        self.progress, self.calls, self.sampled = progress, calls, calls.sampled
        self._wrap_hooks = wrap_hooks
        self.end = StepEnd()
        self.batches = Batches(progress.work)
        self._steps = steps = progress.steps
        self.seen = Seen(steps)
        self.search = Search()
        self.optimizer = progress.phases.of_hooks("optimizer")
        self.optimizing: int | None = None
        """The optimizer whose step is open, by its id."""
        self.closure = False
        """Whether that step was given a closure, which calls the model."""
        self.stepped_in_backward = False
        """Whether an optimizer has stepped inside the backward that is under way."""
        self.evaluated: WatchedModel | None = None
        """A model in evaluation mode that was called with gradients on, and none in training mode
        since. Where a step ends, it trains so."""

    def begin(self) -> None:
        """Work begins: of a new step, or more of the same."""
        # An optimizer that raised has not reported its end.
        if self.optimizing is not None:
            self.optimizing = None
            self.closure = False
            self.progress.phases.leave(self.optimizer)
        # Work begins again after a backward, and no optimizer made a step of it: more of the same
        # step, unless the scaler has seen to it that none was made.
        if self.end.scaler_skipped():
            self.finish(skipped=True)
        steps = self._steps
        if not steps.in_step:
            if steps.began:
                steps.begin_step()
            else:
                self.sampled.listener.first_step_began()
                self.progress.begin_steps()

    def finish(self, skipped: bool = False, phase: Phase | None = None) -> None:
        """The step is over, and so is *phase*."""
        if self.evaluated is not None:
            self.evaluated.trains_in_eval = True
        if not self.end.backwards:
            self.batches.no_backward_seen()
        self.end.step_ended()
        self.batches.step_ends(self.end.others_step())
        progress, sampled = self.progress, self.sampled
        if progress.step_finished(skipped, phase) or sampled.sampling:
            sampled.run("flush", progress.flush)
            sampled.notify("step_ended")
        following = self._steps.count + 1
        if following >= sampled.next_change:
            sampled.begin(following)
            self._wrap_hooks()
