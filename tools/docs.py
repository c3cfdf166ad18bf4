"""Writes the generated pages of docs/; the tests fail where they are stale."""

from __future__ import annotations

from pathlib import Path

from otel_ddp import catalog, settings

DOCS = Path(__file__).parents[1] / "docs"

if __name__ == "__main__":
    (DOCS / "metrics.md").write_text(catalog.markdown())
    (DOCS / "settings.md").write_text(settings.markdown())
