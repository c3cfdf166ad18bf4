"""The inputs of the doctor's checks, and the type of their findings."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

from otel_ddp import settings
from otel_ddp.errors import ConfigError
from otel_ddp.journal.place import candidates, existing, is_in_memory
from otel_ddp.journal.survey import Survey, survey

Level = Literal["ok", "warn", "fail"]


class Finding(NamedTuple):
    """One line of the answer."""

    level: Level
    subject: str
    sentence: str


Findings = Iterator[Finding]


class DoctorInputs:
    """The inputs of all checks; each is read when a check needs it first."""

    def __init__(
        self,
        directory: str = "",
        env: Mapping[str, str] = os.environ,
        proc: Path = Path("/proc"),
        dev: Path = Path("/dev"),
        *,
        nvml_s: float = 10.0,
        answer_s: float = 5.0,
    ) -> None:
        self._directory = directory
        self.named_by = "with --dir" if directory else "in OTEL_DDP_DIR"
        self.host = os.uname().nodename
        self.env = env
        self.proc = proc
        self.dev = dev
        self._nvml_s = nvml_s
        self.answer_s = answer_s

    @cached_property
    def _read(self) -> tuple[settings.Settings, list[str]]:
        usable, wrong = dict(self.env), []
        for name in sorted(self.env):
            try:
                settings.read({name: self.env[name]})
            except ConfigError as error:  # noqa: PERF203
                wrong.append(str(error))
                del usable[name]
        return settings.read(usable, directory=self._directory or None), wrong

    @property
    def conf(self) -> settings.Settings:
        """The settings, without the variables that are wrong."""
        return self._read[0]

    @property
    def wrong(self) -> list[str]:
        """A sentence for each variable that is wrong."""
        return self._read[1]

    @cached_property
    def survey(self) -> Survey:
        """The agents and processes of this node."""
        return survey(existing(self.conf.directory, self.env))

    @property
    def agents(self) -> list[Mapping[str, Any]]:
        """The living agents, as they describe themselves."""
        return [each for each in self.survey.agents if each["alive"]]

    @cached_property
    def place(self) -> Path:
        """The directory in which a process that starts now would put its journal."""
        if self.conf.directory:
            return Path(self.conf.directory).absolute()
        paths = list(dict.fromkeys(candidates(self.env, offline=self.conf.offline)))
        usable = [path for path in paths if not problem(path, named=False)]
        return min(usable or paths, key=lambda path: not is_in_memory(path))

    @cached_property
    def nvml(self) -> dict[str, Any] | str:
        """What NVML reports; if it does not answer, the reason as the end of a sentence."""
        code = "from otel_ddp.cli.setup.doctor.machine import print_gpus; print_gpus()"
        return run_python(code, self._nvml_s)


def problem(path: Path, named: bool) -> str:
    """Why a private directory cannot be used or made; empty where it can."""
    nearest = nearest_existing(path)
    try:
        if nearest == path:
            found = os.lstat(path)
            if not stat.S_ISDIR(found.st_mode):
                return "is no directory (a link is not followed)"
            if found.st_uid != os.geteuid():
                return f"belongs to user {found.st_uid}, not to this one"
            if named and (mode := stat.S_IMODE(found.st_mode)) & 0o077:
                return f"can be entered by other users (mode {mode:04o}): chmod 700 {path}"
        # Quotas, read-only mounts and full disks show only on a write.
        with tempfile.TemporaryFile(dir=nearest) as file:
            file.write(b"otel_ddp")
            file.flush()
    except OSError as error:
        return f"cannot be written to ({error.strerror})"
    return ""


def nearest_existing(path: Path) -> Path:
    """The path itself, or the nearest directory above it that exists."""
    return next(each for each in (path, *path.parents) if os.path.lexists(each))


def run_python(code: str, limit_s: float) -> dict[str, Any] | str:
    """What this code prints as JSON; if it fails, the reason as the end of a sentence.

    It runs in a process of its own, because it may crash or never return.
    """
    start = "import json, sys\nsys.path[:] = json.loads(sys.argv[1])\n"
    process = subprocess.Popen(
        [sys.executable, "-c", start + code, json.dumps(sys.path)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    try:
        output, errors = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        process.kill()
        # A process that hangs in the kernel cannot be killed, and is left behind.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=1.0)
        return f"has not ended within {limit_s:g} s"
    if process.returncode < 0:
        return f"died of signal {-process.returncode}"
    try:
        answer = json.loads(output.splitlines()[-1])
    except (ValueError, IndexError):
        answer = None
    if process.returncode or not isinstance(answer, dict):
        last = (errors.strip().splitlines() or ["it printed nothing"])[-1]
        return f"failed ({last})"
    return answer
