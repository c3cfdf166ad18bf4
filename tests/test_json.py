"""The documents for programs: their page is not stale, and no key changes without its number."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from tools.json_page import ASKED, DEFINITIONS, json_page

DOCS = Path(__file__).parents[1] / "docs"
# By document and number: a digest of its keys and their types.
PINNED = {
    ("status", 8): "f6161487a1ec1918",
    ("runs", 2): "c0f5359ff663dd70",
    ("report", 8): "d74af68f255f78cd",
    ("goodput", 2): "3a03bd34386c8fdc",
    ("compare", 5): "9fa08a61d7c66fa8",
    ("stacks", 1): "add94b0d7e572e29",
    ("verdicts", 3): "c305617cf94702d5",
    ("curves", 1): "da1afd1dc3be4d0d",
}


def keys(schema: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, str]]:
    """Each key of a document with its type; what a word may be is no part of that."""
    if "$ref" in schema:
        yield from keys(DEFINITIONS[schema["$ref"].rpartition("/")[2]], path)
        return
    yield path, json.dumps(schema.get("type", "any"))
    for each in schema.get("anyOf", ()):
        yield from keys(each, path)
    if "items" in schema:
        yield from keys(schema["items"], f"{path}[]")
    for key, each in schema.get("properties", {}).items():
        mark = "" if key in schema["required"] else "?"
        yield from keys(each, f"{path}.{key}{mark}")


@pytest.mark.parametrize("document", ASKED)
def test_no_key_of_a_document_changes_without_its_number(document: str) -> None:
    schema = DEFINITIONS[document]
    number = schema["properties"]["schema"]["const"]
    digest = sha256(json.dumps(sorted(keys(schema))).encode()).hexdigest()[:16]

    assert PINNED.get((document, number)) == digest, (
        f"The keys of {document} have changed: raise its number in json.schema.json and in src, "
        f"and pin them by the new number as {digest}."
    )


def test_every_mapping_is_described_in_full() -> None:
    for schema in DEFINITIONS.values():
        for each in mappings(schema):
            assert each["additionalProperties"] is False
            assert {*each["required"]} <= each["properties"].keys()


def mappings(schema: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(schema, dict):
        if schema.get("type") == "object" and "properties" in schema:
            yield schema
        for each in schema.values():
            yield from mappings(each)


def test_the_page_of_json_is_what_the_schema_says() -> None:
    page = (DOCS / "json.md").read_text()

    assert page == json_page(page), "docs/json.md is stale: run `make docs`."
