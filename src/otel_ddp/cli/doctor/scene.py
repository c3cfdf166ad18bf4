"""What the checks look at, and what they find."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

from otel_ddp import settings
from otel_ddp.agent.node_status import survey
from otel_ddp.cli.doctor.asking import ask
from otel_ddp.cli.status import mappings
from otel_ddp.errors import ConfigError
from otel_ddp.journal.place import candidates, existing, on_memory

Level = Literal["ok", "warn", "fail"]


class Finding(NamedTuple):
    """One line of the answer."""

    level: Level
    subject: str
    sentence: str


Findings = Iterator[Finding]


class DoctorInputs:
    """What the checks look at, each found out when a check asks for it first."""

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
        """Without the variables that mean nothing."""
        return self._read[0]

    @property
    def wrong(self) -> list[str]:
        """What is wrong with those."""
        return self._read[1]

    @cached_property
    def survey(self) -> dict[str, Any]:
        return survey(existing(self.conf.directory, self.env))

    @property
    def agents(self) -> list[Mapping[str, Any]]:
        """Those that live, as they describe themselves."""
        return [each for each in mappings(self.survey["agents"]) if each.get("alive") is True]

    @cached_property
    def place(self) -> Path:
        """Where a process that starts now would put its journal."""
        if self.conf.directory:
            return Path(self.conf.directory).absolute()
        paths = list(dict.fromkeys(candidates(self.env, offline=self.conf.offline)))
        usable = [path for path in paths if not problem(path, named=False)]
        return min(usable or paths, key=lambda path: not on_memory(path))

    @cached_property
    def boards(self) -> dict[str, Any] | str:
        """What NVML tells, or in which way it does not answer."""
        return ask("from otel_ddp.cli.doctor.boards import tell; tell()", self._nvml_s)


def problem(path: Path, named: bool) -> str:
    """Why a private directory cannot be used or made; empty where it can."""
    nearest = nearest_that_is(path)
    try:
        if nearest == path:
            found = os.lstat(path)
            if not stat.S_ISDIR(found.st_mode):
                return "is no directory (a link is not followed)"
            if found.st_uid != os.geteuid():
                return f"belongs to user {found.st_uid}, not to us"
            if named and (mode := stat.S_IMODE(found.st_mode)) & 0o077:
                return f"can be entered by other users (mode {mode:04o}): chmod 700 {path}"
        # Quotas, read-only mounts and full disks show only when something is written.
        with tempfile.TemporaryFile(dir=nearest) as file:
            file.write(b"otel_ddp")
            file.flush()
    except OSError as error:
        return f"cannot be written to ({error.strerror})"
    return ""


def nearest_that_is(path: Path) -> Path:
    """The path itself, or what there is of it."""
    return next(each for each in (path, *path.parents) if os.path.lexists(each))
