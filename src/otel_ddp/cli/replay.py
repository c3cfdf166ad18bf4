"""otel-ddp replay: sends the data that offline runs have kept on disk, or a copy of it."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2s
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from otel_ddp import files, settings
from otel_ddp.agent.export.otlp import SIGNALS, Signal, exported_signals
from otel_ddp.agent.export.report import DeliveryStatus, human_size
from otel_ddp.agent.export.spool import LOCK, OFFLINE_PREFIX, Entries, Entry, Why, list_entries
from otel_ddp.cli.text import cell, print_answer
from otel_ddp.errors import ConfigError
from otel_ddp.journal.layout import SUFFIX

if TYPE_CHECKING:
    from otel_ddp.agent.export.delivery import Delivery

# After so many failures without a success, a minute or two, the rest of a signal is left.
_MOST_FAILURES = 7
# From this age on a Prometheus with the usual settings refuses values.
_OLD_S = 3600.0
_SHOWN_EVERY_S = 10.0


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
    from otel_ddp.agent.export.delivery import Delivery
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
                # In the order of time, and whatever is in doubt is refused: a person waits.
                delivery = Delivery(transport, kept, jitter=lambda: 0.5, patience_s=0.0)
                there = cell(transport.destination)
                return _replay(kept, spools, delivery, there, options.on_conflict)
        except ReplayStopped as why:
            print(why, file=sys.stderr)
    return 1


# -- what was kept


@dataclass(frozen=True)
class FoundSpool:
    """A spool and the requests that were found in it."""

    path: Path
    entries: Sequence[Entry]

    @property
    def missing(self) -> int:
        """How many of the requests that an offline agent put here are no longer here."""
        # An agent that sends empties its own spool.
        offline = self.path.name.startswith(OFFLINE_PREFIX) and self.entries
        return self.entries[-1].number - len(self.entries) if offline else 0


def find_spools(directory: Path) -> list[FoundSpool]:
    """The directory as a spool, or the offline spools in it. Raises OSError."""
    own = FoundSpool(directory, list_entries(directory))
    if own.entries:
        return [own]
    paths = sorted(path for path in directory.glob(f"{OFFLINE_PREFIX}*") if path.is_dir())
    spools = [FoundSpool(path, list_entries(path)) for path in paths]
    return [spool for spool in spools if spool.entries]


def _spools(directories: Sequence[Path]) -> Iterator[FoundSpool]:
    known: set[str] = set()
    for directory in directories:
        try:
            spools = find_spools(directory)
        except OSError as error:
            raise ConfigError(f"{directory} cannot be read: {error.strerror}.") from None
        if not spools and any(directory.glob(f"*{SUFFIX}")):
            raise ConfigError(
                f"{directory} holds journals that no agent has read: `otel-ddp agent --dir "
                f"{directory}` exports them."
            )
        if not spools:
            raise ConfigError(f"{directory} holds no data of an offline run.")
        for spool in spools:
            if (path := os.path.realpath(spool.path)) not in known:
                known.add(path)
                yield spool


def merge_by_time(spools: Sequence[FoundSpool]) -> list[Entry]:
    """The requests of all spools by time; those of one spool in their own order.

    Merged, because a backend refuses values that are much older than its newest one. If one node
    were sent after the other, all values of the second would be too old.
    """
    dated: list[tuple[int, Entry]] = []
    for spool in spools:
        times = accumulate((entry.oldest_s for entry in spool.entries), max)
        dated += zip(times, spool.entries, strict=True)
    return [entry for _, entry in sorted(dated, key=lambda each: each[0])]


class ReplayStopped(Exception):
    """What was sent cannot be remembered; the text says why."""


class SentLog:
    """Remembers which requests of one spool were sent to one address.

    It is a file in the spool, with a line for each request: the name of the request's file, which
    survives copying. It is locked while it is open, so that two replays do not send the same.
    """

    def __init__(self, spool: Path, address: str) -> None:
        told = address.encode("utf-8", "replace")
        self.path = spool / f"sent-{blake2s(told, digest_size=4).hexdigest()}"
        with self._explained(), contextlib.ExitStack() as opened:
            descriptor = files.open_private(self.path, os.O_RDWR | os.O_CREAT)
            self._file = opened.enter_context(os.fdopen(descriptor, "r+b", buffering=0))
            self._lock()
            content = self._file.read()
            # A kill may have torn the last line: then its request was not remembered.
            whole = content[: content.rfind(b"\n") + 1]
            self._file.truncate(len(whole))
            self._file.seek(len(whole))
            self._file.write(b"" if whole else b"# " + told + b"\n")
            opened.pop_all()
        self._names = set(whole.decode("utf-8", "replace").split("\n"))

    def _lock(self) -> None:
        try:
            files.lock(self._file.fileno())
        except BlockingIOError:
            sentence = "Another replay of these data to this destination is running."
            raise ReplayStopped(sentence) from None
        except OSError:
            pass  # a file system without locks

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ReplayStopped(
                f"{self.path} cannot be written: {error.strerror}. That file remembers what was "
                "sent: replay a copy."
            ) from None

    def __contains__(self, entry: Entry) -> bool:
        return entry.path.name in self._names

    def add(self, entry: Entry) -> None:
        """Remember a request; once this returns, a kill does not undo it."""
        with self._explained():
            self._file.write(f"{entry.path.name}\n".encode())

    def close(self) -> None:
        self._file.close()


class KeptRequests(Entries):
    """What is left to send, as the delivery takes it from a spool; no file is removed."""

    def __init__(
        self,
        spools: Sequence[FoundSpool],
        address: Callable[[Signal], str],
        signals: Sequence[Signal] = SIGNALS,
        *,
        again: bool = False,
    ) -> None:
        """*address*: where a signal is sent to. *again*: also what was sent there before."""
        super().__init__()
        self._address = address
        self._logs: dict[tuple[Path, str], SentLog] = {}
        with contextlib.ExitStack() as opened:
            opened.callback(self.close)
            for spool in spools:
                for there in {address(signal) for signal in signals}:
                    self._logs[spool.path, there] = SentLog(spool.path, there)
            opened.pop_all()
        self.sent_before = 0
        for each in merge_by_time(spools):
            if each.signal not in signals:
                continue
            before = each in self._log(each)
            self.sent_before += before
            if again or not before:
                self.add(each)

    def close(self) -> None:
        """Let another replay of the same spools begin."""
        for log in self._logs.values():
            log.close()

    def _log(self, entry: Entry) -> SentLog:
        return self._logs[entry.path.parent, self._address(entry.signal)]

    @property
    def left(self) -> dict[Signal, int]:
        """How many requests of each signal."""
        return {signal: len(entries) for signal, entries in self._entries.items() if entries}

    @property
    def oldest_s(self) -> int:
        """When the oldest value that is to be sent was measured; 0: there is none."""
        times = (each.oldest_s for each in self._entries["metrics"].values())
        return min(filter(None, times), default=0)

    def remove(self, entry: Entry, why: Why) -> None:
        """Done with; the next replay tries again what is refused."""
        super().remove(entry, why)
        if why == "delivered":
            self._log(entry).add(entry)


# -- sending it


def send(
    kept: KeptRequests, delivery: Delivery, sleep: Callable[[float], None] = time.sleep
) -> Iterator[None]:
    """Send all that is taken; comes back after each attempt."""
    for signal in SIGNALS:
        while (wait_s := delivery.send_next(signal)) is not None:
            yield
            if wait_s:
                # Before the first success, a wrong address is more likely than a busy collector.
                failures, status = delivery.failures(signal), delivery.status()
                if failures >= _MOST_FAILURES or not status.delivered:
                    break
                sleep(wait_s)


def _replay(
    kept: KeptRequests,
    spools: Sequence[FoundSpool],
    delivery: Delivery,
    there: str,
    on_conflict: str,
) -> int:
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
    shown_at, requests = time.monotonic(), kept.entries
    try:
        for _ in send(kept, delivery):
            if time.monotonic() - shown_at >= _SHOWN_EVERY_S:
                shown_at = time.monotonic()
                print(f"{requests - kept.entries} of {requests} requests", flush=True)
    except (KeyboardInterrupt, ReplayStopped):
        print(f"stopped: {_sent(delivery.status(), there)}; the next replay continues there")
        raise
    print(_sent(delivery.status(), there))
    troubles = list(_troubles(kept, delivery.status()))
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
    # A living agent still adds requests.
    if files.lock_holder(spool.path / LOCK) is not None:
        print("! an agent still adds to it: replay it again when the training has ended")


def _warn_of_age(oldest_s: int, now_s: float) -> None:
    age_s = now_s - oldest_s
    if not oldest_s or age_s < _OLD_S:
        return
    hours = age_s / 3600
    age = f"{hours:.0f} h" if hours < 48 else f"{hours / 24:.0f} days"
    print(
        f"! The oldest value is {age} old. Prometheus refuses a value that is older than "
        "its newest one by more than out_of_order_time_window (2h in deploy/prometheus/"
        "prometheus.yml), and a collector in between does not report that. Set it to "
        f"{int(hours) + 2}h before. --on-conflict send sends refused values again."
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
