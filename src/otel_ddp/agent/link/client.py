"""A follower's end of the link to the lead of a run: sends reports, and keeps what is answered.

It connects in the thread of links, for as long as it is started. A lead that lies is as harmless as
a silent one: answers are bounded, and a question can only be one that our own agent asks too.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import time
from collections.abc import Sequence
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from otel_ddp.agent.link import addresses, credentials, limits
from otel_ddp.agent.link.addresses import Place
from otel_ddp.agent.link.answered import Answered
from otel_ddp.agent.link.clock_offset import ClockOffset
from otel_ddp.agent.link.link_pb2 import Answer, Report
from otel_ddp.agent.link.link_thread import LinkThread, within
from otel_ddp.agent.link.queues import WaitingReports

log = logging.getLogger("otel_ddp.agent")

_MOST_WAITING_BYTES = 8 << 20
_CONNECT_WITHIN_S = 2.0
_ANSWER_WITHIN_S = 5.0
_CONFIRMED_WITHIN_S, _CONFIRMED_LOOK_S = 1.0, 0.01
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 5.0
# A lead that takes each link and cuts it at once is tried ever less often too.
_LASTING_S = 30.0
_MOST_LETTERS = 200

_OPTIONS = (
    *limits.CONNECTION,
    ("grpc.max_receive_message_length", limits.MOST_ANSWER_BYTES + limits.STAMP_BYTES),
    ("grpc.max_send_message_length", limits.MOST_REPORT_BYTES + limits.STAMP_BYTES),
    ("grpc.max_metadata_size", 4096),
    ("grpc.ssl_target_name_override", credentials.NAME),
    ("grpc.enable_http_proxy", 0),
    ("grpc.enable_retries", 0),
    ("grpc.service_config_disable_resolution", 1),
    # Otherwise a new channel may get the connection, or the pause, of an earlier one.
    ("grpc.use_local_subchannel_pool", 1),
)


class _Unreachable(Exception):
    """Why there is no link to a place, or no longer."""


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
        self._credentials = credentials.of_follower(secret)
        self._sender = {
            "node": node,
            "agent": random.getrandbits(64),
            "agent_began_ns": time.time_ns(),
        }
        self._hosts, self._ports = hosts, ports
        self._waiting = WaitingReports(_MOST_WAITING_BYTES)
        # By the agent's loop, and by the thread of links.
        self._sent = self._answered_reports = 0
        self._answered = Answered()
        self._clock = ClockOffset()
        self._wake: asyncio.Event | None = None
        self._lead_agent: int | None = None
        self._last: Place | None = None
        self.new_leads = 0
        """How often another lead has taken the place of the last one: it knows nothing yet."""
        self.state = "not connected yet"
        """What `status` says of the link."""
        self.is_connected = False

    def start(self) -> None:
        self._thread.add(self._follow)

    def stop(self) -> None:
        """Close the link once the lead has acknowledged what was sent; waits a second at most."""
        until = time.monotonic() + _CONFIRMED_WITHIN_S
        while self.is_connected and self._answered_reports < self._sent:
            if time.monotonic() > until:
                break
            time.sleep(_CONFIRMED_LOOK_S)
        self._thread.discard(self._follow)

    def send(self, report: Any) -> None:
        """Send a report. If the connection breaks it is lost: the lead requests what it lacks.

        The report belongs to the link from here on: who sends it does not change it any more.
        """
        report.MergeFrom(Report(**self._sender))
        if (size := report.ByteSize()) > limits.MOST_REPORT_BYTES:
            # It would end the stream.
            return
        self._sent += 1
        self._waiting.add("", report, size)
        wake = self._wake
        if wake is not None:
            self._thread.call(wake.set)

    def take(self) -> list[Any]:
        """The answers since the last call that say more than that a report has come."""
        return self._answered.take()

    @property
    def clock_offset_ns(self) -> int | None:
        """What to add to our monotonic clock to get that of the lead; None: not known yet."""
        return self._clock.ns

    @property
    def clock_uncertainty_ns(self) -> int:
        """How far the true offset may be from that."""
        return self._clock.uncertainty_ns

    @property
    def refused_questions(self) -> int:
        """How many questions of the lead were too many at once, or of no known kind."""
        return self._answered.refused_questions

    # -- in the thread of links

    async def _follow(self) -> None:
        self._wake = asyncio.Event()
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
            self._wake, self.state = None, "not connected"

    async def _try_all(self) -> None:
        """Converse with the first place that is the lead, until the link breaks."""
        why: dict[str, dict[str, list[int]]] = {}
        if self._last is not None and await self._tried([self._last], {}):
            return
        for host in self._hosts:
            try:
                found = await addresses.resolve(host)
            except OSError as error:
                why.setdefault(_text(error), {})[host] = []
                continue
            if await self._tried(addresses.places(found, self._ports), why):
                return
        reasons = [f"{addresses.shortly(where)}: {text}" for text, where in why.items()]
        self.state = f"cannot reach the lead: {'; '.join(reasons) or 'no host is known'}"

    async def _tried(self, places: Sequence[Place], why: dict[str, dict[str, list[int]]]) -> bool:
        """Whether one of them was the lead; else why not, by reason, address and port."""
        # Together: an address that lets nothing through answers on none of its ports.
        knocked = await asyncio.gather(*map(_knock, places))
        for place, closed in zip(places, knocked, strict=True):
            ended = closed or await self._converse(place)
            if self.is_connected:
                self.is_connected, self._last = False, place
                self.state = f"lost {place}: {ended}"
                log.info("the link to the lead of a run: %s", self.state)
                return True
            why.setdefault(ended, {}).setdefault(place.address, []).append(place.port)
        return False

    async def _converse(self, place: Place) -> str:
        """Send and receive until the link breaks; why it did, or why there was none."""
        options = _OPTIONS
        try:
            async with grpc.aio.secure_channel(place.target, self._credentials, options) as channel:
                await self._exchange(place, channel)
        except _Unreachable as error:
            return str(error)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                return _printable(error.details() or error.code().name)
            # The texts of gRPC differ between its versions.
            return "no longer heard" if self.is_connected else "it is not the lead of this run"
        return "closed"

    async def _exchange(self, place: Place, channel: grpc.aio.Channel) -> None:
        call = channel.stream_stream(f"/{limits.SERVICE}/{limits.METHOD}")()
        try:
            answer = await self._greeted(call)
            # These reports were queued for the previous connection.
            self._waiting.take()
            self._answered_reports = self._sent
            self._begin(place, answer)
            sends = asyncio.create_task(self._send_all(call))
            try:
                while True:
                    self._received(answer := await _read(call))
                    self._answered_reports += bool(answer.report_sent_ns)
            finally:
                sends.cancel()
        finally:
            call.cancel()

    async def _greeted(self, call: Any) -> Any:
        greeting = Report(sent_ns=time.monotonic_ns(), **self._sender)
        await call.write(greeting.SerializeToString())
        try:
            return await within(_ANSWER_WITHIN_S, _read(call))
        except asyncio.TimeoutError:
            raise _Unreachable(f"no answer within {_ANSWER_WITHIN_S:g} s") from None

    def _begin(self, place: Place, answer: Any) -> None:
        now = time.strftime("%H:%M:%S")
        node = _printable(answer.node)
        self.state, self.is_connected = f"connected to {node} ({place}) since {now}", True
        log.info("the link to the lead of a run: %s", self.state)
        if self._lead_agent not in (None, answer.agent):
            self.new_leads += 1
        self._lead_agent = answer.agent
        self._received(answer)

    async def _send_all(self, call: Any) -> None:
        assert self._wake is not None
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            # The reader learns of the same end.
            while True:
                self._wake.clear()
                for _, report in self._waiting.take():
                    await call.write(self._stamped(report))
                await self._wake.wait()

    def _stamped(self, report: Any) -> bytes:
        if self._clock.ns is not None:
            report.clock_offset_ns = self._clock.ns
        report.sent_ns = time.monotonic_ns()
        return bytes(report.SerializeToString())

    def _received(self, answer: Any) -> None:
        if answer.report_sent_ns:
            stamps = (answer.report_sent_ns, answer.report_received_ns, answer.sent_ns)
            self._clock.add(*stamps, time.monotonic_ns())
        self._answered.add(answer)


async def _read(call: Any) -> Any:
    data = await call.read()
    if data is grpc.aio.EOF:
        # Raises where the lead gave a reason.
        code, details = await call.code(), await call.details()
        raise _Unreachable(_printable(details) or f"closed ({code.name})")
    try:
        return Answer.FromString(data)
    except DecodeError:
        raise _Unreachable("an answer that cannot be read") from None


async def _knock(place: Place) -> str:
    """Why nothing listens there, which the system says better than gRPC; empty: something does."""
    try:
        connected = asyncio.open_connection(place.address, place.port)
        _, writer = await within(_CONNECT_WITHIN_S, connected)
    except asyncio.TimeoutError:
        return f"no answer within {_CONNECT_WITHIN_S:g} s"
    except OSError as error:
        return _text(error)
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return ""


def _text(error: OSError) -> str:
    # asyncio has a text of its own, and names that do not resolve have numbers of their own.
    if error.errno is not None and error.errno > 0:
        return os.strerror(error.errno).lower()
    return (error.strerror or str(error)).lower()


def _printable(text: str) -> str:
    return "".join(each if each.isprintable() else "?" for each in text[:_MOST_LETTERS])
