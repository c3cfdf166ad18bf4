"""otel-ddp status: runs, ranks and GPUs of this node, from the journals if no agent lives."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import time
from collections.abc import Iterable, Mapping
from typing import Any

from otel_ddp.agent.node_status import survey
from otel_ddp.agent.reading.world_size import World, training_world
from otel_ddp.cli import where
from otel_ddp.errors import ConfigError

_LONGEST_CELL = 1000
# A driver keeps something of each board for itself.
_IDLE_SHARE = 0.05
_WIDEST_GPU_CELL = 60
_WIDEST_ROLE = 24
OVER = ("finished", "failed", "killed")
# What to say where no agent runs, by OTEL_DDP_AGENT.
NO_AGENT = {
    "auto": "none runs: a training process starts one",
    "external": "OTEL_DDP_AGENT=external, but none runs: start `otel-ddp agent` on this node",
    "offline": "none runs: a training process starts one, which sends nothing "
    "(OTEL_DDP_AGENT=offline)",
    "off": "OTEL_DDP_AGENT=off: journals are written, and nobody exports what is in them",
}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="the same, for programs")
    where.argument(parser)


def run(asked: argparse.Namespace) -> int:
    try:
        conf, places, missing = where.look(asked.dir)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    found = survey(places)
    if missing:
        found["unreadable"].append(missing)
    if asked.json:
        return tell(json.dumps(found, indent=2))
    told = lines(found, time.time_ns(), agent=conf.agent, named=bool(conf.directory))
    return tell("\n".join(told))


def tell(text: str) -> int:
    """Print the answer; the exit status."""
    try:
        encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
        print(text.encode(encoding, "backslashreplace").decode(encoding))
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        # What is still buffered would be tried again, and complained of, when Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return 0  # `| head` has read what it wanted
        print(f"The answer could not be written: {error.strerror}.", file=sys.stderr)
        return 1
    return 0


def lines(
    found: Mapping[str, Any], now_ns: int, *, agent: str = "auto", named: bool = True
) -> Iterable[str]:
    """The survey in words, for a terminal; *agent* is what OTEL_DDP_AGENT says.

    *named*: a directory was; by default it is the user's own.
    """
    alive = [agent for agent in mappings(found.get("agents")) if agent.get("alive")]
    for each in alive:
        pid, version = cell(each.get("pid"), "?"), cell(each.get("version"), "?")
        if each.get("starting") is True:
            yield f"agent     pid {pid} is starting"
            continue
        yield f"agent     pid {pid}, version {version}"
        yield f"endpoint  {cell(each.get('scrape'), 'none')}"
        yield f"export    {cell(each.get('export'), 'unknown')}"
        if remark := cell(each.get("remark")):
            yield f"note      {remark}"
    in_vain = list(unserved(found)) if agent in ("auto", "offline") else []
    if not alive and not in_vain:
        yield f"agent     {NO_AGENT[agent]}"
    yield from (f"agent     {sentence}" for sentence in in_vain)
    yield from (f"note      {cell(why)}" for why in found.get("unreadable") or ())
    runs: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    # A run stands where its first process does: in order of start.
    for each in sorted(mappings(found.get("processes")), key=_started):
        runs.setdefault(_run(each), []).append(each)
    if not runs:
        yield "no runs" if named else "no runs of this user"
    for run, processes in runs.items():
        yield ""
        yield from _table(run, processes, now_ns)
        yield from (f"  ! {sentence}" for sentence in doubled(found, run))
        yield from (f"  ! {sentence}" for sentence in notes(found, run))
        for verdict in mappings(found.get("verdicts")):
            who = verdict.get("who")
            if isinstance(who, Mapping) and _run(who) == run:
                yield f"  ! {cell(verdict.get('sentence'), '?')}"
        for each in alive:
            yield from _not_judged(each, run)
    for each in alive:
        yield from _devices(each)


def _run(said: Mapping[str, Any]) -> tuple[str, str]:
    """Which run it is: a name alone may be in several groups."""
    return cell(said.get("group")), cell(said.get("run"), "?")


def _table(run: tuple[str, str], processes: list[Mapping[str, Any]], now_ns: int) -> Iterable[str]:
    """One run: its head, and a row a process, with its role where they differ."""
    group, name = run
    world = _world(processes)
    roles = {cell(each.get("job_type")) for each in processes}
    told = (group and f"group {group}", *(roles if len(roles) == 1 else ()))
    yield ", ".join((f"run {name}", *filter(None, told), _of_world(processes, world)))
    widest = min(max(map(len, roles)), _WIDEST_ROLE) if len(roles) > 1 else 0
    yield _columns(_HEADS, "job_type", widest)
    for each in sorted(processes, key=_place):
        yield _columns(_row(each, now_ns), cell(each.get("job_type"), "-"), widest)


def _world(processes: list[Mapping[str, Any]]) -> int | None:
    """How many ranks train together."""
    told = [
        (World(size, each.get("trains") is True), each)
        for each in processes
        if each.get("proxy") is not True and (size := _whole(each.get("world_size"))) is not None
    ]
    living = [world for world, each in told if each.get("state") not in OVER]
    # Of what has ended the training is what trained, or was several; of that the newest attempt.
    ended = [
        (world.trains, world.size > 1, _started(each), world.size)
        for world, each in told
        if each.get("state") in OVER
    ]
    trained, _, _, size = max(ended, default=(False, False, 0, 0))
    return training_world(living, World(size, trained)) or None


def _of_world(processes: list[Mapping[str, Any]], world: int | None) -> str:
    """How many of the ranks that train together there are here."""
    if world is None:
        return "world ?"
    here = {
        rank
        for each in processes
        if each.get("proxy") is not True
        and each.get("world_size") in (None, world)
        and (rank := _whole(each.get("rank"))) is not None
    }
    return f"{len(here)} of {world} ranks here" if len(here) < world else f"world {world}"


def unserved(found: Mapping[str, Any]) -> Iterable[str]:
    """Each place whose processes have waited in vain for their agent, in one sentence."""
    for each in mappings(found.get("unserved")):
        count, where = _whole(each.get("processes")) or 0, cell(each.get("directory"), "?")
        who = f"{count} processes run" if count > 1 else "a process runs"
        if said := cell(each.get("agent_log")):
            why = f"{where}/agent.log ends with: {said}"
        else:
            why = "what the training prints at its start may say why"
        yield (
            f"{who}, but no agent came up (which is right after OTEL_DDP_AGENT=off); {why}; try "
            f"`otel-ddp agent --dir {shlex.quote(where)}`"
        )


def doubled(found: Mapping[str, Any], run: tuple[str, str] | None = None) -> Iterable[str]:
    """Each rank that several living processes say they are, in one sentence."""
    for each in mappings(found.get("doubled")):
        name, said = cell(each.get("run"), "?"), each.get("pids")
        pids = [cell(pid, "?") for pid in said] if isinstance(said, list) else []
        if run in (None, _run(each)):
            yield (
                f"pids {' and '.join(pids)} each say that they are rank "
                f"{cell(each.get('rank'), '?')} of run {name}, and the metrics show one of them: "
                "give each launch an OTEL_DDP_RUN of its own, or leave it out"
            )


def notes(found: Mapping[str, Any], run: tuple[str, str]) -> Iterable[str]:
    """What the agent has to say of how this run is set up, each in one sentence."""
    for each in mappings(found.get("notes")):
        if _run(each) == run:
            yield cell(each.get("sentence"), "?")


def _not_judged(agent: Mapping[str, Any], run: tuple[str, str]) -> Iterable[str]:
    """Why the agent cannot say who keeps the others of this run waiting."""
    for each in mappings(agent.get("insufficient")):
        if _run(each) == run:
            yield f"  stragglers: {cell(each.get('why'), '?')}"


_HEADS = ("rank", "local", "node", "pid", "state", "step", "phase", "since")
_WIDTHS = (6, 6, 16, 8, 10, 10, 14, 10)


def _columns(cells: tuple[str, ...], role: str = "", role_width: int = 0) -> str:
    """One line of the table; the role stands behind the rank, where there is room for it."""
    padded = [cell.ljust(width) for cell, width in zip(cells, _WIDTHS, strict=False)]
    if role_width:
        padded.insert(1, role.ljust(max(role_width, len("job_type"))))
    return "  " + " ".join(padded).rstrip() + "".join(f" {cell}" for cell in cells[len(_WIDTHS) :])


def _row(each: Mapping[str, Any], now_ns: int) -> tuple[str, ...]:
    since_ns, lost = _whole(each.get("phase_since_ns")), _whole(each.get("lost"))
    state = cell(each.get("state"), "?")
    notes = []
    if reason := cell(each.get("reason")):
        notes.append(reason)
    if state == "killed":
        notes.append("gone without a word")
    if lost:
        notes.append(f"{lost} records lost")
    if not each.get("settled", True) and state not in OVER:
        notes.append("waits for its process group")
    return (
        cell(each.get("rank"), "?"),
        cell(each.get("local_rank"), "?"),
        cell(each.get("node"), "?"),
        cell(each.get("pid"), "?"),
        state,
        cell(each.get("step"), "-"),
        cell(each.get("phase"), "-"),
        "-" if since_ns is None else _ago(max(0.0, (now_ns - since_ns) / 1e9)),
        *notes,
    )


_GPU_HEADS = ("gpu", "name", "rank", "busy", "memory", "power", "temp", "throttled by")
# What only says that no driver is here, as on any node without GPUs, is for the doctor to say.
NO_DRIVER = ("There is no NVIDIA driver", "The NVIDIA kernel driver is not loaded")


def _devices(agent: Mapping[str, Any]) -> Iterable[str]:
    """The GPUs of one agent's node, and what there is to say of them."""
    gpus = mappings(agent.get("gpus"))
    said = agent.get("gpu_remarks")
    remarks = [cell(each, "?") for each in (said if isinstance(said, list) else ())]
    if not gpus:
        remarks = [each for each in remarks if not each.startswith(NO_DRIVER)]
    if not gpus and not remarks:
        return
    yield ""
    driver = cell(agent.get("gpu_driver"))
    yield ", ".join(filter(None, (f"GPUs of {cell(agent.get('node'), '?')}", driver)))
    if gpus:
        runs = {cell(labels(each).get("run")) for each in gpus} - {""}
        rows = [_GPU_HEADS, *(_gpu_row(each, len(runs) > 1) for each in gpus)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(_GPU_HEADS))]
        for row in rows:
            padded = (text.ljust(width) for text, width in zip(row, widths, strict=True))
            yield "  " + "  ".join(padded).rstrip()
    yield from (f"  ! {each}" for each in remarks)


def _gpu_row(each: Mapping[str, Any], several_runs: bool) -> tuple[str, ...]:
    busy, celsius = _number(each.get("busy_ratio")), _number(each.get("temperature_c"))
    throttled = each.get("throttled")
    reasons = throttled if isinstance(throttled, list) else ()
    row = (
        cell(each.get("index"), "?"),
        cell(each.get("name"), "?"),
        user(each, several_runs),
        "-" if busy is None else f"{busy:.0%}",
        _share(each.get("used_bytes"), each.get("limit_bytes"), 1 << 30, "GiB", 1),
        _share(each.get("power_w"), each.get("power_limit_w"), 1, "W", 0),
        "-" if celsius is None else f"{celsius:.0f} °C",
        ", ".join(cell(reason, "?") for reason in reasons) or "-",
    )
    return tuple(text[:_WIDEST_GPU_CELL] for text in row)


def user(gpu: Mapping[str, Any], several_runs: bool) -> str:
    """Who uses a GPU: `3`, `3 of run x` where there are several runs, `free` and so on."""
    said = labels(gpu)
    run = cell(said.get("run"), "?")
    if rank := cell(said.get("rank")):
        return f"{rank} of run {run}" if several_runs else rank
    if "run" in said:
        return f"shared by run {run}"
    # Processes of nobody we know, or of several runs at once; in a container the driver may tell of
    # none, but of what they hold.
    used, limit = _number(gpu.get("used_bytes")), _number(gpu.get("limit_bytes"))
    held = used is not None and limit is not None and used > _IDLE_SHARE * limit
    return "others" if held or _whole(gpu.get("processes")) else "free"


def labels(gpu: Mapping[str, Any]) -> Mapping[str, Any]:
    found = gpu.get("labels")
    return found if isinstance(found, Mapping) else {}


def _share(part: Any, whole: Any, unit: int, name: str, digits: int) -> str:
    """`60.0/80.0 GiB`, or as much of it as is known."""
    used, most = (
        "-" if number is None else f"{number / unit:.{digits}f}"
        for number in (_number(part), _number(whole))
    )
    if used == most == "-":
        return "-"
    return f"{used} {name}" if most == "-" else f"{used}/{most} {name}"


def _ago(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds < 3600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def _started(each: Mapping[str, Any]) -> int:
    return _whole(each.get("started_ns")) or 0


def _place(each: Mapping[str, Any]) -> tuple[bool, int, int]:
    """Ranks by number; those that do not know theirs last; of one rank's attempts the first."""
    rank = _whole(each.get("rank"))
    return rank is None, rank or 0, _started(each)


# Journals and agent.json are files: another version, or anybody with this user's rights, may have
# put anything there.


def mappings(value: Any) -> list[Mapping[str, Any]]:
    return [each for each in value if isinstance(each, Mapping)] if isinstance(value, list) else []


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and abs(value) < 2**63 else None


def _number(value: Any) -> float | None:
    sane = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e18
    return float(value) if sane else None


def cell(value: Any, otherwise: str = "") -> str:
    """Anything as one line that does nothing to a terminal: ESC and newlines are written out."""
    if value is None or value == "":
        return otherwise
    text = json.dumps(value, default=repr) if isinstance(value, (dict, list)) else str(value)
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode()
        for letter in text[:_LONGEST_CELL]
    )
