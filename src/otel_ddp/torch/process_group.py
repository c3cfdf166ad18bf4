"""Reads the ranks from torch.distributed, and lets all ranks agree on one name of the run."""

from __future__ import annotations

import logging
import os
import sys
import threading
from typing import Any

from otel_ddp import errors
from otel_ddp.identity.identity import GroupFacts

log = logging.getLogger("otel_ddp")

RUN_KEY = "otel_ddp/run"

# One round trip takes 0.1 ms; a store that is this late is not going to answer.
_LONGEST_WAIT_S = 3.0


def is_up() -> bool:
    """Whether a default process group exists. Cheap enough for every call."""
    # Half imported, or built without distributed, it has no such function.
    initialized = getattr(sys.modules.get("torch.distributed"), "is_initialized", None)
    return initialized is not None and bool(initialized())


def backend() -> str:
    """The backend of the default process group, empty where there is none."""
    if not is_up():
        return ""
    return str(sys.modules["torch.distributed"].get_backend())


def facts(propose: str, *, agree: bool) -> GroupFacts | None:
    """Ranks and host of the default process group; None where there is none.

    With `agree`, its store also gives the name of the run: what the first rank has proposed, for
    all ranks. A rank that is alone has no other to agree with.
    """
    if not is_up():
        return None
    module: Any = sys.modules["torch.distributed"]
    try:
        rank, world_size = module.get_rank(), module.get_world_size()
    except (RuntimeError, ValueError):
        errors.reraise_foreign()
        return None  # another thread has just destroyed it
    store = _store(module)
    asks = agree and world_size > 1 and store is not None
    agreed_run = _agree(store, propose) if asks else None
    return GroupFacts(rank, world_size, agreed_run, _host(store))


def _store(module: Any) -> Any:
    """The store that init_process_group used, without the prefixes that change at a restart."""
    # Private, and the only way to it: without it there is no agreement, and all else works.
    getter = getattr(getattr(module, "distributed_c10d", None), "_get_default_store", None)
    if getter is None:
        return None
    try:
        store = getter()
    except (RuntimeError, ValueError, KeyError, TypeError):
        errors.reraise_foreign()
        return None
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # torchrun's agent keeps one store over all its restarts of the workers and prefixes each
        # attempt; below the prefixes the name holds as long as the launch. Any other store may
        # be shared by several launches that a prefix tells apart, so there it stays on.
        store = _bare(store)
    return store


def _bare(store: Any) -> Any:
    while (below := getattr(store, "underlying_store", None)) is not None:
        store = below
    return store


def _host(store: Any) -> str:
    host = getattr(_bare(store), "host", "") if store is not None else ""
    return host if isinstance(host, str) else ""


def _agree(store: Any, propose: str) -> str | None:
    """The name in the store, ours if there was none.

    compare_set answers at once whether or not the key exists, but the store's timeout does not
    cover it. With a server that is stopped it waits for ever (measured with PyTorch 2.15, timeout
    2 s), and so would a training job. The store is the user's, and so is its timeout: we cannot
    change it. Hence a thread for these 0.1 ms, and a limit to the waiting.
    """
    # Two torchruns may share a rendezvous store, with an id each.
    elastic_id = os.environ.get("TORCHELASTIC_RUN_ID", "")
    key = f"{RUN_KEY}/{elastic_id}" if elastic_id else RUN_KEY
    answer: list[str] = []

    def ask() -> None:
        try:
            answer.append(store.compare_set(key, "", propose).decode("utf-8", "replace"))
        except (RuntimeError, ValueError, TypeError, AttributeError) as error:
            log.info("The process group's store cannot agree on a run: %s", error)

    thread = threading.Thread(target=ask, name="otel-ddp-agree", daemon=True)
    thread.start()
    thread.join(_LONGEST_WAIT_S)
    if thread.is_alive():
        log.warning("The process group's store did not answer within %g s.", _LONGEST_WAIT_S)
    return answer[0] if answer and answer[0] else None
