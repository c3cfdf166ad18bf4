"""Checks this machine: the installation, variables, GPUs, directories and processes."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import runpy
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from otel_ddp import __version__, files, settings
from otel_ddp.agent.export import spool_directory
from otel_ddp.agent.node.gpu import drivers
from otel_ddp.agent.node.gpu.driver import DriverMissing, NothingHere
from otel_ddp.cli.node.status import NO_DRIVER_REMARKS, duplicate_ranks, gpu_remarks
from otel_ddp.cli.text import cell, mappings
from otel_ddp.errors import ConfigError
from otel_ddp.history.directory import default_directory
from otel_ddp.identity import identity
from otel_ddp.identity.strategy import Choice
from otel_ddp.journal import place
from otel_ddp.journal.survey import Survey, survey
from otel_ddp.torch.models import device_runtime, loses_overlap, too_old
from otel_ddp.vocabulary.words import NO_OVERLAP

Level = Literal["ok", "warn", "fail"]
Said = Iterator[tuple[Level, str]]
Check = Callable[["Inputs"], Said]

_PACKAGES = {
    "opentelemetry-sdk": "opentelemetry.sdk.resources",
    "opentelemetry-exporter-otlp": "opentelemetry.exporter.otlp.proto.http.metric_exporter",
    "prometheus-client": "prometheus_client",
    "requests": "requests",
    "nvidia-ml-py": "pynvml",
}
# Accelerators that no driver of ours reads, by the names of their device files.
_UNREAD = {"Ascend": "davinci[0-9]*", "Gaudi": "hl[0-9]*", "TPU": "accel[0-9]*"}
# What torch has to be built for, by the vendor with which a driver's version begins.
_BUILDS = {"NVIDIA": "CUDA", "AMD": "ROCm"}
_RANKS = 8
_MIB = 1024 * 1024


class Inputs:
    """What the checks look at; each part is read when a check needs it first."""

    def __init__(
        self,
        directory: str = "",
        env: Mapping[str, str] = os.environ,
        *,
        dev: Path = Path("/dev"),
        driver_s: float = 10.0,
        answer_s: float = 5.0,
    ) -> None:
        self.directory, self.env = directory, env
        self.dev = dev
        self._driver_s, self.answer_s = driver_s, answer_s
        self.wrong: list[str] = []
        """A sentence for each variable that is wrong."""
        usable = dict(env)
        for name in sorted(env):
            try:
                settings.read({name: env[name]})
            except ConfigError as error:  # noqa: PERF203
                self.wrong.append(str(error))
                del usable[name]
        self.conf = settings.read(usable, directory=directory or None)
        """The settings, without the variables that are wrong."""

    @cached_property
    def survey(self) -> Survey:
        """The agents and processes of this node."""
        return survey(place.existing(self.conf.directory, self.env))

    @property
    def agents(self) -> list[Mapping[str, Any]]:
        """The living agents, as they describe themselves."""
        return [each for each in self.survey.agents if each["alive"]]

    def places(self) -> tuple[list[place.Place], str]:
        """Where a process that starts now puts its journal, and a remark; raises ConfigError."""
        given_as = "--dir" if self.directory else "OTEL_DDP_DIR"
        offline = self.conf.offline
        return place.find(self.conf.directory, self.env, given_as=given_as, offline=offline)

    @cached_property
    def gpus(self) -> dict[str, Any] | str:
        """What the driver reports; if it does not answer, the reason as the end of a sentence."""
        return _asked_in_a_process(self._driver_s)


def python(inputs: Inputs) -> Said:
    yield "ok", f"otel_ddp {__version__} on Python {platform.python_version()} ({sys.executable})"


def packages(inputs: Inputs) -> Said:
    found = []
    for package, module in _PACKAGES.items():
        try:
            importlib.import_module(module)
            found.append(f"{package} {importlib.metadata.version(package)}")
        except ImportError as error:  # noqa: PERF203
            advice = f"pip install --force-reinstall '{package}'"
            yield "fail", f"{package} cannot be imported ({error}): {advice}"
    if found:
        yield "ok", ", ".join(found)


def variables(inputs: Inputs) -> Said:
    for sentence in inputs.wrong:
        yield "fail", sentence
    # A training that starts here would stop, although each variable is valid by itself.
    for refused_by_init in (
        lambda: Choice(inputs.conf.strategy),
        lambda: identity.resolve(env=inputs.env),
    ):
        try:
            refused_by_init()
        except ConfigError as error:  # noqa: PERF203
            yield "fail", str(error)
    for sentence in (*settings.doubts(inputs.env), *settings.unknown(inputs.env)):
        yield "warn", sentence
    if inputs.conf.disabled:
        yield "warn", "OTEL_SDK_DISABLED=true: nothing is recorded; unset it"
    given = sorted(name for name in settings.names() if inputs.env.get(name, "").strip())
    # Without their values: one may be a token.
    yield "ok", f"set: {', '.join(given)}" if given else "none is set, so the defaults hold"


def torch(inputs: Inputs) -> Said:
    """Reads its file of versions: an import takes seconds, and may end this process."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        yield (
            "warn",
            "torch is not installed for this Python: values can be logged, but no training is "
            "measured: pip install 'torch>=2.4'; if torch is elsewhere, call `python -m otel_ddp "
            "doctor` with that Python",
        )
        return
    says = runpy.run_path(str(Path(found.origin).with_name("version.py")))
    version = str(says["__version__"])
    build = device_runtime(says) or "CPU only"
    doubt = too_old(version)
    if not doubt and isinstance(inputs.gpus, dict) and inputs.gpus.get("devices"):
        vendor = inputs.gpus["version"].partition(" ")[0]
        if not build.startswith(wanted := _BUILDS[vendor]):
            doubt = f"it uses none of the {vendor} GPUs here; install a build for {wanted}"
    described = f"torch {version}, {build}"
    yield ("warn", f"{described}: {doubt}") if doubt else ("ok", described)
    if loses_overlap(inputs.env):
        yield "warn", NO_OVERLAP


def _has_gpus(inputs: Inputs) -> bool:
    return isinstance(inputs.gpus, dict) and bool(inputs.gpus.get("devices"))


def print_gpus() -> None:
    """Print what the driver reports as JSON."""
    try:
        driver = drivers.opened(drivers.known())
    except DriverMissing as why:
        print(json.dumps({"missing": str(why), "here": not isinstance(why, NothingHere)}))
        return
    devices = [(each.index, each.name) for each in driver.devices()]
    remarks = list(driver.silent)
    found = {"version": driver.version(), "devices": devices, "remarks": remarks}
    print(json.dumps({**found, "hiding": list(driver.hiding)}))
    driver.close()


def gpus(inputs: Inputs) -> Said:
    found = inputs.gpus
    if isinstance(found, str):
        yield (
            "fail",
            f"the GPU driver {found}: check whether the vendor's tool answers (`nvidia-smi`, "
            "`amd-smi`), and the kernel's log; the agent goes on without GPU metrics",
        )
    elif "missing" in found:
        here = found.get("here") or (inputs.dev / "nvidiactl").exists()
        yield "warn" if here else "ok", str(found["missing"])
    else:
        by_name: dict[str, list[str]] = defaultdict(list)
        for index, name in found["devices"]:
            by_name[name].append(index)
        names = "; ".join(f"{name} ({', '.join(them)})" for name, them in by_name.items())
        left_out = "" if "gpu" in inputs.conf.sources else "; OTEL_DDP_SOURCES leaves them out"
        yield "ok", f"{found['version']}, GPUs: {names}{left_out}"
        yield from (("warn", remark) for remark in found["remarks"])
        for name in found["hiding"]:
            if inputs.env.get(name, "all").strip() in ("", "-1"):
                yield "warn", f"{name} shows no GPU to programs started from here"
    unread = [
        f"{vendor} (/dev/{node.relative_to(inputs.dev)})"
        for vendor, pattern in _UNREAD.items()
        for node in sorted(inputs.dev.glob(pattern))[:1]
    ]
    if unread:
        yield (
            "warn",
            f"boards of {' and '.join(unread)} are not read, so there are no hw_gpu_* series of "
            "them; the training on them is measured all the same",
        )
    for agent in inputs.agents:
        sees_some = bool(mappings(agent.get("gpus")))
        if _has_gpus(inputs) and not sees_some:
            yield (
                "warn",
                "the agent shows no GPU, although there are some: it was started with other "
                "OTEL_DDP_SOURCES, or in a container that does not see them",
            )
        for remark in gpu_remarks(agent):
            if _has_gpus(inputs) or sees_some or not remark.startswith(NO_DRIVER_REMARKS):
                yield "warn", remark


def journals(inputs: Inputs) -> Said:
    """Makes the directory, as the next process that starts would, and says what that one says."""
    try:
        places, remark = inputs.places()
    except ConfigError as error:
        yield "fail", str(error)
        return
    if remark:
        yield "warn" if places else "fail", remark
    if not places:
        return
    path, found = places[0].directory, os.statvfs(places[0].directory)
    yield "ok", f"{path} can be written to"
    size, free_bytes = inputs.conf.journal_bytes, found.f_bavail * found.f_frsize
    needed = f"{_RANKS} journals take {_RANKS * size / _MIB:.0f} MiB"
    sentence = f"{free_bytes / _MIB:.0f} MiB are free, {needed}"
    if free_bytes >= _RANKS * size:
        yield "ok", sentence
    else:
        level: Level = "warn" if free_bytes >= size else "fail"
        advice = "make room (docker: --shm-size), or set OTEL_DDP_JOURNAL_BYTES lower"
        yield level, f"{sentence}: {advice}"


def directories(inputs: Inputs) -> Said:
    """Makes those on a disk, as the agent would."""
    conf = inputs.conf
    try:
        first = inputs.places()[0][0]
    except (ConfigError, IndexError):
        return  # the check of the journals says why
    for variable, path, ours in (
        ("OTEL_DDP_SPOOL_DIR", spool_directory(conf, first, conf.node), True),
        ("OTEL_DDP_HISTORY_DIR", default_directory(conf.history_directory), False),
    ):
        try:
            files.make_kept(path, ours=ours)
            # Quotas, read-only mounts and full disks show only on a write.
            with tempfile.TemporaryFile(dir=path, buffering=0) as file:
                file.write(b"otel_ddp")
        except OSError as error:  # noqa: PERF203
            why = f"{path} cannot be used ({error.strerror})"
            yield "fail", f"{why}; name another directory in {variable}"
        else:
            yield "ok", f"{path} can be written to"


def processes(inputs: Inputs) -> Said:
    for sentence in duplicate_ranks(inputs.survey):
        yield "warn", sentence
    unseen = [
        cell(rank, "?")
        for each in inputs.agents
        if isinstance(each.get("unseen"), list)
        for rank in each["unseen"]
    ]
    if not unseen:
        yield "ok", "no process is hidden from its agent"
        return
    yield (
        "warn",
        f"the agent cannot see the process of rank {', '.join(unseen)}, so there are no "
        "process_* series for it. If it runs in another container, let them share process ids "
        "(shareProcessNamespace, hostPID, --pid=host); if on another node, OTEL_DDP_DIR must name "
        "a directory that each node has for itself, such as one in /dev/shm",
    )


def _asked_in_a_process(limit_s: float) -> dict[str, Any] | str:
    """What `print_gpus` says in a process of its own, as a call of the driver may never return."""
    process = subprocess.Popen(
        [sys.executable, "-c", f"from {__name__} import print_gpus; print_gpus()"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    try:
        output, said = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        process.kill()
        # A process that hangs in the kernel cannot be killed, and is left behind.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=1.0)
        return f"has not ended within {limit_s:g} s"
    if process.returncode:
        return f"failed ({(said.strip().splitlines() or [f'exit {process.returncode}'])[-1]})"
    # A driver's library may have printed something before.
    answer: dict[str, Any] = json.loads(output.strip().splitlines()[-1])
    return answer
