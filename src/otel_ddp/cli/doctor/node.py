"""Checks the node: its GPUs and whose they are, its directories and processes."""

from __future__ import annotations

import os
import shutil
import stat
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from otel_ddp.agent.export.exporter import spool_directory
from otel_ddp.agent.verdicts import postmortem
from otel_ddp.cli.doctor.scene import DoctorInputs, Finding, Findings, nearest_that_is, problem
from otel_ddp.cli.status import NO_DRIVER, OVER, cell, doubled, labels, mappings, user
from otel_ddp.journal.place import Place, on_memory

_RANKS = 8
_MIB = 1024 * 1024


def gpus(scene: DoctorInputs) -> Findings:
    said = scene.boards
    if isinstance(said, str):
        sentence = (
            f"the NVIDIA driver {said}: see whether `nvidia-smi` answers, and the kernel's log "
            "for Xid; the agent goes on without GPU statistics"
        )
        yield Finding("fail", "gpus", sentence)
        return
    if "missing" in said:
        here = (scene.dev / "nvidiactl").exists()
        yield Finding("warn" if here else "ok", "gpus", str(said["missing"]))
        given = scene.env.get("NVIDIA_DRIVER_CAPABILITIES", "")
        if here and given and not {"utility", "all"} & {each.strip() for each in given.split(",")}:
            sentence = f"NVIDIA_DRIVER_CAPABILITIES is {given!r}: add `utility` to it"
            yield Finding("warn", "gpus", sentence)
        return
    by_name: dict[str, list[str]] = defaultdict(list)
    for index, name in said["devices"]:
        by_name[name].append(index)
    told = "; ".join(f"{name} ({', '.join(found)})" for name, found in by_name.items())
    # `6:1` is a part of board 6.
    parts = sum(":" in index for index, _ in said["devices"])
    boards = len(said["devices"]) - parts
    count = f"{boards} GPU{'' if boards == 1 else 's'}"
    if parts:
        count += f" and {parts} MIG instance{'' if parts == 1 else 's'}"
    sentence = f"{said['version']}, {count}: {told}"
    if "gpu" not in scene.conf.sources:
        sentence += "; OTEL_DDP_SOURCES leaves them out"
    yield Finding("ok", "gpus", sentence)
    for remark in said["remarks"]:
        yield Finding("warn", "gpus", remark)
    chosen = scene.env.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None and said["visible"] is not None:
        seen = ", ".join(said["visible"])
        sentence = f"CUDA_VISIBLE_DEVICES={chosen} shows {f'GPU {seen}' if seen else 'no GPU'}"
        yield Finding("ok" if seen else "warn", "gpus", f"{sentence} to what is started from here")


def owners(scene: DoctorInputs) -> Findings:
    for agent in scene.agents:
        devices = mappings(agent.get("gpus"))
        said = agent.get("gpu_remarks")
        remarks = [cell(each) for each in said] if isinstance(said, list) else []
        if devices:
            several = len({cell(labels(each).get("run")) for each in devices} - {""}) > 1
            told = (
                f"GPU {cell(each.get('index'), '?')}: {_used(each, several)}" for each in devices
            )
            yield Finding("ok", "owners", ", ".join(told))
        elif isinstance(scene.boards, dict) and scene.boards.get("devices"):
            sentence = (
                "the agent shows no GPU, although there are some: it was started with other "
                "OTEL_DDP_SOURCES, or in a container that does not see them"
            )
            yield Finding("warn", "owners", sentence)
        else:
            remarks = [each for each in remarks if not each.startswith(NO_DRIVER)]
        for remark in remarks:
            yield Finding("warn", "owners", remark)


def _used(gpu: Mapping[str, Any], several_runs: bool) -> str:
    return ("rank " if labels(gpu).get("rank") else "") + user(gpu, several_runs)


def journals(scene: DoctorInputs) -> Findings:
    path, named = scene.place, bool(scene.conf.directory)
    if why := problem(path, named):
        sentence = f"{path} {why}; name another directory {scene.named_by}"
        yield Finding("fail", "journals", sentence)
        return
    there = path.is_dir()
    told = f"{path} {'can be written to' if there else 'is not there yet, and can be made'}"
    if there and path.stat().st_mode & 0o077:
        sentence = f"{path} is open to other users; the next process that starts closes it"
        yield Finding("warn", "journals", sentence)
    elif there:
        told += f", is private (mode {stat.S_IMODE(path.stat().st_mode):04o})"
    if on_memory(path):
        yield Finding("ok", "journals", f"{told} and lies on tmpfs")
    else:
        sentence = (
            f"{told}, but lies on a disk, for which a process may have to wait: mount a tmpfs on "
            f"/dev/shm, or name a directory of one {scene.named_by}"
        )
        yield Finding("warn", "journals", sentence)
    yield _room(path, scene.conf.journal_bytes)


def _room(path: Path, journal_bytes: int) -> Finding:
    found = os.statvfs(nearest_that_is(path))
    free_bytes = found.f_bavail * found.f_frsize
    needed = f"{_RANKS} journals take {_RANKS * journal_bytes / _MIB:.0f} MiB"
    told = f"{free_bytes / _MIB:.0f} MiB are free, {needed}"
    if free_bytes >= _RANKS * journal_bytes:
        return Finding("ok", "journals", told)
    sentence = f"{told}: make room (docker: --shm-size), or set OTEL_DDP_JOURNAL_BYTES lower"
    return Finding("warn" if free_bytes >= journal_bytes else "fail", "journals", sentence)


def directories(scene: DoctorInputs) -> Findings:
    conf = scene.conf
    for subject, variable, path in (
        (
            "spool",
            "OTEL_DDP_SPOOL_DIR",
            spool_directory(conf, Place(scene.place), conf.node),
        ),
        (
            "post-mortem",
            "OTEL_DDP_POSTMORTEM_DIR",
            postmortem.directory(conf.postmortem_directory),
        ),
    ):
        named = subject != "spool" and bool(conf.postmortem_directory)
        if why := problem(path, named):
            sentence = f"{path} {why}; name another directory in {variable}"
            yield Finding("fail", subject, sentence)
        else:
            yield Finding("ok", subject, f"{path} can be written to")


def processes(scene: DoctorInputs) -> Findings:
    for sentence in doubled(scene.survey):
        yield Finding("warn", "processes", sentence)
    unseen = [
        cell(rank, "?")
        for each in scene.agents
        if isinstance(each.get("unseen"), list)
        for rank in each["unseen"]
    ]
    if unseen:
        living = (
            each for each in mappings(scene.survey["processes"]) if each.get("state") not in OVER
        )
        hosts = sorted({scene.host, *(cell(each.get("host")) for each in living)} - {""})
        share = "let them share process ids (shareProcessNamespace, hostPID, --pid=host)"
        sentence = (
            f"the agent cannot see the process of rank {', '.join(unseen)}, so there are no "
            "process_* series of it: "
        )
        if len(hosts) == 1:
            sentence += f"it runs in another container; {share}"
        else:
            sentence += (
                f"processes of several hosts ({', '.join(hosts)}) write to {scene.place}. Where "
                "these are nodes, OTEL_DDP_DIR must name a directory that each node has for "
                f"itself, such as one in /dev/shm; where they are containers of one, {share}"
            )
        yield Finding("warn", "processes", sentence)
    elif _readable(scene.proc / "1"):
        yield Finding("ok", "processes", f"{scene.proc} shows the processes of all users")
    else:
        sentence = (
            f"{scene.proc} hides the processes of other users (hidepid), so the agent has to run "
            "as the user who trains; one that a training process starts does"
        )
        yield Finding("ok", "processes", sentence)
    if shutil.which("py-spy"):
        yield Finding("ok", "processes", "py-spy is there, for `otel-ddp stacks`")
    else:
        sentence = (
            "py-spy is not installed, which is no fault: `otel-ddp stacks` needs it only for a "
            "process that does not answer itself"
        )
        yield Finding("ok", "processes", sentence)


def _readable(process: Path) -> bool:
    try:
        (process / "stat").read_bytes()
    except OSError:
        return False
    return True
