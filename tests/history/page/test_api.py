"""The page's API over real sockets: the numbers are the history's own, and bad input is told of."""

from __future__ import annotations

import base64
import json
import math
import os
import re
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from histories import S, two_attempts, value_rows, write_history
from history.page.serving import Client, Served
from otel_ddp.agent.ledger import Ledger
from otel_ddp.agent.serve.endpoint import Endpoint
from otel_ddp.history.page.app import App
from otel_ddp.history.page.runs import Runs, head
from otel_ddp.history.reader import History
from otel_ddp.history.run_file import RunFile
from otel_ddp.history.tables import Event, SeriesKey
from otel_ddp.history.whole_run import main_values
from otel_ddp.journal.process_state import ProcessState
from otel_ddp.journal.survey import Survey
from otel_ddp.vocabulary.words import MEASURED_PHASES


@contextmanager
def served(app: App) -> Iterator[Client]:
    with Served(app) as server:
        yield Client(server.port)


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    with served(App(tmp_path)) as client:
        yield client


def test_runs_of_several_nodes_are_one_and_faults_are_told(tmp_path: Path, client: Client) -> None:
    write_history(tmp_path, "a", node="n0", ranks=2, began_ns=5 * S)
    write_history(
        *(tmp_path, "a"),
        node="n1",
        ranks=2,
        first_rank=2,
        state="killed",
        began_ns=6 * S,
        late=1,
        bound="compute-bound",
    )
    write_history(tmp_path, "b", ranks=1, began_ns=7 * S, bound="compute-bound")
    (tmp_path / "bad.sqlite").write_bytes(b"no database" * 100)

    found = client.api("runs").json

    assert [run["run"] for run in found["runs"]] == ["b", "a"]
    assert found["runs"][1]["ranks"] == ["0", "1", "2", "3"]
    assert found["runs"][1]["local_ranks"] == ["0", "1"]
    assert found["runs"][1]["script"] == "mnist/train.py"
    assert found["runs"][1]["nodes"] == ["n0", "n1"]
    # A list of large runs describes no rank.
    assert "seen_alive_ns" not in str(found["runs"])
    assert (found["runs"][1]["state"], found["runs"][1]["began_ns"]) == ("killed", 5 * S)
    # The worst comes first.
    verdicts = [[(v["kind"], v["harmless"]) for v in run["verdicts"]] for run in found["runs"]]
    assert verdicts == [[("bound", True)], [("straggler", False), ("bound", True)]]
    [first] = client.api("run", run="a").json["first"]
    assert first["who"]["rank"] == "3"
    assert client.api("run", run="b").json["first"] == []
    assert ["bad.sqlite" in fault for fault in found["faults"]] == [True]


def test_words_where_numbers_belong_are_a_fault_of_one_file(tmp_path: Path, client: Client) -> None:
    write_history(tmp_path, "good", ranks=1)
    with closing(sqlite3.connect(write_history(tmp_path, "bad", ranks=1, late=0))) as db, db:
        db.execute("UPDATE verdicts SET about = '7'")

    listed, broken = client.api("runs").json, client.api("run", run="bad")

    assert [run["run"] for run in listed["runs"]] == ["good"]
    assert ["is damaged" in fault for fault in listed["faults"]] == [True]
    assert (broken.status, "is damaged" in broken.json["error"]) == (500, True)


def test_values_are_those_of_the_file_and_of_fewer_columns_the_extremes_and_sums(
    tmp_path: Path, client: Client
) -> None:
    with History(write_history(tmp_path, steps=300)) as history:
        buckets = history.sums(history.series("value", "loss")[0])

    def ask(**how: int) -> list[dict[str, Any]]:
        found = client.api("values", run="lr-0.3", name="loss", **how).json["series"]
        assert [(each["rank"], each["split"]) for each in found] == [("0", "train"), ("0", "val")]
        return [each["columns"] for each in found]

    whole, few, part = ask(columns=1000)[0], ask(columns=7)[0], ask(first=100, until=109)

    assert whole["x"] == list(range(300))
    assert whole["last"] == [each.last for each in buckets]
    assert whole["ms"] == [each.last_ns // 10**6 for each in buckets]
    assert [each["x"] for each in part] == [list(range(100, 110)), [100]]
    assert few["values"] == [43] * 6 + [42]
    for at, first in enumerate(few["first"]):
        own = [each.last for each in buckets[first : few["x"][at] + 1] if each.last is not None]
        assert (few["low"][at], few["high"][at]) == (min(own), max(own))
        assert few["last"][at] == own[-1]
        assert few["mean"][at] == pytest.approx(sum(own) / len(own))


def test_what_is_not_finite_is_in_no_mean_and_no_extreme(tmp_path: Path, client: Client) -> None:
    file = RunFile(write_history(tmp_path, "r", steps=20))
    points = [(at, at * S, value) for at, value in enumerate((1.0, math.nan, math.inf, math.nan))]
    file.write(rows={SeriesKey("value", "reward", "0", ()): value_rows(points)})
    file.close()

    for columns, mean in ((9, [1, None, None, None]), (2, [1, None])):
        [found] = client.api("values", run="r", name="reward", columns=columns).json["series"]
        told = found["columns"]
        assert (told["mean"], told["low"], told["high"]) == (mean, mean, mean)
    assert told["not_finite"] == [1, 2]


def test_phases_of_all_ranks_add_up_to_the_steps(tmp_path: Path, client: Client) -> None:
    write_history(tmp_path, ranks=4, steps=90, late=2)

    found = client.api("steps", run="lr-0.3", columns=9).json

    assert found["wide"] == 10
    columns = found["columns"]
    assert columns["steps"] == [40] * 9
    # Of one of four ranks it takes half as long again.
    assert columns["forward"] == pytest.approx([6.75e-3] * 9, rel=0.02)
    for at in range(9):
        assert sum(columns[phase][at] for phase in MEASURED_PHASES) == pytest.approx(
            columns["step_s"][at]
        )


def test_ranks_of_two_nodes_are_side_by_side(tmp_path: Path, client: Client) -> None:
    write_history(tmp_path, "a", node="n0", ranks=2, steps=20, late=1)
    write_history(tmp_path, "a", node="n1", ranks=2, first_rank=2, steps=20)

    both, one = (client.api("steps", run="a", rank=rank).json for rank in ("", "3"))
    found = client.api("waits", run="a").json
    table = client.api("ranks", run="a").json["ranks"]

    assert (both["many"]["ranks"], one["many"]["ranks"]) == (4, 1)
    assert both["columns"]["steps"] == [4] * 20
    assert [(each["rank"], each["node"]) for each in found["ranks"]] == [("1", "n0")]
    assert found["others"]["count"] == 3
    assert [(each["rank"], each["node"]) for each in table] == [
        *(("0", "n0"), ("1", "n0"), ("2", "n1"), ("3", "n1"))
    ]


def test_the_late_rank_is_measured_against_the_median_one_over_its_own_steps(
    tmp_path: Path, client: Client
) -> None:
    write_history(tmp_path, ranks=8, steps=300, late=5, late_in=range(100, 200))

    found = client.api("waits", run="lr-0.3").json
    strip = found["strip"]
    [late, other] = [strip["rows"][rank]["late_s"] for rank in (5, 2)]

    assert (found["first"], found["until"]) == (100, 199)
    assert [each["rank"] for each in found["ranks"]] == ["5"]
    # Forward takes 6 ms, and 3 ms more on this rank.
    assert found["ranks"][0]["work_s"] - found["usual_work_s"] == pytest.approx(3e-3, rel=0.1)
    assert found["ranks"][0]["phases"]["comm_wait"] < 1e-3 < found["others"]["phases"]["comm_wait"]
    assert found["step_s"] == pytest.approx(21.5e-3, rel=0.02)
    # 32 samples of each rank in a step.
    assert found["work_per_s"] == pytest.approx(8 * 32 / found["step_s"], rel=0.02)
    where = [at for at, s in zip(strip["x"], late, strict=True) if s > 1.5e-3]
    assert (where[0], where[-1]) == (pytest.approx(100, abs=3), pytest.approx(198, abs=3))
    assert max(other) < 1.5e-3


def test_each_dimension_has_the_waits_of_its_ranks_at_the_steps_that_are_shown(
    tmp_path: Path, client: Client
) -> None:
    write_history(
        *(tmp_path, "a"),
        waits_s={
            ("tp", "all_reduce"): {2: 0.001, 3: 0.016},
            ("tp", "all_gather"): {3: 0.002},
            ("dp", "all_reduce"): {0: 0.02},
        },
    )
    write_history(tmp_path, "b")

    found, none = (client.api("waits", run=run).json["dimensions"] for run in "ab")

    assert found == [
        {"name": "dp", "waits_s": [["0", pytest.approx(0.02)]]},
        {"name": "tp", "waits_s": [["2", pytest.approx(0.001)], ["3", pytest.approx(0.018)]]},
    ]
    assert none == []


@pytest.mark.parametrize(
    ("logged", "main"),
    [
        ("lr/ accuracy/val loss/train loss/val", "loss/train loss/val"),
        # No loss of validation is logged.
        ("loss/train accuracy/validation", "loss/train accuracy/validation"),
        ("lossy/ reward/", "lossy/"),
    ],
)
def test_a_run_is_judged_by_its_loss_and_by_one_of_validation(logged: str, main: str) -> None:
    rows = [dict(zip(("name", "split"), each.split("/"), strict=True)) for each in logged.split()]

    found = main_values(rows)

    assert [f"{each['name']}/{each['split']}" for each in found] == main.split()


def test_the_last_checkpoint_is_the_newest_event_of_one(tmp_path: Path, client: Client) -> None:
    path = write_history(tmp_path, steps=20)
    file = RunFile(path)
    saved = {"name": "training.checkpoint", "severity": "INFO", "body": "", "rank": "0"}
    events = [
        Event(time_ns=at, step=at, attributes={"duration_s": at / 10}, **saved) for at in (7, 9, 8)
    ]
    noise = Event(10, 10, "0", "log", "INFO", "training.checkpoint is late", {})
    file.write(events=[*events, noise])
    file.close()

    found = client.api("waits", run="lr-0.3").json["checkpoint"]

    assert found == {"step": 9, "ended_ns": 9, "took_s": 0.9}


def test_values_of_many_ranks_are_their_mean_and_the_band_between_them(
    tmp_path: Path, client: Client
) -> None:
    write_history(tmp_path, ranks=4, steps=60, logged_by=4)
    each = [
        client.api("values", run="lr-0.3", name="loss", rank=str(rank)).json["series"]
        for rank in range(4)
    ]

    found = client.api("values", run="lr-0.3", name="loss", over="ranks").json["series"]

    assert [(one["split"], one["ranks"]) for one in found] == [("train", 4), ("val", 4)]
    for at, together in enumerate(one["columns"] for one in found):
        steps = [one[at]["columns"]["last"] for one in each]
        assert together["mean"] == pytest.approx([sum(of) / 4 for of in zip(*steps, strict=True)])
        assert together["low"] == [min(of) for of in zip(*steps, strict=True)]
        assert together["high"] == [max(of) for of in zip(*steps, strict=True)]
    assert found[1]["columns"]["x"] == list(range(0, 60, 10))


def test_a_counter_is_shown_by_its_rate(tmp_path: Path, client: Client) -> None:
    file = RunFile(tmp_path / "a.sqlite")
    key = SeriesKey("counter", "system.network.io", "", (("network.io.direction", "receive"),))
    points = [(1, S, 100.0), (2, 2 * S, 300.0), (4, 4 * S, 700.0), (5, 5 * S, 10.0)]
    file.write(rows={key: value_rows(points)}, about={"run": "a"})
    file.close()

    [found] = client.api("node", run="a", name="system.network.io").json["series"]

    # What began anew has no rate.
    assert found["columns"]["per_second"] == [200.0, 200.0, None]
    assert found["columns"]["ms"] == [2000, 4000, 5000]


@pytest.mark.parametrize(("is_even", "shift", "found_at"), [(True, -1, 105), (False, 0, 100)])
def test_steps_have_the_numbers_of_the_program_everywhere(
    tmp_path: Path, client: Client, is_even: bool, shift: int, found_at: int
) -> None:
    first = {"began_ns": 1, "shift": -1, "is_even": is_even}
    attempts = [first, {**first, "began_ns": 2, "shift": 5}]
    write_history(tmp_path, late=2, late_in=range(61, 250), about={"attempts": attempts})

    head, waits, whole = (client.api(of, run="lr-0.3").json for of in ("run", "waits", "steps"))
    part = client.api("steps", run="lr-0.3", first=99, until=109).json["columns"]

    (late,) = head["verdicts"]
    assert (late["since_step"], late["until_step"]) == (61 + shift, 249 + shift)
    # Detectors count from 1 in each attempt: this is the second.
    assert late["step"] == found_at
    assert (waits["first"], waits["until"]) == (61 + shift, 249 + shift)
    assert (waits["strip"]["x"][0], waits["strip"]["until"]) == (shift, 299 + shift)
    assert whole["columns"]["first"][0] == shift
    assert (part["first"][0], part["x"][-1]) == (99, 109)


def test_the_head_has_state_verdicts_gaps_and_configuration(tmp_path: Path, client: Client) -> None:
    gap = {"since_ns": 3 * S, "until_ns": None, "why": "the disk is full"}
    write_history(tmp_path, late=1, about={"gaps": [gap]})

    found = client.api("run", run="lr-0.3").json

    assert (found["group"], found["state"], found["ranks"]) == ("sweep", "finished", 4)
    [verdict] = found["verdicts"]
    assert (verdict["who"]["rank"], verdict["phase"]) == ("1", "forward")
    assert "rank 1 is slow in forward" in verdict["sentence"]
    assert (verdict["step"], verdict["since_step"]) == (100, 60)
    assert found["gaps"] == [{"node": "node-0", **gap}]
    assert found["config"] == {"lr": 0.3, "batch": 32}


def test_a_run_that_came_back_is_not_judged_by_what_ended_an_earlier_attempt(
    tmp_path: Path, client: Client
) -> None:
    # Rank 1 is late from the second second on.
    for run, began_s in (("before", 4), ("since", 1), ("open", 4)):
        began_ns = time.time_ns() if run == "open" else 5 * S
        about = two_attempts(began_ns)
        about["attempts"][1]["began_ns"] = began_ns + began_s * S
        state = "running" if run == "open" else "finished"
        write_history(tmp_path, run, began_ns=began_ns, late=1, about=about, state=state)
    none = {"kind": "death", "since_ns": 6 * S, "until_ns": 7 * S, "who": {"rank": "0"}}
    taken_back = {**none, "evidence": {"taken_back": True}}
    write_history(tmp_path, "no death", began_ns=5 * S, verdicts=[taken_back])

    rows = {each["run"]: each["verdicts"] for each in client.api("runs").json["runs"]}
    heads = {run: client.api("run", run=run).json for run in rows}

    assert (rows["before"], heads["before"]["first"], heads["no death"]["first"]) == ([], [], [])
    for run in ("since", "open"):
        found = (*rows[run], *heads[run]["first"])
        assert [each["kind"] for each in found] == ["straggler"] * 2
    assert [len(each["verdicts"]) for each in heads.values()] == [1, 1, 1, 1]


def test_a_run_whose_agent_was_killed_is_said_to_be_silent(tmp_path: Path, client: Client) -> None:
    write_history(tmp_path, state="running", began_ns=5 * S, late=1)
    write_history(tmp_path, "on", state="running", late=1)
    write_history(tmp_path, "over", late=1)

    found, on, over = (client.api("run", run=run).json for run in ("lr-0.3", "on", "over"))

    assert (found["state"], found["silent"]) == ("running", True)
    # No verdict goes on after its run, or after the agent.
    ends = [each["verdicts"][0]["until_ns"] for each in (found, on, over)]
    assert ends == [found["seen_ns"], None, over["seen_ns"]]


def test_events_are_found_by_their_words(tmp_path: Path, client: Client) -> None:
    write_history(tmp_path)

    all_of_them = client.api("events", run="lr-0.3").json["events"]
    [found] = client.api("events", run="lr-0.3", like="TRAINING").json["events"]

    assert [each["body"] for each in all_of_them] == ["<b>loss</b> & more", "training begins"]
    assert found == all_of_them[1]


def test_post_mortems_of_a_run_are_its_own(tmp_path: Path) -> None:
    write_history(tmp_path)
    for name, run in (("a", "lr-0.3"), ("b", "other")):
        report = {"run": run, "written_ns": 5, "verdict": {"sentence": "rank 1 died", "who": {}}}
        (tmp_path / f"postmortem-{name}.json").write_text(json.dumps(report))

    with served(App(tmp_path)) as client:
        [found] = client.api("postmortems", run="lr-0.3").json["postmortems"]
        text = client.api("postmortem", name=found["name"]).body
        outside = client.api("postmortem", name="postmortem-../../x").status

    assert (found["sentence"], json.loads(text)["run"], outside) == ("rank 1 died", "lr-0.3", 404)


def test_bad_requests_are_told_of(tmp_path: Path, client: Client) -> None:
    write_history(tmp_path, steps=30)
    expected = {
        "/api/run?run=none": 404,
        "/api/values?run=lr-0.3&name=loss&columns=many": 400,
        "/api/none?run=lr-0.3": 404,
        "/static/style.css": 404,
        "/../app.py": 404,
        "/none": 404,
        "/api/values?run=lr-0.3&name=none": 200,
        "/api/steps?run=lr-0.3&first=20&until=10": 200,
    }

    assert {path: client.ask(path).status for path in expected} == expected


def test_why_ranks_are_not_compared_is_told_of_runs_that_go_on(tmp_path: Path) -> None:
    write_history(tmp_path, "r")
    told = {}
    for state in ("running", "finished"):
        rank = ProcessState("r", "sweep", rank=0, state=state)
        lacks = {"group": "sweep", "run": "r", "why": "why"}
        with Runs(tmp_path, ours=False).opened("sweep", "r") as run:
            told[state] = head(run, Survey(processes=[rank], insufficient=[lacks]))["insufficient"]

    assert told == {"running": ["why"], "finished": []}


def test_while_the_disk_hangs_the_page_says_so_and_touches_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_history(tmp_path)
    kept = {"directory": "/kept", "problem": "the disk does not answer", "since_ns": S}
    monkeypatch.setattr(Runs, "_read", lambda runs: pytest.fail("it is touched"))
    app = App(tmp_path, live=lambda: Survey(agents=[{"history": kept}]), disk_hangs=lambda: True)
    with served(app) as client:
        runs = client.api("runs").json
        run = client.api("run", run="lr-0.3")
        report = client.api("postmortem", name="postmortem-a")
        now = client.api("now")

    assert runs["runs"] == []
    assert "the disk does not answer" in runs["faults"][0]
    assert run.json["error"] == "The disk of the histories does not answer."
    assert (run.status, report.status, now.status) == (503, 503, 200)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's files")
@pytest.mark.parametrize("whose", ["directory", "file"])
def test_the_agents_page_shows_nothing_that_another_user_has_put_there(
    whose: str, tmp_path: Path
) -> None:
    path = write_history(tmp_path / "h")
    report = {"run": "lr-0.3", "verdict": {"sentence": "a lie", "who": {}}}
    (tmp_path / "h/postmortem-a.json").write_text(json.dumps(report))
    os.chown(path if whose == "file" else tmp_path / "h", 65534, 65534)
    with served(App(tmp_path / "h", ours=True)) as client:
        runs = client.api("runs").json
        run = client.api("run", run="lr-0.3")
        lie = client.api("postmortem", name="postmortem-a")

    said = (
        f"no history is read: {path if whose == 'file' else tmp_path / 'h'} belongs to user 65534"
    )
    assert (runs["runs"], runs["faults"]) == ([], [f"{said}, not to us"])
    assert (run.status, run.json["error"]) == (500, f"{said}, not to us")
    assert lie.status == (404 if whose == "directory" else 200)
    # A folder that a person names for a look may be anybody's.
    with served(App(tmp_path / "h")) as client:
        assert len(client.api("runs").json["runs"]) == 1


def test_no_link_is_followed_to_a_history_or_a_post_mortem(tmp_path: Path) -> None:
    folder = tmp_path / "h"
    folder.mkdir()
    (folder / "a.sqlite").symlink_to(write_history(tmp_path / "elsewhere"))
    (tmp_path / "secret").write_text("secret")
    (folder / "postmortem-a.json").symlink_to(tmp_path / "secret")
    with served(App(folder)) as client:
        assert client.api("runs").json["runs"] == []
        assert client.api("postmortem", name="postmortem-a").status == 404


def test_two_runs_are_compared_as_the_command_does(tmp_path: Path, client: Client) -> None:
    write_history(tmp_path, "a", ranks=1)
    write_history(tmp_path, "b", ranks=1, seed=1, slower={"forward": 1.1})

    found = client.api("compare", run=["a", "b"], group=["sweep", "sweep"]).json
    told = {row["name"]: row["verdict"] for row in found["rows"] if row["verdict"]}
    steps, _ = found["tables"]

    assert (found["a"], found["b"], told["forward"]) == ("sweep/a", "sweep/b", "worse")
    assert ["forward", "worse"] in [[row[0], row[-1]] for row in steps["rows"]]
    assert client.api("compare", run="a").status == 400


def test_other_sites_get_no_answer(client: Client) -> None:
    assert client.ask("/api/runs", Sec_Fetch_Site="cross-site").status == 403
    assert client.ask("/api/runs", Sec_Fetch_Site="same-origin").status == 200
    # A link on another site opens the page.
    assert client.ask("/", Sec_Fetch_Site="cross-site").status == 200
    answer = client.ask("/", Origin="http://evil.example")
    assert "access-control-allow-origin" not in answer.headers
    policy = answer.headers["content-security-policy"]
    assert {"default-src 'none'", "connect-src 'self'", "frame-ancestors 'none'"} <= {
        *policy.split("; ")
    }


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://localhost.evil.example", 403),
        ("http://localhost:1", 403),
        ("null", 403),
        ("http://LOCALHOST:9464", 200),
    ],
)
def test_a_browser_that_tells_the_origin_alone_is_believed(
    tmp_path: Path, origin: str, status: int
) -> None:
    app = App(tmp_path, live=Survey, ask_stacks=lambda *_: [])
    with served(app) as client:
        named = {"Host": "localhost:9464", "Origin": origin}
        asked = [
            client.ask("/api/stacks", "POST", X_Otel_Ddp="page", **named),
            client.ask("/api/runs", **named),
        ]

    assert [each.status for each in asked] == [status] * 2


def test_stacks_are_asked_for_by_our_own_page_alone(tmp_path: Path) -> None:
    write_history(tmp_path)
    asked = []

    def ask(group: str, run: str, rank: str) -> list[dict[str, Any]]:
        asked.append((group, run, rank))
        return [{"rank": 1}]

    with served(App(tmp_path, live=Survey, ask_stacks=ask)) as client:
        path = "/api/stacks?group=g&run=r&rank=1"
        refused = [client.ask(path).status, client.ask(path, "POST").status]
        answer = client.ask(path, "POST", X_Otel_Ddp="page")

    assert refused == [405, 403]
    assert answer.json == {"processes": [{"rank": 1}]}
    assert asked == [("g", "r", "1")]


def test_a_run_that_is_over_is_renamed_tagged_and_deleted_with_the_token(tmp_path: Path) -> None:
    write_history(tmp_path, "r", group="g", node="n1")
    write_history(tmp_path, "r", group="g", node="n2", first_rank=4)
    write_history(tmp_path, "on", group="g", state="running", began_ns=time.time_ns())
    write_history(tmp_path, "held", group="g")
    live = Survey(processes=[ProcessState(group="g", run="held", state="finished")])
    app = App(tmp_path, live=lambda: live)
    endpoint = Endpoint(Ledger(), "127.0.0.1", 0, app, token=b"secret")
    endpoint.start()
    try:
        client = Client(endpoint.port)
        bearer = {"Authorization": "Bearer secret", "X_Otel_Ddp": "page"}
        password = base64.b64encode(b"me:secret").decode()
        remembered = {"Authorization": f"Basic {password}", "X_Otel_Ddp": "page"}

        def change(method: str = "POST", of: str = "r", what: str = "", **headers: str) -> int:
            return client.ask(f"/api/change?group=g&run={of}&{what}", method, **headers).status

        refused = [
            change(what="delete=yes", X_Otel_Ddp="page"),
            change(what="delete=yes", **remembered),
            change(what="delete=yes", Authorization="Bearer secret"),
            change("GET", what="delete=yes", **bearer),
            change(of="on", what="delete=yes", **bearer),
            change(of="held", what="delete=yes", **bearer),
            change(of="none", what="delete=yes", **bearer),
        ]
        tmp_path.chmod(0o777)
        open_to_others = [change(what=what, **bearer) for what in ("name=x", "delete=yes")]
        tmp_path.chmod(0o700)
        named = [change(what="name=best", **bearer), change(what="tags=keep", **bearer)]
        rows = client.ask("/api/runs", **bearer).json["runs"]
        deleted = change(what="delete=yes", **bearer)
        left = client.ask("/api/runs", **bearer).json["runs"]
    finally:
        endpoint.stop()

    assert refused == [401, 403, 403, 405, 409, 409, 404]
    assert open_to_others == [500, 500]
    assert [*named, deleted] == [200, 200, 200]
    assert ("best", "keep") in {(each["name"], each["tags"]) for each in rows}
    assert {each["run"] for each in left} == {"on", "held"}
    assert {path.name.partition("-")[0] for path in tmp_path.iterdir()} == {"on", "held"}


def test_a_folder_without_a_token_is_not_changed(tmp_path: Path, client: Client) -> None:
    write_history(tmp_path, "r")

    answer = client.ask(
        "/api/change?run=r&delete=yes", "POST", X_Otel_Ddp="page", Authorization="Bearer "
    )

    assert answer.status == 403
    assert "OTEL_DDP_SCRAPE_TOKEN_FILE" in answer.json["error"]
    assert len([*tmp_path.iterdir()]) == 1


def test_the_page_is_one_answer_whose_scripts_have_a_number_of_their_own(client: Client) -> None:
    pages = [client.ask("/"), client.ask("/run/r")]

    numbers = [
        set(re.findall(r"nonce-([\w-]{20,})'", each.headers["content-security-policy"]))
        for each in pages
    ]
    scripts = [re.findall(r'<script nonce="([^"]*)"', each.body.decode()) for each in pages]
    assert [{*each} for each in scripts] == numbers
    assert numbers[0] != numbers[1]
    assert b"<script src" not in pages[0].body
    assert len(client.ask("/", Accept_Encoding="gzip").body) < 100_000
