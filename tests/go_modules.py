"""Programs out of Go modules, for what only `make stress` looks at."""

from __future__ import annotations

import os
import subprocess
from functools import cache
from pathlib import Path

from tools.stack.build import ROOM
from tools.stack.go import find
from tools.stack.versions import OLDEST_GO


@cache
def _go() -> Path:
    return find(ROOM, lambda _, command: subprocess.run(command, check=True))


def run(program: str, *arguments: str | Path) -> tuple[int, str]:
    """The exit status of a program, `<module>@<version>/<folder>`, and what it prints.

    Go builds it at the first call, which takes minutes for a large one.
    """
    module, _, rest = program.partition("@")
    version, _, within = rest.partition("/")
    # A module of our own that asks for it: `go run <package>@<version>` also asks for the list of
    # all versions, which a registry may not have.
    asking = ROOM / "go" / f"{module.replace('/', '_')}@{version}"
    asking.mkdir(parents=True, exist_ok=True)
    if not (asking / "go.mod").exists():
        oldest = ".".join(map(str, OLDEST_GO))
        asked = f"module asking\n\ngo {oldest}\n\nrequire {module} {version}\n"
        (asking / "go.mod").write_text(asked)
    command = [_go(), "run", "-mod=mod", f"{module}/{within}".rstrip("/"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=asking, env=_environment())
    return done.returncode, done.stdout if done.returncode == 0 else done.stdout + done.stderr


def _environment() -> dict[str, str]:
    # No newer toolchain fetched behind our back, and none of the user's module settings.
    return {**os.environ, "GOTOOLCHAIN": "local", "GOFLAGS": "", "GOWORK": "off"}
