"""Writes the table of docs/settings.md: each setting, with the text below it in the source."""

from __future__ import annotations

import ast
import inspect
from dataclasses import Field, fields
from typing import Any

from tools.tables import with_rows

from otel_ddp import settings


def settings_page(page: str) -> str:
    """The page with a row for each setting; a test holds that it has all other variables."""
    texts = _texts()
    rows = (
        f"| `{each.metadata['variable']}` | {_default(each)} | {texts[each.name]} |"
        for each in fields(settings.Settings)
    )
    return with_rows(page, "# Settings", rows)


def _texts() -> dict[str, str]:
    """The text below each field, as one line."""
    (record,) = ast.parse(inspect.getsource(settings.Settings)).body
    assert isinstance(record, ast.ClassDef)
    return {
        each.target.id: " ".join(text.value.value.split())
        for each, text in zip(record.body, record.body[1:], strict=False)
        if isinstance(each, ast.AnnAssign)
        and isinstance(each.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }


def _default(setting: Field[Any]) -> str:
    default = setting.default
    if isinstance(default, bool):
        text = str(default).lower()
    elif isinstance(default, frozenset):
        text = ",".join(sorted(default))
    elif isinstance(default, float):
        standard = not setting.metadata["variable"].startswith("OTEL_DDP_")
        text = f"{default * 1000 if standard else default:g}"
    elif setting.name.endswith("_bytes"):
        text = f"{default // settings.MIB}M"
    else:
        text = str(default or "") if default != () else ""
    return f"`{text}`" if text else ""
