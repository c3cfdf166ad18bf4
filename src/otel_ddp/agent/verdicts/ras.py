"""Asks NCCL's RAS whom it does not reach.

A thread within NCCL answers, so it needs no Python of the ranks, and it hears of all nodes. Any
program may listen there, so nothing in an answer is trusted.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Collection, Mapping
from typing import Any

from otel_ddp import files, plain

# Where NCCL listens.
_VARIABLE, _DEFAULT = "NCCL_RAS_ADDR", "localhost:28028"
# JSON came with NCCL 2.28.7; older versions send a text, which is passed over.
_QUESTION = b"set format json\nverbose status\n"
_CONNECT_S = 0.2
# RAS itself gives up on a peer after five seconds.
_ANSWER_NS = 30_000_000_000
_LARGEST_ANSWER = 16 * 1024 * 1024
_MOST_NAMED = 8
_LONGEST_HOST = 100


class Ras:
    """One question for each stall. Called from the agent's loop alone, which it does not hold."""

    def __init__(self, env: Mapping[str, str]) -> None:
        host, _, port = (env.get(_VARIABLE) or _DEFAULT).rpartition(":")
        self._address = host.strip("[]"), int(port) if port.isdigit() else 0
        self._socket: socket.socket | None = None
        self._asked_ns: int | None = None
        self._content = bytearray()

    def forget(self) -> None:
        """The stall is over."""
        self._close()
        self._asked_ns = None

    def poll(self, now_ns: int) -> Mapping[str, Any]:
        """The answer, once; empty: nothing has come so far, or nobody answers."""
        found: Any = None
        try:
            if self._asked_ns is None:
                self._asked_ns, self._content = now_ns, bytearray()
                if self._address[0] != "localhost":
                    # To look up another name might hold the agent.
                    ipaddress.ip_address(self._address[0])
                self._socket = socket.create_connection(self._address, _CONNECT_S)
                self._socket.sendall(_QUESTION)
                self._socket.setblocking(False)
            elif self._socket is not None and self._is_whole(self._socket):
                self._close()
                # Before it each command has an answer of its own.
                _, begins, rest = self._content.partition(b"{")
                found = files.parse_json(bytes(begins + rest))
            elif now_ns - self._asked_ns > _ANSWER_NS:
                self._close()
        except (OSError, ValueError):
            self._close()
        return plain.mapping(found)

    def _is_whole(self, answers: socket.socket) -> bool:
        while len(self._content) < _LARGEST_ANSWER:
            try:
                more = answers.recv(65536)
            except BlockingIOError:
                return False
            if not more:
                return True
            self._content += more
        raise ValueError("an answer of RAS has no end")

    def _close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def remark(content: Mapping[str, Any], pids: Collection[int], world_size: int) -> str:
    """What RAS says of a job that stands; empty: nothing, or it is another job.

    *pids*: of ranks on this node.
    """
    found = plain.list_of(dict, content.get("communicators"))
    members = [plain.list_of(dict, each.get("ranks")) for each in found]
    missing = [plain.list_of(dict, each.get("missing_ranks")) for each in found]
    if not any(each.get("pid") in pids for several in members for each in several):
        return ""
    # In the communicator of all ranks, these have the numbers that the program knows them by.
    ranks = {
        _process(each): each.get("rank")
        for one, *of_one in zip(found, members, missing, strict=True)
        if one.get("size") == world_size
        for several in of_one
        for each in several
    }

    def name(process: str) -> str:
        return f"rank {ranks[process]} ({process})" if process in ranks else process

    if lost := {_process(each): _state(each) for several in missing for each in several}:
        return f"NCCL does not reach {_listed([f'{name(e)}, {lost[e]}' for e in lost])}"
    return ""


def _process(member: Mapping[str, Any]) -> str:
    host = str(member.get("host"))[:_LONGEST_HOST]
    return f"process {plain.whole(member.get('pid'))} on {host}"


def _state(member: Mapping[str, Any]) -> str:
    is_dead = plain.mapping(member.get("status")).get("considered_dead") is True
    return "which it takes for dead" if is_dead else "which does not respond"


def _listed(several: list[str]) -> str:
    more = len(several) - _MOST_NAMED
    return "; ".join(several[:_MOST_NAMED]) + (f"; and {more} more" if more > 0 else "")
