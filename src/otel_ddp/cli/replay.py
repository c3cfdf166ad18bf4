"""otel-ddp replay: sends the data that offline runs have stored on disk."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from operator import itemgetter
from pathlib import Path

from otel_ddp import files, settings, shown
from otel_ddp.agent.export.delivery import Delivery, Send
from otel_ddp.agent.export.exporter import OFFLINE_PREFIX
from otel_ddp.agent.export.folder import LOCK, Request, Waiting, Why, list_requests
from otel_ddp.agent.export.otlp.variables import LANES, SIGNALS, signals_with_endpoint
from otel_ddp.cli.command import cell
from otel_ddp.errors import ConfigError

# If this many attempts in a row fail, which takes a minute or two, give up on the signal (metrics,
# traces or logs). The requests that are left can be sent by the next replay.
_MOST_FAILURES = 7
# By default Prometheus refuses values that are older than this, so a replay of such values warns.
_OLD_S = 3600.0
_SHOWN_EVERY_S = 10.0
# The name of the file that lists the sent requests. It is in the folder of the requests.
_SENT = "sent"

# The requests of one folder, in the order in which they were stored.
Requests = Sequence[Request]


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
    # Ignore OTEL_DDP_AGENT: if it is still `offline`, as for the training, nothing would be sent.
    conf = settings.read(agent="auto")
    directories = {each.resolve(): each for each in options.directories}
    spools = [spool for each in directories.values() for spool in find_spools(each)]
    # Imported here, because the packages that it needs take long to import.
    from otel_ddp.agent.export.otlp.transport import Transport

    if not signals_with_endpoint(conf, os.environ):
        raise ConfigError(
            "No collector is named. Set OTEL_EXPORTER_OTLP_ENDPOINT, to http://collector:4318 for "
            "example."
        )
    with contextlib.closing(Transport(conf)) as transport:
        try:
            replay = Replay(spools, again=options.again)
            _say_before(replay, spools)
            _send(replay, delivery_of(replay, transport.send), cell(transport.destination))
            return _say_troubles(replay, spools)
        except OSError as error:
            sentence = f"What was sent cannot be remembered ({error}): replay a copy of the data."
            print(sentence, file=sys.stderr)
    return 1


# -- stored requests


def find_spools(directory: Path) -> list[Requests]:
    """The spool in this directory, and the offline spools below it. Raises ConfigError."""
    try:
        folders = (directory, *sorted(directory.glob(f"{OFFLINE_PREFIX}*/")))
        requests = [list_requests(folder) for folder in folders]
    except OSError as error:
        raise ConfigError(f"{directory} cannot be read: {error.strerror}.") from None
    spools = [[each for each in found if each.lane in SIGNALS] for found in requests]
    if not any(spools):
        raise ConfigError(f"{directory} holds no data of an offline run.")
    return [each for each in spools if each]


def merge_by_time(spools: Iterable[Requests]) -> list[Request]:
    """The requests of all spools, sorted by time; the order within each spool is preserved.

    Backends refuse values much older than the newest one. If the data of one node were sent after
    that of another, all its values would be too old.
    """
    dated: list[tuple[int, Request]] = []
    for spool in spools:
        times = accumulate((each.oldest_s for each in spool), max)
        dated += zip(times, spool, strict=True)
    return [request for _, request in sorted(dated, key=itemgetter(0))]


def _folder(spool: Requests) -> Path:
    return spool[0].path.parent


def _sent_log(folder: Path) -> int:
    """Open, or create, the file that lists the sent requests. Raises OSError."""
    return files.open_private(folder / _SENT, os.O_RDWR | os.O_CREAT | os.O_APPEND)


def _names_sent(folder: Path) -> set[str]:
    with os.fdopen(_sent_log(folder), errors="replace") as file:
        return set(file.read().splitlines())


class Replay(Waiting):
    """The queue of the requests of some spools that were not sent before.

    Unlike other queues, it deletes no request that was sent: it lists the request as sent.
    """

    def __init__(self, spools: Sequence[Requests], *, again: bool = False) -> None:
        """*again*: also send requests that were sent before.

        Raises OSError if the file that lists the sent requests cannot be opened.
        """
        super().__init__(SIGNALS)
        sent = {folder: _names_sent(folder) for folder in map(_folder, spools)}
        for request in merge_by_time(spools):
            if again or request.path.name not in sent[request.path.parent]:
                self.add(request)

    def remove(self, request: Request, why: Why, cause: str = "") -> None:
        super().remove(request, why, cause)
        # A request that the collector refused is not listed, so the next replay sends it again.
        if why == "delivered":
            # If this process is killed while it writes, part of a name remains in the file. It does
            # no harm, as no request has this name.
            with os.fdopen(_sent_log(request.path.parent), "a") as file:
                file.write(f"\n{request.path.name}")

    @property
    def left(self) -> int:
        """How many requests are still to be sent."""
        return sum(map(len, self.lanes.values()))

    @property
    def oldest_s(self) -> int:
        """The time of the oldest value to be sent; 0 if there is none."""
        return min(filter(None, (each.oldest_s for each in self.lanes["metrics"])), default=0)

    def send(
        self, delivery: Delivery, sleep: Callable[[float], None] = time.sleep
    ) -> Iterator[None]:
        """Send all requests; yields after each attempt."""
        total = self.left
        for signal in SIGNALS:
            while (wait_s := delivery.send_next(signal)) is not None:
                yield
                if wait_s:
                    # Give up after many failures; or at once if no request at all has arrived,
                    # since the address is probably wrong.
                    if delivery.failures(signal) >= _MOST_FAILURES or self.left == total:
                        break
                    sleep(wait_s)


def delivery_of(
    replay: Replay, send: Send, clock: Callable[[], float] = time.monotonic
) -> Delivery:
    """A delivery for *replay*. If a collector rejects a request, it is dropped, and not retried."""
    return Delivery(replay, send, LANES, clock, jitter=lambda: 0.5, patience_s=0.0)


def _send(replay: Replay, delivery: Delivery, there: str) -> None:
    requests, shown_at = replay.left, time.monotonic()
    try:
        for _ in replay.send(delivery):
            if time.monotonic() - shown_at >= _SHOWN_EVERY_S:
                shown_at = time.monotonic()
                print(f"{requests - replay.left} of {requests} requests", flush=True)
    finally:
        print(f"sent {delivery.attempts['delivered']} requests to {there}")


# -- messages


def _say_before(replay: Replay, spools: Sequence[Requests]) -> None:
    for spool in spools:
        folder, kept = _folder(spool), shown.size(sum(each.size_bytes for each in spool))
        print(f"{folder}: {len(spool)} requests, {kept}")
        if files.lock_holder(folder / LOCK) is not None:
            print("! an agent still adds to it: replay it again when the training has ended")
    if before := sum(map(len, spools)) - replay.left:
        print(f"{before} requests were sent before and are left out (--again sends them too)")
    age_s = time.time() - replay.oldest_s
    if replay.oldest_s and age_s >= _OLD_S:
        hours = int(age_s / 3600)
        print(
            f"! The oldest value is {hours} h old. Prometheus refuses a value that is older than "
            "its newest one by more than out_of_order_time_window (2h in deploy/prometheus/"
            "prometheus.yml), and a collector in between does not report that. Set it to "
            f"{hours + 2}h before. --again sends refused values once more."
        )


def _say_troubles(replay: Replay, spools: Sequence[Requests]) -> int:
    """Print how much did not arrive, and why; returns the exit status."""
    # Only sums are printed here: the reason for each loss was logged on stderr when it happened.
    lost = replay.dropped.items()
    troubles = [f"{points} points did not arrive: {what}" for what, points in lost]
    if replay.left:
        troubles.append(f"{replay.left} requests are left, and the next replay goes on there")
    # The requests of a spool are numbered. In an offline spool a missing number means a lost
    # request. Other spools delete requests that were sent, so there it means nothing.
    offline = [each for each in spools if _folder(each).name.startswith(OFFLINE_PREFIX)]
    if missing := sum(each[-1].number - len(each) for each in offline):
        troubles.append(
            f"{missing} requests are missing: they made room for newer ones "
            "(OTEL_DDP_SPOOL_BYTES), or were deleted"
        )
    for sentence in troubles:
        print(f"! {sentence}")
    return 1 if troubles else 0
