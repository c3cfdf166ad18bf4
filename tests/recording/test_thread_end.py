"""The end of a thread is told in its own process, and only when the thread has ended."""

from __future__ import annotations

import subprocess
import sys

import pytest

# A thread that is told of, and what becomes of it while it is still at work.
PROGRAM = """
import os, sys, threading
from otel_ddp.recording.progress import call_at_thread_end

def train():
    call_at_thread_end(lambda: print("told", flush=True))
    ready.set()
    go_on.wait()

ready, go_on = threading.Event(), threading.Event()
thread = threading.Thread(target=train, daemon=True)
thread.start()
ready.wait()
if sys.argv[1] == "fork":
    pid = os.fork()
    if not pid:
        os._exit(0)
    os.waitpid(pid, 0)
if sys.argv[1] == "ends":
    go_on.set()
    thread.join()
print("over", flush=True)
"""


@pytest.mark.parametrize(
    ("what", "said"), [("ends", "told\nover\n"), ("fork", "over\n"), ("exit", "over\n")]
)
def test_only_a_thread_that_has_ended_is_told_and_none_in_a_fork_or_at_exit(
    what: str, said: str
) -> None:
    # The thread may hold a lock in the middle of a write: whoever tells for it waits for ever.
    command = [sys.executable, "-c", PROGRAM, what]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)

    assert (done.stdout, done.stderr) == (said, "")
