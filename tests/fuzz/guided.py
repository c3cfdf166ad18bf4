"""Fuzzes one target, guided by what of our code each input reaches: TARGET SECONDS CORPUS."""

from __future__ import annotations

import logging
import sys

import atheris

with atheris.instrument_imports(include=["otel_ddp", "fuzz"]):
    from fuzz.targets import TARGETS
    from otel_ddp import errors


def main() -> None:
    target, seconds, corpus = sys.argv[1:]
    logging.disable(logging.CRITICAL)
    # Nothing of ours hides a fault while it is looked for.
    errors.raise_failures = True
    limits = (
        f"-max_total_time={seconds}",
        "-timeout=20",
        "-rss_limit_mb=2048",
        "-max_len=2000",
        "-len_control=0",
    )
    atheris.Setup([sys.argv[0], corpus, *limits], TARGETS[target])
    atheris.Fuzz()


if __name__ == "__main__":
    main()
