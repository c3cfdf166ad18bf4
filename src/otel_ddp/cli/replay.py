"""otel-ddp replay: sends the data that offline runs have kept on disk, or a copy of it."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from otel_ddp import files, settings
from otel_ddp.agent.export.otlp import SIGNALS
from otel_ddp.agent.export.report import human_size
from otel_ddp.agent.export.spool import LOCK, OFFLINE_PREFIX, Entries, Entry, Why, list_entries
from otel_ddp.cli.text import cell
from otel_ddp.errors import ConfigError

if TYPE_CHECKING:
    from otel_ddp.agent.export.delivery import Delivery

# After so many failures without a success, a minute or two, the rest of a signal is left.
_MOST_FAILURES = 7
# From this age on a Prometheus with the usual settings refuses values.
_OLD_S = 3600.0
_SHOWN_EVERY_S = 10.0
# A file beside the data, with the names of the requests that were sent.
_SENT = "sent"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Send the data that offline runs have kept on disk, with their own times. Nothing is "
        "removed: a file beside the data remembers what was sent. The variables "
        "OTEL_EXPORTER_OTLP_* name the destination."
    )
    parser.add_argument(
        "directories",
        nargs="+",
        metavar="DIR",
        type=Path,
        help="the directory that `otel-ddp status` shows, a copy of it, or one that holds several",
    )
    parser.add_argument(
        "--again", action="store_true", help="send what was sent before once more, wherever it went"
    )


def run(options: argparse.Namespace) -> int:
    try:
        # Not the trainings' setting, which may be offline: a replay sends.
        conf = settings.read(agent="auto")
        directories = {each.resolve(): each for each in options.directories}
        spools = [spool for each in directories.values() for spool in _spools(each)]
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    # These packages take long to import.
    from otel_ddp.agent.export.delivery import Delivery
    from otel_ddp.agent.export.otlp import signals_with_endpoint
    from otel_ddp.agent.export.otlp.transport import Transport

    if not signals_with_endpoint(conf, os.environ):
        sentence = "Set OTEL_EXPORTER_OTLP_ENDPOINT, to http://collector:4318 for example."
        print(f"No collector is named. {sentence}", file=sys.stderr)
        return 2
    with contextlib.closing(Transport(conf)) as transport:
        try:
            kept = KeptRequests(spools, again=options.again)
            # In the order of time, and whatever is in doubt is refused: a person waits.
            delivery = Delivery(transport, kept, jitter=lambda: 0.5, patience_s=0.0)
            return _replay(kept, spools, delivery, cell(transport.destination))
        except OSError as error:
            sentence = f"What was sent cannot be remembered ({error}): replay a copy of the data."
            print(sentence, file=sys.stderr)
    return 1


# -- what was kept

# The requests of one directory, in their order.
Requests = Sequence[Entry]


def find_spools(directory: Path) -> list[Requests]:
    """The directory as a spool, or the offline spools in it. Raises OSError."""
    if own := list_entries(directory):
        return [own]
    paths = sorted(path for path in directory.glob(f"{OFFLINE_PREFIX}*") if path.is_dir())
    return [found for path in paths if (found := list_entries(path))]


def _spools(directory: Path) -> list[Requests]:
    try:
        spools = find_spools(directory)
    except OSError as error:
        raise ConfigError(f"{directory} cannot be read: {error.strerror}.") from None
    if not spools:
        raise ConfigError(f"{directory} holds no data of an offline run.")
    return spools


def merge_by_time(spools: Sequence[Requests]) -> list[Entry]:
    """The requests of all spools by time; those of one spool in their own order.

    Merged, because a backend refuses values that are much older than its newest one. If one node
    were sent after the other, all values of the second would be too old.
    """
    dated: list[tuple[int, Entry]] = []
    for spool in spools:
        times = accumulate((entry.oldest_s for entry in spool), max)
        dated += zip(times, spool, strict=True)
    return [entry for _, entry in sorted(dated, key=lambda each: each[0])]


def _sent_log(spool: Path) -> int:
    """The file of what was sent, open; raises OSError where it cannot be written."""
    return files.open_private(spool / _SENT, os.O_RDWR | os.O_CREAT | os.O_APPEND)


def _names_sent(spool: Path) -> set[str]:
    with os.fdopen(_sent_log(spool), errors="replace") as file:
        return set(file.read().splitlines())


class KeptRequests(Entries):
    """What is left to send, as the delivery takes it from a spool; no file is removed."""

    def __init__(self, spools: Sequence[Requests], *, again: bool = False) -> None:
        """*again*: also what was sent before. Raises OSError where nothing can be remembered."""
        super().__init__()
        folders = {spool[0].path.parent for spool in spools}
        sent = {folder: _names_sent(folder) for folder in folders}
        for each in merge_by_time(spools):
            if again or each.path.name not in sent[each.path.parent]:
                self.add(each)

    @property
    def oldest_s(self) -> int:
        """When the oldest value that is to be sent was measured; 0: there is none."""
        times = (each.oldest_s for each in self._entries["metrics"].values())
        return min(filter(None, times), default=0)

    def remove(self, entry: Entry, why: Why) -> None:
        """Done with; the next replay tries again what is refused."""
        super().remove(entry, why)
        if why == "delivered":
            # A kill that tears this line makes a name that no request has.
            with os.fdopen(_sent_log(entry.path.parent), "a") as file:
                file.write(f"\n{entry.path.name}")


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


def _replay(kept: KeptRequests, spools: Sequence[Requests], delivery: Delivery, there: str) -> int:
    for spool in spools:
        _describe(spool)
    requests = kept.entries
    if before := sum(map(len, spools)) - requests:
        print(f"{before} requests were sent before and are left out (--again sends them too)")
    _warn_of_age(kept.oldest_s, time.time())
    shown_at = time.monotonic()
    try:
        for _ in send(kept, delivery):
            if time.monotonic() - shown_at >= _SHOWN_EVERY_S:
                shown_at = time.monotonic()
                print(f"{requests - kept.entries} of {requests} requests", flush=True)
    finally:
        print(f"sent {delivery.status().delivered} requests to {there}")
    troubles = list(_troubles(kept, spools, delivery))
    for sentence in troubles:
        print(f"! {sentence}")
    return 1 if troubles else 0


def _describe(spool: Requests) -> None:
    folder, kept = spool[0].path.parent, human_size(sum(entry.size_bytes for entry in spool))
    print(f"{folder}: {len(spool)} requests, {kept}")
    # A living agent still adds requests.
    if files.lock_holder(folder / LOCK) is not None:
        print("! an agent still adds to it: replay it again when the training has ended")


def _warn_of_age(oldest_s: int, now_s: float) -> None:
    hours = int((now_s - oldest_s) / 3600)
    if oldest_s and now_s - oldest_s >= _OLD_S:
        print(
            f"! The oldest value is {hours} h old. Prometheus refuses a value that is older than "
            "its newest one by more than out_of_order_time_window (2h in deploy/prometheus/"
            "prometheus.yml), and a collector in between does not report that. Set it to "
            f"{hours + 2}h before. --again sends refused values once more."
        )


def _troubles(kept: KeptRequests, spools: Sequence[Requests], delivery: Delivery) -> Iterator[str]:
    """A sentence for each kind of data that did not arrive."""
    # The delivery's log, on stderr, has said why.
    for what, points in delivery.status().dropped_points.items():
        yield f"{points} points did not arrive: {what}"
    if kept.entries:
        yield f"{kept.entries} requests are left, and the next replay goes on there"
    # An agent that sends empties its own spool.
    offline = [each for each in spools if each[0].path.parent.name.startswith(OFFLINE_PREFIX)]
    if missing := sum(each[-1].number - len(each) for each in offline):
        yield (
            f"{missing} requests are missing: they made room for newer ones "
            "(OTEL_DDP_SPOOL_BYTES), or were deleted"
        )
