"""otel-ddp top: what it shows of real journals, what its keys do, and how it leaves a terminal."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import pty
import select
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot
from textual.widgets import DataTable, Static

from node import Node, finished, until
from otel_ddp.agent.ledger import Ledger
from otel_ddp.agent.reading.journals import Journals
from otel_ddp.agent.scrape.endpoint import Endpoint
from otel_ddp.cli import main
from otel_ddp.cli.node import top
from otel_ddp.cli.node.top import frame
from otel_ddp.cli.node.top.app import TopApp
from otel_ddp.cli.node.top.frame import Choice
from otel_ddp.cli.node.top.watch import Watch
from otel_ddp.history.page.app import App
from otel_ddp.history.terminal import shown_time
from otel_ddp.journal.place import Place

PROGRAM = Path(__file__).parents[1] / "written_ranks.py"
SINCE_NS = 1_700_000_000 * 10**9
SENTENCE = "rank 3 is late: forward takes 25 ms longer"
LATE = f"since {shown_time(SINCE_NS, 2 * SINCE_NS)}: {SENTENCE}"
WHO = {"group": "g", "run": "one", "rank": "3"}
GPU = {
    "index": 5,
    "name": "H100",
    "busy_ratio": 0.87,
    "temperature_c": 64.0,
    "power_w": 612.0,
    "used_bytes": 60 << 30,
    "limit_bytes": 80 << 30,
    "power_limit_w": 700.0,
}
AGENT = {
    "verdicts": [{"who": WHO, "sentence": SENTENCE, "since_ns": SINCE_NS}],
    "gpus": [
        {**GPU, "labels": WHO},
        {**GPU, "index": 6, "used_bytes": 0},
        {"index": 7, "name": "Other GPU", "power_w": 150.0},
    ],
}


class Ranks:
    """Ranks that another process has written, and goes on with as it is told; and their agent.

    The agent's loop is left out: it reads the journals whenever it is asked.
    """

    def __init__(self, node: Node, place: Path, **said: Any) -> None:
        self.place = Place(place)
        place.mkdir(mode=0o700)
        self._says = said.pop("agent", {})
        self._journals = Journals(self.place, Ledger(), "")
        app = App(place, live=self._live, recent=self._journals.recent)
        token = said.pop("token", b"")
        self._endpoint = Endpoint(Ledger(), "127.0.0.1", 0, app, token=token)
        self._endpoint.start()
        said["agent"] = {"scrape": self._endpoint.url}
        self._process = node.start(sys.executable, str(PROGRAM), str(place), json.dumps(said))
        self._answer("ready")
        self._journals.find()

    def _live(self) -> dict[str, Any]:
        self._journals.find()
        self._journals.poll()
        unreadable = self._journals.unreadable()
        return {**self._says, "unreadable": unreadable, "processes": self._journals.describe()}

    def _answer(self, word: str) -> None:
        assert self._process.stdout is not None
        assert self._process.stdout.readline().strip() == word

    def tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        self._answer("done")

    def forget(self) -> None:
        """Their journals are deleted, and the agent has forgotten them."""
        paths = [each.reader.path for each in self._journals.feeds()]
        self._journals.close(paths)
        self._journals.delete(paths)
        self._journals.forget_ended(0.0)

    def stop(self) -> None:
        self._endpoint.stop()
        self._journals.close([each.reader.path for each in self._journals.feeds()])

    def leave(self) -> None:
        finished(self._process)

    def watch(self) -> Watch:
        return Watch(str(self.place.directory))

    def shown(self, **chosen: str) -> tuple[list[str], list[dict[str, str]]]:
        """The lines above the table, and its rows by their heads."""
        view, choice = self.watch().look(), Choice(**chosen)
        heads = frame.heads(view)
        rows = [dict(zip(heads, row.cells, strict=True)) for row in frame.rows(view, choice)]
        return frame.above(view, choice), rows


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    with Node(OTEL_DDP_AGENT="off") as found:
        yield found


@pytest.fixture(scope="module")
def eight(node: Node) -> Iterator[Ranks]:
    """Eight ranks after 100 steps, rank 3 late; nothing changes in them."""
    ranks = Ranks(node, node.root / "eight", ranks=8, late=3, agent=AGENT, names=["loss", "lr"])
    ranks.tell("step 100")
    yield ranks
    ranks.stop()


Make = Callable[..., Ranks]


@pytest.fixture
def make(node: Node) -> Iterator[Make]:
    made: list[Ranks] = []

    def new(**said: Any) -> Ranks:
        made.append(Ranks(node, Path(tempfile.mkdtemp(dir=node.root)) / "place", **said))
        return made[-1]

    yield new
    for each in made:
        each.stop()


# -- what a look finds


def test_ranks_stand_with_phase_step_and_their_own_time_and_the_late_one_is_marked(
    eight: Ranks,
) -> None:
    lines, rows = eight.shown()

    assert lines[0].startswith("otel-ddp top  alpha  8 of 8 ranks")
    assert lines[1:4] == ["run one, group g, 8 alive", f"! {LATE}", "loss 0.5  lr 0.25"]
    assert [row["RANK"] for row in rows] == ["0", "1", "2", "!3", "4", "5", "6", "7"]
    assert {row["WORK"] for row in rows if row["RANK"] != "!3"} == {"20 ms"}
    assert (rows[3]["PHASE"], rows[3]["STEP"], rows[3]["WORK"]) == ("forward", "100", "45 ms")
    # A bar for each step, on one scale for the run.
    assert set(rows[3]["LAST STEPS"]) == {"█"}
    assert set(rows[2]["LAST STEPS"]) == {"▄"}
    # All are of one run and one node.
    assert not {"RUN", "NODE"} & rows[0].keys()
    assert [row["GPU"] for row in rows][2:5] == ["", "5: 87% 60.0/80.0 GiB 612/700 W 64 °C", ""]
    assert lines[-2:] == ["gpu 6: free, 87%, 0.0/80.0 GiB", "gpu 7: no rank"]


def test_ranks_are_sorted_and_filtered(eight: Ranks) -> None:
    def ranks(**chosen: str) -> str:
        return " ".join(row["RANK"].lstrip("!") for row in eight.shown(**chosen)[1])

    assert ranks(sort="work") == ranks(sort="state") == "3 0 1 2 4 5 6 7"
    assert ranks(filter="rank=3") == ranks(filter="FORWARD") == "3"
    assert ranks(filter="alpha comm") == "0 1 2 4 5 6 7"
    assert ranks(filter="nothing like it") == ""


def test_names_with_control_characters_and_damaged_journals_are_shown_as_text(make: Make) -> None:
    names = {"run": "[b]\x1b]0;x\x07", "group": "訓練"}
    ranks = make(ranks=2, names=["[red]loss[/red]", "a\x1b[31mb"], identity=names)
    ranks.tell("step 1")
    (ranks.place.directory / "3-cccccccc.journal").write_bytes(b"no journal")

    lines, _ = ranks.shown()

    assert not any(letter < " " or letter == "\x7f" for line in lines for letter in line)
    assert lines[1].startswith("note: ")
    assert lines[1].endswith("is not a journal")
    assert lines[2].startswith("run [b]�]0;x�, group 訓練")
    assert "[red]loss[/red] 0.5" in lines[3]
    ranks.leave()


# -- looking again and again


def test_new_steps_and_an_end_are_followed_and_stay_while_no_agent_answers(make: Make) -> None:
    ranks = make(ranks=2)
    ranks.tell("step 3")
    watch = ranks.watch()
    first, _ = watch.look().ranks
    ranks.tell("step 4")
    ranks.tell("end 1")
    second, ended = watch.look().ranks

    assert [step.number for step in first.steps] == [1, 2, 3]
    assert [step.number for step in second.steps] == [1, 2, 3, 4, 5, 6, 7]
    assert {(step.took_ns, step.work_ns) for step in second.steps} == {(50_000_000, 20_000_000)}
    assert second.phases_ns == {"comm_wait": 30_000_000, "forward": 20_000_000}
    assert ended.process.state == "finished"

    # It held the lock of the agent.
    ranks.leave()
    view = watch.look()

    assert view.notes == ("no agent runs: `otel-ddp status` reads the journals without one",)
    assert [rank.process.state for rank in view.ranks] == ["running", "finished"]
    assert "no agent" in frame.above(view, Choice())[0]


def test_an_agent_that_wants_a_token_is_shown_it(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text("abc\n")
    ranks = make(ranks=1, token=b"abc")

    (asked,) = ranks.watch().look().notes
    monkeypatch.setenv("OTEL_DDP_SCRAPE_TOKEN_FILE", str(tmp_path / "token"))
    admitted = ranks.watch().look()

    assert "wants a token: set OTEL_DDP_SCRAPE_TOKEN_FILE" in asked
    assert (len(admitted.ranks), admitted.notes) == (1, ())
    ranks.leave()


# -- one picture


def test_once_prints_plain_lines_also_without_the_library(
    eight: Ranks, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "textual", None)

    assert main(["top", "--once", "--dir", str(eight.place.directory)]) == 0

    shown = capsys.readouterr().out
    heads, *rows = shown.splitlines()[-9:]
    assert heads.split()[:3] == ["RANK", "PHASE", "FOR"]
    assert [row.split()[0] for row in rows] == ["0", "1", "2", "!3", "4", "5", "6", "7"]
    assert "\x1b" not in shown


def test_without_the_library_or_a_terminal_the_command_says_what_to_do(
    eight: Ranks, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["top", "--dir", str(eight.place.directory)]

    assert main(arguments) == 2
    assert "needs a terminal; `otel-ddp top --once`" in capsys.readouterr().err
    monkeypatch.setattr(top, "find_spec", lambda name: None)
    assert main(arguments) == 2
    assert "pip install 'otel-ddp[top]'" in capsys.readouterr().err
    assert main(["top", "--once", "--dir", "/nowhere/at/all"]) == 2
    assert "does not exist" in capsys.readouterr().err


# -- keys

Act = Callable[[TopApp, Pilot[None]], Coroutine[Any, Any, None]]


def drive(ranks: Ranks, act: Act) -> None:
    """Run the real application, and let the test press keys in it."""

    async def driven() -> None:
        app = TopApp(ranks.watch(), interval_s=0.2)
        async with app.run_test(size=(80, 24)) as pilot:
            await looked(app, pilot)
            await act(app, pilot)

    asyncio.run(driven())


async def looked(app: TopApp, pilot: Pilot[None]) -> None:
    """Wait for the next look."""
    seen, began = app.looks, time.monotonic()
    while app.looks <= seen:
        assert time.monotonic() - began < 180
        await pilot.pause(0.02)


def above(app: TopApp) -> list[str]:
    return str(app.query_one("#above", Static).render()).splitlines()


def ranks_shown(app: TopApp) -> str:
    """The ranks on the screen."""
    table = app.query_one(DataTable)
    height = table.size.height - 1
    first = round(table.scroll_y)
    rows = [table.get_row_at(at) for at in range(table.row_count)]
    return " ".join(str(row[0]).split()[0].lstrip("!") for row in rows[first : first + height])


def test_keys_sort_filter_scroll_and_show_a_rank(eight: Ranks) -> None:
    async def act(app: TopApp, pilot: Pilot[None]) -> None:
        assert ranks_shown(app) == "0 1 2 3 4 5 6 7"
        # Keys with which another program kills.
        await pilot.press("t", "K", "T", "f9", "delete", "x")
        await pilot.press("s")
        assert ranks_shown(app) == "3 0 1 2 4 5 6 7"
        assert "sorted by work" in above(app)[0]
        await pilot.press("slash", *"rank=3", "enter")
        assert ranks_shown(app) == "3"
        await pilot.press("d")
        await looked(app, pilot)
        await looked(app, pilot)
        shown = str(app.screen.query_one(Static).render()).splitlines()
        assert shown[0] == "rank 3"
        assert f"! {LATE}" in shown
        assert any(each.split()[:2] == ["loss", "0.5"] for each in shown)
        assert any(each.split() == ["median", "45", "ms"] for each in shown)
        # Keys of the screen below do nothing here.
        await pilot.press("s", "escape", "escape")
        await pilot.pause()
        assert ranks_shown(app) == "3 0 1 2 4 5 6 7"
        # Where not all have room, the table scrolls and the cursor stays on its rank.
        await pilot.resize_terminal(20, 8)
        await pilot.press("end", "k")
        await looked(app, pilot)
        assert ranks_shown(app).split()[0] != "3"
        assert "6" in ranks_shown(app)
        await pilot.press("d")
        await looked(app, pilot)
        await looked(app, pilot)
        assert str(app.screen.query_one(Static).render()).startswith("rank 6")
        await pilot.press("escape", "home")
        await pilot.pause()
        assert ranks_shown(app).startswith("3 ")
        await pilot.press("q")
        await pilot.pause()
        assert not app.is_running

    drive(eight, act)


def test_a_place_that_vanishes_is_said_and_found_again(make: Make) -> None:
    ranks = make(ranks=1)
    place = ranks.place.directory
    ranks.tell("step 3")

    async def act(app: TopApp, pilot: Pilot[None]) -> None:
        place.rename(place.with_suffix(".away"))
        await looked(app, pilot)
        await looked(app, pilot)
        assert above(app)[1] == f"note: {place} does not exist."
        assert above(app)[2].startswith("run one")
        place.with_suffix(".away").rename(place)
        await looked(app, pilot)
        await looked(app, pilot)
        assert above(app)[1] == "run one, group g, 1 alive"

    drive(ranks, act)
    ranks.leave()


# -- a real terminal


def test_in_a_real_terminal_with_a_real_agent_q_ends_it_and_leaves_the_terminal_as_it_was(
    node: Node,
) -> None:
    code = "import otel_ddp; run = otel_ddp.init(run='r'); run.log({'loss': 1.0}); input()"
    training = node.python(code, OTEL_DDP_AGENT="auto")
    node.agent()
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    before = termios.tcgetattr(theirs)
    env = {**node.env, "TERM": "xterm-256color", "NO_COLOR": "1", "OTEL_DDP_AGENT": "off"}
    command = [sys.executable, "-m", "otel_ddp", "top", "--dir", str(node.place.directory)]
    process = subprocess.Popen(
        command, env=env, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    )
    shown = bytearray()

    def read() -> bytes:
        while select.select([ours], [], [], 0)[0]:
            shown.extend(os.read(ours, 65536))
        return bytes(shown)

    try:
        until(lambda: b"loss 1" in read() and b"quit" in shown, "the value on the screen")
        os.write(ours, b"q")
        until(lambda: (read(), process.poll() is not None)[1], "the end")
        read()
        after = termios.tcgetattr(theirs)
    finally:
        process.kill()
        process.wait()
        os.close(ours)
        os.close(theirs)

    training.communicate("\n")
    assert process.returncode == 0
    assert after == before
    # Out of the other screen, and with a cursor again.
    assert shown.rindex(b"\x1b[?1049l") > shown.rindex(b"\x1b[?1049h")
    assert shown.rindex(b"\x1b[?25h") > shown.rindex(b"\x1b[?25l")
    # Without mouse, and as asked without colours.
    assert b"\x1b[?1000h" not in shown
    assert b"\x1b[31m" not in shown
    assert b";31m" not in shown
