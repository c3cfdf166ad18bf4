"""One artifact as a rank has told of it, and what the agent knows of it by now."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from otel_ddp.agent.ledger import Labels
from otel_ddp.catalog import LONGEST_LABEL
from otel_ddp.journal.reader import clean_text

WAITING, COMPLETE, INCOMPLETE, LEFT_OUT = "waiting", "complete", "incomplete", "left_out"
_STATES = (WAITING, COMPLETE, INCOMPLETE, LEFT_OUT)
_LATEST_NS = 2**63


class Told(NamedTuple):
    """What the rank has said."""

    labels: Labels
    project: str
    name: str
    type: str
    direction: str
    uri: str
    time_ns: int
    step: int | None
    span: str
    trace: str
    metadata: dict[str, Any]


@dataclass
class Artifact:
    """One of the agent's work list. Its lock guards all of it."""

    key: str
    """Of its record: the journal, and the position there. The same record may be read twice."""
    told: Told
    state: str = WAITING
    size: int | None = None
    digest: str = ""
    stored_uri: str = ""
    problem: str = ""
    """Why it is not complete, or not yet."""
    attempts: int = 0
    not_before: float = field(default=0.0, compare=False)
    """On the monotonic clock: when it is tried again."""
    began_ns: int = 0
    done_ns: int = 0

    @property
    def uri(self) -> str:
        """Where it lies: the copy, once there is one."""
        return self.stored_uri or self.told.uri

    @property
    def slot(self) -> tuple[Labels, str, str]:
        """Of those with the same one, the newest is shown."""
        return self.told.labels, self.told.name, self.told.direction

    def to_json(self) -> dict[str, Any]:
        """What the next agent needs."""
        content = vars(self).copy()
        del content["not_before"]
        return content


def told(labels: Labels, project: str, content: dict[str, Any]) -> Told | None:
    """What a record says; None if it makes no sense. Another process has written it."""
    words = [content.get(name) for name in ("name", "type", "direction", "uri", "span", "trace")]
    if not all(isinstance(word, str) for word in words):
        return None
    name, kind, direction, uri, span, trace = map(str, words)
    time_ns, step, metadata = (content.get(each) for each in ("time", "step", "metadata"))
    if direction not in ("output", "input") or not name or not uri:
        return None
    if not _is_whole(time_ns) or not (step is None or _is_whole(step)):
        return None
    more = metadata if isinstance(metadata, dict) else {}
    return Told(
        *(labels, project, name, kind, direction, uri, int(time_ns or 0), step, span, trace, more)
    )


def from_json(content: Any) -> Artifact | None:
    """One that an earlier agent has written down; None if that is damaged."""
    try:
        *before, metadata = content["told"]
        labels = tuple((str(name), str(value)) for name, value in before[0])
        names = ("name", "type", "direction", "uri", "time", "step", "span", "trace")
        said = dict(zip(names, before[2:], strict=True), metadata=metadata)
        known = told(labels, str(before[1]), said)
        size = content["size"]
        if known is None or content["state"] not in _STATES:
            return None
        if not (size is None or _is_whole(size)):
            return None
        found = Artifact(str(content["key"]), known, str(content["state"]), size)
        for name in ("digest", "stored_uri", "problem"):
            setattr(found, name, str(content[name]))
        for name in ("attempts", "began_ns", "done_ns"):
            setattr(found, name, int(content[name]))
    except (LookupError, TypeError, ValueError, OverflowError):
        return None
    texts = (found.digest, found.stored_uri, found.problem, *known[2:6], *sum(labels, ()))
    return found if all(map(_is_clean, texts)) else None


def label(text: str) -> str:
    """A text as a label, which stores want short."""
    return text if len(text) <= LONGEST_LABEL else f"{text[: LONGEST_LABEL - 1]}…"


def _is_clean(text: str) -> bool:
    """Whether it can be a label as it is, like every text that a journal gives."""
    return clean_text(text.encode(errors="replace")) == text


def _is_whole(value: Any) -> bool:
    return type(value) is int and 0 <= value < _LATEST_NS
