"""What a browser asks, and what it is answered; JSON and CSV as it gets them."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

JSON = "application/json; charset=utf-8"
TEXT = "text/plain; charset=utf-8"
# A spreadsheet takes a cell that begins so for a formula.
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


class Refused(Exception):
    """A request that is not answered; the text says why."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


class Question(NamedTuple):
    """A request. Names of headers are in small letters."""

    path: str
    query: Mapping[str, Sequence[str]] = {}
    method: str = "GET"
    headers: Mapping[str, str] = {}
    is_private: Callable[[], bool] = lambda: True
    """Whether whoever asks may read what /metrics does not tell."""
    has_token: bool = False
    """Whether the request itself has the token: a browser sends a remembered one by itself."""

    @classmethod
    def of_address(cls, target: str, **more: Any) -> Question:
        """*target*: the path with its query, as the guard lets it through."""
        try:
            parts = urlsplit(target)
            query = parse_qs(parts.query, keep_blank_values=True, max_num_fields=1000)
        except ValueError:
            raise Refused(400, "the address cannot be read") from None
        return cls(parts.path, query, **more)

    def text(self, name: str, default: str = "") -> str:
        return (self.query.get(name) or (default,))[-1]

    @property
    def group(self) -> str | None:
        """The group of the run that is asked for; None: the newest one."""
        return self.text("group") if "group" in self.query else None

    def texts(self, name: str) -> Sequence[str]:
        return self.query.get(name, ())

    def of_each_run(self) -> list[Question]:
        """The same about each of several runs; one without a group is the newest of its name."""
        groups, found = self.texts("group"), []
        for at, run in enumerate(self.texts("run")):
            query = {**self.query, "run": [run], "group": groups[at : at + 1]}
            found.append(self._replace(query={key: each for key, each in query.items() if each}))
        return found or [self]

    def whole(self, name: str, default: int, low: int, high: int) -> int:
        """A whole number within bounds."""
        text = self.text(name)
        if not text:
            return default
        try:
            return min(max(int(text), low), high)
        except ValueError:
            raise Refused(400, f"{name} must be a whole number, not {text[:40]!r}") from None


class Answer(NamedTuple):
    """What is sent."""

    status: int
    headers: Mapping[str, str]
    body: bytes


def json_text(content: Any, **how: Any) -> str:
    """NaN and infinities are null: JSON has none. *how*: what `json.dumps` takes."""
    # A file from elsewhere may have bytes where it should have a text.
    try:
        return json.dumps(content, allow_nan=False, default=str, **how)
    except ValueError:
        return json.dumps(_plain(content), default=str, **how)


def as_json(status: int, content: Any) -> Answer:
    text = json_text(content, separators=(",", ":"))
    # Half a character, as in a text that was cut.
    body = text.encode("utf-8", "replace")
    return Answer(status, {"Content-Type": JSON, "Cache-Control": "no-store"}, body)


def as_text(status: int, text: str, headers: Mapping[str, str] | None = None) -> Answer:
    always = {"Content-Type": TEXT, "Cache-Control": "no-store"}
    return Answer(status, {**always, **(headers or {})}, text.encode("utf-8", "replace"))


def as_html(page: str, policy: str) -> Answer:
    headers = {
        "Content-Type": "text/html; charset=utf-8",
        "Cache-Control": "no-store",
        "Content-Security-Policy": policy,
    }
    return Answer(200, headers, page.encode())


def as_csv(series: Iterable[Mapping[str, Any]]) -> Answer:
    """One row a value. What says which series it is stands before the columns."""
    rows = list(series)
    labels = list(dict.fromkeys(key for each in rows for key in each if key != "columns"))
    columns = list(dict.fromkeys(key for each in rows for key in each["columns"]))
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow(map(_cell, (*labels, *columns)))
    for each in rows:
        before = [_cell(each.get(label)) for label in labels]
        missing = [None] * max(map(len, each["columns"].values()), default=0)
        values = [each["columns"].get(column, missing) for column in columns]
        writer.writerows([*before, *map(_cell, row)] for row in zip(*values, strict=True))
    headers = {
        "Content-Type": "text/csv; charset=utf-8",
        "Content-Disposition": 'attachment; filename="otel_ddp.csv"',
        "Cache-Control": "no-store",
    }
    return Answer(200, headers, out.getvalue().encode("utf-8", "replace"))


def _cell(value: Any) -> Any:
    if isinstance(value, str) and value.startswith(_FORMULA):
        return f"'{value}"
    return "" if value is None else value


def _plain(content: Any) -> Any:
    if isinstance(content, float):
        return content if math.isfinite(content) else None
    if isinstance(content, Mapping):
        return {str(key): _plain(value) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [_plain(each) for each in content]
    return content
