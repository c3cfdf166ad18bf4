"""Words for people that several verdicts share: ranks, durations, shares."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from otel_ddp.diagnosis.verdict import Labels


def rank_name(labels: Labels) -> str:
    """What people call a rank: `rank 3 (node-1)`."""
    found = dict(labels)
    return f"rank {found.get('rank', '?')} ({found.get('node', '?')})"


def rank_numbers(numbers: list[str]) -> str:
    """`rank 3`, or `ranks 3, 5`; at most eight are shown."""
    shown = ", ".join(numbers[:8]) + (", ..." if len(numbers) > 8 else "")
    return f"rank{'s' * (len(numbers) > 1)} {shown}"


def duration(seconds: float) -> str:
    """A length of time: three digits, in the unit that fits."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"


def percent(share: float) -> str:
    """A share: `32 %`."""
    return f"{share * 100:.0f} %"


def rounded(values: Mapping[str, Any]) -> dict[str, float]:
    """Numbers as evidence shows them: more digits than these would be noise."""
    return {word: round(value, 4) for word, value in values.items()}
