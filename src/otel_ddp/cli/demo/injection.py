"""What goes wrong in the demo on purpose: `backward:1:30ms`, `hang:1`."""

from __future__ import annotations

import re
from typing import NamedTuple

from otel_ddp.errors import ConfigError

# Phases in which a rank may be late, and the other faults.
PHASES = ("data", "backward")
FAULTS = ("hang", "kill")
# Up to this step all goes well, so that the change can be seen.
TROUBLE_AT = 150
_PATTERN = re.compile(r"(\w+):(\d+)(?::(\d+(?:\.\d+)?)(ms|s))?")


class Injection(NamedTuple):
    """One fault of one rank."""

    what: str = ""
    rank: int = 0
    seconds: float = 0.0

    def late_s(self, phase: str, rank: int) -> float:
        """How many seconds this rank is late in this phase."""
        return self.seconds if self.hits(phase, rank) else 0.0

    def hits(self, what: str, rank: int) -> bool:
        """Whether this rank has this fault, or is late in this phase."""
        return (self.what, self.rank) == (what, rank)


def parse(text: str) -> Injection:
    """Parse what the user typed; raises ConfigError."""
    if not text:
        return Injection()
    found = _PATTERN.fullmatch(text)
    if found is None or found[1] not in (FAULTS if found[3] is None else PHASES):
        raise ConfigError(
            f"{text!r} cannot be injected. Give a phase, a rank and a time, such as "
            f"backward:1:30ms ({', '.join(PHASES)}), or {', '.join(FAULTS)} and a rank, such "
            "as hang:1."
        )
    return Injection(
        found[1], int(found[2]), float(found[3] or 0) / (1000 if found[4] == "ms" else 1)
    )
