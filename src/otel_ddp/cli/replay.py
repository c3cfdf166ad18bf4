"""otel-ddp replay: sends the data that offline runs have kept on disk, or a copy of it."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from otel_ddp import settings
from otel_ddp.agent.export.otlp.outcome import SIGNALS, exported_signals
from otel_ddp.agent.export.replay import (
    AnotherReplay,
    FoundSpool,
    KeptRequests,
    SentLogUnwritable,
    find_spools,
    send,
)
from otel_ddp.agent.export.report import DeliveryStatus, human_size
from otel_ddp.cli.text import cell, print_answer
from otel_ddp.errors import ConfigError
from otel_ddp.journal.layout import SUFFIX

if TYPE_CHECKING:
    from otel_ddp.agent.export.delivery import Delivery
    from otel_ddp.agent.export.otlp.transport import Transport

# From this age on a Prometheus with the usual settings refuses values.
_OLD_S = 3600.0
_SHOWN_EVERY_S = (0.2, 10.0)


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
    again = options.on_conflict == "send"
    with contextlib.closing(Transport(conf_there)) as transport:
        try:
            kept = KeptRequests(spools, transport.address, signals, again=again)
            with contextlib.closing(kept):
                return _replay(kept, spools, transport, options.on_conflict)
        except AnotherReplay:
            print("Another replay of these data to this destination is running.", file=sys.stderr)
        except SentLogUnwritable as why:
            print(f"{why}. That file remembers what was sent: replay a copy.", file=sys.stderr)
    return 1


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
    kept: KeptRequests, spools: Sequence[FoundSpool], transport: Transport, on_conflict: str
) -> int:
    there = cell(transport.destination)
    for spool in spools:
        _describe(spool)
    if kept.sent_before and on_conflict == "error":
        sentence = (
            f"{kept.sent_before} of these requests were sent to {there} before, so nothing is "
            "sent now (--on-conflict error)."
        )
        print(sentence, file=sys.stderr)
        return 1
    if kept.sent_before:
        what = "are sent again" if on_conflict == "send" else "are left out"
        print(f"{kept.sent_before} requests were sent to {there} before and {what}")
    missing = sum(spool.missing for spool in spools)
    if not kept.entries:
        print_answer("nothing is left to send")
        return 1 if missing else 0
    _warn_of_age(kept.oldest_s, time.time())
    from otel_ddp.agent.export.delivery import Delivery

    # In the order of time, and whatever is in doubt is refused: a person waits.
    delivery = Delivery(transport, kept, jitter=lambda: 0.5, patience_s=0.0)
    try:
        _send(kept, delivery)
    except (KeyboardInterrupt, SentLogUnwritable):
        print(f"stopped: {_sent(delivery.status(), there)}; the next replay continues there")
        raise
    print(_sent(delivery.status(), there))
    troubles = list(_troubles(kept, delivery.status()))
    if missing:
        troubles.append(f"{missing} requests were missing, as said above, and are lost")
    for sentence in troubles:
        print(f"! {sentence}")
    return 1 if troubles else 0


def _send(kept: KeptRequests, delivery: Delivery) -> None:
    """Show how far it is: on one line of a terminal, elsewhere now and then."""
    terminal = sys.stdout.isatty()
    began = shown_at = time.monotonic()
    whole, requests = max(kept.size_bytes, 1), kept.entries
    try:
        for _ in send(kept, delivery):
            now = time.monotonic()
            if now - shown_at < _SHOWN_EVERY_S[not terminal]:
                continue
            shown_at, share = now, 1.0 - kept.size_bytes / whole
            left_s = (now - began) * (1.0 - share) / max(share, 1e-9)
            done = f"{requests - kept.entries} of {requests} requests"
            text = f"{share:.0%}  {done}, {left_s:.0f} s left"
            print(f"\r\033[K{text}" if terminal else text, end="" if terminal else "\n", flush=True)
    finally:
        if terminal:
            print("\r\033[K", end="", flush=True)


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


def _warn_of_age(oldest_s: int, now_s: float) -> None:
    age_s = now_s - oldest_s
    if not oldest_s or age_s < _OLD_S:
        return
    print(
        f"! The oldest value is {_age(age_s)} old. Prometheus refuses a value that is older than "
        "its newest one by more than out_of_order_time_window (2h in deploy/prometheus/"
        "prometheus.yml), and a collector in between does not report that. Set it to "
        f"{int(age_s / 3600) + 2}h before. --on-conflict send sends refused values again."
    )


def _sent(status: DeliveryStatus, there: str) -> str:
    return f"sent {status.delivered} requests with {status.delivered_points} points to {there}"


def _troubles(kept: KeptRequests, status: DeliveryStatus) -> Iterator[str]:
    """A sentence for each kind of data that did not arrive."""
    for why, points in status.refused_points.items():
        yield f"{points} points were refused: {cell(why)}"
    for signal, count in kept.left.items():
        why = cell(status.troubles[signal])
        yield f"{count} requests of {signal} are left: {why}; the next replay continues there"
    if damaged := status.dropped_points.get("corrupt"):
        yield f"{damaged} points are in damaged requests and cannot be sent"


def _age(seconds: float) -> str:
    if seconds < 2 * 86400:
        return f"{seconds / 3600:.0f} h"
    return f"{seconds / 86400:.0f} days"
