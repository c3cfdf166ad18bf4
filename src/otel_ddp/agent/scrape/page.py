"""Renders the page that a person sees who opens the endpoint in a browser."""

from __future__ import annotations

import html
from typing import Any

# No more than /metrics tells, which every user of the node can read: texts of errors stay out.
_COLUMNS = ("run", "group", "job_type", "node", "rank", "state", "step", "phase")


def render_page(status: dict[str, Any]) -> str:
    """The agent's status as HTML."""
    rows = "".join(
        "<tr>" + "".join(f"<td>{html.escape(_cell(each.get(key)))}</td>" for key in _COLUMNS)
        for each in status.get("processes", [])
    )
    heads = "".join(f"<th>{key.replace('_', ' ')}</th>" for key in _COLUMNS)
    return (
        "<!doctype html><meta charset=utf-8><title>otel_ddp</title>"
        "<style>body{font:14px sans-serif;margin:2em}td,th{padding:.2em 1em;text-align:left}"
        "</style>"
        f"<h1>otel_ddp on {html.escape(str(status.get('node', '')))}</h1>"
        f"<table><tr>{heads}</tr>{rows}</table>"
        '<p><a href="/metrics">/metrics</a> <a href="/healthz">/healthz</a></p>'
    )


def _cell(value: Any) -> str:
    return "" if value is None else str(value)
