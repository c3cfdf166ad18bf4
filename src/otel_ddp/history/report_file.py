"""How a report calls itself, for those who write it and those who read it."""

from __future__ import annotations

from typing import Final

FORMAT: Final = "otel_ddp report"
VERSION: Final = 1
