"""otel-ddp run: runs a command, and measures all training processes below it."""

from __future__ import annotations

import argparse
import os
import signal
import sys

from otel_ddp import settings
from otel_ddp.errors import ConfigError
from otel_ddp.identity import identity
from otel_ddp.identity.identity import Choice
from otel_ddp.integrations import launch
from otel_ddp.journal import place

# Exit codes if the command cannot be run: the same as those of env, nohup and timeout.
_NOT_EXECUTABLE, _NOT_FOUND = 126, 127


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "otel-ddp run -- COMMAND ..."
    parser.description = (
        "Run a command, and measure every training below it without a change to its programs: "
        "`otel-ddp run -- torchrun --nproc-per-node=4 train.py`. The command takes this "
        "process's place, so its exit status and its signals are its own."
    )
    parser.add_argument(
        "words",
        nargs=argparse.REMAINDER,
        metavar="COMMAND",
        help="what to run, with its arguments: python train.py, torchrun, accelerate launch, srun",
    )


def run(options: argparse.Namespace) -> int:
    words = options.words[1:] if options.words[:1] == ["--"] else options.words
    if not words:
        raise ConfigError("nothing to run: otel-ddp run -- python train.py")
    if lacking := place.missing_calls():
        _say(f"this system lacks {lacking}, so nothing is recorded")
    else:
        _check_settings()
        launch.add_to_path(os.environ)
    return _take_our_place(words)


def _check_settings() -> None:
    """Raise ConfigError for invalid settings. In the training itself they would only be logged."""
    conf = settings.read()
    Choice(conf.strategy)
    identity.resolve()


def _take_our_place(words: list[str]) -> int:
    # Python ignores these signals, and a command that `exec` starts would ignore them too. So
    # restore their defaults.
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(words[0], words)
    except FileNotFoundError:
        _say(f"{words[0]}: not found{_advice(words[0])}")
        return _NOT_FOUND
    except OSError as error:
        _say(f"{words[0]}: {error.strerror}{_advice(words[0])}")
        return _NOT_EXECUTABLE


def _advice(word: str) -> str:
    return f": otel-ddp run -- python {word}" if word.endswith(".py") else ""


def _say(what: str) -> None:
    print(f"otel-ddp run: {what}", file=sys.stderr)
