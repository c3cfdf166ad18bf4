"""otel-ddp replay: send what offline runs have kept on disk, from here or from a copy."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TextIO

from otel_ddp import settings
from otel_ddp.agent.export.delivery_report import human_size
from otel_ddp.agent.export.otlp.outcome import SIGNALS, exported_signals
from otel_ddp.agent.export.replay import (
    AnotherReplay,
    FoundSpool,
    Replay,
    SentLogUnwritable,
    Tally,
    find_spools,
)
from otel_ddp.cli.status import cell, tell
from otel_ddp.errors import ConfigError
from otel_ddp.journal.layout import SUFFIX

# From this age on a Prometheus with the usual settings refuses values.
_OLD_S = 3600.0
_BAR = 30
_LINE_EVERY_S = 10.0
_DRAW_EVERY_S = 0.1


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Send what offline runs have kept on disk, with its own times. Nothing is removed: what "
        "was sent is remembered beside it, for each destination. Where to: what the variables "
        "OTEL_EXPORTER_OTLP_* say, else a collector on this machine."
    )
    parser.add_argument(
        "directories",
        nargs="+",
        metavar="DIR",
        type=Path,
        help="what `otel-ddp status` named, a copy of it, or a directory in which several lie",
    )
    parser.add_argument(
        "--on-conflict",
        choices=("skip", "error", "send"),
        default="skip",
        help="with what was sent there before: leave it out (skip, the default), stop before "
        "anything is sent (error), or send it again (send)",
    )


def run(asked: argparse.Namespace) -> int:
    try:
        # Whatever the trainings are told: who replays wants to send.
        conf = settings.read(agent="auto")
        spools = list(_spools(asked.directories))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    signals = exported_signals(os.environ)
    for each in SIGNALS:
        if each not in signals:
            print(f"{each} are not sent: OTEL_{each.upper()}_EXPORTER=none")
    # These packages take long to import.
    from otel_ddp.agent.export.otlp.transport import Transport, with_endpoint

    conf_there = with_endpoint(conf)
    if conf_there is None:
        sentence = (
            "No collector is named and none answers on this machine: set "
            "OTEL_EXPORTER_OTLP_ENDPOINT, to http://collector:4318 for example."
        )
        print(sentence, file=sys.stderr)
        return 2
    transport = Transport(conf_there)
    try:
        with Replay(transport, spools, signals, again=asked.on_conflict == "send") as replay:
            return _replay(replay, spools, transport.destination, asked.on_conflict)
    except AnotherReplay:
        print("Another replay of the same to the same destination is under way.", file=sys.stderr)
        return 1
    except SentLogUnwritable as why:
        print(f"{why}. What was sent is remembered there: replay a copy.", file=sys.stderr)
        return 1
    finally:
        transport.close()


def _spools(directories: Sequence[Path]) -> Iterator[FoundSpool]:
    known: set[str] = set()
    for directory in directories:
        try:
            spools = find_spools(directory)
        except OSError as error:
            raise ConfigError(f"{directory} cannot be read: {error.strerror}.") from None
        if not spools:
            raise ConfigError(_nothing(directory))
        for spool in spools:
            if (path := os.path.realpath(spool.path)) not in known:
                known.add(path)
                yield spool


def _nothing(directory: Path) -> str:
    if any(directory.glob(f"*{SUFFIX}")):
        return (
            f"{directory} holds journals, which no agent has read: `otel-ddp agent --dir "
            f"{directory}` exports what is in them."
        )
    return f"Nothing that an offline run has kept is in {directory}."


def _replay(replay: Replay, spools: Sequence[FoundSpool], there: str, on_conflict: str) -> int:
    there = cell(there)
    for spool in spools:
        _introduce(spool)
    if replay.sent_before and on_conflict == "error":
        sentence = (
            f"{replay.sent_before} of these requests were sent to {there} before, so nothing is "
            "sent now (--on-conflict error)."
        )
        print(sentence, file=sys.stderr)
        return 1
    if replay.sent_before:
        what = "are sent again" if on_conflict == "send" else "are left out"
        print(f"{replay.sent_before} requests were sent to {there} before and {what}")
    if not replay.pending:
        return tell("nothing is left to send")
    _warn_of_age(replay, time.time())
    progress = Progress(sys.stdout, len(replay.pending), replay.size_bytes)
    try:
        for tally in replay.send():
            progress.show(tally)
    except (KeyboardInterrupt, SentLogUnwritable):
        progress.end()
        print(f"stopped: {_sent(replay.tally, there)}; the next replay goes on from there")
        raise
    progress.end()
    print(_sent(replay.tally, there))
    told = list(_troubles(replay.tally))
    for sentence in told:
        print(f"! {sentence}")
    return 1 if told else 0


def _introduce(spool: FoundSpool) -> None:
    kept = human_size(sum(entry.size_bytes for entry in spool.entries))
    print(f"{spool.path}: {len(spool.entries)} requests, {kept}")
    if spool.missing:
        print(
            f"! {spool.missing} requests that were kept here are gone: they made room for newer "
            "ones (OTEL_DDP_SPOOL_BYTES), or were deleted"
        )
    if spool.in_use:
        print("! an agent still adds to it: replay it once more when the training has ended")


def _warn_of_age(replay: Replay, now_s: float) -> None:
    age_s = now_s - replay.oldest_s
    if not replay.oldest_s or age_s < _OLD_S:
        return
    print(
        f"! The oldest value is {_long(age_s)} old. Prometheus refuses what is older than its "
        "newest value by more than its out_of_order_time_window (2h in deploy/prometheus/"
        "prometheus.yml), and a collector in between does not say so. Set it to "
        f"{int(age_s / 3600) + 2}h before. What was refused is sent again by --on-conflict send."
    )


def _sent(tally: Tally, there: str) -> str:
    return f"sent {tally.requests} requests with {tally.points} points to {there}"


def _troubles(tally: Tally) -> Iterator[str]:
    """What did not arrive, and why."""
    for why, points in tally.refused_points.items():
        yield f"{points} points were refused: {cell(why)}"
    if tally.rejected_points:
        yield f"{tally.rejected_points} points were taken and dropped by the collector"
    for signal, why in tally.given_up.items():
        yield (
            f"{tally.left[signal]} requests of {signal} are left: {cell(why)}; the next "
            "replay goes on from there"
        )
    if tally.damaged:
        yield f"{tally.damaged} requests are damaged and cannot be sent"
    for why, count in tally.unreadable.items():
        yield f"{count} requests cannot be read: {why}"


def _long(seconds: float) -> str:
    if seconds < 2 * 86400:
        return f"{seconds / 3600:.0f} h"
    return f"{seconds / 86400:.0f} days"


class Progress:
    """A bar on a terminal; elsewhere a line every ten seconds."""

    def __init__(
        self,
        stream: TextIO,
        requests: int,
        size_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = stream
        self._requests = requests
        self._size_bytes = max(size_bytes, 1)
        self._clock = clock
        self._terminal = stream.isatty()
        self._began = self._shown = clock()
        self._drawn = ""

    def show(self, tally: Tally) -> None:
        """Say how far it is, if it is time to."""
        now = self._clock()
        if now - self._shown < (_DRAW_EVERY_S if self._terminal else _LINE_EVERY_S):
            return
        self._shown = now
        share = tally.done_bytes / self._size_bytes
        left_s = (now - self._began) * (1.0 - share) / max(share, 1e-9)
        text = f"{share:4.0%}  {tally.requests} of {self._requests} requests, {left_s:.0f} s left"
        if not self._terminal:
            print(text.strip(), file=self._stream, flush=True)
            return
        done = int(share * _BAR)
        self._draw(f"[{'#' * done}{'.' * (_BAR - done)}] {text}")

    def end(self) -> None:
        """Take the bar away."""
        self._draw("")

    def _draw(self, text: str) -> None:
        if self._terminal and (text or self._drawn):
            with contextlib.suppress(OSError):
                print(f"\r{text.ljust(len(self._drawn))}", end="", file=self._stream)
                print(end="" if text else "\r", file=self._stream, flush=True)
            self._drawn = text
