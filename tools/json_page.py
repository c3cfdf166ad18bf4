"""Writes docs/json.md from docs/json.schema.json, which describes each document of the commands."""

from __future__ import annotations

import inspect
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tools.tables import with_rows

from otel_ddp.cli.mcp import Questions

SCHEMA = Path(__file__).parents[1] / "docs" / "json.schema.json"
DEFINITIONS: Mapping[str, Any] = json.loads(SCHEMA.read_text())["$defs"]
# By document: the command that prints it, and the MCP tool that returns it.
ASKED = {
    "status": ("otel-ddp status --json", ""),
    "runs": ("otel-ddp runs --json", "runs"),
    "report": ("otel-ddp report RUN --json", "run"),
    "goodput": ("otel-ddp goodput RUN --json", "goodput"),
    "compare": ("otel-ddp compare A B --json", "compare"),
    "stacks": ("otel-ddp stacks --json", "stacks"),
    "verdicts": ("", "verdicts"),
    "curves": ("", "curves"),
}
# Keys of all documents, described once.
SHARED = ("schema", "left_out")
# How many documents and parts have a key with this description.
_MEANINGS = Counter(
    (key, each["description"])
    for schema in DEFINITIONS.values()
    for key, each in schema["properties"].items()
    if key not in SHARED and "description" in each
)


def schema_of(document: str) -> dict[str, Any]:
    """The JSON Schema of one document."""
    return {**json.loads(SCHEMA.read_text()), "$ref": f"#/$defs/{document}"}


def json_page(page: str) -> str:
    """The page with the documents, their parts and keys."""
    page = with_rows(page, "# JSON and the MCP server", _documents())
    written, heading, _ = page.partition("## Keys of several documents\n")
    assert heading
    return written + "\n".join(_sections())


def _documents() -> Iterator[str]:
    for name, (command, tool) in ASKED.items():
        schema = DEFINITIONS[name]
        words = (f"`{each}`" if each else "-" for each in (command, _call(tool)))
        number = schema["properties"]["schema"]["const"]
        what = f"[{name}](#{name}): {schema['description']}"
        yield f"| {what} | {' | '.join(words)} | {number} |"


def _call(tool: str) -> str:
    """The tool with the names of its arguments."""
    if not tool:
        return ""
    arguments = list(inspect.signature(getattr(Questions, tool)).parameters)[1:]
    return f"{tool}({', '.join(arguments)})"


def _sections() -> Iterator[str]:
    yield "## Keys of several documents\n"
    for (key, text), times in _MEANINGS.items():
        if times > 1:
            yield f"- `{key}`: {text}"
    yield ""
    for name in ASKED:
        yield from _section(name, "##")
    yield "## Parts\n"
    for name in sorted(DEFINITIONS.keys() - ASKED.keys()):
        yield from _section(name, "###")


def _section(name: str, level: str) -> Iterator[str]:
    schema = DEFINITIONS[name]
    yield f"{level} {name}\n"
    plain = []
    for key, each in schema["properties"].items():
        if key in SHARED:
            continue
        text = each.get("description", "")
        text = "" if _MEANINGS[key, text] > 1 else text
        keys = _keys(each)
        what = ". ".join(filter(None, (text, keys and f"Keys: {keys}")))
        named = " ".join(filter(None, (_key(schema, key), _type(each))))
        if what:
            yield f"- {named}: {what}"
        else:
            plain.append(named)
    if plain:
        yield f"- {', '.join(plain)}"
    yield ""


def _key(schema: Mapping[str, Any], key: str) -> str:
    shown = f"`{key}[]`" if schema["properties"][key].get("type") == "array" else f"`{key}`"
    return shown if key in schema["required"] else f"*{shown}*"


def _keys(schema: Mapping[str, Any]) -> str:
    """The keys of a mapping, or of the mappings in a list, if they have no section."""
    inner = schema.get("items", schema)
    return ", ".join(
        _key(inner, key) + (f" ({keys})" if (keys := _keys(each)) else "")
        for key, each in inner.get("properties", {}).items()
    )


def _type(schema: Mapping[str, Any]) -> str:
    """A link to its section, or the allowed words; other types are in the schema."""
    for each in (schema, schema.get("items", {}), *schema.get("anyOf", ())):
        if "$ref" in each:
            name = each["$ref"].rpartition("/")[2]
            return f"([{name}](#{name}))"
    words = (f"`{each}`" for each in schema.get("enum", ()))
    return f"({', '.join(words)})" if "enum" in schema else ""
