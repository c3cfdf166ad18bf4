"""What Loki makes of log records, and of the boards' queries, where no Loki was built.

It keeps what Loki 3 keeps, under the same names: some attributes of the resource are labels, all
others are metadata of each line. It understands the part of LogQL that the boards use, and refuses
anything else. Where there is a real Loki, the same tests ask that one too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from otlp_receiver import attributes_of

# Of a line, labels included. Loki refuses a request with a line that has more.
MOST_METADATA = 128
_LABELS = ("service.name", "service.namespace", "service.instance.id")
_LEVELS = ((4, "trace"), (8, "debug"), (12, "info"), (16, "warn"), (20, "error"), (24, "fatal"))
_STREAM = re.compile(r"\s*\{(\w+)(=~?)(\"(?:[^\"\\]|\\.)*\")\}\s*")
_FILTER = re.compile(r"\|\s*(\w+)\s*(=~?)\s*(\"(?:[^\"\\]|\\.)*\")\s*")
_FORMAT = re.compile(r"\|\s*line_format\s+`([^`]*)`\s*")


class Line(NamedTuple):
    """One record."""

    text: str
    labels: dict[str, str]


def received(request: Any) -> Iterator[Line]:
    """The lines of a request of OTLP; raises ValueError where Loki refuses one."""
    for of_resource in request.resource_logs:
        resource = _attributes(of_resource.resource.attributes)
        for of_scope in of_resource.scope_logs:
            for record in of_scope.log_records:
                found = {**resource, **_attributes(record.attributes)}
                found["scope_name"] = of_scope.scope.name
                found["scope_version"] = of_scope.scope.version
                found["severity_text"] = record.severity_text
                found["severity_number"] = str(record.severity_number)
                found["trace_id"], found["span_id"] = record.trace_id.hex(), record.span_id.hex()
                number = record.severity_number
                levels = (word for most, word in _LEVELS if 0 < number <= most)
                found["detected_level"] = next(levels, "unknown")
                # What is empty is not there.
                labels = {name: value for name, value in found.items() if value}
                if len(labels) > MOST_METADATA + len(_LABELS):
                    raise ValueError("structured metadata has too many entries")
                yield Line(record.body.string_value, labels)


def _attributes(pairs: Any) -> dict[str, str]:
    return {
        re.sub(r"\W", "_", name): str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in attributes_of(pairs).items()
    }


def chosen(lines: list[Line], query: str) -> list[Line]:
    """What a query for lines brings; raises ValueError for one that is not understood."""
    stream = _STREAM.match(query)
    if stream is None:
        raise ValueError(f"no stream is chosen: {query}")
    rest = query[stream.end() :]
    found = [line for line in lines if _matches(line, *stream.groups())]
    while rest:
        if (wanted := _FILTER.match(rest)) is not None:
            found = [line for line in found if _matches(line, *wanted.groups())]
        elif (wanted := _FORMAT.match(rest)) is not None:
            shape = wanted[1]
            found = [line._replace(text=_formatted(shape, line)) for line in found]
        else:
            raise ValueError(f"not understood: {rest}")
        rest = rest[wanted.end() :]
    return found


def _matches(line: Line, name: str, how: str, quoted: str) -> bool:
    value, wanted = line.labels.get(name, ""), json.loads(quoted)
    return bool(re.fullmatch(wanted, value)) if how == "=~" else value == wanted


def _formatted(shape: str, line: Line) -> str:
    def maybe(found: re.Match[str]) -> str:
        return found[2] if line.labels.get(found[1]) else ""

    text = re.sub(r"\{\{if \.(\w+)\}\}(.*?)\{\{end\}\}", maybe, shape, flags=re.DOTALL)
    text = re.sub(r"\{\{\.(\w+)\}\}", lambda found: line.labels.get(found[1], ""), text)
    return text.replace("{{__line__}}", line.text)
