"""Writes docs/json.md from docs/json.schema.json, which describes each document of the commands."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tools.tables import with_rows

SCHEMA = Path(__file__).parents[1] / "docs" / "json.schema.json"
DEFINITIONS: Mapping[str, Any] = json.loads(SCHEMA.read_text())["$defs"]
# By document: the command that prints it, and the tool of `otel-ddp mcp` that answers with it.
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
# What each document may have, which the page says once.
SHARED = ("schema", "left_out")

_WORDS = {"string": "text", "object": "mapping", "boolean": "true, false", "integer": "integer"}


def schema_of(document: str) -> dict[str, Any]:
    """The JSON Schema of one document."""
    return {**json.loads(SCHEMA.read_text()), "$ref": f"#/$defs/{document}"}


def json_page(page: str) -> str:
    """The page with the documents, their parts, and the keys of each."""
    page = with_rows(page, "# JSON and the MCP server", _documents())
    written, heading, _ = page.partition(f"## {next(iter(ASKED))}\n")
    assert heading
    return written + "\n".join(_sections())


def _documents() -> Iterator[str]:
    for name, (command, tool) in ASKED.items():
        number = DEFINITIONS[name]["properties"]["schema"]["const"]
        words = (f"`{each}`" if each else "-" for each in (command, tool))
        yield f"| [{name}](#{name}): {_plain(name)} | {' | '.join(words)} | {number} |"


def _sections() -> Iterator[str]:
    for name in ASKED:
        yield from _section(name, DEFINITIONS[name])
    yield "## Parts\n"
    yield "Several documents have these in them."
    yield ""
    for name in sorted(DEFINITIONS.keys() - ASKED.keys()):
        yield from _section(name, DEFINITIONS[name], "###")


def _plain(name: str) -> str:
    return str(DEFINITIONS[name]["description"]).partition(":")[0]


def _section(name: str, schema: Mapping[str, Any], level: str = "##") -> Iterator[str]:
    text = str(schema["description"])
    yield f"{level} {name}\n"
    yield f"{text[0].upper()}{text[1:]}."
    yield ""
    plain = []
    for key, each in schema["properties"].items():
        keys = _keys(each)
        what = ". ".join(filter(None, (each.get("description"), keys and f"Keys: {keys}")))
        if key in SHARED:
            continue
        if what:
            yield f"- {_key(schema, key)} ({_type(each)}): {what}"
        else:
            plain.append(f"{_key(schema, key)} ({_type(each)})")
    if plain:
        yield f"- {', '.join(plain)}"
    yield ""


def _key(schema: Mapping[str, Any], key: str) -> str:
    return f"`{key}`" if key in schema["required"] else f"*`{key}`*"


def _keys(schema: Mapping[str, Any]) -> str:
    """Those of a mapping, or of each mapping in a list, where they have no section."""
    inner = schema.get("items", schema)
    return ", ".join(
        _key(inner, key) + (f" ({keys})" if (keys := _keys(each)) else "")
        for key, each in inner.get("properties", {}).items()
    )


def _type(schema: Mapping[str, Any]) -> str:
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name})"
    if "const" in schema:
        return f"`{schema['const']}`"
    if "enum" in schema:
        return ", ".join("null" if each is None else f"`{each}`" for each in schema["enum"])
    if "anyOf" in schema:
        return " or ".join(map(_type, schema["anyOf"]))
    kinds = schema.get("type", "anything")
    if kinds == "array":
        return f"list of {_type(schema['items'])}"
    return " or ".join(
        _WORDS.get(each, each) for each in ([kinds] if kinds == str(kinds) else kinds)
    )
