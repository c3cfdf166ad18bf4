"""Finds out where the agent is that leads this run: by variables, or by the process group."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

from otel_ddp.errors import ConfigError
from otel_ddp.identity import launchers, lead
from otel_ddp.identity.identity import GroupFacts
from otel_ddp.identity.lead import Lead
from otel_ddp.settings import Settings


class LeadSearch:
    """One a run."""

    def __init__(self, found: Lead | None = None, *, is_sought: bool = False) -> None:
        self.is_sought = is_sought
        """Whether the process group may still tell more of it."""
        self._found = found
        self._was_told = False

    @classmethod
    def by(cls, conf: Settings) -> LeadSearch:
        """As the variables say; raises ConfigError if they cannot be meant."""
        if conf.lead == "off":
            return cls()
        if not conf.lead and not conf.lead_token_file:
            # The stores of torchft's replica groups know nothing of each other.
            return cls(is_sought=launchers.replicas(os.environ) is None)
        return cls(_named(conf))

    def is_due(self, *, has_synced: bool) -> bool:
        """Whether to ask now. *has_synced*: a step has ended, so each rank has begun one."""
        # In between a rank that is not the first would ask in vain.
        return self.is_sought and (has_synced or not self._was_told)

    def heard(self, group: GroupFacts, *, has_synced: bool) -> None:
        """What the process group has said."""
        self._found = group.lead or self._found
        # Rank 0 may come last to say where it is, but before its first step ends.
        self.is_sought &= group.lead is not None and group.global_rank != 0 and not has_synced
        self._was_told = True

    def facts(self) -> dict[str, Any]:
        """The fact for the journal, if the lead is known."""
        return {} if self._found is None else {lead.FACT: self._found.as_json()}


# -- named by variables

# What a person can remember can also be guessed.
_SHORTEST_TOKEN = 16


def _named(conf: Settings) -> Lead:
    if not (conf.lead and conf.lead_token_file):
        raise ConfigError(
            "OTEL_DDP_LEAD, by host:port where the agent that leads the run is reached, and "
            "OTEL_DDP_LEAD_TOKEN_FILE, a file with a token that all nodes of the run have, need "
            "each other: set both, or unset both."
        )
    host, _, port = conf.lead.rpartition(":")
    return lead.of_token(_token(conf.lead_token_file), host, int(port))


def _token(path: str) -> str:
    """Raises ConfigError, which never shows what is in the file."""
    text = ""
    try:
        mode = os.stat(path).st_mode
        problem = "" if stat.S_ISREG(mode) else "it is no file"
        if not problem and mode & stat.S_IRWXO:
            shown = f"{stat.S_IMODE(mode):04o}"
            problem = f"every user can use it (mode {shown}), make it 0600 or 0440"
        if not problem:
            text = Path(path).read_text(encoding="utf-8").strip()
            short = len(text) < _SHORTEST_TOKEN
            problem = f"its token has fewer than {_SHORTEST_TOKEN} characters" if short else ""
    except OSError as error:
        problem = f"it cannot be read: {error.strerror}"
    except ValueError:
        problem = "it is no text"
    if problem:
        raise ConfigError(
            f"OTEL_DDP_LEAD_TOKEN_FILE={path}: {problem}. Correct it, or unset OTEL_DDP_LEAD too."
        )
    return text
