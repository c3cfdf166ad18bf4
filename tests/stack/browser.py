"""Boards as a person sees them: pages of a real Grafana in a real Chromium."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

WIDTH = 1600
PATIENCE_MS = 60_000
_LOOK_MS, _QUIET_MS = 50, 500
# Of one line of Grafana's grid, and what stands above the first.
_LINE, _HEAD = 38, 400
_CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
_PANELS = '[data-testid^="data-testid Panel header "]'
# What each panel says of itself. An answer that is still awaited has a bar.
_SEEN = """() => [...document.querySelectorAll('[data-testid^="data-testid Panel header "]')].map(
  panel => ({
    title: panel.dataset.testid.slice("data-testid Panel header ".length),
    failed: panel.querySelector('[data-testid^="data-testid Panel status"]') !== null,
    empty: panel.querySelector('[data-testid="data-testid Panel data error message"]') !== null,
    waits: panel.querySelector('[aria-label="Panel loading bar"]') !== null,
    text: panel.innerText,
  }))"""


class Seen(NamedTuple):
    """A panel of a page."""

    title: str
    failed: bool
    empty: bool
    text: str


class Board:
    """One board that was opened; all of it is within the window, so all of it is drawn."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self._under_way: set[Any] = set()
        page.on("request", self._began)
        for how in ("requestfinished", "requestfailed"):
            page.on(how, self._ended)

    def _began(self, request: Any) -> None:
        # The worker that lays out the graph of inputs and outputs: its request has no end.
        if not request.url.startswith("blob:"):
            self._under_way.add(request)

    def _ended(self, request: Any) -> None:
        self._under_way.discard(request)

    def _wait_for_answers(self) -> None:
        """Until nothing has been asked for half a second, as `networkidle` has it."""
        quiet_ms = 0
        for _ in range(PATIENCE_MS // _LOOK_MS):
            self.page.wait_for_timeout(_LOOK_MS)
            quiet_ms = 0 if self._under_way else quiet_ms + _LOOK_MS
            if quiet_ms >= _QUIET_MS:
                return
        raise AssertionError(f"no answer to {[each.url for each in self._under_way]}")

    def panels(self) -> list[Seen]:
        """Every panel, once each has its answer."""
        self.page.wait_for_selector(_PANELS, timeout=PATIENCE_MS)
        self._wait_for_answers()
        self.page.wait_for_function(
            f"() => !({_SEEN})().some(panel => panel.waits)", timeout=PATIENCE_MS
        )
        said = self.page.evaluate(_SEEN)
        return [Seen(*(each[name] for name in Seen._fields)) for each in said]

    def open_rows(self) -> None:
        """Open what is closed at first."""
        closed = self.page.get_by_label("Expand row")
        self.page.wait_for_selector(_PANELS, timeout=PATIENCE_MS)
        while closed.count():
            closed.last.click()

    def keep(self, path: Path) -> None:
        path.write_bytes(self.page.screenshot())


class Browser:
    """A Chromium that looks at one Grafana."""

    def __init__(self, chromium: Any, url: str) -> None:
        self._chromium, self._url = chromium, url

    @contextmanager
    def open(self, uid: str, lines: int, **asked: str) -> Iterator[Board]:
        """A board of so many lines of the grid, with these parts of its address."""
        page = self._chromium.new_page(
            viewport={"width": WIDTH, "height": _HEAD + lines * _LINE}, timezone_id="UTC"
        )
        page.set_default_timeout(PATIENCE_MS)
        try:
            chosen = "&".join(f"{name.replace('_', '-', 1)}={each}" for name, each in asked.items())
            board = Board(page)
            page.goto(f"{self._url}/d/{uid}?{chosen}", timeout=PATIENCE_MS)
            yield board
        finally:
            page.close()


@contextmanager
def browser(url: str) -> Iterator[Browser]:
    """Of a Grafana; skips where there is none."""
    with chromium() as found:
        yield Browser(found, url)


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
