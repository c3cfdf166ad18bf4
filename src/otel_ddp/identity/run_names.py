"""Chooses the name of a run before its ranks agree: given, launcher's, inherited, or made up."""

from __future__ import annotations

import hashlib
import os
import re
import unicodedata
from collections.abc import Callable, Mapping, MutableMapping
from typing import NamedTuple

from otel_ddp.identity import launchers
from otel_ddp.identity.launchers import LauncherFacts, ProcessFacts

INHERITED_RUN = "OTEL_DDP_INHERITED_RUN"

# Names from these sources may differ between nodes, or be the same for two launches. Once there is
# a process group, its ranks may agree on another name.
NEGOTIABLE = frozenset({"inherited", "parent", "rendezvous", "made"})
# Names from these sources may differ even between the ranks of a node. So such a name is not final
# before there is a process group.
OPEN = frozenset({"parent", "rendezvous"})

MOST_CHARACTERS = 200

# Matches the id that torchrun generates for a run on one node: with --standalone, and since PyTorch
# 2.15 also without address, port and id. The run gets a readable name instead.
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


class RunName(NamedTuple):
    """The name of a launch; see Identity's run, run_from and proposal."""

    run: str
    source: str
    proposal: str = ""


class Names(NamedTuple):
    """The run and group that an ancestor handed down, and its pid. Empty if none has done so."""

    run: str = ""
    group: str = ""
    by: str = ""


def find(
    given: str,
    process: ProcessFacts,
    facts: LauncherFacts,
    world: int | None,
    make_id: Callable[[], str],
) -> RunName:
    """The name of this launch. All ranks find the same one, if they have data in common for it."""
    env = process.env
    if given:
        return RunName(given, "given")
    if facts.launcher == "pool":
        return RunName(make_id(), "made")
    elastic_id = clean(env.get("TORCHELASTIC_RUN_ID", ""))
    if facts.launcher == "torchrun" and elastic_id not in ("", "none"):
        is_uuid = _UUID.fullmatch(elastic_id)
        return RunName(_derived("torchrun", elastic_id) if is_uuid else elastic_id, "launcher")
    # If each task of srun runs a torchrun for itself, each task is another run, so the Slurm step
    # cannot name the run.
    own_torchruns = facts.launcher == "torchrun" and facts.nodes != launchers.slurm_tasks(env)
    step = launchers.slurm_step(env)
    if step and facts.launcher not in launchers.MPI and not own_torchruns:
        return RunName(clean(f"slurm-{step}"), "launcher")
    if (parents := of_parent(process, facts, world)).run:
        return RunName(parents.run, "inherited")
    by_launcher = _derived(*launchers.launcher_process(process, facts.markers))
    if facts.launcher in ("torchrun", *launchers.MPI) and facts.nodes == 1:
        return RunName(by_launcher, "launcher")
    job = env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid")
    if facts.launcher in launchers.MPI and job:
        return RunName(_derived("mpi", job), "launcher")
    if process.spawned:
        # All children of a parent derive the same name, even if the parent has started them for two
        # runs. So propose a unique name, on which the ranks can agree.
        return RunName(by_launcher, "parent", make_id())
    if (facts.launcher == "lone" and world == 1) or facts.world_size == world == 1:
        return RunName(make_id(), "made")
    # If workers restart, the torchrun process that launched them stays the same, and so does a name
    # that is derived from it.
    proposal = by_launcher if facts.launcher == "torchrun" else make_id()
    if master := env.get("MASTER_ADDR", ""):
        rendezvous = _derived("rendezvous", master, env.get("MASTER_PORT", ""))
        return RunName(rendezvous, "rendezvous", proposal)
    return RunName(by_launcher, "parent", proposal)


def launched_by(process: launchers.ProcessFacts, facts: launchers.LauncherFacts) -> str:
    """An id of the process that launched this one. All processes that it launched have the same."""
    return _digest(*launchers.launcher_process(process, facts.markers)).hex()[:10]


def group_of_tasks(process: ProcessFacts) -> str:
    """The default group of a pool's tasks: the parent's group, else its run, else an id of it."""
    parents = _handed_down(process)
    named = parents.group or parents.run or clean(process.env.get("OTEL_DDP_RUN", ""))
    return named or f"pool-{_digest(*launchers.launcher_process(process, ())).hex()[:10]}"


def parent_has_run(env: Mapping[str, str] = os.environ) -> bool:
    """Whether the multiprocessing parent of this process has opened a run."""
    by = env.get(INHERITED_RUN, "").partition(":")[0]
    return by == str(launchers.multiprocessing_parent())


def hand_down(run: str, group: str, env: MutableMapping[str, str] = os.environ) -> None:
    """Set a variable by which ranks that this process starts join its run.

    If a launcher starts them and names their run, its name takes precedence.
    """
    from urllib.parse import quote

    # Percent-encode the names: the encoding of the locale may lack some of their characters.
    env[INHERITED_RUN] = f"{os.getpid()}:{quote(run)}:{quote(group)}"


def make() -> str:
    """A new unique name."""
    # Do not use `random`: training scripts seed it, so every launch would get the same name.
    return readable(os.urandom(16))


def clean(text: str, longest: int = MOST_CHARACTERS) -> str:
    """Text for a label: one line, valid Unicode, and of bounded length."""

    def keep(character: str) -> str:
        category = unicodedata.category(character)
        if category == "Cs":
            return "\ufffd"
        return " " if category in ("Cc", "Zl", "Zp") else character

    # Cut the text before cleaning it, since cleaning a very long text would take time.
    some = text.strip()[: 4 * longest]
    return "".join(map(keep, some)).strip()[:longest].rstrip()


def _derived(*parts: str) -> str:
    return readable(_digest(*parts))


def _digest(*parts: str) -> bytes:
    return hashlib.sha256("\0".join(parts).encode("utf-8", "replace")).digest()


def of_parent(process: ProcessFacts, facts: LauncherFacts, world: int | None) -> Names:
    """Run and group of an ancestor, if this process belongs to the ancestor's run."""
    found = _handed_down(process)
    if found.by == str(process.pid):
        return Names()
    # All descendants inherit the variable, but many are runs of their own, such as a trial of a
    # sweep or a script that a notebook starts. Only two kinds join the ancestor's run: one of
    # several ranks that a launcher started; and a multiprocessing child whose parent opened the run
    # itself.
    placed = facts.launcher != "spawn" and world != 1
    if placed or (process.spawned and not launchers.parent_was_given(process, INHERITED_RUN)):
        return found
    return Names()


def _handed_down(process: ProcessFacts) -> Names:
    from urllib.parse import unquote

    by, _, names = process.env.get(INHERITED_RUN, "").partition(":")
    run, _, group = names.partition(":")
    return Names(clean(unquote(run)), clean(unquote(group)), by)


# -- readable names: brisk-otter-4k7d2

# 123 adjectives and 121 animals for names: short and simple words.
_HOW = (
    "able agile alert amber ample apt azure balmy basic bold brave breezy bright brisk broad "
    "calm candid careful cheery chief civil classy clean clear clever coastal comfy cool copper "
    "coral cosmic cosy crisp curious daring deft dewy direct double eager early earnest easy "
    "elated epic equal exact fair famous fancy fast festive fine firm fleet fluent fond frank "
    "free fresh frosty gentle giant glad gleeful golden good grand great green happy hardy "
    "hearty helpful honest humble ideal indigo ivory jade jaunty jolly jovial keen kind large "
    "lasting light lively local loyal lucid lucky lunar magic main major mellow merry mighty "
    "mild misty modern neat nimble noble novel olive open patient placid plucky polite prime "
    "proud quick quiet rapid ready rosy royal ruby rustic "
)
_WHO = (
    "adder albatross alpaca antelope badger bat bear beaver bee beetle bison boar bobcat bream "
    "buffalo bunting camel caribou carp cat cheetah chough cicada civet clam cobra cod condor "
    "coot cougar coyote crab crane cricket crow cuckoo curlew deer dingo dipper dolphin "
    "dormouse dove dragonfly duck dunlin eagle eel egret eider elk ermine falcon ferret finch "
    "firefly flamingo fox frog gannet gazelle gecko gibbon giraffe gnu goat godwit goose gopher "
    "grebe grouse gull haddock hare hawk hedgehog heron herring hobby hoopoe hornet horse hyena "
    "ibex ibis iguana impala jackal jackdaw jay kestrel kingfisher kite kiwi koala krill lark "
    "lemming lemur leopard linnet lion lizard llama lobster lynx macaw magpie mallard mantis "
    "marlin marmot marten merlin mink mole moose moth mouse newt ocelot "
)
# The characters of the random end of a name: no vowels, so that they never form a word, and no
# letters that look alike.
_LETTERS = "23456789bcdfghjkmnpqrstvwxyz"
_MOST_LETTERS = 5


def readable(random: bytes) -> str:
    """The readable name for these bytes; equal bytes give the same name.

    There are 2.5 x 10^11 names: a collision among 10,000 runs has a probability of 1 in 5,000.
    """
    number = int.from_bytes(random[:16], "big")
    words = []
    for known in (_HOW.split(), _WHO.split()):
        number, which = divmod(number, len(known))
        words.append(known[which])
    letters = ""
    for _ in range(_MOST_LETTERS):
        number, which = divmod(number, len(_LETTERS))
        letters += _LETTERS[which]
    return "-".join((*words, letters))
