"""The page in a real Chromium: every view, light and dark; numbers are the file's own."""

from __future__ import annotations

import csv
import json
import re
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from histories import SPENT_S, S, summary, two_attempts, value_rows, write_history
from history.page.serving import Served
from otel_ddp.agent.ledger import Ledger
from otel_ddp.agent.serve.endpoint import Endpoint
from otel_ddp.history.directory import find_run
from otel_ddp.history.page import answers
from otel_ddp.history.page.app import App
from otel_ddp.history.run_file import RunFile
from otel_ddp.history.tables import SeriesKey
from otel_ddp.journal.process_state import ProcessState
from otel_ddp.journal.survey import Survey
from stack.browser import chromium

PATIENCE_MS = 60_000
LATE = "/run/late?group=sweep"
BOTH = "/compare?run=late&group=sweep&run=other&group=sweep"
MARKUP = "<img src=x onerror=document.title='bad'>"
# The times of trouble and the attempts that a picture shows: the word, from where, to where.
SPANS = """title => {
    const {picture} = document.querySelector(`figure[data-picture="${title}"]`);
    const {spans} = picture.draw(picture.answer, picture.kind());
    return spans.map(each => [each.text, each.from, each.to ?? null]);
}"""
# Of a laptop, without what the browser itself takes.
SIZE = {"width": 1366, "height": 700}
STACK = {"file": "train.py", "line": 7, "function": "forward"}


def live() -> Survey:
    now_ns = time.time_ns()
    who = {"group": "sweep", "run": "late", "node": "node-0", "rank": "2"}
    since = {"phase": "forward", "phase_since_ns": now_ns - 5 * S}
    late = {"kind": "straggler", "who": who, "phase": "forward", "since_ns": now_ns}
    return Survey(
        agents=[{"node": "node-0", "version": "0"}],
        processes=[
            ProcessState("late", "sweep", node="node-0", rank=rank, step=299, **since)
            for rank in range(4)
        ],
        verdicts=[{**late, "sentence": "rank 2 (node-0) keeps the others waiting"}],
    )


def stacks(group: str, run: str, rank: str) -> list[dict[str, Any]]:
    threads = [{"name": "MainThread", "frames": [STACK]}]
    return [{"rank": int(rank), "pid": 9, "why": "", "threads": threads}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("histories")
    began_ns = time.time_ns() - 60 * S
    row = summary("loss", "val", [(280, began_ns, 0.0625), (290, began_ns, 0.125)])
    names = ("loss", "accuracy", "lr")
    again = two_attempts(began_ns, why=MARKUP)
    write_history(folder, "again", group="again", ranks=1, began_ns=began_ns, about=again)
    spent = {"productive": 18.2, "start": 1.9, "data": 0.4, "late_rank": 2.1, "end": 0.2}
    nan = {"kind": "nonfinite", "who": {"rank": "3", "node": "node-0"}, "step": 290}
    write_history(
        *(folder, "late"),
        late=2,
        late_in=range(61, 250),
        verdicts=[
            {
                **nan,
                "since_ns": began_ns + 6 * S,
                "until_ns": began_ns + 7 * S,
                "sentence": "loss became NaN on rank 3 at step 290. Look at the learning rate.",
            }
        ],
        names=names,
        began_ns=began_ns,
        about={
            "summary": [row],
            "time": {"seconds": spent, "late": {"rank 2 (node-0)": 2.1}},
        },
        bound="compute-bound",
        waits_s={("tp", "all_reduce"): {2: 0.0, 3: 0.002}, ("dp", "all_reduce"): {0: 0.003}},
    )
    config = {"lr": 0.1, "batch": 32}
    write_history(
        *(folder, "other"),
        names=(*names, "=lr"),
        began_ns=began_ns - 60 * S,
        seed=1,
        about={"config": config},
        bound="compute-bound: 75 % of the step",
    )
    path = write_history(
        *(folder, f"<b>{MARKUP}"),
        group="",
        ranks=1,
        steps=20,
        names=(MARKUP,),
        state="killed",
    )
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("UPDATE series SET rank = '<b>0</b>' WHERE kind = 'steps'")
    names = ("learning_rate", "grad_norm", "lr", "train/loss", "loss", "val/grad_norm")
    write_history(folder, "read", group="names", ranks=1, steps=60, names=names)
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Served]:
    with Served(App(folder, live=live, ask_stacks=stacks)) as served:
        yield served


@pytest.fixture(scope="module")
def driver() -> Iterator[Any]:
    with chromium() as found:
        yield found


STRESS = pytest.mark.stress


@pytest.fixture(scope="module", params=["light", pytest.param("dark", marks=STRESS)])
def look(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Window:
    """A page of the browser; whatever it complains of fails the test."""

    def __init__(self, driver: Any, address: str, look: str = "light", **more: Any) -> None:
        self._context = driver.new_context(
            **{"color_scheme": look, "viewport": SIZE, "accept_downloads": True, **more}
        )
        self.page = self._context.new_page()
        self.page.set_default_timeout(PATIENCE_MS)
        self.complaints: list[str] = []
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("console", self._hear)
        self.address = address

    def _hear(self, message: Any) -> None:
        # What the network did is said on the page; a script that fails is not.
        if message.type == "error" and "Failed to load resource" not in message.text:
            self.complaints.append(message.text)

    def open(self, path: str) -> Any:
        self.page.goto(self.address + path)
        return self.page

    def figure(self, title: str) -> Any:
        """A picture that is drawn."""
        found = self.page.locator(f"figure[data-picture={json.dumps(title)}]")
        found.scroll_into_view_if_needed()
        self.page.wait_for_selector(f"figure[data-picture={json.dumps(title)}][data-drawn]")
        return found

    def draw_all(self) -> None:
        """Scroll through, so that each picture is drawn."""
        figures = self.page.locator("figure:visible")
        for at in range(figures.count()):
            figures.nth(at).scroll_into_view_if_needed()
            figures.nth(at).and_(self.page.locator("[data-drawn]")).wait_for()
        self.page.evaluate("scrollTo(0, 0)")

    def __enter__(self) -> Window:
        return self

    def __exit__(self, *exception: object) -> None:
        self._context.close()
        assert self.complaints == []


@pytest.fixture(scope="module")
def _window(driver: Any, server: Served, look: str) -> Iterator[Window]:
    with Window(driver, server.url, look) as window:
        yield window


@pytest.fixture
def window(_window: Window) -> Iterator[Window]:
    """One for all tests: a new one would compile the library of plots again, for two seconds."""
    yield _window
    assert _window.complaints == []


def check_accessibility(page: Any) -> None:
    page.evaluate((resources.files("axe_playwright_python") / "axe.min.js").read_text())
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    assert [
        (each["id"], [node["html"][:200] for node in each["nodes"]]) for each in found["violations"]
    ] == []


def on_first_screen(page: Any, *selectors: str) -> dict[str, bool]:
    """Whether all that these select is seen before anybody scrolls."""
    return {
        selector: page.evaluate(
            "of => { const all = [...document.querySelectorAll(of)]; return all.length > 0 && "
            "all.every(e => { const {top, bottom, right, height} = e.getBoundingClientRect(); "
            "return height > 0 && top >= 0 && bottom <= innerHeight && right <= innerWidth; }); }",
            selector,
        )
        for selector in selectors
    }


LEARNS = "section[aria-labelledby=learns] .plot .uplot"
WAITS = ("section[aria-labelledby=waits] .wait", "canvas.strip")
ALWAYS = ("h1", ".pill", ".tile")


def test_the_first_screen_of_an_ended_run_names_the_worst_trouble_and_the_costliest(
    window: Window, look: str
) -> None:
    page = window.open("/run/late?group=sweep")
    page.locator(LEARNS).wait_for()
    page.locator(".wait.late").wait_for()
    seen = on_first_screen(
        *(page, *ALWAYS, *WAITS, LEARNS, ".trouble", ".trouble p", ".bar", ".causes", ".jump")
    )
    worst, costliest = (each.inner_text() for each in page.locator(".trouble").all())
    tiles = {
        name: rest
        for name, *rest in (each.split("\n") for each in page.locator(".tile").all_inner_texts())
    }
    bars = [each.split("\n") for each in page.locator(".wait").all_inner_texts()]
    spans = page.evaluate(SPANS, "loss (train), loss (val)")
    check_accessibility(page)

    assert [name for name, is_seen in seen.items() if not is_seen] == []
    assert "Loss became NaN on rank 3 at step 290" in worst
    assert "step 290" in worst
    assert "Rank 2 (node-0) held the run back steps 61 to 249" in costliest
    assert "3 ms late in forward: 21.5 ms a step instead of 18.5 ms. Look at what" in costliest
    assert "1.16× slower" in costliest
    assert tiles["loss (train)"] == ["0.106", "step 299"]
    assert tiles["loss (val)"] == ["0.125", "best 0.0625 at step 280"]
    assert tiles["step time"][0] == "21.5 ms"
    assert tiles["productive"] == ["79.8 %", "of 22.8 s of all ranks"]
    assert [bar[0] for bar in bars[:2]] == ["rank 2 node-0", "3 others"]
    assert "late" in bars[0][-1]
    assert bars[2:] == [
        ["waits in dp", "rank 0 13.9 %, least rank 0"],
        ["waits in tp", "rank 3 9.3 %, least rank 2"],
    ]
    assert spans == [["late: rank 2", 61, 249], ["NaN: rank 3", 290, 299]]


def test_the_first_screen_of_a_run_that_goes_on_says_what_to_do_next(
    window: Window, tmp_path: Path
) -> None:
    write_history(
        *(tmp_path, "on"),
        ranks=64,
        steps=60,
        late=37,
        late_in=range(20, 60),
        logged_by=64,
        state="running",
        began_ns=time.time_ns() - 2 * S,
    )
    with Served(App(tmp_path, live=live, ask_stacks=stacks)) as served:
        page = window.page
        page.goto(f"{served.url}/run/on")
        page.locator(LEARNS).wait_for()
        page.locator(".wait.late").wait_for()
        seen = on_first_screen(page, *ALWAYS, *WAITS, LEARNS, ".trouble", ".acts button", ".jump")
        trouble = page.get_by_role("region", name="Rank 37").inner_text()
        bars = page.locator(".wait > span:first-child").all_inner_texts()
        strip = page.locator("canvas.strip").get_attribute("aria-label") or ""
        page.get_by_role("button", name="Profile command").click()
        page.get_by_text("otel-ddp profile --rank 37").wait_for()
        page.get_by_role("button", name="Its stack").click()
        page.get_by_text("forward (train.py:7)").wait_for()
        check_accessibility(page)
        # The page would go on asking a server that is gone.
        page.goto("about:blank")

    assert [name for name, is_seen in seen.items() if not is_seen] == []
    assert "Rank 37 (node-0) holds the run back since step 20" in trouble
    assert "1.16× slower" in trouble
    assert bars == ["rank 37 node-0", "63 others"]
    # Of 64 ranks a row has two.
    assert "The latest: ranks 36–37, by up to 3" in strip


@pytest.mark.parametrize(("ranks", "steps"), [(1, 40), (1024, 20)])
def test_the_first_screen_has_what_the_run_has_and_nothing_empty(
    window: Window, tmp_path: Path, ranks: int, steps: int
) -> None:
    write_history(tmp_path, "r", group="", ranks=ranks, steps=steps)
    with Served(App(tmp_path)) as served:
        page = window.page
        page.goto(f"{served.url}/run/r")
        page.get_by_text(f"{ranks} rank").first.wait_for()
        page.locator(LEARNS).wait_for()
        if ranks > 1:
            page.get_by_text("others").first.wait_for()
        seen = on_first_screen(page, "h1", ".tile", LEARNS)
        counts = {each: page.locator(each).count() for each in (".trouble", ".wait", ".bar")}
        widths = {}
        for width in (400, 2560):
            page.set_viewport_size({"width": width, "height": 700})
            widths[width] = page.evaluate("document.documentElement.scrollWidth")
        page.set_viewport_size(SIZE)
        check_accessibility(page)
        page.goto("about:blank")

    assert all(seen.values())
    # Nothing is wrong, and time was not counted.
    assert counts == {".trouble": 0, ".wait": int(ranks > 1), ".bar": 0}
    assert widths == {400: 400, 2560: 2560}


def test_ten_thousand_ranks_are_drawn_as_far_as_one_scrolls_the_worst_first(
    window: Window, tmp_path: Path
) -> None:
    file = RunFile(tmp_path / "r.sqlite")
    processes = {
        str(rank): {"state": "failed" if rank == 7777 else "running", "rank": rank, "node": "n"}
        for rank in range(10_000)
    }
    file.write(about={"run": "r", "began_ns": time.time_ns()}, ranks=processes)
    file.close()

    with Served(App(tmp_path)) as served:
        page = window.page
        page.goto(f"{served.url}/run/r")
        page.get_by_text("Ranks, the worst first").click()
        rows = page.get_by_role("region", name="10000 of 10000 ranks").locator("tbody tr")
        first, count = rows.first.inner_text(), rows.count()
        heads = page.locator("h2:visible").all_inner_texts()
        page.goto("about:blank")

    assert first.startswith("7777\tn\tfailed")
    assert count == 100
    # It has made no step.
    assert not {"Step time and phases", "Verdicts"} & {*heads}


def test_the_page_of_a_run(window: Window) -> None:
    page = window.open(LATE)
    caption = window.figure("loss").locator("figcaption").inner_text()
    phases = window.figure("Phases of a step").locator("figcaption").inner_text()
    window.draw_all()
    check_accessibility(page)
    page.get_by_label("Filter events").fill("begins")
    page.get_by_role("cell", name="training begins").wait_for()

    # The histories are made by chance, and always alike.
    assert "train: last 0.106, lowest 0.106, highest 2.0559" in caption
    assert "waiting for other ranks: 1.4" in phases


# How much of the bar each cause has.
BAR = """[...document.querySelectorAll('.bar > span')].map(each =>
    [each.dataset.cause, each.offsetWidth / each.parentElement.offsetWidth])
"""


def test_a_run_shows_what_its_time_went_to_and_its_attempts(window: Window) -> None:
    page = window.open("/run/again?group=again&x=time")
    causes = page.locator(".causes li")
    causes.first.wait_for()
    bar, told = dict(page.evaluate(BAR)), causes.all_inner_texts()
    rows = page.get_by_role("region", name="Attempts").locator("tbody tr")
    first, second = (each.split("\t") for each in rows.all_inner_texts())
    window.figure("loss")
    against_time = page.evaluate(SPANS, "loss")
    page.get_by_role("combobox", name="x", exact=True).select_option("step")
    window.draw_all()
    against_steps = page.evaluate(SPANS, "loss")
    check_accessibility(page)

    for cause, spent_s in SPENT_S.items():
        assert bar[cause] == pytest.approx(spent_s / 100, abs=0.005)
    assert told == [
        "steps that moved the run on 60 % · 60 s",
        "starting, until the first step has ended; compiling 20 % · 20 s",
        "waiting for a late rank or node 5 % · 5 s (rank 2 (node-0) 5 s)",
        "steps done twice, after a restart 12 % · 12 s",
        "not known 3 % · 3 s",
    ]
    assert (first[0], *first[2:6], first[7]) == ("1", "", "0", "99", "-", MARKUP)
    assert first[6].startswith("killed ")
    assert second[0:1] + second[2:] == ["2", "7 s", "60", "199", "40", "finished", ""]
    assert [each[0] for each in against_time] == ["attempt 2"]
    assert against_steps == [["attempt 2", 60, None]]


@STRESS
def test_the_list_of_runs_leads_to_their_comparison(driver: Any, server: Served, look: str) -> None:
    with Window(driver, server.url, look) as window:
        page = window.open("/")
        page.get_by_role("link", name="late").wait_for()
        check_accessibility(page)
        assert MARKUP in page.locator("main").inner_text()
        late = page.locator("tr[data-run=late]")
        cells, curves = late.inner_text().split("\t"), late.locator("svg.spark").count()
        page.get_by_role("button", name="Sort by run").click()
        order = page.locator("tr[data-run] a").all_inner_texts()
        page.keyboard.press("Enter")
        back = page.locator("tr[data-run] a").all_inner_texts()
        assert "sort=-run" in page.url
        assert cells[1:4] == ["finished", "late", "sweep"]
        assert cells[6:8] == ["NaN · rank 3 · step 290", "299"]
        assert cells[-1] == "79.8 %"
        assert curves == 1
        assert back == order[::-1]
        page.get_by_label("Filter").fill("group=sweep")
        page.get_by_label("Group by").select_option("state")
        assert page.locator("tr[data-run]").count() == 2
        assert "state: finished (2)" in page.locator("tr.group").inner_text()
        for run in ("late", "other"):
            page.get_by_label(f"Compare {run}").focus()
            page.keyboard.press("Space")
        page.get_by_role("button", name="Compare the ticked runs").click()
        page.wait_for_url("**/compare?*")
        assert "Compare 2 runs" in page.get_by_role("heading", level=1).inner_text()
        caption = window.figure("loss").locator("figcaption").inner_text()
        window.draw_all()
        check_accessibility(page)
        runs = page.get_by_role("region", name="Runs").inner_text()
        differs = page.get_by_role("region", name="What differs").inner_text()
        page.get_by_label("Step", exact=True).fill("200")
        page.keyboard.press("Enter")
        table = page.get_by_role("region", name="Values at step 200")
        row = table.locator("tr", has_text="loss (train)").inner_text()

    assert "lr\t0.3\t0.1" in differs
    assert "batch" not in differs
    assert "NaN · rank 3 · step 290" in runs
    assert "late · rank 2 · 1.16× slower" in runs
    assert "late, train: last" in caption
    assert "other, val: last" in caption
    for last in ("0.27909", "0.30732"):
        assert f"{last} (step 200)" in row


def test_ticked_runs_are_renamed_and_deleted_by_who_types_the_token(
    driver: Any, tmp_path: Path
) -> None:
    for run in ("one", "other"):
        write_history(tmp_path, run, ranks=1, steps=20)
    endpoint = Endpoint(Ledger(), "127.0.0.1", 0, App(tmp_path), token=b"secret")
    endpoint.start()
    known = {"username": "me", "password": "secret"}
    try:
        with Window(driver, f"http://localhost:{endpoint.port}", http_credentials=known) as window:
            page = window.open("/")
            page.on("dialog", lambda dialog: dialog.accept())
            page.get_by_label("Compare one").check()
            page.get_by_text("Change the ticked runs").click()
            page.get_by_label("Name", exact=True).fill("the best")
            page.get_by_label("Token").fill("secret")
            page.get_by_role("button", name="Save").click()
            page.get_by_text("the best · mnist/train.py").wait_for()
            check_accessibility(page)
            page.get_by_label("Compare other").check()
            page.get_by_role("button", name="Delete").click()
            page.locator("tr[data-run=other]").wait_for(state="detached")
            left = page.locator("tr[data-run]").count()
    finally:
        endpoint.stop()

    assert left == 1


def test_what_goes_on_now_and_where_it_is(window: Window, look: str) -> None:
    page = window.open("/now")
    page.locator("tr.late[data-rank='2']").wait_for()
    row = page.locator("tr[data-rank='2']").inner_text()
    assert re.search(r"forward\t5(\.\d+)? s", row), row
    page.get_by_role("button", name="Stacks of rank 2").click()
    page.get_by_text("forward (train.py:7)").wait_for()
    check_accessibility(page)


@STRESS
def test_what_is_chosen_stands_in_the_address(driver: Any, server: Served) -> None:
    with Window(driver, server.url) as window:
        page = window.open(LATE)
        figure = window.figure("loss")
        page.get_by_label("Log axis").check()
        page.get_by_label("Smoothing").fill("0.5")
        figure.locator(".plot").focus()
        page.keyboard.press("+")
        page.wait_for_function("() => location.search.includes('zoom=')")
        address = page.url
        for part in ("log=1", "smooth=0.5", "zoom=step"):
            assert part in address
        range_of = (
            "(({min, max}) => [min, max].map(Math.round))"
            "(document.querySelector('figure[data-picture=loss]').picture.drawn.chart.scales.x)"
        )
        page.wait_for_function(f"() => {range_of}[0] > 1")
        zoomed = page.evaluate(range_of)
        again = window.open(address.removeprefix(server.url))
        window.figure("loss")
        assert again.evaluate(range_of) == zoomed
        assert again.get_by_label("Log axis").is_checked()


def test_pictures_are_saved_as_numbers_and_as_an_image(window: Window, tmp_path: Path) -> None:
    def saved(path: str, title: str, kind: str) -> bytes:
        page = window.open(path)
        button = window.figure(title).get_by_role("button", name=f"{kind} of {title}")
        with page.expect_download() as download:
            button.click()
        download.value.save_as(tmp_path / kind)
        return (tmp_path / kind).read_bytes()

    image = saved(LATE, "loss", "PNG")
    one, both = (
        [*csv.DictReader(saved(path, title, "CSV").decode().splitlines())]
        for path, title in ((LATE.replace("late", "other"), "=lr"), (BOTH, "loss"))
    )

    assert image.startswith(b"\x89PNG")
    assert [row["x"] for row in one if row["split"] == "train"] == [str(at) for at in range(300)]
    # No spreadsheet takes it for a formula.
    assert {row["name"] for row in one} == {"'=lr"}
    # Of train, and each tenth of val.
    assert [row["run"] for row in both] == ["late"] * 330 + ["other"] * 330


def test_markup_in_names_is_text(window: Window) -> None:
    page = window.open(f"/run/%3Cb%3E{MARKUP}")
    window.figure(MARKUP)
    assert "1 rank on node-0 ·" in page.locator("main").inner_text()
    assert page.locator("main img").count() == 0
    assert "bad" not in page.title().split()
    assert page.get_by_role("heading", level=1).inner_text() == f"<b>{MARKUP}"


def test_a_saved_page_shows_the_run_without_a_network(
    driver: Any, folder: Path, tmp_path: Path
) -> None:
    with find_run("late", folder) as run:
        (tmp_path / "report.html").write_text(answers.saved(run))
    asked: list[str] = []
    with Window(driver, (tmp_path / "report.html").as_uri(), offline=True) as window:
        window.page.on("request", lambda request: asked.append(request.url))
        page = window.open("")
        page.locator("figure[data-drawn]").first.wait_for()
        window.draw_all()
        figures = page.locator("section[aria-labelledby=values] figure")
        drawn = "figure => figure.picture.drawn.chart.data.slice(1).flat().filter(Number).length"
        lines = [each.evaluate(drawn) for each in figures.all()]
        text = page.locator("main").inner_text()
        check_accessibility(page)
        page.get_by_label("Log axis").check()

    assert asked == [window.address]
    assert len(lines) == 3
    assert min(lines) > 0
    assert "Telemetry took: hooks 2 s on all ranks (0.5 % of the steps)." in text
    assert "training begins" in text
    assert "rank 2 is slow in forward" in text
    assert re.search(r"H100 GPU-2\t[78]\d(\.\d)? %, mean", text)


def test_what_is_logged_and_read_is_drawn_once(window: Window) -> None:
    page = window.open("/run/read?group=names")
    window.figure("lr")
    drawn = page.locator("section[aria-labelledby=values] h3").all_inner_texts()
    count = page.get_by_text("4 of 6 names; ").inner_text()
    page.get_by_label("Filter", exact=True).fill("learning")
    window.figure("learning_rate")

    assert drawn == ["lr", "train/loss", "val/grad_norm", "grad_norm"]
    assert "learning_rate, loss is logged under another name" in count


@STRESS
def test_a_run_that_goes_on_stays_zoomed_and_an_agent_that_has_gone_is_told_of(
    driver: Any, tmp_path: Path
) -> None:
    file = RunFile(tmp_path / "on.sqlite")
    key = SeriesKey("value", "loss", "0", (("split", "train"),))

    def write(until: int) -> None:
        now_ns = time.time_ns()
        points = [(step, now_ns + step, 2.0 - step / 100) for step in range(until - 50, until)]
        process = {"state": "running", "step": until - 1, "rank": 0, "node": "n"}
        file.write(
            rows={key: value_rows(points)},
            about={"run": "on", "began_ns": now_ns, "seen_ns": now_ns},
            ranks={"0": process},
        )

    write(50)
    app = App(tmp_path, live=live)
    with Served(app) as first:
        port, window = first.port, Window(driver, first.url)
        page = window.open("/run/on")
        window.figure("loss").locator(".plot").focus()
        page.keyboard.press("+")
        page.wait_for_function("() => location.search.includes('zoom=')")
        address = page.url
        write(100)
        page.get_by_text("step 99 ·").wait_for()
        # What was zoomed to stays.
        assert page.url == address
    file.close()
    with window:
        page.get_by_text("The agent has not answered since").wait_for()
        assert page.locator("figure[data-drawn] .uplot").count() > 0
        with Served(app, port):
            page.locator("#trouble").wait_for(state="hidden")


def test_no_run_at_all_says_what_to_type(window: Window, tmp_path: Path) -> None:
    with Served(App(tmp_path)) as empty:
        window.page.goto(empty.url)
        window.page.get_by_text("otel-ddp demo").wait_for()
        check_accessibility(window.page)
        # The page would go on asking a server that is gone.
        window.page.goto("about:blank")
