"""What goes wrong in the demo, on purpose: `backward:1:30ms`, `hang:1`, `kill:0`."""

from __future__ import annotations

import re
from typing import NamedTuple

# Where a rank may be late, and the other things that may befall it.
PHASES = ("data", "forward", "backward", "other", "checkpoint")
ACCIDENTS = ("hang", "kill", "nan", "leak", "imbalance")
# Until this step all goes well, so that what changes can be seen.
TROUBLE_AT = 150
_SHAPE = re.compile(r"([a-z]+)(?::(\d+))?(?::(\d+(?:\.\d+)?)(ms|s))?")
_USUAL_S = 0.03


class Injection(NamedTuple):
    """One trouble of one rank."""

    what: str
    rank: int = 1
    seconds: float = _USUAL_S

    def late(self, phase: str, rank: int) -> float:
        """By how much this rank is late in this phase."""
        return self.seconds if (self.what, self.rank) == (phase, rank) else 0.0

    def hits(self, accident: str, rank: int) -> bool:
        """Whether this befalls this rank."""
        return (self.what, self.rank) == (accident, rank)

    @property
    def deadly(self) -> bool:
        """Whether the training does not come to its end."""
        return self.what in ("hang", "kill")


NOTHING = Injection("")


def parse(text: str) -> Injection:
    """What somebody asks for in words; raises ValueError with a sentence."""
    if not text:
        return NOTHING
    found = _SHAPE.fullmatch(text.strip().lower())
    what = found[1] if found else ""
    if found is None or what not in (*PHASES, *ACCIDENTS):
        raise ValueError(
            f"{text!r} is nothing to inject. Say a phase, a rank and a time, such as "
            f"backward:1:30ms ({', '.join(PHASES)}), or {', '.join(ACCIDENTS)} and a rank, such "
            "as hang:1."
        )
    if found[3] and what in ACCIDENTS:
        raise ValueError(f"{what} takes a rank and no time: {what}:1")
    seconds = float(found[3]) / (1000 if found[4] == "ms" else 1) if found[3] else _USUAL_S
    return Injection(what, int(found[2] or 1), seconds)
