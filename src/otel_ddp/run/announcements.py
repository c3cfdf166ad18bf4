"""The messages of a run: warnings, once per process, and the address of its page, on stderr."""

from __future__ import annotations

import contextlib
import os
import select
import shlex
import sys
from typing import Any

from otel_ddp import settings
from otel_ddp.errors import warn_once
from otel_ddp.history.terminal import printable
from otel_ddp.identity import addresses
from otel_ddp.identity.identity import Choice, Identity
from otel_ddp.journal.place import Place
from otel_ddp.settings import Settings


def nothing_is_recorded(lacking: str) -> None:
    """Warn that the system lacks calls that a journal needs."""
    warn_once(
        "system",
        "Nothing is recorded here: this system lacks %s, which Linux has. Your script goes on as "
        "it is, and every call of otel_ddp does nothing.",
        lacking,
    )


def doubts(conf: Settings, process: Identity) -> None:
    """Warn of incomplete, invalid or unknown environment variables; once per node."""
    if process.local_rank:
        return
    if process.launcher == "environment" and process.world_size is None:
        warn_once(
            "world size",
            "RANK is set and WORLD_SIZE is not: this process is recorded as rank %s of an "
            "unknown number of ranks. Set WORLD_SIZE as well, as torchrun does, or open the "
            "run after init_process_group. If this process is no rank, unset RANK.",
            process.label_rank,
        )
    for doubt in settings.doubts(exports=conf.agent == "auto"):
        warn_once(doubt, "%s; `otel-ddp doctor` checks it.", doubt)
    for sentence in settings.unknown():
        warn_once(sentence, "%s", sentence)


def where_it_is_kept(conf: Settings) -> None:
    """In offline mode, say where data is stored, and how much at most."""
    where = shlex.quote(conf.spools)
    warn_once(
        "offline",
        "OTEL_DDP_AGENT=offline: nothing is sent. What is recorded is kept in %s, %d MiB at "
        "most on each node (OTEL_DDP_SPOOL_BYTES); `otel-ddp replay %s` sends it later.",
        where,
        conf.spool_bytes // settings.MIB,
        where,
    )


def journal_is_full(agent: str) -> None:
    """Warn that the journal is full, and that no agent reads it."""
    warn_once(
        "overwritten",
        "The journal is full and no agent reads it (OTEL_DDP_AGENT=%s): the oldest records are "
        "overwritten from now on. `otel-ddp status` says why; `otel-ddp agent` is one.",
        agent,
    )


def exports_are_unknown(choice: Choice) -> None:
    """Warn that the strategy needs this process's rank, but lacks it: series stay on the node."""
    what = "LOCAL_RANK" if choice.text == "node" else "RANK"
    warn_once(
        "strategy",
        "strategy %r needs the %s of this process, which is not known here, so its series "
        "stay on the node. Set OTEL_DDP_%s%s.",
        choice.text,
        what.lower().replace("_", " "),
        what,
        " or pass local_rank= to init"
        if what == "LOCAL_RANK"
        else ", or open the run after init_process_group",
    )


def comes_too_late(name: str, known: object, asked: object) -> None:
    """Warn that a second `init` has another value for an argument than the first."""
    warn_once(
        f"again {name}",
        "A run is open in this process, with %s=%r: %s=%r comes too late and is ignored. Say it "
        "in the first call of init or instrument, or call finish() before this one.",
        name,
        known,
        name,
        asked,
    )


# -- the address of a run's page, printed once at its start

# Limit of a text: a pipe with room takes this much at once, while a longer text could block.
_MOST_BYTES = 4096


def where_to_look(place: Place, run: str) -> str:
    """The line with the address of the run's page; empty if the agent has no address yet."""
    if not (base := addresses.page(place)):
        return ""
    tunnel = addresses.tunnel(base, os.environ)
    more = f"          from your machine: {tunnel}\n" if tunnel else ""
    return f"otel_ddp: run {run} · {addresses.page_of_run(base, run)}\n{more}"


def say(text: str) -> None:
    """Write a text to stderr, unless that would block, as a full pipe does."""
    stream = sys.stderr
    if stream is None:
        return
    encoding = getattr(stream, "encoding", None) or "utf-8"
    # Names in the text may contain control codes, or characters that reverse the line.
    clean = "\n".join(map(printable, text.split("\n")))
    encoded = clean.encode(encoding, "replace")[:_MOST_BYTES]
    # Ignore errors: stderr may be closed, or a pipe without a reader.
    with contextlib.suppress(OSError, ValueError):
        if _takes_at_once(stream):
            stream.write(encoded.decode(encoding, "ignore"))
            stream.flush()


def _takes_at_once(stream: Any) -> bool:
    try:
        fd = stream.fileno()
    except (AttributeError, OSError, ValueError):
        return True  # no file, as in a notebook: writing does not block
    return bool(select.select([], [fd], [], 0)[1])
