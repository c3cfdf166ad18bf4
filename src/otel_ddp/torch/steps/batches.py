"""The samples of a step: those of one batch for each backward, and of one of its optimizers."""

from __future__ import annotations

from collections import deque

from otel_ddp.recording.steps import Work
from otel_ddp.torch.steps.watched_model import WatchedModel

# A pipeline has fewer micro-batches under way. What never has a backward must not grow.
_MOST_UNDER_WAY = 1024


class Batches:
    """A siamese network and a critic are called several times before a backward, on one batch.

    Of several optimizers that step in turn (the two of a GAN), each has a batch, made of the same
    samples or of noise: the step has those of the optimizer with the most.
    """

    __slots__ = ("_by_optimizer", "_counted", "_late", "_uncounted", "_work", "awaits", "model")

    def __init__(self, work: Work) -> None:
        self._work = work
        self.model: WatchedModel | None = None
        """The first model that the step calls: an encoder and its decoder work on one batch."""
        self.awaits = False
        """Whether there was a forward since the last backward; its batch is that of the next."""
        # The samples of further forwards: those of a pipeline have their backwards later.
        self._late: deque[int] = deque(maxlen=_MOST_UNDER_WAY)
        # Of each optimizer that has stepped since the step began; None: only ours does. With
        # others, samples count once the step is over: the work counted never falls.
        self._by_optimizer: dict[int, int] | None = None
        self._uncounted = self._counted = 0

    def forward_begins(self, watched: WatchedModel) -> None:
        """A training forward, whose inputs were measured."""
        if not watched.counted:
            self.awaits = True
            return
        self._work.tokens += watched.tokens
        if self.awaits:
            self._late.append(watched.samples)
        else:
            self.awaits = True
            self._count(watched.samples)

    def backward_ended(self) -> None:
        """A backward has ended."""
        if self.awaits:
            self.awaits = False
        elif self._late:
            self._count(self._late.popleft())

    def no_backward_seen(self) -> None:
        """The step is about to end, and its backwards were not to be seen: each forward counts."""
        self._count(sum(self._late))

    def _count(self, samples: int) -> None:
        if self._by_optimizer is None:
            self._work.samples += samples
        else:
            self._uncounted += samples

    def optimizer_stepped(self, optimizer: int, ours: bool) -> None:
        """What came since the last step of an optimizer was the work of this one, by its id."""
        if self._by_optimizer is None:
            if ours:
                return
            self._by_optimizer = {}
            self._uncounted = self._counted = self._work.samples - self._work.samples_before
        self._by_optimizer[optimizer] = self._by_optimizer.get(optimizer, 0) + self._uncounted
        self._uncounted = 0
        self._forget()

    def step_ends(self, others_step: bool) -> None:
        """Our step is about to end. *others_step*: other optimizers step in those that follow."""
        if self._by_optimizer is not None:
            most = max([self._uncounted, *self._by_optimizer.values()])
            self._work.samples += max(0, most - self._counted)
            self._uncounted = self._counted = 0
        self._by_optimizer = {} if others_step else None
        self._forget()

    def _forget(self) -> None:
        self.model = None
        self.awaits = False
        self._late.clear()
