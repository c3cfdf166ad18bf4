"""What the demo's link shows in a real Chromium while it trains."""

from __future__ import annotations

import re
import signal

import pytest

from cli.test_demo import begin
from node import Node
from stack.browser import chromium

PATIENCE_MS = 120_000


@pytest.mark.stress
def test_the_late_rank_its_phase_and_the_loss_are_shown_while_it_trains() -> None:
    with chromium() as driver, Node() as node:
        demo = begin(node, "--seconds", "600", "--inject", "backward:1:30ms")
        assert demo.stdout is not None
        link = next(line for line in demo.stdout if line.startswith("Look:")).split()[1]
        page = driver.new_page()
        page.set_default_timeout(PATIENCE_MS)
        page.goto(link)
        page.locator("tr.late[data-rank='1']").wait_for()
        sentence = page.locator("p.verdict").first.inner_text()
        loss = page.locator("figure[data-picture=loss]")
        loss.locator(".main-svg .scatterlayer path").first.wait_for(state="attached")
        caption = loss.locator("figcaption").inner_text()
        page.get_by_role("link", name="Now").click()
        page.locator("tr.late[data-rank='1']").wait_for()
        page.get_by_role("button", name="Stacks of rank 1").click()
        page.get_by_text("MainThread").first.wait_for()
        demo.send_signal(signal.SIGINT)
        demo.communicate(timeout=300)

    assert "rank 1" in sentence
    assert "backward" in sentence
    lasts = re.findall(r"rank \d: last ([\d.e-]+),", caption)
    assert len(lasts) == 2
