"""Which ranks' training series leave the node."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from otel_ddp.errors import ConfigError
from otel_ddp.identity.identity import Identity

Strategy: TypeAlias = str | Callable[[Identity], bool]
WORDS = ("all", "node", "main")


class Choice:
    """A checked strategy: decides for each rank whether its series leave the node."""

    def __init__(self, strategy: Strategy) -> None:
        self._rule = None if isinstance(strategy, str) else strategy
        self.text = strategy.strip().lower() if isinstance(strategy, str) else "custom"
        if not callable(self._rule) and self.text not in WORDS:
            raise ConfigError(
                f'strategy must be "all" (every rank), "node" (local rank 0 of each node), "main" '
                f"(rank 0), or a function of the identity, got {strategy!r}. Correct the argument "
                f"or OTEL_DDP_STRATEGY, or leave both out."
            )

    def exports(self, process: Identity) -> bool | None:
        """Whether this rank's series leave the node; None if that is not known yet."""
        if self._rule is not None:
            return bool(self._rule(process))
        if self.text == "all":
            return True
        rank = process.local_rank if self.text == "node" else process.global_rank
        return None if rank is None else rank == 0
