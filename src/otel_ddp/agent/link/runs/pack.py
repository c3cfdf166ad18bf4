"""Packs what the judge reads of a process into a message, and unpacks it on the lead's node.

What is unpacked comes from another machine: it is bounded, and what makes no sense is refused.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, chain, groupby
from typing import Any, Protocol, TypeVar

from otel_ddp import files
from otel_ddp.agent.link import link_pb2 as wire
from otel_ddp.agent.reading.steps import Parts, Step
from otel_ddp.diagnosis.death.cause import EndedProcess
from otel_ddp.diagnosis.detector import Memory, NonfiniteValue, RankState
from otel_ddp.diagnosis.stall.evidence import (
    Collective,
    Evidence,
    Frame,
    Group,
    Kernel,
    Position,
    Question,
)
from otel_ddp.diagnosis.step_facts import DeviceStep, TimedStep
from otel_ddp.diagnosis.verdict import Labels
from otel_ddp.vocabulary.words import PHASES, RANK_LABELS, STATES, phase_word, state_word

_Record = TypeVar("_Record")
# Nothing that people read, and no list of theirs, is longer.
_LONGEST_TEXT = 4000
_MOST_MEMBERS = 1000
_MOST_STEPS = 100_000
# Times further away than this are none.
_LAST_NS = 1 << 62


class Senseless(ValueError):
    """A message that no agent of ours makes."""


# -- records: a message has the fields of the record of the same name


def _put(message: Any, record: Any, names: Iterable[str] = ()) -> None:
    """Fill these fields of a message, or all; what does not fit is left out, as if not known."""
    for name in names or message.DESCRIPTOR.fields_by_name:
        value = getattr(record, name)
        if value is not None:
            with contextlib.suppress(ValueError):
                setattr(message, name, _text(value) if isinstance(value, str) else value)


def _text(text: str) -> str:
    # Paths may hold what is no character.
    return text[:_LONGEST_TEXT].encode("utf-8", "replace").decode()


def _got(kind: Callable[..., _Record], message: Any) -> _Record:
    fields = message.DESCRIPTOR.fields
    return kind(**{each.name: _field(message, each) for each in fields})


def _field(message: Any, field: Any) -> Any:
    if field.has_presence and not message.HasField(field.name):
        return None
    value = getattr(message, field.name)
    return value[:_LONGEST_TEXT] if isinstance(value, str) else value


# -- who it is

_OF_RANK = (
    *("own_world_size", "waits_known", "device_clock", "under_nccl", "began_ns"),
    "clock_shift_ns",
)


def pack_state(
    message: wire.State, labels: Labels, rank: RankState, project: str, trains: bool
) -> None:
    """What seldom changes."""
    known = dict(labels)
    message.labels.extend([_text(known.get(name, "")) for name in RANK_LABELS])
    message.project, message.trains = _text(project), trains
    message.own_collectives.extend(rank.own_collectives)
    _put(message, rank, _OF_RANK)


def unpack_labels(message: wire.State) -> Labels:
    """The six labels of a process."""
    if len(message.labels) != len(RANK_LABELS):
        raise Senseless("labels")
    return tuple(zip(RANK_LABELS, [each[:_LONGEST_TEXT] for each in message.labels], strict=True))


def unpack_state(message: wire.State, labels: Labels, clock_offset_ns: int) -> RankState:
    """*clock_offset_ns*: what to add to its times."""

    def known(name: str) -> Any:
        return getattr(message, name) if message.HasField(name) else None

    return RankState(
        labels,
        own_world_size=known("own_world_size"),
        waits_known=known("waits_known"),
        own_collectives=tuple(
            each for each in message.own_collectives[:_MOST_MEMBERS] if each in PHASES
        ),
        device_clock=known("device_clock"),
        under_nccl=message.under_nccl,
        began_ns=message.began_ns + clock_offset_ns,
        # Its steps are shifted to the lead's clock; what its host tells beside them is not.
        clock_shift_ns=message.clock_shift_ns - clock_offset_ns,
    )


# -- where it is

_OF_POSITION = ("alive", "in_mark", "step", "since_ns", "name", "expect_s", "written", "world")


def pack_position(message: wire.Position, position: Position) -> None:
    """What changes all the time; the rest of it follows from the state."""
    message.state = STATES.get(position.state, STATES["running"])
    message.phase = PHASES.get(position.phase, PHASES["other"])
    _put(message, position, _OF_POSITION)


def unpack_position(message: wire.Position, rank: RankState, since_ns: int) -> Position:
    """*since_ns*: when its phase began, by the lead's clock."""
    return Position(
        labels=rank.labels,
        alive=message.alive,
        state=state_word(message.state),
        step=message.step if message.HasField("step") else None,
        phase=phase_word(message.phase),
        since_ns=since_ns,
        name=message.name[:_LONGEST_TEXT],
        expect_s=message.expect_s if message.HasField("expect_s") else None,
        written=message.written,
        world=message.world if message.HasField("world") else None,
        in_mark=message.in_mark,
        waits_in=rank.waits_in,
    )


# -- its steps. The lead unpacks those of all ranks of a run, so they go in columns.


class _Steps(Protocol):
    """Where messages of steps are added."""

    def add(self) -> wire.Steps: ...


def pack_steps(into: _Steps, steps: Sequence[TimedStep]) -> None:
    """Steps on the clock of the host."""
    for kind, same in groupby(steps, _kind):
        _pack_alike(into.add(), kind, list(same))


def pack_device_steps(into: _Steps, steps: Sequence[DeviceStep]) -> None:
    """Steps on the clock of the device."""
    for (kind, _, _), same in groupby(
        steps, lambda step: (_kind(step), len(step.paced), step.lag_ns is None)
    ):
        alike = list(same)
        message = into.add()
        _pack_alike(message, kind, alike)
        message.paced.extend(chain.from_iterable([step.paced for step in alike]))
        message.lag_ns.extend([step.lag_ns for step in alike if step.lag_ns is not None])


def _kind(step: TimedStep) -> tuple[bytes, int, bool, bool, bool]:
    """What steps of one message have in common."""
    codes, rest = step.parts.codes, step.rest
    if rest:
        codes += bytes([code for code, _ in rest])
    return codes, len(rest), step.number is not None, step.skipped, step.profiled


def _pack_alike(
    message: wire.Steps, kind: tuple[bytes, int, bool, bool, bool], steps: Sequence[TimedStep]
) -> None:
    message.codes, rests, numbered, skipped, profiled = kind
    message.count, message.began_ns = len(steps), steps[0].began_ns
    message.spans_ns.extend(chain.from_iterable([step.parts.spans_ns for step in steps]))
    if rests:
        message.rests = rests
        del message.spans_ns[:]
        for step in steps:
            message.spans_ns.extend((*step.parts.spans_ns, *[ns for _, ns in step.rest]))
    if skipped:
        message.skipped = True
    if profiled:
        message.profiled = True
    before, ended_ns = 0, message.began_ns
    numbers, gaps_ns = [], []
    for step in steps:
        gaps_ns.append(step.began_ns - ended_ns)
        ended_ns = step.ended_ns
        if numbered:
            number = step.number or 0
            numbers.append(number - before)
            before = number
    message.numbers.extend(numbers)
    if any(gaps_ns):
        message.gaps_ns.extend(gaps_ns)
    gc_ns = [round(step.gc_s * 1e9) for step in steps]
    if any(gc_ns):
        message.gc_ns.extend(gc_ns)
    work = [step.work for step in steps]
    if any(work):
        message.work.extend(work)


def unpack_steps(messages: Iterable[wire.Steps], clock_offset_ns: int) -> list[Step]:
    """Those of one process, by either clock."""
    found: list[Step] = []
    for each in messages:
        # Before it is believed: a step takes a byte at least.
        if not 0 < each.count <= min(each.ByteSize(), _MOST_STEPS - len(found)):
            raise Senseless("steps")
        found += _unpack_alike(each, clock_offset_ns)
    return found


def _unpack_alike(message: wire.Steps, clock_offset_ns: int) -> list[Step]:
    count, codes = message.count, message.codes
    parts = len(codes) - message.rests
    if parts < 0:
        raise Senseless("steps")
    columns = (
        _column(accumulate(message.numbers), count, None),
        _column(message.gaps_ns, count, 0),
        _rows(message.spans_ns, count, len(codes)),
        _column(message.gc_ns, count, 0),
        _column(message.work, count, 0),
        _rows(message.paced, count, len(message.paced) // count),
        _column(message.lag_ns, count, None),
    )
    of_parts, of_rest = codes[:parts], codes[parts:]
    skipped, profiled = message.skipped, message.profiled
    until_ns = message.began_ns + clock_offset_ns
    found: list[Step] = []
    for number, gap_ns, spans_ns, gc_ns, work, paced, lag_ns in zip(*columns, strict=True):
        began_ns = until_ns + gap_ns
        until_ns = began_ns + sum(spans_ns)
        rest = tuple(zip(of_rest, spans_ns[parts:], strict=True)) if of_rest else ()
        found.append(
            Step(
                number,
                began_ns,
                until_ns,
                Parts(began_ns, of_parts, spans_ns[:parts]),
                rest,
                gc_ns / 1e9,
                skipped,
                0,
                work,
                None,
                paced,
                lag_ns,
                profiled,
            )
        )
    if not -_LAST_NS < until_ns < _LAST_NS:
        raise Senseless("times")
    return found


def _column(values: Iterable[int], count: int, absent: int | None) -> Sequence[Any]:
    """One for each of so many steps; all are absent where the message has none."""
    found: list[int | None] = [*values] or [absent] * count
    if len(found) != count:
        raise Senseless("steps")
    return found


def _rows(values: Iterable[int], count: int, width: int) -> Sequence[Any]:
    """As many for each of so many steps."""
    found = list(values)
    if len(found) != count * width:
        raise Senseless("steps")
    return [*zip(*[iter(found)] * width, strict=True)] if width else [()] * count


# -- what is read beside its steps


def pack_memory(message: wire.Memory, memory: Memory) -> None:
    _put(message, memory)


def unpack_memory(message: wire.Memory) -> Memory:
    return _got(Memory, message)


def pack_nonfinite(process: wire.Process, values: Iterable[NonfiniteValue]) -> None:
    """The values that are not finite now."""
    for each in list(values)[:_MOST_MEMBERS]:
        _put(process.nonfinite.add(), each)


def unpack_nonfinite(process: wire.Process, clock_offset_ns: int) -> list[NonfiniteValue]:
    found = [_got(NonfiniteValue, each) for each in process.nonfinite[:_MOST_MEMBERS]]
    return [each._replace(time_ns=each.time_ns + clock_offset_ns) for each in found]


_OF_EVIDENCE = (
    *("silent_s", "answered", "kind", "answered_ns", "device_phase", "device_step", "package"),
)


def pack_evidence(message: wire.Evidence, evidence: Evidence) -> None:
    """Its answer, and what the kernel says of it."""
    for name in ("groups", "collectives", "stack"):
        for each in getattr(evidence, name)[:_MOST_MEMBERS]:
            _put(getattr(message, name).add(), each)
    if evidence.kernel is not None:
        message.kernel.SetInParent()
        _put(message.kernel, evidence.kernel)
    _put(message, evidence, _OF_EVIDENCE)


def unpack_evidence(message: wire.Evidence, clock_offset_ns: int) -> Evidence:
    return Evidence(
        silent_s=message.silent_s if message.HasField("silent_s") else None,
        answered=message.answered,
        kind="what" if message.kind == "what" else "where",
        answered_ns=message.answered_ns + clock_offset_ns if message.answered else 0,
        groups=tuple(_got(Group, each) for each in message.groups[:_MOST_MEMBERS]),
        collectives=tuple(_got(Collective, each) for each in message.collectives[:_MOST_MEMBERS]),
        stack=tuple(_got(Frame, each) for each in message.stack[:_MOST_MEMBERS]),
        device_phase=message.device_phase[:_LONGEST_TEXT],
        device_step=message.device_step if message.HasField("device_step") else None,
        package=message.package[:_LONGEST_TEXT],
        kernel=_got(Kernel, message.kernel) if message.HasField("kernel") else None,
    )


# -- what it is asked

QUESTIONS: Mapping[Question, Any] = {
    "where": wire.Question.WHERE,
    "what": wire.Question.WHAT,
    "when": wire.Question.WHEN,
}


def unpack_question(kind: int) -> Question | None:
    """None: it is none of these."""
    return next((each for each, code in QUESTIONS.items() if code == kind), None)


# -- its end

_OF_END = (
    *("state", "step", "phase", "phase_since_ns", "seen_alive_ns", "ended_ns", "reason"),
    "world_size",
)
# What may be known of its cause, and how it is written.
_CAUSES: Mapping[str, Any] = {
    **dict.fromkeys(("signal", "out_of_memory", "out_of_memory_in", "memory_limit_of"), str),
    **dict.fromkeys(("exit_code", "out_of_memory_kills", "resident_bytes"), int),
    **dict.fromkeys(("memory_limit_bytes",), int),
    **dict.fromkeys(("out_of_memory_within_s", "resident_age_s"), (int, float)),
    "out_of_memory_group": str,
    "xid": list,
}


def pack_end(message: wire.End, ended: EndedProcess) -> None:
    """How it ended, as far as that is known by now."""
    message.cause = json.dumps(dict(ended.cause)).encode()
    _put(message, ended, _OF_END)


def unpack_end(message: wire.End, labels: Labels, clock_offset_ns: int) -> EndedProcess:
    if message.state not in STATES:
        raise Senseless("state")
    return EndedProcess(
        labels=labels,
        state=message.state,
        step=message.step if message.HasField("step") else None,
        phase=message.phase[:_LONGEST_TEXT],
        phase_since_ns=message.phase_since_ns + clock_offset_ns,
        seen_alive_ns=message.seen_alive_ns + clock_offset_ns,
        ended_ns=message.ended_ns + clock_offset_ns,
        reason=message.reason[:_LONGEST_TEXT],
        cause=unpack_cause(message.cause),
        world_size=message.world_size if message.HasField("world_size") else None,
    )


def unpack_cause(content: bytes) -> Mapping[str, Any]:
    """What is known of the cause of an end."""
    found = unpack_json(content)
    cause = {word: each for word, each in found.items() if isinstance(each, _CAUSES.get(word, ()))}
    if isinstance(xids := cause.get("xid"), list):
        cause["xid"] = [str(each)[:_LONGEST_TEXT] for each in xids[:_MOST_MEMBERS]]
    return cause


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise Senseless("JSON")
    return number


def unpack_json(content: bytes) -> Mapping[str, Any]:
    """A mapping as JSON, of which others make JSON again: a browser reads no infinite number."""
    try:
        found = files.parse_json(content or b"{}", parse_constant=_finite, parse_float=_finite)
    except ValueError:
        raise Senseless("JSON") from None
    if not isinstance(found, dict):
        raise Senseless("JSON")
    return found
