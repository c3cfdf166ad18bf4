"""Chooses the store of artifacts by its address."""

from __future__ import annotations

from hashlib import blake2s
from pathlib import Path
from urllib.parse import unquote

from otel_ddp.agent.artifacts.directory_sink import DirectorySink
from otel_ddp.agent.artifacts.fsspec_sink import FsspecSink
from otel_ddp.agent.artifacts.sink import Sink


def is_directory(address: str) -> bool:
    """Whether it is one of this machine's directories."""
    return address.startswith(("/", "file:///"))


def sink_of(address: str, agent: str) -> Sink:
    """The store at this address. *agent*: what tells this agent's parts from another's."""
    word = blake2s(agent.encode("utf-8", "replace"), digest_size=4).hexdigest()
    if is_directory(address):
        plain = unquote(address[len("file://") :]) if address.startswith("file:") else address
        return DirectorySink(Path(plain), word)
    return FsspecSink(address, word)
