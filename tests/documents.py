"""Holds the documents for programs against their schemas."""

from __future__ import annotations

from typing import Any

from tools.json_page import schema_of

from extras import needed


def check(document: str, found: Any) -> None:
    """Raises where the schema does not describe it."""
    needed("jsonschema", "dev").Draft202012Validator(schema_of(document)).validate(found)
