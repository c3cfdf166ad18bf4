"""A real Chromium, for what only a browser shows."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

_CHROMIUM = ("chromium", "chromium-browser", "google-chrome")


@contextmanager
def chromium() -> Iterator[Any]:
    """Skips where there is no Chromium, or nothing to drive it with."""
    sync_api = pytest.importorskip(
        "playwright.sync_api", reason="no browser: install the extra `browser`, and have a Chromium"
    )
    binary = next(filter(None, map(shutil.which, _CHROMIUM)), None)
    if binary is None:
        pytest.skip("no browser: there is no Chromium on the PATH")
    with sync_api.sync_playwright() as driver:
        started = driver.chromium.launch(
            executable_path=binary,
            # Root's sandbox is refused; what is shown is ours.
            args=["--no-sandbox", "--disable-gpu"],
        )
        try:
            yield started
        finally:
            started.close()
