"""Which ranks' training series leave the node."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from otel_ddp.errors import ConfigError
from otel_ddp.identity.identity import Identity

Strategy: TypeAlias = str | Callable[[Identity], bool]
WORDS = ("all", "node", "main")


class _Unsaid(str):
    """A default that differs from the same word of the user, which overrules a variable."""


UNSAID: str = _Unsaid("all")


class Choice:
    """A checked strategy: decides for each rank whether its series leave the node."""

    def __init__(self, strategy: Strategy) -> None:
        self._rule: Callable[[Identity], bool] | None = None
        if isinstance(strategy, str) and (word := strategy.strip().lower()) in WORDS:
            self.text = word
        elif callable(strategy):
            self.text = "custom"
            self._rule = strategy
        else:
            raise ConfigError(
                f'strategy must be "all" (every rank), "node" (local rank 0 of each node), "main" '
                f"(rank 0), or a function of the identity, got {strategy!r}. Correct the argument "
                "or OTEL_DDP_STRATEGY, or leave both out."
            )

    def exports(self, process: Identity) -> bool | None:
        """Whether this rank's series leave the node; None if that is not known yet."""
        if self._rule is not None:
            return bool(self._rule(process))
        if self.text == "all":
            return True
        if self.text == "node":
            if process.local_rank is None:
                return None
            return process.local_rank == 0
        return None if process.global_rank is None else process.global_rank == 0
