"""A follower's end of the link to the lead of a run: sends reports, and keeps what is answered.

It connects in the thread of links, for as long as it is started. A lead that lies is as harmless as
a silent one: answers are bounded, and a question can only be one that our own agent asks too.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import ssl
import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from otel_ddp import __version__
from otel_ddp.agent.link import addresses, credentials
from otel_ddp.agent.link.addresses import Place
from otel_ddp.agent.link.channel import (
    DEAD_AFTER_S,
    MOST_ANSWER_BYTES,
    MOST_REPORT_BYTES,
    PING_EVERY_S,
    STAMP_BYTES,
    Channel,
)
from otel_ddp.agent.link.link_pb2 import Answer, Report
from otel_ddp.agent.link.link_thread import LinkThread, within

log = logging.getLogger("otel_ddp.agent")

_CONNECT_WITHIN_S = 2.0
_NOT_REACHED = f"no answer within {_CONNECT_WITHIN_S:g} s"
_ANSWER_WITHIN_S = 5.0
_NO_ANSWER = f"no answer within {_ANSWER_WITHIN_S:g} s"
_CONFIRMED_WITHIN_S, _CONFIRMED_LOOK_S = 1.0, 0.01
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 5.0
# A lead that takes each link and cuts it at once is tried ever less often too.
_LASTING_S = 30.0
_MOST_LETTERS = 200
# The lead sends one answer a report: more wait unread.
_MOST_UNREAD = 64


class _Unreachable(Exception):
    """Why there is no link to a place, or no longer."""


class _Link(Channel):
    """A connection to what may be the lead."""

    def __init__(self, context: ssl.SSLContext) -> None:
        super().__init__(context, MOST_ANSWER_BYTES + STAMP_BYTES)
        self._messages: asyncio.Queue[bytes | None] = asyncio.Queue()

    async def next(self, within_s: float, late: str) -> bytes:
        """Its next message, and before all others an empty one, once it is proved to be the lead.

        Raises _Unreachable. *late*: why, where nothing is heard for so long.
        """
        while True:
            try:
                message = await within(PING_EVERY_S, self._messages.get())
            except asyncio.TimeoutError:
                if time.monotonic() - self.heard_s > within_s:
                    raise _Unreachable(late) from None
                self.send(b"")
                continue
            self.hold("unread", False)
            if message is None:
                raise _Unreachable("closed" if self.is_proved else "it is not the lead of this run")
            return message

    def proved(self) -> None:
        self._messages.put_nowait(b"")

    def received(self, message: bytes) -> None:
        if message:
            self._messages.put_nowait(message)
            if self._messages.qsize() >= _MOST_UNREAD:
                self.hold("unread", True)

    def connection_lost(self, error: Exception | None) -> None:
        self._messages.put_nowait(None)


_MOST_ANSWERS = 32


class LinkClient:
    """One a run whose lead is another agent. `start` returns at once, and `stop` soon."""

    def __init__(
        self,
        thread: LinkThread,
        secret: bytes,
        *,
        node: str,
        hosts: Sequence[str],
        ports: Sequence[int],
    ) -> None:
        """*node*: this one; *hosts*, *ports*: where its lead may listen."""
        self._thread = thread
        self._context = credentials.context(secret, leads=False)
        self._sender = {
            "node": node,
            "agent": random.getrandbits(64),
            "agent_began_ns": time.time_ns(),
        }
        self._hosts, self._ports = hosts, ports
        # By the agent's loop, and by the thread of links.
        self._sent = self._answered_reports = 0
        # A lead that lies costs no more than one that does not.
        self._answers: deque[Any] = deque(maxlen=_MOST_ANSWERS)
        self._clock = ClockOffset()
        self._link: _Link | None = None
        self.state = "not connected yet"
        """What `status` says of the link."""

    @property
    def is_connected(self) -> bool:
        """Whether a report can be sent now. Until then its records stay in the journals."""
        link = self._link
        return link is not None and link.is_writable

    def start(self) -> None:
        self._thread.add(self._follow)

    def stop(self) -> None:
        """Close the link once the lead has acknowledged what was sent; waits a second at most."""
        until = time.monotonic() + _CONFIRMED_WITHIN_S
        while self._link is not None and self._answered_reports < self._sent:
            if time.monotonic() > until:
                break
            time.sleep(_CONFIRMED_LOOK_S)
        self._thread.discard(self._follow)

    def send(self, report: Any) -> None:
        """Send a report. If the connection breaks it is lost: the lead requests what it lacks.

        The report belongs to the link from here on: who sends it does not change it any more.
        """
        report.MergeFrom(Report(**self._sender))
        # It would end the stream.
        if report.ByteSize() <= MOST_REPORT_BYTES:
            self._sent += 1
            self._thread.call(partial(self._send, report))

    def take(self) -> list[Any]:
        """The answers since the last call that say more than that a report has come."""
        found = []
        while self._answers:
            found.append(self._answers.popleft())
        return found

    @property
    def clock_offset_ns(self) -> int | None:
        """What to add to our monotonic clock to get that of the lead; None: not known yet."""
        return self._clock.ns

    @property
    def clock_uncertainty_ns(self) -> int:
        """How far the true offset may be from that."""
        return self._clock.uncertainty_ns

    # -- in the thread of links

    async def _follow(self) -> None:
        pause_s = _FIRST_PAUSE_S
        try:
            while True:
                began = time.monotonic()
                await self._try_all()
                if time.monotonic() - began > _LASTING_S:
                    pause_s = _FIRST_PAUSE_S
                # Not all nodes of a run at the same moment.
                await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        finally:
            self._link, self.state = None, "not connected"

    async def _try_all(self) -> None:
        """Converse with the first place that is the lead, until the link breaks."""
        why: dict[str, list[str]] = {}
        for host in self._hosts:
            try:
                found = await addresses.resolve(host)
            except OSError as error:
                why.setdefault(_text(error), []).append(host)
                continue
            for address in found:
                for place in (Place(address, port) for port in self._ports):
                    ended = await self._tried(place)
                    if self._link is not None:
                        self._link, self.state = None, f"lost {place}: {ended}"
                        log.info("the link to the lead of a run: %s", self.state)
                        return
                    why.setdefault(ended, []).append(str(place))
                    if ended == _NOT_REACHED:
                        # An address that lets nothing through answers on none of its ports.
                        break
        reasons = [f"{', '.join(where)}: {text}" for text, where in why.items()]
        self.state = f"cannot reach the lead: {'; '.join(reasons) or 'no host is known'}"

    async def _tried(self, place: Place) -> str:
        """Receive from this place until the link breaks; why it did, or why there was none."""
        connected = asyncio.get_running_loop().create_connection(
            lambda: _Link(self._context), place.address, place.port
        )
        try:
            _, link = await within(_CONNECT_WITHIN_S, connected)
        except asyncio.TimeoutError:
            return _NOT_REACHED
        except OSError as error:
            return _text(error)
        try:
            await link.next(_ANSWER_WITHIN_S, _NO_ANSWER)
            greeting = Report(version=__version__, sent_ns=time.monotonic_ns(), **self._sender)
            link.send(greeting.SerializeToString())
            self._begin(place, link, _parsed(await link.next(_ANSWER_WITHIN_S, _NO_ANSWER)))
            while True:
                self._received(_parsed(await link.next(DEAD_AFTER_S, "no longer heard")))
        except _Unreachable as why:
            return str(why)
        finally:
            link.transport.abort()

    def _begin(self, place: Place, link: _Link, answer: Any) -> None:
        now = time.strftime("%H:%M:%S")
        self.state = f"connected to {_printable(answer.node)} ({place}) since {now}"
        log.info("the link to the lead of a run: %s", self.state)
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
            self._link.send(self._stamped(report))

    def _stamped(self, report: Any) -> bytes:
        if self._clock.ns is not None:
            report.clock_offset_ns = self._clock.ns
        report.sent_ns = time.monotonic_ns()
        return bytes(report.SerializeToString())


def _parsed(message: bytes) -> Any:
    """An answer; raises _Unreachable where it is the last one."""
    try:
        answer = Answer.FromString(message)
    except DecodeError:
        raise _Unreachable("an answer that cannot be read") from None
    if answer.refused:
        raise _Unreachable(_printable(answer.refused))
    return answer


def _text(error: OSError) -> str:
    # asyncio has a text of its own, and names that do not resolve have numbers of their own.
    if error.errno is not None and error.errno > 0:
        return os.strerror(error.errno).lower()
    return (error.strerror or str(error)).lower()


def _printable(text: str) -> str:
    return "".join(each if each.isprintable() else "?" for each in text[:_MOST_LETTERS])


# -- how far the clock of the lead is ahead of ours, from stamps of messages there and back


class _Sample(NamedTuple):
    received_ns: int
    round_trip_ns: int
    offset_ns: int

    def contradicts(self, other: _Sample) -> bool:
        # The true offset is at most half a round trip away from each; the rest is drift.
        apart_ns = abs(self.offset_ns - other.offset_ns)
        return apart_ns > (self.round_trip_ns + other.round_trip_ns) // 2 + _DRIFT_NS


_SAMPLES = 64
# 100 parts in a million: more than a crystal's error; and that of 64 s.
_DRIFT = 1e-4
_DRIFT_NS = 6_400_000
# 100 years: a clock that was never set begins in 1970.
_MOST_NS = 3_153_600_000 * 1_000_000_000


class ClockOffset:
    """Of the last exchanges the one with the least round trip counts."""

    def __init__(self) -> None:
        self._samples: deque[_Sample] = deque(maxlen=_SAMPLES)
        self._best: _Sample | None = None

    def add(self, sent_ns: int, there_ns: int, back_ns: int, received_ns: int) -> None:
        """*sent_ns*, *received_ns*: by our clock; *there_ns*, *back_ns*: by the other one."""
        round_trip_ns = (received_ns - sent_ns) - (back_ns - there_ns)
        if received_ns < sent_ns or back_ns < there_ns or round_trip_ns < 0:
            return  # A clock was set in between.
        offset_ns = ((there_ns - sent_ns) + (back_ns - received_ns)) // 2
        sample = _Sample(received_ns, round_trip_ns, offset_ns)
        if abs(sample.offset_ns) > _MOST_NS:
            return  # No clock is that wrong.
        if self._best is not None and sample.contradicts(self._best):
            # A clock was set: earlier measurements are void.
            self._samples.clear()
        self._samples.append(sample)
        self._best = min(self._samples, key=lambda each: each.round_trip_ns)

    @property
    def ns(self) -> int | None:
        """What to add to our clock to get the other one; None: not known yet."""
        return None if self._best is None else self._best.offset_ns

    @property
    def uncertainty_ns(self) -> int:
        """How far the true offset may be from `ns`."""
        if self._best is None:
            return 0
        age_ns = self._samples[-1].received_ns - self._best.received_ns
        return self._best.round_trip_ns // 2 + int(_DRIFT * max(age_ns, 0))
