"""Describes a whole run: the labels of its info, and its configuration as log records."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from otel_ddp import catalog
from otel_ddp.agent.ledger import Labels
from otel_ddp.journal.layout import EVENT
from otel_ddp.journal.reader import Document, JournalReader

# Loki refuses a log record with more than 128 attributes, including labels and the resource's.
_MOST_ATTRIBUTES = 80
_TEXTS = ("project", "name", "description", "tags")


def info_labels(
    identity: Mapping[str, Any], facts: Mapping[str, Any], config: Mapping[str, Any]
) -> Labels:
    """The labels of the run's info: texts, facts, and a bounded part of the configuration."""
    found: dict[str, str] = {}
    for key in (*_TEXTS, "world_size", "nodes", "strategy"):
        found[key] = _word(identity.get(key))
    for key in ("script", "model", "backend", "precision", "torch", "cuda", "git_sha"):
        found[key] = _word(facts.get(key))
    for key, value in islice(config.items(), catalog.MOST_CONFIG_LABELS):
        # Two keys may become one label ("a.b", "a_b"): the first key keeps it.
        name = catalog.prometheus_label(f"config_{key}")[:100]
        found.setdefault(name, _word(value))
    return tuple((key, value) for key, value in found.items() if value)


def _word(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    word, longest = str(value), catalog.LONGEST_LABEL
    return word if len(word) <= longest else f"{word[: longest - 1]}…"


class ConfigRecords:
    """Log records of a run's configuration: one set when it is known, and one when it grows."""

    def __init__(self) -> None:
        self._version = (-1, -1)
        self._sent: dict[str, Any] = {}

    def new_records(self, reader: JournalReader, now_ns: int) -> Iterator[Document]:
        """The records of the whole configuration if it has changed; otherwise none.

        An agent that starts again sends all of them once more.
        """
        version = (reader.identity_count, reader.definition_reads)
        if version == self._version:
            return
        self._version = version
        settings = {f"config.{key}": _attribute(value) for key, value in reader.config.items()}
        texts = {key: text for key in _TEXTS if (text := reader.identity.get(key))}
        content = {**settings, **texts}
        if content == self._sent or not (settings or texts.keys() & {"description", "tags"}):
            return
        self._sent = content
        keys = list(settings)
        parts = max(1, -(-len(keys) // _MOST_ATTRIBUTES))
        for part in range(parts):
            some = keys[part * _MOST_ATTRIBUTES : (part + 1) * _MOST_ATTRIBUTES]
            of = f", part {part + 1} of {parts}" if parts > 1 else ""
            record = {
                "name": catalog.RUN_CONFIG_EVENT,
                "time": now_ns,
                "body": f"configuration of run {reader.identity.get('run')}{of}",
                "attributes": {**texts, **{key: settings[key] for key in some}},
            }
            yield Document(EVENT, record, reader.position)


def _attribute(value: Any) -> Any:
    # OTLP has no None, and "not set" is a setting too.
    return "None" if value is None else value
