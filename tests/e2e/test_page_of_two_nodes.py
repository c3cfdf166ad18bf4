"""The page of a run on two nodes in a real Chromium, while it trains, without any server."""

from __future__ import annotations

import re
from contextlib import ExitStack
from pathlib import Path

from e2e.test_two_agents import TwoNodes
from node import Node
from otel_ddp.identity import addresses
from stack.browser import chromium

PATIENCE_MS = 120_000
# At one moment: the page makes its rows anew.
ROWS = """[...document.querySelectorAll("tr[data-rank]")].map(each => [
    ...[...each.querySelectorAll("td")].slice(0, 2).map(cell => cell.innerText),
    getComputedStyle(each.querySelector("td")).color,
])
"""


def test_all_ranks_are_shown_and_those_of_the_late_node_in_red(tmp_path: Path) -> None:
    with chromium() as driver, ExitStack() as stack:
        nodes = [stack.enter_context(Node(OTEL_DDP_NODE=f"node-{each}")) for each in range(2)]
        run = TwoNodes(nodes, tmp_path)
        for rank in (2, 3):
            run.trouble(rank, "backward 0.03")
        run.verdict(0, "straggler")
        [name] = {each["run"] for each in nodes[0].agent()["elsewhere"]}
        page = driver.new_page()
        page.set_default_timeout(PATIENCE_MS)
        page.goto(addresses.page_of_run(addresses.page(nodes[0].place), name))
        for rank in "23":
            page.locator(f"tr.late[data-rank='{rank}']").wait_for()
        rows = page.evaluate(ROWS)
        sentence = page.locator("p.verdict.bad").first.inner_text()
        work = page.locator("figure[data-picture='Own work, rank by step']")
        work.locator(".main-svg .hm").first.wait_for(state="attached")
        caption = work.locator("figcaption").inner_text()

    assert [row[:2] for row in rows] == [
        *(["0", "node-0"], ["1", "node-0"], ["2", "node-1"], ["3", "node-1"])
    ]
    reds = []
    for rank, _, color in rows:
        red, green, blue = map(int, re.findall(r"\d+", color)[:3])
        reds += [rank] if red > 2 * max(green, blue) else []
    assert reds == ["2", "3"]
    assert "node-1 keeps the others waiting" in sentence
    assert sorted(re.findall(r"rank (\d): ", caption)[:2]) == ["2", "3"]
