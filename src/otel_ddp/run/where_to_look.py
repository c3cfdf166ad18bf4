"""Says once, at the beginning of a run, where it can be looked at."""

from __future__ import annotations

import contextlib
import html
import os
import select
import sys
from typing import Any

from otel_ddp import errors
from otel_ddp.history.quantities import printable
from otel_ddp.identity import addresses
from otel_ddp.journal.place import Place

# An agent that was started a moment ago has no address yet.
ASK_AGAIN_NS = 500_000_000
_ASKED_OFTEN = 20
# What a pipe takes at once: more could wait for its reader.
_MOST_BYTES = 4096


class WhereToLook:
    """One a run, of the process that speaks for all of it."""

    def __init__(self) -> None:
        self.said = False
        self._asked = 0

    @property
    def may_know_soon(self) -> bool:
        """Whether an agent may be about to have an address."""
        return not self.said and self._asked < _ASKED_OFTEN

    @errors.contained()
    def say(self, place: Place, run: str) -> None:
        """Say it, if the agent has an address by now."""
        self._asked += 1
        if self.said or not (base := addresses.page(place)):
            return
        # Before it is said: what a signal handler interrupts is not said twice.
        self.said = True
        address = addresses.page_of_run(base, run)
        if _shown_in_notebook(run, address):
            return
        tunnel = addresses.tunnel(base, os.environ)
        line = f"otel_ddp: run {run} · {address}"
        text = f"{line}\n          from your machine: {tunnel}\n" if tunnel else f"{line}\n"
        say(text)


def _shown_in_notebook(run: str, address: str) -> bool:
    """Whether this is a notebook, where the address can be clicked."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else errors.attempt(ipython.get_ipython, None)
    if ipython is None or type(shell).__name__ != "ZMQInteractiveShell":
        return False
    link = f'<a href="{html.escape(address)}" target="_blank">{html.escape(run)}</a>'
    ipython.display.display(ipython.display.HTML(f"otel_ddp: run {link}"))
    return True


def say(text: str) -> None:
    """Write it to stderr, or nothing where a full pipe would hold the process."""
    stream = sys.stderr
    if stream is None:
        return
    encoding = getattr(stream, "encoding", None) or "utf-8"
    # A name may hold control codes, or letters that turn the line around: a terminal obeys them.
    clean = "\n".join(map(printable, text.split("\n")))
    encoded = clean.encode(encoding, "replace")[:_MOST_BYTES]
    # It may be closed, or a pipe whose reader has gone.
    with contextlib.suppress(OSError, ValueError):
        if _takes_at_once(stream):
            stream.write(encoded.decode(encoding, "ignore"))
            stream.flush()


def _takes_at_once(stream: Any) -> bool:
    try:
        fd = stream.fileno()
    except (AttributeError, OSError, ValueError):
        return True  # a notebook's, or one in memory
    return bool(select.select([], [fd], [], 0)[1])
