"""Takes the pictures of docs/page.md: `make pictures`.

Two real trainings of the demo learn to tell ten classes apart, on four ranks each. In the second
one, rank 2 loads its data late from step 150 on.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

from otel_ddp.identity import addresses
from otel_ddp.journal.place import Place
from otel_ddp.journal.survey import last_of_agent

INTO = Path(__file__).parents[1] / "docs" / "img"
RANKS, SECONDS = 4, 60.0
RUNS = {"steady": "", "late-loader": "data:2:40ms"}
SIZE = {"width": 1366, "height": 700}
# The page polls every second; the agent writes every two.
SETTLES_MS, VERDICT_S = 4000, 30.0
CHROMIUM = ("chromium", "chromium-browser", "google-chrome")


def shoot(browser: Any, address: str, name: str, look: str = "light", height: int = 0) -> None:
    size = {**SIZE, "height": height or SIZE["height"]}
    context = browser.new_context(viewport=size, color_scheme=look)
    page = context.new_page()
    page.goto(address)
    page.wait_for_timeout(SETTLES_MS)
    page.screenshot(path=INTO / f"page-{name}-{look}.png")
    context.close()


def train(browser: Any, run: str, injected: str, root: Path) -> None:
    """Run a training; with a fault, take pictures of its page while it runs."""
    place = Place(root / run)
    own = {
        "OTEL_DDP_RUN": run,
        "OTEL_DDP_DIR": str(place.directory),
        "OTEL_DDP_SPOOL_DIR": str(root / "spool"),
        "OTEL_DDP_HISTORY_DIR": str(root / "history"),
        "OTEL_DDP_OVERHEAD": "all",
        "OMP_NUM_THREADS": "1",
    }
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *(f"--nproc-per-node={RANKS}", "-m", "otel_ddp.cli.demo_training"),
        *(str(SECONDS), injected),
    ]
    with subprocess.Popen(command, env={**os.environ, **own}) as training:
        if injected:
            while not last_of_agent(place).verdicts and training.poll() is None:
                time.sleep(0.5)
            # Until the cost and the curves are visible.
            time.sleep(VERDICT_S)
            page = addresses.page(place)
            shoot(browser, addresses.page_of_run(page, run), "run")
            shoot(browser, f"{page.rstrip('/')}/now", "now", "dark", 360)
    # The agent writes the end of the run.
    if pid := place.agent_pid():
        os.kill(pid, signal.SIGTERM)
    while place.agent_is_alive():
        time.sleep(0.5)


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of a page without an agent."""
    command = [sys.executable, "-m", "otel_ddp", "open", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield server.stdout.readline().split()[-1].rstrip("/")
        finally:
            server.terminate()


def main() -> None:
    binary = next(filter(None, map(shutil.which, CHROMIUM)))
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=binary, args=["--no-sandbox"])
        for run, injected in RUNS.items():
            train(browser, run, injected, Path(folder))
        with served(Path(folder) / "history") as address:
            shoot(browser, f"{address}/", "runs", height=240)
            both = "&".join(f"run={run}&group=demo" for run in RUNS)
            shoot(browser, f"{address}/compare?{both}", "compare", "dark")
        browser.close()


if __name__ == "__main__":
    main()
