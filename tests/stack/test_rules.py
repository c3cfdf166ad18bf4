"""Rules and alerts by promtool; their names by the catalogue; runbooks."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from otel_ddp.vocabulary import catalog
from otel_ddp.vocabulary.words import NODE_LABELS
from stack.servers import binaries

_WORDS = {"and", "or", "unless", "offset", "bool", "Inf", "NaN"}
_TEXT = re.compile(r'"(?:[^"\\]|\\.)*"|#[^\n]*')
# In braces, or behind a word that takes labels.
_LABELS = re.compile(
    r"\{([^}]*)\}|\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)"
)
_Rule = dict[str, Any]


@cache
def load(path: Path) -> Any:
    # In Python it takes seconds.
    return yaml.load(path.read_text(), Loader=yaml.CSafeLoader)


def rules(paths: list[Path]) -> list[_Rule]:
    return [rule for path in paths for group in load(path)["groups"] for rule in group["rules"]]


def names_in(query: str) -> tuple[set[str], set[str]]:
    """The metrics and the labels that a query names."""
    bare = _TEXT.sub('""', query)
    labels = re.findall(r"[a-zA-Z_]\w*", " ".join(a + b for a, b in _LABELS.findall(bare)))
    # A word before a bracket is a function.
    words = re.findall(r"\b[a-zA-Z_][\w:]*\b(?!\s*\()", _LABELS.sub(" ", bare))
    patterns = re.findall(r'__name__=~"([^"]*)"', query)
    return ({*words} - _WORDS).union(*map(spelt_out, patterns)), {*labels}


def spelt_out(pattern: str) -> set[str]:
    """Every name that a pattern of choices in brackets may mean."""
    parts = re.split(r"(\([^()]*\)\??)", pattern)
    choices = [
        [*each.strip("()?").split("|"), *([""] if each.endswith("?") else [])] for each in parts
    ]
    return {"".join(each) for each in itertools.product(*choices)}


def queries_of(rule: _Rule) -> list[str]:
    """What a rule asks, in its text too."""
    text = rule.get("annotations", {}).get("description", "")
    return [
        rule["expr"],
        *(
            re.sub(r"%q", '"x"', each.replace('\\"', '"'))
            for each in re.findall(r'printf "((?:[^"\\]|\\.)*)"', text)
        ),
    ]


def with_needed_rules(case: Path, folder: Path) -> list[Path]:
    """The same tests, each beside only those rules that what it asks for is made of.

    At each moment of a test promtool evaluates every rule that it has loaded: most of its time goes
    into rules that the test does not look at.
    """
    head, text = case.read_text().split("\ntests:\n")
    settings = yaml.safe_load(head)
    files = [path for each in settings["rule_files"] for path in sorted(case.parent.glob(each))]
    known = rules(files)
    texts = re.findall(r"^  - (?:.*\n|\n)+?(?=^  - |\Z)", text, re.MULTILINE)
    by_names: dict[frozenset[str], list[str]] = {}
    for test, its_text in zip(load(case)["tests"], texts, strict=True):
        by_names.setdefault(frozenset(_needed(_asked(test), known)), []).append(its_text)
    written = []
    for number, (needed, tests) in enumerate(by_names.items()):
        groups = [
            {**group, "rules": [each for each in group["rules"] if _name(each) in needed]}
            for path in files
            for group in load(path)["groups"]
        ]
        found = folder / f"{case.stem}-{number}.rules.yml"
        found.write_text(yaml.safe_dump({"groups": groups}))
        written.append(folder / f"{case.stem}-{number}.yml")
        with_found = yaml.safe_dump({**settings, "rule_files": [found.name]})
        written[-1].write_text(f"{with_found}\ntests:\n{''.join(tests)}")
    return written


def _asked(test: dict[str, Any]) -> set[str]:
    alerts = {str(each["alertname"]) for each in test.get("alert_rule_test", [])}
    asked = (names_in(each["expr"])[0] for each in test.get("promql_expr_test", []))
    return alerts.union(*asked)


def _needed(asked: set[str], known: list[_Rule]) -> set[str]:
    needed: set[str] = set()
    left = asked
    while left:
        needed |= left
        more = [query for rule in known if _name(rule) in left for query in queries_of(rule)]
        left = set().union(*(names_in(query)[0] for query in more)) - needed
    return needed


def _name(rule: _Rule) -> str:
    return str(rule.get("record") or rule["alert"])


REPOSITORY = Path(__file__).parents[2]
PROMETHEUS = REPOSITORY / "deploy" / "prometheus"
RULES = sorted(PROMETHEUS.glob("rules/*.yml"))
ALERTS = sorted(PROMETHEUS.glob("alerts/*.yml"))
CASES = sorted(PROMETHEUS.glob("tests/*.yml"))
# Of the cases, so that a failure is short enough to be read.
PARTS = 4
SCRAPES = sorted(PROMETHEUS.glob("scrape-*.yml"))
DOCS = REPOSITORY / "docs"
RUNBOOKS = DOCS / "runbooks"
ALERT_RULES = rules(ALERTS)
ALERT_NAMES = sorted({rule["alert"] for rule in ALERT_RULES})


def promtool(*arguments: str | Path, cwd: Path = PROMETHEUS) -> subprocess.CompletedProcess[str]:
    command = [str(binaries().promtool), *map(str, arguments)]
    # A quarter of its time would go into collecting garbage.
    env = {**os.environ, "GOGC": "400"}
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)


# -- names


# `le` is Prometheus' own, of histograms; a scrape gives `job` and `instance` to everything.
_LABELS_OF_ALL = frozenset({"__name__", "le", "job", "instance"})
RECORDED_NAMES = Counter(rule["record"] for rule in rules(RULES))
# Of a metric as Prometheus knows it: the labels that its series may have.
KNOWN: dict[str, frozenset[str]] = {}
for _metric in catalog.METRICS:
    _behind = ("_bucket", "_sum", "_count") if _metric.kind is catalog.Kind.HISTOGRAM else ("",)
    for _suffix in _behind:
        KNOWN[_metric.prometheus + _suffix] = (
            frozenset(catalog.LABELS[_metric.labels])
            | {catalog.prometheus_label(each) for each in _metric.attributes}
            | _LABELS_OF_ALL
        )
# Of others: what Prometheus says of a scrape, and what the collector has, which test_collector.py
# looks up in a real one. Counters may have `_total` behind them, and the uptime its unit.
_SCRAPED = frozenset({"job", "instance"})
_EXPORTER = _SCRAPED | {"exporter"}
_SIGNALS = ("metric_points", "spans", "log_records")
COLLECTORS: dict[str, frozenset[str]] = {
    "otelcol_process_uptime": _SCRAPED,
    "otelcol_exporter_queue_size": _EXPORTER | {"data_type"},
    "otelcol_exporter_queue_capacity": _EXPORTER | {"data_type"},
    **{
        f"otelcol_exporter_{how}_{what}": _EXPORTER
        for how in ("sent", "send_failed")
        for what in _SIGNALS
    },
    **{
        f"otelcol_receiver_{how}_{what}": _SCRAPED | {"receiver"}
        for how in ("refused", "failed")
        for what in _SIGNALS
    },
}
# Some exporters say besides whom they sent to.
LABELLED = {
    **KNOWN,
    **{name: labels | {"server_address"} for name, labels in COLLECTORS.items()},
    **{f"{name}_total": labels for name, labels in COLLECTORS.items()},
    **{f"otelcol_process_uptime{behind}": _SCRAPED for behind in ("_seconds", "_seconds_total")},
    "up": _SCRAPED,
}
KNOWN_LABELS = frozenset().union(*LABELLED.values())


def strangers(query: str) -> list[str]:
    """Names in a query that neither the catalogue nor a rule of ours knows, nor a collector has."""
    metrics, labels = names_in(query)
    unknown = [each for each in metrics if each not in LABELLED and not RECORDED_NAMES[each]]
    return sorted([*unknown, *(labels - KNOWN_LABELS)])


def series_of_cases() -> Iterator[tuple[Path, str]]:
    for path in CASES:
        for test in load(path)["tests"]:
            for series in test["input_series"]:
                yield path, series["series"]
            for asked in test.get("promql_expr_test", []):
                yield path, asked["expr"]


def test_every_name_and_label_in_rules_and_alerts_is_in_the_catalogue() -> None:
    wrong = {
        rule.get("record") or rule["alert"]: strangers(query)
        for rule in rules(RULES) + ALERT_RULES
        for query in queries_of(rule)
        if strangers(query)
    }

    assert wrong == {}


def test_every_series_of_the_cases_is_in_the_catalogue() -> None:
    wrong = {
        (path.name, series, *strangers(series))
        for path, series in series_of_cases()
        if strangers(series)
    }

    assert wrong == set()


def test_a_recorded_name_says_its_level_and_is_defined_once() -> None:
    assert {name: times for name, times in RECORDED_NAMES.items() if times > 1} == {}
    levels = "(rank|node|run|group|cluster|gpu|collector)(_(phase|name|code|reason|role|cause))?"
    for name in RECORDED_NAMES:
        assert re.fullmatch(rf"{levels}:[a-z_]+:[a-z0-9_]+", name), name


_ADDS_UP = re.compile(r"\b(?:sum|avg|count|quantile)\s+by\s*\([^)]*\)\s*\((.*)", re.DOTALL)


def test_series_that_come_twice_are_made_one_before_they_are_counted() -> None:
    for rule in rules(RULES) + ALERT_RULES:
        for start in re.finditer(r"\b(?:sum|avg|count|quantile)\s+by\b", rule["expr"]):
            behind = _ADDS_UP.match(rule["expr"], start.start())
            assert behind, rule
            known = r"|(?:" + "|".join(KNOWN) + r")\b"
            # Collectors are scraped only: `job` and `instance` keep them apart.
            first = re.search(r"max by|[a-z_]+:[\w:]+|__name__=~\"otelcol_" + known, behind[1])
            assert first, rule
            assert first[0] not in KNOWN, f"{rule}: {first[0]} may be there twice"


# -- alerts, their texts, their runbooks and their cases


@pytest.mark.parametrize("rule", ALERT_RULES, ids=lambda rule: str(rule["alert"]))
def test_an_alert_tells_people_what_to_do_and_where_to_read(rule: dict[str, Any]) -> None:
    annotations = rule["annotations"]

    assert re.fullmatch(r"([A-Z][a-z]+)+", rule["alert"])
    assert len(rule["alert"]) <= 40
    assert rule["labels"] == {"severity": rule["labels"]["severity"]}
    assert rule["labels"]["severity"] in ("info", "warning", "critical")
    assert set(annotations) == {"summary", "description", "runbook_url"}
    assert re.fullmatch(r"[A-Z][^{}\n]*\.", annotations["summary"])
    assert "$value" in annotations["description"] or "$labels" in annotations["description"]
    assert annotations["runbook_url"] == f"docs/runbooks/{rule['alert']}.md"


def test_each_alert_has_a_runbook_and_each_runbook_an_alert() -> None:
    assert sorted(path.stem for path in RUNBOOKS.glob("*.md")) == ALERT_NAMES


def test_a_runbook_answers_the_five_questions_with_queries_that_hold(tmp_path: Path) -> None:
    asked = {}
    for alert in ALERT_NAMES:
        text = (RUNBOOKS / f"{alert}.md").read_text()
        assert text.startswith(f"# {alert}\n")
        assert re.findall(r"^## (.*)$", text, re.MULTILINE) == [
            "Meaning",
            "First look",
            "Causes",
            "Action",
            "False alarms",
        ]
        asked[alert] = queries_on(text)
        assert asked[alert], alert
    assert_queries_hold(asked, tmp_path)


def test_the_queries_of_the_other_pages_hold(tmp_path: Path) -> None:
    pages = [page for page in DOCS.rglob("*.md") if page.parent != RUNBOOKS]
    asked = {page.stem: queries_on(page.read_text()) for page in pages}

    assert asked["quickstart"]
    assert_queries_hold(asked, tmp_path)


def queries_on(page: str) -> list[str]:
    """A block has a query a line, which goes on if the next line is indented."""
    blocks = re.findall(r"```promql\n(.*?)```", page, re.DOTALL)
    return [query for block in blocks for query in re.split(r"\n(?=[\w(])", block)]


def assert_queries_hold(asked: Mapping[str, list[str]], folder: Path) -> None:
    queries = [query for of_one in asked.values() for query in of_one]
    assert [(each, strangers(each)) for each in queries if strangers(each)] == []
    # As rules, so that one call checks them all.
    records = [
        {"record": f"page:{re.sub('[^a-zA-Z]', '_', name)}:{n}", "expr": query}
        for name, of_one in asked.items()
        for n, query in enumerate(of_one)
    ]
    path = folder / "pages.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "pages", "rules": records}]}))
    checked = promtool("check", "rules", path)
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.parametrize("alert", ALERT_NAMES)
def test_each_alert_has_cases_in_which_it_fires_stays_silent_and_nearly_fires(alert: str) -> None:
    kinds: dict[str, set[bool]] = {"fires": set(), "silent": set(), "boundary": set()}
    for test in load(PROMETHEUS / "tests" / f"{alert}.yml")["tests"]:
        whose, kind, what = test["name"].split(": ", 2)
        assert whose == alert
        assert what
        checks = test["alert_rule_test"]
        assert {each["alertname"] for each in checks} == {alert}
        kinds[kind] |= {bool(each["exp_alerts"]) for each in checks}

    assert True in kinds["fires"]
    assert kinds["silent"]
    assert kinds["boundary"]
    # A boundary has two sides, of which the cases show both.
    assert {True, False} <= kinds["fires"] | kinds["silent"] | kinds["boundary"]


@pytest.mark.parametrize("alert", [name for name in ALERT_NAMES if not name.startswith("Tele")])
def test_a_finished_run_wakes_nobody(alert: str) -> None:
    names = [test["name"] for test in load(PROMETHEUS / "tests" / f"{alert}.yml")["tests"]]

    assert any(re.search(r"silent: .*(finished|no run)", name) for name in names), names


# -- what promtool says


def test_promtool_finds_nothing_wrong_with_the_rules_and_alerts() -> None:
    found = promtool("check", "rules", "--lint=all", "--lint-fatal", *RULES, *ALERTS)

    assert found.returncode == 0, found.stdout + found.stderr


@pytest.mark.parametrize("first", range(PARTS))
def test_promtool_sees_the_alerts_fire_as_the_cases_say(first: int, tmp_path: Path) -> None:
    cases = [case for each in CASES[first::PARTS] for case in with_needed_rules(each, tmp_path)]

    found = promtool("test", "rules", *cases)

    assert found.returncode == 0, found.stdout + found.stderr


@pytest.mark.stress
def test_cases_hold_beside_all_rules_that_their_files_name() -> None:
    found = promtool("test", "rules", *CASES)

    assert found.returncode == 0, found.stdout + found.stderr


@pytest.mark.parametrize("path", SCRAPES, ids=lambda path: path.name)
def test_prometheus_takes_the_configuration_with_each_way_of_scraping(
    path: Path, tmp_path: Path
) -> None:
    whole = dict(load(PROMETHEUS / "prometheus.yml"))
    whole["rule_files"] = [str(PROMETHEUS / each) for each in whole["rule_files"]]
    whole["scrape_config_files"] = [str(path)]
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(whole))

    found = promtool("check", "config", tmp_path / "prometheus.yml")

    assert found.returncode == 0, found.stdout + found.stderr
    for job in load(path)["scrape_configs"]:
        # Without it a scraper's own `node` would push ours aside. A collector has none.
        assert job.get("honor_labels", False) is (not job["job_name"].startswith("otel-collector"))


# -- who is told


def matched(matchers: list[str]) -> set[str]:
    """The alerts that these are about: labels and alerts that exist."""
    found = set(ALERT_NAMES)
    for matcher in matchers:
        parts = re.fullmatch(r'(\w+) =~? "(.*)"', matcher)
        assert parts, matcher
        label, wanted = parts.groups()
        assert label in {"alertname", "severity"} | KNOWN_LABELS
        if label == "alertname":
            found = {each for each in found if re.fullmatch(wanted, each)}
            is_pattern = "(" in wanted or ".*" in wanted
            assert is_pattern or set(wanted.split("|")) == found, matcher
    assert found, matchers
    return found


def test_the_routing_names_receivers_labels_and_alerts_that_exist() -> None:
    routing = load(PROMETHEUS / "alertmanager.example.yml")
    routes = [routing["route"], *routing["route"]["routes"]]
    rules = routing["inhibit_rules"]
    silenced: dict[str, set[str]] = {}
    for rule in rules:
        sources, targets = matched(rule["source_matchers"]), matched(rule["target_matchers"])
        assert not sources & targets
        assert {*rule["equal"]} & {*NODE_LABELS, "instance"} == {*rule["equal"]} != set()
        for source in sources:
            silenced.setdefault(source, set()).update(targets)

    assert {each["receiver"] for each in routes} == {e["name"] for e in routing["receivers"]}
    for route in routes:
        assert matched(route.get("matchers", []))
        assert set(route.get("group_by", [])) <= {"alertname"} | KNOWN_LABELS
    assert "TrainingStraggler" in silenced["TrainingStalled"]
    assert "TrainingRanksMissing" in silenced["TrainingRunKilled"]
    # A process beside the training that has ended (info) says nothing of the training.
    of_ends = [
        each["source_matchers"] for each in rules if "TrainingRun" in each["source_matchers"][0]
    ]
    assert ['severity = "warning"' in each for each in of_ends] == [True, True]
    # Nobody may silence what nobody else tells.
    never = {"TrainingLossNotFinite", "TrainingRunKilled", "GpuXid", "GpuEccUncorrected"}
    assert not never & set().union(*silenced.values())
