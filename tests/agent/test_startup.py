"""How an agent begins: its log."""

from __future__ import annotations

import subprocess
import sys

LOGS = r"""
import logging
from otel_ddp.agent import service
service.log_to_stderr()
logging.getLogger("otel_ddp.agent").warning("%s is damaged", "a\x1b[31m\nb\udcff")
"""


def test_no_text_of_a_journal_controls_the_terminal_that_shows_the_log() -> None:
    logged = subprocess.run(
        [sys.executable, "-c", LOGS], capture_output=True, text=True, check=True, timeout=300
    )

    assert logged.stderr.endswith(r" otel-ddp agent: a\x1b[31m\nb\udcff is damaged" + "\n")
