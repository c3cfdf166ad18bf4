"""Checks the node: its GPUs and the ranks that use them, its directories and processes."""

from __future__ import annotations

import os
import stat
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from otel_ddp.agent.export.exporter import spool_directory
from otel_ddp.agent.verdicts import postmortem
from otel_ddp.cli.doctor.inputs import DoctorInputs, Finding, Findings, nearest_existing, problem
from otel_ddp.cli.gpus import NO_DRIVER_REMARKS, gpu_labels, gpu_remarks, gpu_user
from otel_ddp.cli.status import duplicate_ranks
from otel_ddp.cli.text import cell, mappings
from otel_ddp.history.directory import default_directory
from otel_ddp.journal.place import Place, is_in_memory

_RANKS = 8
_MIB = 1024 * 1024


def gpus(inputs: DoctorInputs) -> Findings:
    nvml = inputs.nvml
    if isinstance(nvml, str):
        sentence = (
            f"the NVIDIA driver {nvml}: check whether `nvidia-smi` answers, and the kernel's log "
            "for Xid; the agent goes on without GPU metrics"
        )
        yield Finding("fail", "gpus", sentence)
        return
    if "missing" in nvml:
        here = (inputs.dev / "nvidiactl").exists()
        yield Finding("warn" if here else "ok", "gpus", str(nvml["missing"]))
        given = inputs.env.get("NVIDIA_DRIVER_CAPABILITIES", "")
        if here and given and not {"utility", "all"} & {each.strip() for each in given.split(",")}:
            sentence = f"NVIDIA_DRIVER_CAPABILITIES is {given!r}: add `utility` to it"
            yield Finding("warn", "gpus", sentence)
        return
    sentence = f"{nvml['version']}, {_count_gpus(nvml['devices'])}"
    if "gpu" not in inputs.conf.sources:
        sentence += "; OTEL_DDP_SOURCES leaves them out"
    yield Finding("ok", "gpus", sentence)
    for remark in nvml["remarks"]:
        yield Finding("warn", "gpus", remark)
    chosen = inputs.env.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None and nvml["visible"] is not None:
        seen = ", ".join(nvml["visible"])
        sentence = f"CUDA_VISIBLE_DEVICES={chosen} shows {f'GPU {seen}' if seen else 'no GPU'}"
        yield Finding(
            "ok" if seen else "warn", "gpus", f"{sentence} to programs that are started from here"
        )


def _count_gpus(devices: Sequence[tuple[str, str]]) -> str:
    """`8 GPUs: NVIDIA H100 (0, 1, ...)`, and how many of them are parts of a GPU."""
    by_name: dict[str, list[str]] = defaultdict(list)
    for index, name in devices:
        by_name[name].append(index)
    # `6:1` is a part of board 6.
    parts = sum(":" in index for index, _ in devices)
    boards = len(devices) - parts
    count = f"{boards} GPU{'' if boards == 1 else 's'}"
    if parts:
        count += f" and {parts} MIG instance{'' if parts == 1 else 's'}"
    names = "; ".join(f"{name} ({', '.join(found)})" for name, found in by_name.items())
    return f"{count}: {names}"


def owners(inputs: DoctorInputs) -> Findings:
    for agent in inputs.agents:
        devices = mappings(agent.get("gpus"))
        remarks = gpu_remarks(agent)
        if devices:
            several = len({cell(gpu_labels(each).get("run")) for each in devices} - {""}) > 1
            users = (
                f"GPU {cell(each.get('index'), '?')}: {_user(each, several)}" for each in devices
            )
            yield Finding("ok", "owners", ", ".join(users))
        elif isinstance(inputs.nvml, dict) and inputs.nvml.get("devices"):
            sentence = (
                "the agent shows no GPU, although there are some: it was started with other "
                "OTEL_DDP_SOURCES, or in a container that does not see them"
            )
            yield Finding("warn", "owners", sentence)
        else:
            remarks = [each for each in remarks if not each.startswith(NO_DRIVER_REMARKS)]
        for remark in remarks:
            yield Finding("warn", "owners", remark)


def _user(gpu: Mapping[str, Any], several_runs: bool) -> str:
    return ("rank " if gpu_labels(gpu).get("rank") else "") + gpu_user(gpu, several_runs)


def journals(inputs: DoctorInputs) -> Findings:
    path, named = inputs.place, bool(inputs.conf.directory)
    if why := problem(path, named):
        sentence = f"{path} {why}; name another directory {inputs.named_by}"
        yield Finding("fail", "journals", sentence)
        return
    exists = path.is_dir()
    state = f"{path} {'can be written to' if exists else 'does not exist yet, and can be made'}"
    if exists and path.stat().st_mode & 0o077:
        sentence = f"{path} is open to other users; the next process that starts closes it"
        yield Finding("warn", "journals", sentence)
    elif exists:
        state += f", is private (mode {stat.S_IMODE(path.stat().st_mode):04o})"
    if is_in_memory(path):
        yield Finding("ok", "journals", f"{state} and is on tmpfs")
    else:
        sentence = (
            f"{state}, but is on a disk, for which a process may have to wait: mount a tmpfs on "
            f"/dev/shm, or name a directory on one {inputs.named_by}"
        )
        yield Finding("warn", "journals", sentence)
    yield _free_space(path, inputs.conf.journal_bytes)


def _free_space(path: Path, journal_bytes: int) -> Finding:
    found = os.statvfs(nearest_existing(path))
    free_bytes = found.f_bavail * found.f_frsize
    needed = f"{_RANKS} journals take {_RANKS * journal_bytes / _MIB:.0f} MiB"
    sentence = f"{free_bytes / _MIB:.0f} MiB are free, {needed}"
    if free_bytes >= _RANKS * journal_bytes:
        return Finding("ok", "journals", sentence)
    sentence += ": make room (docker: --shm-size), or set OTEL_DDP_JOURNAL_BYTES lower"
    return Finding("warn" if free_bytes >= journal_bytes else "fail", "journals", sentence)


def directories(inputs: DoctorInputs) -> Findings:
    conf = inputs.conf
    for subject, variable, path in (
        (
            "spool",
            "OTEL_DDP_SPOOL_DIR",
            spool_directory(conf, Place(inputs.place), conf.node),
        ),
        (
            "post-mortem",
            "OTEL_DDP_POSTMORTEM_DIR",
            postmortem.directory(conf.postmortem_directory),
        ),
        (
            "history",
            "OTEL_DDP_HISTORY_DIR",
            default_directory(conf.history_directory),
        ),
    ):
        named = bool(
            {"post-mortem": conf.postmortem_directory, "history": conf.history_directory}.get(
                subject
            )
        )
        if why := problem(path, named):
            sentence = f"{path} {why}; name another directory in {variable}"
            yield Finding("fail", subject, sentence)
        else:
            yield Finding("ok", subject, f"{path} can be written to")


def processes(inputs: DoctorInputs) -> Findings:
    for sentence in duplicate_ranks(inputs.survey):
        yield Finding("warn", "processes", sentence)
    unseen = [
        cell(rank, "?")
        for each in inputs.agents
        if isinstance(each.get("unseen"), list)
        for rank in each["unseen"]
    ]
    if unseen:
        living = (each for each in inputs.survey.processes if not each.ended)
        hosts = sorted({inputs.host, *(cell(each.host) for each in living)} - {""})
        share = "let them share process ids (shareProcessNamespace, hostPID, --pid=host)"
        sentence = (
            f"the agent cannot see the process of rank {', '.join(unseen)}, so there are no "
            "process_* series for it: "
        )
        if len(hosts) == 1:
            sentence += f"it runs in another container; {share}"
        else:
            sentence += (
                f"processes of several hosts ({', '.join(hosts)}) write to {inputs.place}. If "
                "these are nodes, OTEL_DDP_DIR must name a directory that each node has for "
                f"itself, such as one in /dev/shm. If they are containers of one node, {share}"
            )
        yield Finding("warn", "processes", sentence)
    elif _readable(inputs.proc / "1"):
        yield Finding("ok", "processes", f"{inputs.proc} shows the processes of all users")
    else:
        sentence = (
            f"{inputs.proc} hides the processes of other users (hidepid), so the agent must run as "
            "the user who trains; an agent that a training process starts does"
        )
        yield Finding("ok", "processes", sentence)


def _readable(process: Path) -> bool:
    try:
        (process / "stat").read_bytes()
    except OSError:
        return False
    return True
