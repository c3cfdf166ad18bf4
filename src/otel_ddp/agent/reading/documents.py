"""Spans and events of one process, and the description of its run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from hashlib import blake2s
from itertools import islice
from typing import Any

from otel_ddp import plain
from otel_ddp.agent.ledger import Labels
from otel_ddp.agent.reading.steps import MOST_PARTS
from otel_ddp.diagnosis.steps import Step
from otel_ddp.journal.layout import EVENT, OF_BUFFERS, SPAN, trace_of_step
from otel_ddp.journal.parser import Document, Journal
from otel_ddp.vocabulary import catalog
from otel_ddp.vocabulary.words import PHASES, STATES, UNMEASURED, phase_word, state_word


def checkpoint_event(document: Document) -> Document | None:
    """Make the log event of a saved or failed checkpoint from its span; None for other
    documents."""
    span = document.content
    if document.kind != SPAN or span.get("name") != "checkpoint":
        return None
    try:
        took_s = (int(span["end"]) - int(span["start"])) / 1e9
    except (KeyError, TypeError, ValueError, OverflowError):
        return None  # the span is of another version of otel_ddp
    error = str(span.get("error") or "")
    body = f"checkpoint failed after {took_s:.1f} s: {error}" if error else ""
    content = {
        "name": catalog.CHECKPOINT_EVENT,
        "time": span["end"],
        "step": span.get("step"),
        "span": span.get("id"),
        "trace": span.get("trace"),
        "body": body or f"checkpoint saved in {took_s:.1f} s",
        "severity": "WARN" if error else "INFO",
        "attributes": {"duration_s": took_s},
        "exception": span.get("exception"),
    }
    return Document(EVENT, content, document.position)


def context_of(reader: Journal) -> tuple[str, str] | None:
    """The trace id and span id that the process recorded for its run; None if it recorded none."""
    known = plain.mapping(reader.facts.get("span"))
    trace, span_id = known.get("trace"), known.get("id")
    return (str(trace), str(span_id)) if trace and span_id else None


def run_span(reader: Journal, state: int, ended_ns: int) -> list[Document]:
    """Make the span of the run, once the process has ended; an empty list if its ids are
    unknown."""
    if (ids := context_of(reader)) is None:
        return []
    trace, span_id = ids
    progress, reason = reader.progress(), reader.reason()
    failed = state != STATES["finished"]
    content = {
        "name": "run",
        "id": span_id,
        "parent": str(reader.facts["span"].get("parent") or ""),
        "trace": trace,
        "start": reader.created_ns,
        "end": max(ended_ns, reader.created_ns),
        "step": None if progress is None else progress.step,
        "error": (reason or state_word(state)) if failed else "",
        "attributes": {"state": state_word(state)},
    }
    return [Document(SPAN, content, reader.position)]


# -- which steps are exported as spans

SAMPLED_EVERY = 100

_WAIT = PHASES["comm_wait"]

# How many first steps of a process never count as slow, since their average is not reliable yet.
_ENOUGH = 20
# How many steps the moving average covers.
_RECENT = 200
# A step is slow if it takes this many times the average. If durations are log-normal with a
# deviation of 15 %, one step in 1,000 is slow.
_SLOW = 1.6
# Rate limit: at most one slow step within this time gets spans.
_SLOW_EVERY_NS = 3_000_000_000

_MOST_CHILDREN = 64


class StepSpans:
    """Chooses the steps of a process that get spans: every n-th one, and some slow ones."""

    def __init__(self) -> None:
        self._seen = self._shown_ns = 0
        self._usual_ns = 0.0
        # Every n-th step gets spans. If that step is unmeasured, this stays True until the next
        # measured step, which gets them instead.
        self._sample_is_due = False

    def spans(self, step: Step, labels: Labels, every: int) -> list[dict[str, Any]]:
        """The spans of a step, as contents of documents; an empty list for most steps."""
        is_slow, number = self._slow(step.took_ns), step.number
        if number is None:
            return []  # without a number, the step has no trace to share with the other ranks
        if every and number % every == 0:
            self._sample_is_due = True
        is_sampled = self._sample_is_due and step.measured
        if is_sampled:
            self._sample_is_due = False
        # The rate is limited by the steps' own times, not by the clock, since an agent that starts
        # late reads many steps at once.
        elif not is_slow or 0 <= step.ended_ns - self._shown_ns < _SLOW_EVERY_NS:
            return []
        else:
            self._shown_ns = step.ended_ns
        why = ["sampled"] * is_sampled + ["slow"] * is_slow
        return list(_make_spans(step, number, ",".join(why), labels))

    def _slow(self, took_ns: int) -> bool:
        slow = self._seen >= _ENOUGH and took_ns > _SLOW * self._usual_ns
        self._seen += 1
        self._usual_ns += (took_ns - self._usual_ns) / min(self._seen, _RECENT)
        return slow


def _make_spans(step: Step, number: int, why: str, labels: Labels) -> Iterator[dict[str, Any]]:
    by_name = dict(labels)
    # Span ids are deterministic, so that a step that is read twice has the same spans. They include
    # the time, because a resumed run repeats step numbers.
    owner = f"{by_name.get('run')}/{by_name.get('rank')}/{number}/{step.began_ns}"

    def span(
        index: int, name: str, began_ns: int, ended_ns: int, attributes: dict[str, Any]
    ) -> dict[str, Any]:
        return {
            "name": name,
            "id": _span_id(owner, index),
            "parent": _span_id(owner, 0) if index else "",
            "trace": trace_of_step(number),
            "start": began_ns,
            "end": ended_ns,
            "step": number if step.logged is None else step.logged,
            "error": "",
            "attributes": attributes,
        }

    attributes: dict[str, Any] = {"reason": why}
    if step.gc_s > 0:
        attributes["gc_s"] = step.gc_s
    if step.retries:
        attributes["retries"] = step.retries
    # The parts after the first MOST_PARTS are sums by phase. They have no begin and end of their
    # own, so they get no spans.
    parts = enumerate(islice(step.parts.each(), MOST_PARTS), 1)
    shown = [(at, part) for at, part in parts if part.code != UNMEASURED]
    if len(shown) > _MOST_CHILDREN:
        # Keep the longest parts only. The gaps between them show that parts are missing.
        shown.sort(key=lambda each: each[1].began_ns - each[1].ended_ns)
        shown = sorted(shown[:_MOST_CHILDREN])
    yield span(0, "step", step.began_ns, step.ended_ns, attributes)
    for index, part in shown:
        sync = "buffers" if part.code & OF_BUFFERS else "gradients"
        more = {"sync": sync} if part.phase == _WAIT else {}
        yield span(index, phase_word(part.phase), part.began_ns, part.ended_ns, more)


def _span_id(owner: str, index: int) -> str:
    return blake2s(f"{owner}/{index}".encode("utf-8", "replace"), digest_size=8).hexdigest()


# -- the description of a run

TEXTS = ("project", "name", "description", "tags")
_OF_IDENTITY = ("world_size", "nodes", "strategy", "launcher")
_INFO_OF_IDENTITY = (*TEXTS, "world_size", "nodes", "strategy")
_OF_PROGRAM = ("script", "model", "backend", "precision", "torch", "device_runtime", "git_sha")
_OF_NODE = ("python", "container_image", "slurm_job_id", "slurm_job_name", "slurm_partition")

# A function that describes the node's devices.
Devices = Callable[[], Mapping[str, Any]]


class RunDescription:
    """Describes a run from the journal of its rank 0."""

    def __init__(self, reader: Journal, devices: Devices) -> None:
        self._reader = reader
        self._devices = devices

    def texts(self) -> dict[str, Any]:
        """The user's texts about the run: its project, name, description and tags."""
        identity = self._reader.identity
        return {key: text for key in TEXTS if (text := identity.get(key))}

    def environment(self) -> dict[str, Any]:
        """What is known about the program, and about the machine and job in which it runs."""
        identity, facts = self._reader.identity, self._reader.facts
        driver = self._devices()
        found = {
            **{key: identity.get(key) for key in _OF_IDENTITY},
            **{key: facts.get(key) for key in (*_OF_PROGRAM, *_OF_NODE)},
            "gpu_driver": driver.get("gpu_driver"),
            "gpus": _counted(driver.get("gpus") or ()),
        }
        return {key: value for key, value in found.items() if value not in (None, "")}

    def info_labels(self) -> Labels:
        """The labels of `training.run.info`: texts, facts, and the first configuration keys."""
        identity, facts = self._reader.identity, self._reader.facts
        found = {key: label_text(identity.get(key)) for key in _INFO_OF_IDENTITY}
        found |= {key: label_text(facts.get(key)) for key in _OF_PROGRAM}
        for key, value in islice(self._reader.config.items(), catalog.MOST_CONFIG_LABELS):
            # If two keys become the same label ("a.b", "a_b"), use the first key's value.
            name = catalog.prometheus_label(f"config_{key}")[:100]
            found.setdefault(name, label_text(value))
        return tuple((key, value) for key, value in found.items() if value)

    def settings(self) -> dict[str, str]:
        """The texts, facts and configuration of the run by name. Their number and length are
        limited as in `info_labels`."""
        known = {**self.texts(), **self.environment()}
        found = {key: label_text(value) for key, value in known.items()}
        for key, value in islice(self._reader.config.items(), catalog.MOST_CONFIG_LABELS):
            found[f"config.{key}"[:100]] = "None" if value is None else label_text(value)
        return found


def _counted(gpus: Any) -> str:
    """The number of GPUs of each model, as in `8 x NVIDIA H100 80GB HBM3`."""
    names = Counter(str(each.get("name")) for each in gpus)
    return ", ".join(f"{count} x {name}" for name, count in names.items())


def label_text(value: Any) -> str:
    """Convert a value to the text of a label, shortened if it is too long."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    word, longest = str(value), catalog.LONGEST_LABEL
    return word if len(word) <= longest else f"{word[: longest - 1]}…"
