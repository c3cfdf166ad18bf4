"""Describes a whole run: the labels of its info, its settings, and all of it as log records."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from otel_ddp import catalog
from otel_ddp.agent.ledger import Labels
from otel_ddp.agent.reading.run_description import TEXTS, RunDescription
from otel_ddp.journal.layout import EVENT
from otel_ddp.journal.reader import Document, JournalReader

# Loki refuses a log record with more than 128 attributes, including labels and the resource's.
_MOST_ATTRIBUTES = 60
# A description is sent once it has not changed for so long: a script says it in several calls.
_RESTS_NS = 2 * 10**9


def info_labels(
    identity: Mapping[str, Any], facts: Mapping[str, Any], config: Mapping[str, Any]
) -> Labels:
    """The labels of the run's info: texts, facts, and a bounded part of the configuration."""
    found: dict[str, str] = {}
    for key in (*TEXTS, "world_size", "nodes", "strategy"):
        found[key] = _word(identity.get(key))
    for key in ("script", "model", "backend", "precision", "torch", "cuda", "git_sha", "baseline"):
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


def settings(
    texts: Mapping[str, Any], environment: Mapping[str, Any], config: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    """Each setting with its value, bounded as the labels of the info are."""
    for key, value in (*texts.items(), *environment.items()):
        yield key, _word(value)
    for key, value in islice(config.items(), catalog.MOST_CONFIG_LABELS):
        yield f"config.{key}"[:100], "None" if value is None else _word(value)


class RunRecords:
    """Log records of all that a run says of itself: one set when that is known, one if it grows."""

    def __init__(self) -> None:
        self._sent: dict[str, Any] = {}
        self._seen: dict[str, Any] = {}
        self._since_ns = 0

    def new_records(
        self, reader: JournalReader, description: RunDescription, now_ns: int, *, ended: bool
    ) -> Iterator[Document]:
        """The whole description if it has changed and rests for a while; otherwise none.

        An agent that starts again sends all of it once more.
        """
        known = description.is_known()
        config = {f"config.{key}": _attribute(value) for key, value in reader.config.items()}
        texts = description.texts()
        content = {**config, **texts, **description.environment()}
        if content != self._seen:
            self._seen, self._since_ns = content, now_ns
        rests = known and now_ns - self._since_ns >= _RESTS_NS
        if content == self._sent or not (rests or ended):
            return
        self._sent = content
        keys = list(content)[: len(config)]
        more = {key: value for key, value in content.items() if key not in config}
        # At least one: a run without configuration has an environment too.
        parts = max(1, -(-len(keys) // _MOST_ATTRIBUTES))
        for part in range(parts):
            some = keys[part * _MOST_ATTRIBUTES : (part + 1) * _MOST_ATTRIBUTES]
            of = f", part {part + 1} of {parts}" if parts > 1 else ""
            record = {
                "name": catalog.RUN_CONFIG_EVENT,
                "time": now_ns,
                "body": f"description of run {reader.identity.get('run')}{of}",
                "attributes": {
                    **(texts if part else more),
                    **{key: content[key] for key in some},
                },
            }
            yield Document(EVENT, record, reader.position)


def _attribute(value: Any) -> Any:
    # OTLP has no None, and "not set" is a setting too.
    return "None" if value is None else value
