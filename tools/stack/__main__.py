"""python -m tools.stack [build | demo ...]: the real servers here, without Docker."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from tools.stack.build import binaries
from tools.stack.go import CannotBuild
from tools.stack.server import NotUp
from tools.stack.up import Addresses, AlreadyRunning, up


def main(words: list[str]) -> int:
    """Without arguments: run the stack until Ctrl-C."""
    for polite in (signal.SIGTERM, signal.SIGHUP):
        # End the servers too.
        signal.signal(polite, lambda number, _: sys.exit(128 + number))
    what, *rest = words or ["run"]
    if what not in ("run", "build", "demo"):
        print(__doc__, file=sys.stderr)
        return 2
    try:
        return _run(what, rest)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except AlreadyRunning as other:
        _say(f"stack: {other}")
        if what == "demo":
            return _demo(other.addresses, rest)
        _say("\n".join(other.addresses.lines()))
    except (CannotBuild, NotUp) as why:
        print(f"stack: {why}", file=sys.stderr)
        return 1
    return 0


def _run(what: str, rest: list[str]) -> int:
    built = binaries(say=_say)
    if what == "build":
        return 0
    with up(built, say=_say) as addresses:
        if what == "demo" and (status := _demo(addresses, rest)):
            return status
        _say("\n".join(["", *addresses.lines(), "", "Ctrl-C ends it; the data stay in .stack."]))
        with suppress(KeyboardInterrupt):
            while True:
                signal.pause()
    return 0


def _demo(addresses: Addresses, rest: list[str]) -> int:
    command = [str(Path(sys.executable).with_name("otel-ddp")), "demo", *rest]
    env = {**os.environ, "OTEL_EXPORTER_OTLP_ENDPOINT": addresses.collector}
    status = subprocess.run(command, env=env).returncode
    if status:
        return status
    look = addresses.grafana or (
        f"curl {addresses.prometheus}/api/v1/query -d 'query=training_scalar{{name=\"loss\"}}[10m]'"
    )
    _say(f"\nLook at what arrived in Prometheus:  {look}")
    return 0


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
