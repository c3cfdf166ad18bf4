"""The checks of otel-ddp drill: what is green, and what each red line names."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import warm
from cli.drill_servers import DrillServers
from node import PATIENCE_S, until
from otel_ddp.cli import main
from otel_ddp.cli.drill import answer, line
from otel_ddp.cli.drill.boards import Board, put_in
from otel_ddp.cli.drill.checks import Check, Drill
from otel_ddp.cli.drill.collector import collector
from otel_ddp.cli.drill.http_api import HttpApi, NoAnswer
from otel_ddp.cli.drill.plays import Play, environment, three_plays
from otel_ddp.cli.drill.prometheus import Prometheus, Rule, missing_rules, recorded_names
from otel_ddp.cli.shipped import board_files, rule_names
from otel_ddp.journal.place import Place
from otlp_receiver import Receiver

LIMIT_S = 300.0
TITLES = [each["title"] for each in board_files().values()]


class FakeClock:
    """Time goes on where it is waited for."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


class FakePlay:
    """A play of which the agent finds the trouble at once, unless told otherwise."""

    def __init__(self, run: str, alert: str) -> None:
        self.run, self.alert = run, alert
        self.found, self.broken = f"{run} was found", ""

    def failure(self) -> str:
        return self.broken

    def verdict(self) -> str:
        return self.found


@pytest.fixture
def servers() -> Iterator[DrillServers]:
    with DrillServers() as found:
        yield found


@pytest.fixture
def plays() -> list[FakePlay]:
    return [FakePlay(each.run, each.alert) for each in three_plays("id")]


def drill(servers: DrillServers, *, grafana: bool = False) -> Drill:
    clock = FakeClock()
    return Drill(
        Prometheus(HttpApi(servers.url)),
        HttpApi(servers.url) if grafana else None,
        LIMIT_S,
        clock=clock,
        sleep=clock.sleep,
        now=clock,
    )


def all_checks(here: Drill, plays: list[FakePlay]) -> list[Check]:
    played: list[Play] = [*plays]
    return [here.rules(), *here.plays(played), *here.boards([each.run for each in plays])]


def red(checks: list[Check]) -> dict[str, str]:
    return {each.what: each.sentence for each in checks if not each.ok}


@pytest.mark.parametrize("grafana", [False, True])
def test_where_all_is_well_each_line_is_green_and_nothing_is_waited_for(
    servers: DrillServers, plays: list[FakePlay], grafana: bool
) -> None:
    checks = all_checks(drill(servers, grafana=grafana), plays)

    assert red(checks) == {}
    assert [each.what for each in checks] == [
        "rules",
        *("verdict drill-late-id", "series drill-late-id", "alert TrainingStraggler"),
        *("verdict drill-hang-id", "series drill-hang-id", "alert TrainingStalled"),
        *("verdict drill-death-id", "series drill-death-id", "alert TrainingRunKilled"),
        *(f"board {title}" for title in TITLES),
    ]
    assert {each.seconds for each in checks} == {0.0}


def test_a_rule_that_was_taken_out_is_named_with_its_file(
    servers: DrillServers, plays: list[FakePlay]
) -> None:
    del servers.rules["run:training_stalled:age"]

    found = red(all_checks(drill(servers), plays))

    assert found["rules"].startswith("not loaded: run:training_stalled:age (rules/stall.yml); load")


def test_an_alert_that_is_not_loaded_is_not_waited_for(
    servers: DrillServers, plays: list[FakePlay]
) -> None:
    del servers.rules["TrainingStalled"]
    servers.firing.remove("TrainingStalled")

    checks = all_checks(drill(servers), plays)

    assert "there is no such alert in " in red(checks)["alert TrainingStalled"]
    assert {each.seconds for each in checks} == {0.0}


def test_a_rule_whose_evaluation_fails_is_named_with_the_error(
    servers: DrillServers, plays: list[FakePlay]
) -> None:
    servers.errors["TrainingStraggler"] = "many-to-many matching"

    found = red(all_checks(drill(servers), plays))

    assert found == {"rules": "evaluation fails: TrainingStraggler (many-to-many matching)"}


@pytest.mark.parametrize(
    ("pending", "query", "sentence"),
    [
        ({"TrainingStalled"}, "up", "pending, as its `for` has not passed yet"),
        (set(), "a:b > 0", "asks for what no rule records: a:b;"),
        (set(), "up == 7", "its expression brings nothing for drill-hang-id"),
    ],
)
def test_an_alert_that_does_not_fire_in_time_is_red_with_where_to_look(
    servers: DrillServers, plays: list[FakePlay], pending: set[str], query: str, sentence: str
) -> None:
    servers.firing.remove("TrainingStalled")
    servers.pending, servers.rules["TrainingStalled"] = pending, query

    checks = all_checks(drill(servers), plays)

    assert list(found := red(checks)) == ["alert TrainingStalled"]
    assert found["alert TrainingStalled"].startswith(sentence)
    assert [each.seconds for each in checks if not each.ok] == [LIMIT_S]


def test_a_verdict_that_does_not_come_is_red(servers: DrillServers, plays: list[FakePlay]) -> None:
    plays[0].found = ""

    assert "has not found it" in red(all_checks(drill(servers), plays))["verdict drill-late-id"]


def test_a_play_that_went_wrong_is_told_at_once_and_not_put_down_to_the_servers(
    servers: DrillServers, plays: list[FakePlay]
) -> None:
    plays[1].found, plays[1].broken = "", "rank 0 has ended with status 1: no torch"
    servers.firing.remove("TrainingStalled")

    checks = all_checks(drill(servers), plays)

    why = "the drill's own training went wrong: rank 0 has ended with status 1: no torch"
    assert red(checks) == {"verdict drill-hang-id": why, "alert TrainingStalled": why}
    assert {each.seconds for each in checks} == {0.0}


@pytest.mark.parametrize(
    ("broken", "sentence"),
    [
        ({"state": ""}, "nothing of this run has come to http://127.0.0.1:"),
        ({"state": "training.state"}, "there is no training_state, but training.state"),
        ({"without": "local_rank"}, "series have no local_rank: does the collector drop"),
        ({"ranks": 1}, "one of the 2 ranks has not come"),
    ],
)
def test_series_that_do_not_arrive_as_they_were_sent_are_red(
    servers: DrillServers, plays: list[FakePlay], broken: dict[str, object], sentence: str
) -> None:
    for name, value in broken.items():
        setattr(servers, name, value)
    if broken == {"state": ""}:
        servers.ranks = 0

    found = red(all_checks(drill(servers), plays))

    assert list(found) == [f"series drill-{each}-id" for each in ("late", "hang", "death")]
    assert all(each.startswith(sentence) for each in found.values())


def test_a_board_that_is_not_in_grafana_is_named_with_its_file(
    servers: DrillServers, plays: list[FakePlay]
) -> None:
    del servers.boards["otel-ddp-ranks"]

    found = red(all_checks(drill(servers, grafana=True), plays))

    assert found == {
        "board Ranks": "Grafana has no board otel-ddp-ranks: import "
        "deploy/grafana/dashboards/ranks.json"
    }


@pytest.mark.parametrize("grafana", [False, True])
def test_a_board_whose_query_is_refused_is_red_with_its_panel(
    servers: DrillServers, plays: list[FakePlay], grafana: bool
) -> None:
    servers.refused_query = "training_straggler{group"

    found = red(all_checks(drill(servers, grafana=grafana), plays))

    assert found["board Ranks"].endswith("is refused: 400 invalid parameter")


@pytest.mark.parametrize("broken", ["panels_bring", "knows_runs"])
def test_boards_that_bring_nothing_of_the_runs_are_red(
    servers: DrillServers, plays: list[FakePlay], broken: str
) -> None:
    setattr(servers, broken, False)

    found = red(all_checks(drill(servers), plays))

    assert list(found) == [f"board {title}" for title in TITLES]
    assert found["board Ranks"].endswith(
        "and none of these runs: is its data source this Prometheus?"
    )


def test_a_board_that_needs_a_rule_that_is_not_loaded_is_red(
    servers: DrillServers, plays: list[FakePlay]
) -> None:
    del servers.rules["rank:training_straggler:ratio"]

    found = red(all_checks(drill(servers), plays))

    assert "no rule records rank:training_straggler:ratio" in found["board Ranks"]


def test_boards_are_asked_through_the_data_source_that_grafana_shows_them_with(
    servers: DrillServers, plays: list[FakePlay]
) -> None:
    list(drill(servers, grafana=True).boards(["drill-late-id"]))

    proxied = {each.path for each in servers.asked if "proxy" in each.path}
    assert proxied == {
        f"/api/datasources/proxy/uid/p1/api/v1/{each}" for each in ("query", "query_range")
    }

    servers.asked.clear()
    variables = servers.boards["otel-ddp-runs"]["templating"]["list"]
    variables[0]["current"] = {"value": "p2"}
    list(drill(servers, grafana=True).boards(["drill-late-id"]))
    assert any("/uid/p2/" in each.path for each in servers.asked)


def test_a_grafana_without_a_prometheus_is_red(
    servers: DrillServers, plays: list[FakePlay]
) -> None:
    servers.sources = {}

    found = red(all_checks(drill(servers, grafana=True), plays))

    assert set(found.values()) == {"Grafana has no data source of the type Prometheus"}


def test_no_query_leaves_with_a_variable_in_it(
    servers: DrillServers, plays: list[FakePlay]
) -> None:
    list(drill(servers).boards([each.run for each in plays]))

    left = [each.promql for each in servers.asked if "${" in each.promql or "$_" in each.promql]
    assert left == []
    several = 'run=~"(drill-late-id|drill-hang-id|drill-death-id)"'
    assert any(several in each.promql for each in servers.asked)
    assert any('run="drill-late-id"' in each.promql for each in servers.asked)


def test_a_variable_is_what_it_is_when_the_board_is_opened() -> None:
    variables = [
        {"name": "run", "type": "query", "multi": True},
        {"name": "node", "type": "query", "multi": True},
        {"name": "rank", "type": "query", "multi": True, "allValue": ".+"},
        {"name": "at_step", "type": "textbox", "query": "100"},
        {"name": "width", "type": "custom", "options": [{"value": "10"}, {"value": "20"}]},
        {"name": "name", "type": "query", "current": {"value": "loss"}},
    ]
    board = Board({"title": "T", "uid": "u", "templating": {"list": variables}})

    (values,) = board.values(["a", "b"], "drill", "n")

    assert values == {
        "run": "(a|b)",
        "node": "n",
        "rank": ".+",
        "at_step": "100",
        "width": "10",
        "name": "loss",
    }
    text = "x{run=~'$run',n='${name:raw}'}[$__range] $1 $unknown"
    assert put_in(text, values, 90.2) == "x{run=~'(a|b)',n='loss'}[91s] $1 $unknown"


def test_what_a_query_needs_of_rules_is_followed_through_them() -> None:
    rules = [Rule("a:b", "c:d{x='no:name'} / up", ""), Rule("A", "a:b > 0", "")]

    assert recorded_names('a:b{run=~"x:y"} unless rate(up[$__range:1m])') == {"a:b"}
    assert missing_rules(["a:b"], rules) == {"c:d"}
    assert missing_rules(["c:d or up"], rules) == {"c:d"}


@pytest.mark.parametrize(
    ("status", "said", "sentence"),
    [
        (200, b"<html>", "the answer is no JSON"),
        (200, {"ok": 1}, "the answer is not that of a Prometheus"),
        (401, {"error": "who?"}, "401 who?: give a token"),
        (503, b"busy", "503 Service Unavailable"),
        (302, b"", "302, a redirect: name the address"),
    ],
)
def test_what_is_no_prometheus_or_refuses_is_red_before_anything_is_played(
    servers: DrillServers, status: int, said: object, sentence: str
) -> None:
    servers.status, servers.said = status, said

    (first, second) = drill(servers).servers((True, "fine"))

    assert first.ok
    assert not second.ok
    assert sentence in second.sentence


def test_a_redirect_does_not_take_the_token_along(servers: DrillServers) -> None:
    with DrillServers() as stranger:
        servers.status, servers.said, servers.redirect_to = 302, b"", stranger.url

        with pytest.raises(NoAnswer):
            Prometheus(HttpApi(servers.url, "secret")).query("up")

    assert [each.authorization for each in servers.asked] == ["Bearer secret"]
    assert stranger.asked == []


def test_a_user_in_the_address_is_sent_and_not_shown(servers: DrillServers) -> None:
    api = HttpApi(servers.url.replace("://", "://me:pass%40word@"))

    Prometheus(api).query("up")

    assert servers.asked[0].authorization == "Basic bWU6cGFzc0B3b3Jk"
    assert api.name == servers.url
    assert not api.tells_secrets
    assert HttpApi("http://me:word@prometheus.example.org").tells_secrets
    assert not HttpApi("https://prometheus.example.org", "token").tells_secrets


def test_another_authority_is_named_by_the_usual_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate, key = tmp_path / "own.pem", tmp_path / "own.key"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
            *("-subj", "/CN=own", "-addext", "subjectAltName=IP:127.0.0.1"),
            *("-keyout", str(key), "-out", str(certificate)),
        ],
        check=True,
        capture_output=True,
    )
    with DrillServers(certificate, key) as servers:
        unknown = list(drill(servers).servers((True, "fine")))[1]
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        known = list(drill(servers).servers((True, "fine")))[1]

    assert not unknown.ok
    assert unknown.sentence.endswith("name the authority that signed it in SSL_CERT_FILE")
    assert known.ok


def test_without_a_collector_nothing_is_played(servers: DrillServers) -> None:
    servers.status = 503
    off = {"OTEL_METRICS_EXPORTER": "none"}
    closed = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}

    assert collector(off) == (
        False,
        "OTEL_METRICS_EXPORTER=none: nothing is sent; unset it for the drill",
    )
    ok, sentence = collector(closed)
    assert not ok
    assert "connection refused" in sentence
    assert sentence.endswith("`otel-ddp doctor` says what to do")


def test_a_collector_that_accepts_metrics_is_green() -> None:
    with Receiver() as receiver:
        endpoint = receiver.start_http()
        found = collector({"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint})

    assert found == (True, f"{endpoint} accepts metrics")


def test_a_drill_that_cannot_begin_ends_with_1_and_says_why_as_json(
    servers: DrillServers, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "none")
    monkeypatch.setenv("PROMETHEUS_URL", servers.url)
    monkeypatch.setenv("PROMETHEUS_TOKEN", "secret")

    assert main(["drill", "--json"]) == 1

    told = json.loads(capsys.readouterr().out)
    assert told["ok"] is False
    assert [(each["what"], each["ok"]) for each in told["checks"]] == [
        ("collector", False),
        ("Prometheus", True),
    ]
    assert servers.asked[0].authorization == "Bearer secret"


@pytest.mark.parametrize(
    "wrong",
    [
        ("--prometheus", "localhost:9090"),
        ("--seconds", "-1"),
        ("--prometheus-token-file", "/nowhere/token"),
    ],
)
def test_impossible_options_are_refused_in_a_line(
    wrong: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status: object = main(["drill", *wrong])
    except SystemExit as end:
        status = end.code

    assert status == 2
    assert wrong[1] in capsys.readouterr().err.splitlines()[-1]


def test_without_torch_nothing_is_started(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # As Python has it where a module is not to be found.
    monkeypatch.setitem(sys.modules, "torch", None)

    assert main(["drill"]) == 2

    assert "pip install '.[torch]' in the folder" in capsys.readouterr().err


def test_a_play_has_a_node_and_an_identity_of_its_own(tmp_path: Path) -> None:
    given = {
        "PATH": "/bin",
        "OTEL_DDP_AGENT": "offline",
        "OTEL_DDP_RUN": "mine",
        "OTEL_DDP_WEB_CONFIG": "insecure",
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c",
        "OTEL_EXPORTER_PROMETHEUS_PORT": "9464",
        "SLURM_PROCID": "3",
        "WANDB_MODE": "offline",
    }

    found = environment(given, tmp_path, Place(tmp_path / "place"))

    assert not {"OTEL_DDP_RUN", "SLURM_PROCID", "WANDB_MODE", "OTEL_DDP_WEB_CONFIG"} & set(found)
    assert found["PATH"] == "/bin"
    assert found["OTEL_EXPORTER_OTLP_ENDPOINT"] == "http://c"
    assert found["OTEL_EXPORTER_PROMETHEUS_PORT"] == "0"
    assert found["OTEL_DDP_AGENT"] == "auto"
    assert found["OTEL_DDP_NODE"].startswith("drill-")
    assert found["OTEL_DDP_DIR"] == str(tmp_path / "place")


@pytest.mark.parametrize(
    ("number", "sentence"),
    [
        (0, "has ended with status 1: KeyError: 'WORLD_SIZE'"),
        (2, "rank 1 was to be killed, but: KeyError: 'WORLD_SIZE'"),
    ],
)
def test_a_rank_that_cannot_train_is_told_with_its_last_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, sentence: str
) -> None:
    # Its ranks have torch imported already.
    monkeypatch.setattr(sys, "executable", warm.python().executable)
    play = three_plays()[number]

    play.start(tmp_path / "play", Place(tmp_path / "place"), os.environ)

    try:
        found = until(play.failure, "the failure")
    finally:
        play.wait(time.monotonic() + PATIENCE_S)
    assert found.endswith(sentence)


def test_every_drill_has_runs_of_its_own() -> None:
    first, second = three_plays(), three_plays()

    assert not {each.run for each in first} & {each.run for each in second}


def test_the_alerts_of_the_plays_and_six_boards_come_with_the_package() -> None:
    assert {each.alert for each in three_plays()} <= set(rule_names())
    assert len(board_files()) == 6


def test_a_line_has_the_state_the_time_and_no_control_characters() -> None:
    green = Check("alert A", True, 12.3, "fires")
    bad = Check("rules", False, 0.1, "a\x1b[31m\nb")

    assert line(green) == "ok      12 s  alert A: fires"
    assert line(bad) == "FAIL     0 s  rules: a\\x1b[31m\\nb"
    assert answer([green, bad])["ok"] is False
