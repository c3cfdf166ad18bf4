"""python -m tools.stack [build]: the real servers here, without Docker."""

from __future__ import annotations

import signal
import sys
from contextlib import suppress

from tools.stack.build import binaries
from tools.stack.go import CannotBuild
from tools.stack.server import NotUp
from tools.stack.up import up


def main(words: list[str]) -> int:
    """Without arguments: run the stack until Ctrl-C."""
    for polite in (signal.SIGTERM, signal.SIGHUP):
        # End the servers too.
        signal.signal(polite, lambda number, _: sys.exit(128 + number))
    if words not in ([], ["build"]):
        print(__doc__, file=sys.stderr)
        return 2
    try:
        built = binaries(say=_say)
        if not words:
            with up(built, say=_say) as addresses, suppress(KeyboardInterrupt):
                end = "Ctrl-C ends it; the data stay in .stack."
                _say("\n".join(["", *addresses.lines(), "", end]))
                while True:
                    signal.pause()
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except (CannotBuild, NotUp) as why:
        print(f"stack: {why}", file=sys.stderr)
        return 1
    return 0


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
