"""The picture of `otel-ddp status --watch` in a real terminal: what it draws, and how it leaves."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from node import until
from otel_ddp import files
from otel_ddp.cli import main
from otel_ddp.journal.place import Place
from otel_ddp.journal.process_state import ProcessState
from otel_ddp.journal.survey import Survey


class Terminal:
    """A program in a terminal of its own, as a shell starts it."""

    def __init__(self, *command: str) -> None:
        self._ours, self._theirs = pty.openpty()
        self.resize(24, 80)
        self.before = termios.tcgetattr(self._theirs)
        env = {**os.environ, "TERM": "xterm-256color", "NO_COLOR": "1"}
        self.process = subprocess.Popen(
            # Whoever runs the tests may ignore these; a shell gives each job its own.
            ["env", "--default-signal=INT,HUP", "setsid", "--ctty", sys.executable, *command],
            env=env,
            stdin=self._theirs,
            stdout=self._theirs,
            stderr=self._theirs,
        )
        self._shown = bytearray()

    def resize(self, rows: int, columns: int) -> None:
        """The kernel tells the program by SIGWINCH."""
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def type(self, keys: bytes) -> None:
        os.write(self._ours, keys)

    @property
    def shown(self) -> str:
        """All that was ever written there."""
        while select.select([self._ours], [], [], 0)[0]:
            self._shown += os.read(self._ours, 65536)
        return self._shown.decode()

    def picture(self) -> list[str]:
        """The lines of the last whole picture."""
        whole = self.shown.rpartition("\x1b[J")[0].rpartition("\x1b[H")[2]
        return whole.replace("\x1b[K", "").split("\r\n")

    def shows(self, words: str) -> bool:
        return any(words in line for line in self.picture())

    def ended(self) -> int:
        """Its exit status."""
        until(lambda: (self.shown, self.process.poll() is not None)[1], "its end")
        return int(self.process.returncode)

    def is_as_before(self) -> bool:
        """Whether it has the settings from before, and a line of its own for what comes next."""
        return self.shown.endswith("\r\n") and termios.tcgetattr(self._theirs) == self.before

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._theirs)
        os.close(self._ours)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The directory of an agent that tells of forty ranks."""
    place = Place(tmp_path_factory.mktemp("ranks") / "place")
    place.directory.mkdir(mode=0o700)
    known = [ProcessState(run="r", rank=rank, pid=rank, started_ns=1) for rank in range(40)]
    known[7] = replace(known[7], wait_ratio=0.6, step_s=0.05)
    told = Survey(agents=[{"pid": os.getpid(), "version": "0"}], processes=known)
    place.agent_file.write_text(json.dumps(told.to_json()))
    # It is not silent, however long the tests take.
    in_an_hour = time.time() + 3600
    os.utime(place.agent_file, (in_an_hour, in_an_hour))
    held = os.open(place.agent_lock, os.O_RDWR | os.O_CREAT, 0o600)
    files.lock(held)
    yield str(place.directory)
    os.close(held)


@pytest.fixture
def terminal(ranks: str) -> Iterator[Terminal]:
    with Terminal("-m", "otel_ddp", "status", "--watch", "--dir", ranks) as found:
        until(lambda: found.shows("run r"), "the first picture")
        yield found


def test_the_picture_has_the_size_of_the_terminal(terminal: Terminal) -> None:
    large = terminal.picture()
    terminal.resize(12, 60)
    until(lambda: len(terminal.picture()) <= 12, "a smaller one")
    small = terminal.picture()

    for picture, rows, columns in ((large, 24, 80), (small, 12, 60)):
        assert len(picture) <= rows
        assert max(map(len, picture)) < columns
    # Rank 7 alone has a pace, so its wait is the only one.
    assert any(line.split()[:1] == ["7"] and "██████░░░░  60%" in line for line in large)
    assert any("more ranks, all running" in line for line in small)
    # As asked, without colours.
    assert "\x1b[1m" not in terminal.shown


@pytest.mark.parametrize(("end", "status"), [("\x03", 0), (signal.SIGHUP, 129)])
def test_however_it_ends_the_terminal_is_as_it_was(
    terminal: Terminal, end: str | signal.Signals, status: int
) -> None:
    if isinstance(end, str):
        terminal.type(end.encode())
    else:
        terminal.process.send_signal(end)

    assert terminal.ended() == status
    assert terminal.is_as_before()
    assert "Traceback" not in terminal.shown


def test_without_a_terminal_the_command_says_what_to_do(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["status", "--watch"]) == 2
    assert "needs a terminal, and its name in TERM" in capsys.readouterr().err
