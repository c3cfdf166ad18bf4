"""Checks this machine: the installation, variables, GPUs, directories and processes."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import stat
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from otel_ddp import __version__, settings
from otel_ddp.agent.export import spool_directory
from otel_ddp.agent.node.gpu import drivers
from otel_ddp.agent.node.gpu.driver import DriverMissing
from otel_ddp.agent.verdicts import postmortem
from otel_ddp.cli.node.gpus import NO_DRIVER_REMARKS, gpu_remarks
from otel_ddp.cli.node.status import duplicate_ranks
from otel_ddp.cli.setup.doctor.inputs import (
    DoctorInputs,
    Finding,
    Findings,
    nearest_existing,
    problem,
    run_python,
)
from otel_ddp.cli.text import cell, mappings
from otel_ddp.errors import ConfigError
from otel_ddp.history.directory import default_directory
from otel_ddp.identity import identity
from otel_ddp.identity.strategy import Choice
from otel_ddp.journal.place import Place, is_in_memory
from otel_ddp.torch.models import too_old

_PACKAGES = {
    "opentelemetry-sdk": "opentelemetry.sdk.resources",
    "opentelemetry-exporter-otlp": "opentelemetry.exporter.otlp.proto.http.metric_exporter",
    "prometheus-client": "prometheus_client",
    "requests": "requests",
    "nvidia-ml-py": "pynvml",
}
_TORCH_S = 120.0
_RANKS = 8
_MIB = 1024 * 1024


def python(inputs: DoctorInputs) -> Findings:
    sentence = f"otel_ddp {__version__} on Python {platform.python_version()} ({sys.executable})"
    yield Finding("ok", "python", sentence)


def packages(inputs: DoctorInputs) -> Findings:
    found = []
    for package, module in _PACKAGES.items():
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
            importlib.import_module(module)
        except importlib.metadata.PackageNotFoundError:  # noqa: PERF203
            sentence = f"{package} is not installed: pip install '{package}'"
            yield Finding("fail", "packages", sentence)
        except ImportError as error:
            sentence = (
                f"{found.pop()} cannot be imported ({error}): "
                f"pip install --force-reinstall '{package}'"
            )
            yield Finding("fail", "packages", sentence)
    if found:
        yield Finding("ok", "packages", ", ".join(found))


_TORCH = """
import torch
import torch.distributed as dist
there = dist.is_available()
print(json.dumps({
    "version": torch.__version__,
    "build": f"CUDA {torch.version.cuda}" if torch.version.cuda
    else f"ROCm {torch.version.hip}" if getattr(torch.version, "hip", None) else "CPU only",
    "backends": [each for each in ("nccl", "gloo", "mpi")
                 if there and getattr(dist, f"is_{each}_available", bool)()],
}))
"""


def torch(inputs: DoctorInputs) -> Findings:
    if importlib.util.find_spec("torch") is None:
        sentence = (
            "torch is not installed for this Python: values can be logged, but no training is "
            "measured; if torch is elsewhere, call otel-ddp with that Python"
        )
        yield Finding("warn", "torch", sentence)
        return
    print("importing torch, which can take some seconds ...", file=sys.stderr, flush=True)
    found = run_python(_TORCH, _TORCH_S)
    if isinstance(found, str):
        sentence = f"importing torch {found}: try `python -c 'import torch'`, and reinstall it"
        yield Finding("fail", "torch", sentence)
        return
    build, backends = str(found["build"]), found["backends"]
    described = f"torch {found['version']}, {build}, backends: {', '.join(backends) or 'none'}"
    if remark := too_old(str(found["version"])):
        yield Finding("warn", "torch", f"{described}: {remark}")
    elif not backends:
        yield Finding("warn", "torch", f"{described}: this build cannot train on several ranks")
    elif build == "CPU only" and isinstance(inputs.nvml, dict) and inputs.nvml.get("devices"):
        sentence = f"{described}: it uses none of the GPUs here; install a build for CUDA"
        yield Finding("warn", "torch", sentence)
    elif build.startswith("CUDA") and "nccl" not in backends:
        yield Finding("warn", "torch", f"{described}: without nccl, ranks communicate slowly")
    else:
        yield Finding("ok", "torch", described)


def _refused_by_init(inputs: DoctorInputs) -> Iterator[str]:
    """Why a training that starts here would stop, although each variable is valid by itself."""
    for step in (
        lambda: Choice(inputs.conf.strategy),
        lambda: identity.resolve(env=inputs.env, proc=inputs.proc),
    ):
        try:
            step()
        except ConfigError as error:  # noqa: PERF203
            yield str(error)


def variables(inputs: DoctorInputs) -> Findings:
    for sentence in (*inputs.wrong, *_refused_by_init(inputs)):
        yield Finding("fail", "variables", sentence)
    for sentence in (*settings.doubts(inputs.env), *settings.unknown(inputs.env)):
        yield Finding("warn", "variables", sentence)
    given = sorted(name for name in settings.names() if inputs.env.get(name, "").strip())
    if inputs.conf.disabled:
        sentence = "OTEL_SDK_DISABLED=true: nothing is recorded; unset it"
        yield Finding("warn", "variables", sentence)
    # Without their values: one may be a token.
    sentence = f"set: {', '.join(given)}" if given else "none is set, so the defaults hold"
    yield Finding("ok", "variables", sentence)


def print_gpus() -> None:
    """Print what the driver reports as JSON, in a process of its own: a call may never return."""
    try:
        driver = drivers.opened(drivers.known())
    except DriverMissing as why:
        print(json.dumps({"missing": str(why)}))
        return
    answer = {
        "version": driver.version(),
        "devices": [(each.index, each.name) for each in driver.devices()],
        "remarks": list(driver.silent),
    }
    driver.close()
    print(json.dumps(answer))


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
    if inputs.env.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1"):
        sentence = "CUDA_VISIBLE_DEVICES shows no GPU to programs that are started from here"
        yield Finding("warn", "gpus", sentence)


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
    """What the agents say of their GPUs; `otel-ddp status` shows who uses which."""
    for agent in inputs.agents:
        remarks = gpu_remarks(agent)
        if not mappings(agent.get("gpus")):
            if isinstance(inputs.nvml, dict) and inputs.nvml.get("devices"):
                sentence = (
                    "the agent shows no GPU, although there are some: it was started with other "
                    "OTEL_DDP_SOURCES, or in a container that does not see them"
                )
                yield Finding("warn", "gpus", sentence)
            else:
                remarks = [each for each in remarks if not each.startswith(NO_DRIVER_REMARKS)]
        for remark in remarks:
            yield Finding("warn", "gpus", remark)


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
    spool = spool_directory(conf, Place(inputs.place), conf.node)
    kept, history = conf.postmortem_directory, conf.history_directory
    for subject, variable, path, named in (
        ("spool", "OTEL_DDP_SPOOL_DIR", spool, False),
        ("post-mortem", "OTEL_DDP_POSTMORTEM_DIR", postmortem.directory(kept), bool(kept)),
        ("history", "OTEL_DDP_HISTORY_DIR", default_directory(history), bool(history)),
    ):
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
