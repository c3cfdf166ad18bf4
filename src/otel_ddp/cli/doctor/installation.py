"""Checks the installed packages, torch, and the variables that are set."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import platform
import sys
from collections.abc import Iterator

from otel_ddp import __version__, settings
from otel_ddp.cli.doctor.inputs import DoctorInputs, Finding, Findings
from otel_ddp.cli.doctor.subprocess_call import run_python
from otel_ddp.errors import ConfigError
from otel_ddp.identity import identity
from otel_ddp.identity.strategy import Choice
from otel_ddp.torch.versions import too_old

_PACKAGES = {
    "opentelemetry-sdk": "opentelemetry.sdk.resources",
    "opentelemetry-exporter-otlp": "opentelemetry.exporter.otlp.proto.http.metric_exporter",
    "prometheus-client": "prometheus_client",
    "requests": "requests",
    "nvidia-ml-py": "pynvml",
}
_TORCH_S = 120.0


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
