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
_PATTERN = re.compile(r"([a-z-]+)(?::(\d+))?(?::(\d+(?:\.\d+)?)(ms|s))?")
_DEFAULT_S = 0.03


class Injection(NamedTuple):
    """One fault of one rank."""

    what: str
    rank: int = 1
    seconds: float = _DEFAULT_S

    def late_s(self, phase: str, rank: int) -> float:
        """How many seconds this rank is late in this phase."""
        return self.seconds if (self.what, self.rank) == (phase, rank) else 0.0

    def hits(self, fault: str, rank: int) -> bool:
        """Whether this rank has this fault."""
        return (self.what, self.rank) == (fault, rank)


def parse(text: str) -> Injection:
    """Parse what the user typed; raises ConfigError."""
    if not text:
        return Injection("")
    found = _PATTERN.fullmatch(text.strip().lower())
    what = found[1] if found else ""
    if found is None or what not in (*PHASES, *FAULTS):
        raise ConfigError(
            f"{text!r} cannot be injected. Give a phase, a rank and a time, such as "
            f"backward:1:30ms ({', '.join(PHASES)}), or {', '.join(FAULTS)} and a rank, such "
            "as hang:1."
        )
    if found[3] and what in FAULTS:
        raise ConfigError(f"{what} has a rank and no time: {what}:1")
    seconds = float(found[3]) / (1000 if found[4] == "ms" else 1) if found[3] else _DEFAULT_S
    return Injection(what, int(found[2] or 1), seconds)
