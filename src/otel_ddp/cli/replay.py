"""otel-ddp replay: sends the data that offline runs have kept on disk, or a copy of it."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

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
from otel_ddp.cli.progress_bar import ProgressBar
from otel_ddp.cli.text import cell, print_answer
from otel_ddp.errors import ConfigError
from otel_ddp.journal.layout import SUFFIX

# From this age on a Prometheus with the usual settings refuses values.
_OLD_S = 3600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Send the data that offline runs have kept on disk, with their own times. Nothing is "
        "removed: a file beside the data remembers what was sent to each destination. The "
        "destination is that of the OTEL_EXPORTER_OTLP_* variables, else a collector on this "
        "machine."
    )
    parser.add_argument(
        "directories",
        nargs="+",
        metavar="DIR",
        type=Path,
        help="the directory that `otel-ddp status` shows, a copy of it, or one that holds several",
    )
    parser.add_argument(
        "--on-conflict",
        choices=("skip", "error", "send"),
        default="skip",
        help="for data that were sent there before: leave them out (skip, the default), stop "
        "before anything is sent (error), or send them again (send)",
    )


def run(options: argparse.Namespace) -> int:
    try:
        # Not the trainings' setting, which may be offline: a replay sends.
        conf = settings.read(agent="auto")
        spools = list(_spools(options.directories))
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
        with Replay(transport, spools, signals, again=options.on_conflict == "send") as replay:
            return _replay(replay, spools, transport.destination, options.on_conflict)
    except AnotherReplay:
        print("Another replay of these data to this destination is running.", file=sys.stderr)
        return 1
    except SentLogUnwritable as why:
        print(f"{why}. That file remembers what was sent: replay a copy.", file=sys.stderr)
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
            f"{directory} holds journals that no agent has read: `otel-ddp agent --dir "
            f"{directory}` exports them."
        )
    return f"{directory} holds no data of an offline run."


def _replay(
    replay: Replay, spools: Sequence[FoundSpool], destination: str, on_conflict: str
) -> int:
    there = cell(destination)
    for spool in spools:
        _describe(spool)
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
    missing = sum(spool.missing for spool in spools)
    if not replay.pending:
        print_answer("nothing is left to send")
        return 1 if missing else 0
    _warn_of_age(replay, time.time())
    bar = ProgressBar(sys.stdout, len(replay.pending), replay.size_bytes)
    try:
        for tally in replay.send():
            bar.show(tally)
    except (KeyboardInterrupt, SentLogUnwritable):
        bar.end()
        print(f"stopped: {_sent(replay.tally, there)}; the next replay continues there")
        raise
    bar.end()
    print(_sent(replay.tally, there))
    troubles = list(_troubles(replay.tally))
    if missing:
        troubles.append(f"{missing} requests were missing, as said above, and are lost")
    for sentence in troubles:
        print(f"! {sentence}")
    return 1 if troubles else 0


def _describe(spool: FoundSpool) -> None:
    kept = human_size(sum(entry.size_bytes for entry in spool.entries))
    print(f"{spool.path}: {len(spool.entries)} requests, {kept}")
    if spool.missing:
        print(
            f"! {spool.missing} requests that were kept here are missing: they made room for newer "
            "ones (OTEL_DDP_SPOOL_BYTES), or were deleted"
        )
    if spool.in_use:
        print("! an agent still adds to it: replay it again when the training has ended")


def _warn_of_age(replay: Replay, now_s: float) -> None:
    age_s = now_s - replay.oldest_s
    if not replay.oldest_s or age_s < _OLD_S:
        return
    print(
        f"! The oldest value is {_age(age_s)} old. Prometheus refuses a value that is older than "
        "its newest one by more than out_of_order_time_window (2h in deploy/prometheus/"
        "prometheus.yml), and a collector in between does not report that. Set it to "
        f"{int(age_s / 3600) + 2}h before. --on-conflict send sends refused values again."
    )


def _sent(tally: Tally, there: str) -> str:
    return f"sent {tally.requests} requests with {tally.points} points to {there}"


def _troubles(tally: Tally) -> Iterator[str]:
    """A sentence for each kind of data that did not arrive."""
    for why, points in tally.refused_points.items():
        yield f"{points} points were refused: {cell(why)}"
    if tally.rejected_points:
        yield f"{tally.rejected_points} points were accepted and dropped by the collector"
    for signal, why in tally.given_up.items():
        yield (
            f"{tally.left[signal]} requests of {signal} are left: {cell(why)}; the next replay "
            "continues there"
        )
    if tally.damaged:
        yield f"{tally.damaged} requests are damaged and cannot be sent"
    for why, count in tally.unreadable.items():
        yield f"{count} requests cannot be read: {why}"


def _age(seconds: float) -> str:
    if seconds < 2 * 86400:
        return f"{seconds / 3600:.0f} h"
    return f"{seconds / 86400:.0f} days"
