"""What a launch is called: given, the launcher's, inherited, derived from a parent, or made."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
import unicodedata
from collections.abc import Callable, Mapping, MutableMapping
from typing import NamedTuple

from otel_ddp.identity import launchers
from otel_ddp.identity.launchers import LauncherFacts, ProcessFacts

INHERITED_RUN = "OTEL_DDP_INHERITED_RUN"

# Where a run's name came from, and whether the ranks of a process group may still replace it by
# one they agree on: each of these may differ between nodes, or be the same for two launches.
NEGOTIABLE = frozenset({"inherited", "parent", "rendezvous", "made"})

MOST_CHARACTERS = 200


class RunName(NamedTuple):
    """What a launch is called; the fields are Identity's run, run_from, run_settled, proposal."""

    run: str
    source: str
    settled: bool
    proposal: str


class Names(NamedTuple):
    """What another process handed down, and which one; empty where there is none."""

    run: str = ""
    group: str = ""
    by: str = ""


def find(
    given: str,
    here: ProcessFacts,
    told: LauncherFacts,
    world: int | None,
    make_id: Callable[[], str],
) -> RunName:
    """The name of this launch: never one per rank, as far as anything is shared to make it of."""
    env = here.env
    if given:
        return _settled(given, "given")
    if told.launcher == "pool":
        return _settled(make_id(), "made")
    elastic_id = clean(env.get("TORCHELASTIC_RUN_ID", ""))
    if told.launcher == "torchrun" and elastic_id not in ("", "none"):
        return _settled(elastic_id, "launcher")
    # An srun of several tasks that each run a torchrun of their own is several launches.
    own_torchruns = told.launcher == "torchrun" and told.nodes != launchers.slurm_tasks(env)
    step = launchers.slurm_step(env)
    if step and told.launcher not in launchers.MPI and not own_torchruns:
        return _settled(clean(f"slurm-{step}"), "launcher")
    if (parents := of_parent(here, told, world)).run:
        return _settled(parents.run, "inherited")
    by_launcher = _derived(*launchers.launcher_process(here, told.markers))
    if told.launcher in ("torchrun", *launchers.MPI) and told.nodes == 1:
        return _settled(by_launcher, "launcher")
    job = env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid")
    if told.launcher in launchers.MPI and job:
        return _settled(_derived("mpi", job), "launcher")
    if here.spawned:
        # All children of this parent, whichever call started them: hence to be agreed on.
        return RunName(by_launcher, "parent", False, make_id())
    if (told.launcher == "lone" and world == 1) or told.world_size == world == 1:
        return _settled(make_id(), "made")
    # torchrun's agent outlives its workers: what names it names the launch after a restart, too.
    proposal = by_launcher if told.launcher == "torchrun" else make_id()
    if master := env.get("MASTER_ADDR", ""):
        rendezvous = _derived("rendezvous", master, env.get("MASTER_PORT", ""))
        return RunName(rendezvous, "rendezvous", False, proposal)
    return RunName(by_launcher, "parent", False, proposal)


def launched_by(here: launchers.ProcessFacts, told: launchers.LauncherFacts) -> str:
    """A word for the process that launched this one, the same for all that it launched."""
    return _derived(*launchers.launcher_process(here, told.markers)).removeprefix("run-")


def group_of_tasks(here: ProcessFacts) -> str:
    """The group of the runs that the tasks of one pool make, where neither they nor their parent
    name one: the parent's run, or else a word for the parent itself."""
    parents = _handed_down(here)
    named = parents.group or parents.run or clean(here.env.get("OTEL_DDP_RUN", ""))
    return named or _derived(*launchers.launcher_process(here, ())).replace("run-", "pool-")


def parent_has_run(env: Mapping[str, str] = os.environ) -> bool:
    """Whether the process that started this one by multiprocessing has opened a run."""
    by = env.get(INHERITED_RUN, "").partition(":")[0]
    return by == str(launchers.multiprocessing_parent())


def hand_down(run: str, group: str, env: MutableMapping[str, str] = os.environ) -> None:
    """Let ranks that are started from here join the run, where no launcher names one."""
    from urllib.parse import quote

    # Letters that the encoding of this process's locale lacks cannot be put into a variable.
    env[INHERITED_RUN] = f"{os.getpid()}:{quote(run)}:{quote(group)}"


def make() -> str:
    """A name that no other launch has."""
    # Not `random`: training scripts seed that, and every launch would get the same name.
    return f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{os.urandom(3).hex()}"


def clean(text: str, longest: int = MOST_CHARACTERS) -> str:
    """As a label takes it: one line, valid Unicode, not endless."""

    def keep(character: str) -> str:
        category = unicodedata.category(character)
        if category == "Cs":
            return "\ufffd"
        return " " if category in ("Cc", "Zl", "Zp") else character

    # Cut before as well: nobody's novel is walked through letter by letter.
    some = text.strip()[: 4 * longest]
    # A variable in UTF-8, read under a locale of another encoding: `läuf` under LC_ALL=C.
    with contextlib.suppress(UnicodeEncodeError):
        some = some.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    return "".join(map(keep, some)).strip()[:longest].rstrip()


def _settled(run: str, source: str) -> RunName:
    return RunName(run, source, True, run)


def _derived(*parts: str) -> str:
    text = "\0".join(parts).encode("utf-8", "replace")
    return f"run-{hashlib.sha256(text).hexdigest()[:10]}"


def of_parent(here: ProcessFacts, told: LauncherFacts, world: int | None) -> Names:
    """The run and group of an ancestor, for a process that belongs to it."""
    found = _handed_down(here)
    if found.by == str(here.pid):
        return Names()
    # Everything that is started from a process has its variables: a sweep's trials and a notebook's
    # scripts too, and those are runs of their own. A rank is whom a launcher placed among others...
    placed = told.launcher != "spawn" and world != 1
    # ...or a child of multiprocessing, unless its parent is such a trial and opened no run.
    return found if placed or _parent_opened_one(here) else Names()


def _parent_opened_one(here: ProcessFacts) -> bool:
    return here.spawned and not launchers.parent_was_given(here, INHERITED_RUN)


def _handed_down(here: ProcessFacts) -> Names:
    from urllib.parse import unquote

    by, _, names = here.env.get(INHERITED_RUN, "").partition(":")
    run, _, group = names.partition(":")
    return Names(clean(unquote(run)), clean(unquote(group)), by)
