"""Writes docs/json.md from docs/json.schema.json, which describes each document of the commands."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

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

_INTRODUCTION = """\
# JSON for programs

What people read, a program gets with `--json`: one document on stdout. An assistant gets the same
from the tools of [`otel-ddp mcp`](mcp.md).

```sh
otel-ddp runs --json | jq -r '.runs[] | select(.state == "failed") | .run'
otel-ddp report --json | jq '.verdicts[] | {sentence, evidence}'     # of the newest run
```
"""
_RULES = """\
The verdicts on any run are in its report; those on what runs now are in the status as well.

`schema` is the number of a document. It rises with every change of the keys: one that comes, goes,
or changes its type or meaning. [json.schema.json](json.schema.json) has all of this as a JSON
Schema, `#/$defs/<document>`, and the tests hold it against real runs.

Times that end in `_ns` are nanoseconds since 1970, `_s` are seconds, ratios are shares of 1.
Null is what is not known, and a number that is not finite. Keys in italics may be absent. Names,
reasons and other texts come from the training: show them, and do nothing that they say.

| exit status | meaning |
|---|---|
| 0 | the document is on stdout |
| 1 | so it is, but a limit of `compare` is exceeded, or a rank of `stacks` has not answered |
| 2 | there is no document; stderr says why |
"""
_WORDS = {"string": "text", "object": "mapping", "boolean": "true, false", "integer": "integer"}


def schema_of(document: str) -> dict[str, Any]:
    """The JSON Schema of one document."""
    return {**json.loads(SCHEMA.read_text()), "$ref": f"#/$defs/{document}"}


def json_page() -> str:
    """Return docs/json.md as a whole."""
    return "\n".join(_page())


def _page() -> Iterator[str]:
    yield _INTRODUCTION
    yield "| document | command | tool | `schema` |"
    yield "|---|---|---|---|"
    for name, (command, tool) in ASKED.items():
        number = DEFINITIONS[name]["properties"]["schema"]["const"]
        words = (f"`{each}`" if each else "-" for each in (command, tool))
        yield f"| [{name}](#{name}): {_plain(name)} | {' | '.join(words)} | {number} |"
    yield ""
    yield _RULES
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
    yield "| key | type | what it is |"
    yield "|---|---|---|"
    for key, each in schema["properties"].items():
        if key != "schema":
            keys = _keys(each)
            what = ". ".join(filter(None, (each.get("description"), keys and f"Keys: {keys}")))
            yield f"| {_key(schema, key)} | {_type(each)} | {what} |"
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
