"""A follower's end of the link to a run's lead, the agent that judges the run.

It sends reports and receives answers. If the link breaks, it reconnects until it is stopped. A
malicious lead can only make it ask processes what their own agent asks them, too.
"""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any

from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from otel_ddp import __version__
from otel_ddp.agent.link import credentials
from otel_ddp.agent.link.channel import BROKEN, Channel, LinkThread, connected
from otel_ddp.agent.link.link_pb2 import Answer, Report

log = logging.getLogger("otel_ddp.agent")

_CONFIRMED_WITHIN_S, _CONFIRMED_LOOK_S = 1.0, 0.01
_MOST_LETTERS = 200
# The lead answers each report at once. If more reports than this are unanswered, nothing is sent
# until answers arrive, and records wait in the journals.
_MOST_UNANSWERED = 8


class _Refused(Exception):
    """The lead has ended the link. The text of the exception is the lead's reason."""


class LinkClient:
    """The link to the lead of one run. `start` returns at once, `stop` within about a second."""

    def __init__(
        self,
        thread: LinkThread,
        secret: bytes,
        *,
        node: str,
        hosts: Sequence[str],
        ports: Sequence[int],
    ) -> None:
        """*node*: the name of this node. *hosts*, *ports*: addresses at which the lead may
        listen."""
        self._thread = thread
        self._context = credentials.context(secret, leads=False)
        self._sender = {"node": node, "agent_began_ns": time.time_ns(), "version": __version__}
        self._hosts, self._ports = hosts, ports
        # Two threads count: the agent's loop writes `_sent`, the link thread writes
        # `_answered_reports`.
        self._sent = self._answered_reports = 0
        self._answers: deque[Any] = deque()
        self._clock = ClockOffset()
        self._link: Channel | None = None
        self.state = "not connected yet"
        """The state of the link, for `status`."""

    @property
    def is_connected(self) -> bool:
        """Whether a report can be sent now. While it cannot, new records stay in the journals."""
        unanswered = self._sent - self._answered_reports
        return self._link is not None and unanswered < _MOST_UNANSWERED

    def start(self) -> None:
        self._thread.add(self._follow)

    def stop(self) -> None:
        """Wait until the lead has answered all reports, for a second at most. Then close the
        link."""
        until = time.monotonic() + _CONFIRMED_WITHIN_S
        while self._link is not None and self._answered_reports < self._sent:
            if time.monotonic() > until:
                break
            time.sleep(_CONFIRMED_LOOK_S)
        self._thread.discard(self._follow)

    def send(self, report: Any) -> None:
        """Send a report. If the link breaks, it is lost, and the lead later requests its records.

        The caller must not change the report afterwards.
        """
        self._sent += 1
        self._thread.call(partial(self._send, report))

    def take(self) -> list[Any]:
        """The answers since the last call. Answers that only acknowledge a report are left out."""
        found = []
        while self._answers:
            found.append(self._answers.popleft())
        return found

    @property
    def clock_offset_ns(self) -> int | None:
        """The lead's clock minus our monotonic clock; None if not measured yet."""
        return self._clock.ns

    # -- in the link thread

    async def _follow(self) -> None:
        """Try the addresses until the lead answers at one; then stay connected to it.

        Returns when the link breaks, or if no address answers. The link thread calls it again some
        seconds later.
        """
        why: dict[str, list[str]] = {}
        for host in self._hosts:
            for port in self._ports:
                place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
                try:
                    ended = await self._run_link(host, port, place)
                    if self._link is not None:
                        self.state = f"lost {place}: {_text(ended)}"
                        log.info("the link to the lead of a run: %s", self.state)
                        return
                finally:
                    self._link = None
                why.setdefault(_text(ended), []).append(place)
        reasons = [f"{', '.join(where)}: {text}" for text, where in why.items()]
        self.state = f"cannot reach the lead: {'; '.join(reasons) or 'no host is known'}"

    async def _run_link(self, host: str, port: int, place: str) -> Exception:
        """Connect, and receive answers until the link breaks. Returns the exception that ended
        it."""
        link = None
        try:
            link = await connected(host, port, self._context)
            greeting = Report(sent_ns=time.monotonic_ns(), **self._sender)
            link.send(greeting.SerializeToString())
            self._begin(place, link, _parsed(await link.receive()))
            while True:
                self._received(_parsed(await link.receive()))
        except (_Refused, *BROKEN) as ended:
            return ended
        finally:
            if link is not None:
                link.abort()

    def _begin(self, place: str, link: Channel, answer: Any) -> None:
        now = time.strftime("%H:%M:%S")
        self.state = f"connected to {_printable(answer.node)} ({place}) since {now}"
        log.info("the link to the lead of a run: %s", self.state)
        # Measure the clock offset anew: the lead may be on another machine than before.
        self._clock = ClockOffset()
        self._received(answer)
        self._answered_reports = self._sent
        self._link = link

    def _received(self, answer: Any) -> None:
        if answer.report_sent_ns:
            stamps = (answer.report_sent_ns, answer.report_received_ns, answer.sent_ns)
            self._clock.add(*stamps, time.monotonic_ns())
            self._answered_reports += 1
        if answer.questions or answer.judged or answer.lacking:
            self._answers.append(answer)

    def _send(self, report: Any) -> None:
        if self._link is not None:
            if self._clock.ns is not None:
                report.clock_offset_ns = self._clock.ns
                report.clock_uncertainty_ns = self._clock.uncertainty_ns
            report.sent_ns = time.monotonic_ns()
            self._link.send(report.SerializeToString())


def _parsed(message: bytes) -> Any:
    """Parse an answer; raises _Refused if it is invalid, or the lead refuses this agent."""
    try:
        answer = Answer.FromString(message)
    except DecodeError:
        raise _Refused("an answer that cannot be read") from None
    if answer.refused:
        raise _Refused(_printable(answer.refused))
    return answer


def _text(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return "it is not the lead of this run"
    if isinstance(error, asyncio.TimeoutError):
        return "no answer"
    if isinstance(error, EOFError):
        return "closed"
    text = str(error)
    # Use the operating system's text, since asyncio words its errors differently. An exception for
    # an unknown host name has a negative number, for which there is no such text.
    if isinstance(error, OSError) and error.errno and error.errno > 0:
        text = os.strerror(error.errno)
    return _printable(text.lower()) or "closed"


def _printable(text: str) -> str:
    return "".join(each if each.isprintable() else "?" for each in text[:_MOST_LETTERS])


# -- the offset between two clocks, from the time stamps of messages in both directions

_SAMPLES = 64
# How far two clocks may drift apart during `_SAMPLES` exchanges, at 100 ppm.
_DRIFT_NS = 20_000_000


class ClockOffset:
    """Measures the offset of another clock. Of the recent exchanges of messages, it uses the one
    with the shortest round trip, since its error is smallest."""

    def __init__(self) -> None:
        # Round trip and offset of each recent exchange, both in nanoseconds.
        self._samples: deque[tuple[int, int]] = deque(maxlen=_SAMPLES)
        self._best: tuple[int, int] | None = None

    def add(self, sent_ns: int, there_ns: int, back_ns: int, received_ns: int) -> None:
        """Add an exchange. *sent_ns*, *received_ns*: when the message left and the answer arrived,
        on our clock. *there_ns*, *back_ns*: when the message arrived and the answer left, on the
        other clock."""
        round_trip_ns = (received_ns - sent_ns) - (back_ns - there_ns)
        offset_ns = ((there_ns - sent_ns) + (back_ns - received_ns)) // 2
        self._samples.append((round_trip_ns, offset_ns))
        self._best = min(self._samples)

    @property
    def ns(self) -> int | None:
        """The other clock minus ours; None if not measured yet."""
        return None if self._best is None else self._best[1]

    @property
    def uncertainty_ns(self) -> int:
        """The largest possible error of the offset `ns`."""
        return 0 if self._best is None else self._best[0] // 2 + _DRIFT_NS
