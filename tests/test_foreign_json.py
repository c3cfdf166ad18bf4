"""JSON that any program may have written: what is nested too deeply is damaged."""

from __future__ import annotations

import pytest

from otel_ddp.errors import foreign_json


def nested(depth: int) -> str:
    return '{"a":' * depth + "1" + "}" * depth


@pytest.mark.parametrize("text", ["[" * 100_000, "[" * 900 + "]" * 900, nested(65), "", "{"])
def test_what_is_damaged_or_nested_too_deeply_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"nested too deeply|Expecting"):
        foreign_json.parse(text)


def test_what_we_write_is_read() -> None:
    assert foreign_json.parse('{"a": [1, {"b": null}], "c": []}') == {
        "a": [1, {"b": None}],
        "c": [],
    }
    assert foreign_json.parse(nested(64))
    assert foreign_json.parse(b"3") == 3
