"""Which ranks' training series leave the node."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2s
from typing import TypeAlias

from otel_ddp.errors import ConfigError
from otel_ddp.identity.identity import Identity

Strategy: TypeAlias = str | float | Callable[[Identity], bool]
WORDS = ("all", "node", "main")


class _Unsaid(str):
    """A default that differs from the same word of the user, which overrules a variable."""


UNSAID: str = _Unsaid("all")


class Choice:
    """A checked strategy: decides for each rank whether its series leave the node."""

    def __init__(self, strategy: Strategy) -> None:
        self._rule: Callable[[Identity], bool] | None = None
        self._share: float | None = None
        if isinstance(strategy, str):
            self.text = strategy.strip().lower()
            if self.text not in WORDS:
                self._share = _share(strategy)
        elif isinstance(strategy, (int, float)) and not isinstance(strategy, bool):
            self._share = _share(strategy)
        elif callable(strategy):
            self.text = "custom"
            self._rule = strategy
        else:
            raise _unknown(strategy)
        if self._share is not None:
            self.text = f"{self._share:g}"

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
        if process.global_rank is None:
            return None
        if self._share is None or process.global_rank == 0:
            return process.global_rank == 0
        digest = blake2s(f"{process.run}/{process.global_rank}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") / 2**64 < self._share


def _share(given: str | float) -> float:
    try:
        share = float(given)
    except ValueError:
        raise _unknown(given) from None
    if not 0 < share <= 1:
        raise _unknown(given)
    return share


def _unknown(given: object) -> ConfigError:
    return ConfigError(
        f'strategy must be "all" (every rank), "node" (local rank 0 of each node), "main" '
        f"(rank 0), a share of the ranks above 0 and up to 1 such as 0.1, or a function of the "
        f"identity, got {given!r}. Correct the argument or OTEL_DDP_STRATEGY, or leave both out."
    )
