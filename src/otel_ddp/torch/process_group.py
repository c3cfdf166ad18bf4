"""Reads ranks from torch.distributed; its store lets ranks agree on the run's name and lead."""

from __future__ import annotations

import logging
import os
import sys
import threading
import weakref
from typing import Any
from urllib.parse import quote

from otel_ddp import errors
from otel_ddp.identity import lead
from otel_ddp.identity.identity import GroupFacts, Identity, settle
from otel_ddp.identity.lead import Lead

log = logging.getLogger("otel_ddp")

RUN_KEY = "otel_ddp/run"
LEAD_KEY = "otel_ddp/lead"

# A round trip takes 0.1 ms; a store that has not answered after this time never will.
_LONGEST_WAIT_S = 3.0


def is_up() -> bool:
    """Whether a default process group exists. Cheap enough for every call."""
    # A half-imported torch, or one built without distributed, lacks the function.
    initialized = getattr(sys.modules.get("torch.distributed"), "is_initialized", None)
    return initialized is not None and bool(initialized())


def backend() -> str:
    """The backend of the default process group; empty without one."""
    if not is_up():
        return ""
    return str(sys.modules["torch.distributed"].get_backend())


# In a forked child: the parent's process group, which the child inherits but must not use. A weak
# reference, as the child may destroy the group.
_parents_group: weakref.ref[Any] | None = None


def _default_group() -> Any:
    return getattr(getattr(sys.modules.get("torch.distributed"), "group", None), "WORLD", None)


def _after_fork() -> None:
    global _parents_group
    group = _default_group()
    _parents_group = None if group is None else weakref.ref(group)


# Windows has no fork: this module can be imported there, but records nothing.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def facts(process: Identity, *, seeks_lead: bool = False) -> GroupFacts | None:
    """Ranks and host of the default process group; None without one.

    If the user has not named the run, ranks agree on a name through the group's store: the first
    proposal counts. *seeks_lead*: if ranks may be on other nodes, also agree on the lead, i.e. the
    agent that judges the run.
    """
    if not is_up():
        return None
    module: Any = sys.modules["torch.distributed"]
    try:
        rank, world_size = module.get_rank(), module.get_world_size()
    except (RuntimeError, ValueError):
        errors.reraise_foreign()
        return None  # another thread has just destroyed the group
    store = _store(module)
    found = GroupFacts(rank, world_size, None, _host(store))
    if store is None or world_size == 1:
        return found
    if _parents_group is not None and _parents_group() is _default_group():
        return found  # the parent's group: two processes on one connection would garble it
    placed = settle(process, found)
    seeks_lead = seeks_lead and placed.may_have_other_nodes
    if not (process.wants_agreement or seeks_lead):
        return found
    return _within_limit(store, found, placed, seeks_lead=seeks_lead)


def _store(module: Any) -> Any:
    """The store of init_process_group, without prefixes that change at a restart."""
    # A private function, as torch has no public one. If a torch lacks it, ranks cannot agree on
    # run and lead, but everything else works.
    getter = getattr(getattr(module, "distributed_c10d", None), "_get_default_store", None)
    if getter is None:
        return None
    try:
        store = getter()
    except (RuntimeError, ValueError, KeyError, TypeError):
        errors.reraise_foreign()
        return None
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # torchrun's agent keeps one store across restarts of its workers, and gives each attempt
        # its own key prefix. Drop the prefix, so that the run keeps its name across restarts. In
        # other stores it stays, as several launches may share one store with different prefixes.
        store = _bare(store)
    return store


def _bare(store: Any) -> Any:
    while (below := getattr(store, "underlying_store", None)) is not None:
        store = below
    return store


def _host(store: Any) -> str:
    host = getattr(_bare(store), "host", "") if store is not None else ""
    return host if isinstance(host, str) else ""


def _within_limit(
    store: Any, found: GroupFacts, process: Identity, *, seeks_lead: bool
) -> GroupFacts:
    """The group's facts, with run and lead from the store if it answers in time.

    A thread of its own asks the store, and its caller waits only for some seconds. For compare_set
    normally returns at once, but if the store's server is stopped, it blocks forever, whatever the
    store's timeout (PyTorch 2.15), and so would the training. The thread takes 0.3 ms and then
    ends: a permanent one would keep alive a store that the program has dropped.
    """
    answers = [found]

    def ask() -> None:
        try:
            if process.wants_agreement:
                answers.append(found._replace(agreed_run=_run(store, process.proposal)))
            if seeks_lead:
                named = settle(process, answers[-1])
                answers.append(answers[-1]._replace(lead=_lead(store, found.store_host, named)))
        except (RuntimeError, ValueError, TypeError, AttributeError) as error:
            log.info("The process group's store cannot agree on a run: %s", error)

    thread = threading.Thread(target=ask, name="otel-ddp-agree", daemon=True)
    try:
        thread.start()
    except (RuntimeError, MemoryError) as error:
        log.warning("Ranks cannot agree on the run: no thread can be started (%s).", error)
        return found
    thread.join(_LONGEST_WAIT_S)
    if thread.is_alive():
        log.warning("The process group's store did not answer within %g s.", _LONGEST_WAIT_S)
    return answers[-1]


def _run(store: Any, ours: str) -> str | None:
    """The run's name in the store; stores *ours* if there is none yet."""
    # Each launch has its own key, as two torchruns with different ids may share a rendezvous store.
    elastic_id = os.environ.get("TORCHELASTIC_RUN_ID", "")
    key = f"{RUN_KEY}/{elastic_id}" if elastic_id else RUN_KEY
    return _put(store, key, "", ours) or None


def _lead(store: Any, store_host: str, process: Identity) -> Lead | None:
    """The agent that leads this run, as proposed by the rank that reaches the store first.

    Only rank 0 knows all addresses of that agent, and adds them, but may reach the store last.
    Until then, the other ranks use the store's host as a guess, or the addresses of the previous
    attempt.
    """
    # Each run has its own key, as ranks may have several runs in sequence. The key has no restart
    # count, which may differ between nodes: torchrun counts restarts on each node separately.
    of_run = (os.environ.get("TORCHELASTIC_RUN_ID", ""), process.group, process.run)
    # Quote the names, as they may contain the separator.
    key = "/".join((LEAD_KEY, *(quote(each, safe="") for each in of_run)))
    is_first = process.global_rank == 0
    guess = store_host or os.environ.get("MASTER_ADDR", "")
    ours = lead.propose((process.host, *lead.addresses_here(guess)) if is_first else ())
    stored = _put(store, key, "", ours.as_text())
    found = lead.parse_text(stored)
    if is_first and (found is None or found.hosts != ours.hosts):
        # Either another rank came first, without addresses: add ours to its proposal. Or the stored
        # addresses are of an earlier attempt with rank 0 on another node, which is no longer the
        # lead: replace the proposal.
        if found is not None and not found.hosts:
            ours = found._replace(hosts=ours.hosts)
        found = lead.parse_text(_put(store, key, stored, ours.as_text()))
    return None if found is None else found.with_hosts((guess, *found.hosts))


def _put(store: Any, key: str, expected: str, ours: str) -> str:
    """Store *ours* if the stored value is *expected*; returns the value stored afterwards."""
    stored: bytes = store.compare_set(key, expected, ours)
    return stored.decode("utf-8", "replace")
