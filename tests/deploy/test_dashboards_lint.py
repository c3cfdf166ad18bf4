"""What no schema of Grafana's finds in the boards."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import yaml
from tools.dashboards.queries import FOLDER, panels

from deploy.files import DEPLOY, ROOT
from otel_ddp.settings import Settings

Told = dict[str, Any]

BOARDS: dict[str, Told] = {
    path.stem: json.loads(path.read_text()) for path in FOLDER.glob("*.json")
}
SINGLE = {"Run", "Ranks"}
NAMES = {"compare", "fleet", "goodput", "gpus", "pipeline", "ranks", "run", "runs"}
# Boards of whole runs: no rank is chosen there.
OF_RUNS = {"goodput", "runs"}


def _targets(panel: Told) -> Iterator[Told]:
    """What is asked of Prometheus."""
    for target in panel.get("targets", []):
        if target["datasource"]["type"] == "prometheus":
            yield target


def _variables(board: Told) -> Iterator[Told]:
    yield from board["templating"]["list"]


def the_empty_group_can_be_chosen(board: Told) -> Iterator[str]:
    for variable in _variables(board):
        if variable["name"] == "group" and "" not in [
            option["value"] for option in variable.get("staticOptions", [])
        ]:
            yield "no empty group"


def variables_are_chained(board: Told) -> Iterator[str]:
    """Each asks with those before it alone, and all have one order."""
    seen: list[str] = []
    for variable in _variables(board):
        query = variable["query"]
        text = query["query"] if isinstance(query, dict) else query
        for used in re.findall(r"\$\{?([a-z]\w*)", text):
            if used not in seen:
                yield f"{variable['name']} asks with {used}, which comes later"
        seen.append(variable["name"])
    mission = ["group", "job_type", "run", "node", "rank", "local_rank"]
    if seen[0] != "datasource" or [name for name in mission if name in seen] != [
        name for name in seen if name in mission
    ]:
        yield f"variables in the order {seen}"


def variables_exist_and_are_used(board: Told) -> Iterator[str]:
    there = {variable["name"] for variable in _variables(board)}
    everything = json.dumps([board["panels"], board["annotations"], board["templating"]])
    links = json.dumps([link["url"] for link in board["links"]])
    used = set(re.findall(r"\$\{?([a-z]\w*)", everything + links))
    yield from (f"${name} is nowhere" for name in used - there)
    yield from (f"${name} is used by nothing" for name in there - used)


def what_is_seldom_changed_is_in_the_menu(board: Told) -> Iterator[str]:
    """Else the others take two lines."""
    seldom = {"datasource", "traces", "logs", "service", "severity", "before"}
    for variable in _variables(board):
        if variable["name"] in seldom and not variable.get("hide"):
            yield variable["name"]


def rates_know_the_interval(board: Told) -> Iterator[str]:
    asked = [(p["title"], t["expr"]) for _, p in panels(board) for t in _targets(p)]
    for title, expr in asked:
        for match in re.finditer(r"\b(?:rate|irate|increase)\(", expr):
            window = re.search(r"\[([^\]]*)\]", expr[match.end() :])
            if window is None or window[1] not in ("$__rate_interval", "$__range"):
                yield f"{title}: a rate over {window[1] if window else 'nothing'}"


def sums_over_time_span_a_whole_step(board: Told) -> Iterator[str]:
    """Of a shorter window, the samples between two points of a picture are in no sum."""
    for _, panel in panels(board):
        for target in _targets(panel):
            windows = re.findall(r"\bsum_over_time\([^\[]*\[([^\]]*)\]", target["expr"])
            if not {"$__interval", "$__range"}.issuperset(windows):
                yield f"{panel['title']}: a sum over {windows}"


def boards_lead_to_each_other(board: Told) -> Iterator[str]:
    leads = {link["url"].partition("?")[0] for link in board["links"]}
    others = {f"/d/{each['uid']}" for each in BOARDS.values()} - {f"/d/{board['uid']}"}
    yield from (f"no way to {url}" for url in others - leads)
    for link in board["links"]:
        if not (link["keepTime"] and "${group:queryparam}" in link["url"]):
            yield f"{link['title']}: forgets time or selection"
        forgets = not re.search(r"\$\{run:queryparam\}|var-run=\$\{newest:", link["url"])
        if forgets and board["title"] != "Fleet":
            yield f"{link['title']}: forgets the run"
        if link["title"] in SINGLE and board["title"] not in SINGLE and "${run:" in link["url"]:
            yield f"{link['title']}: shows one run, and may be told of several"
        if "Compare" in (board["title"], link["title"]) and "${rank:" in link["url"]:
            yield f"{link['title']}: rank 0 was not chosen by anybody"


def links_lead_somewhere(board: Told) -> Iterator[str]:
    """To boards that are there, with columns and labels that are there."""
    uids = {each["uid"] for each in BOARDS.values()}
    for _, panel in panels(board):
        config = panel["fieldConfig"]
        links = list(config["defaults"].get("links", []))
        for override in config["overrides"]:
            for each in override["properties"]:
                links += each["value"] if each["id"] == "links" else []
        shown = _columns(panel)
        # The answer's own labels: those of the outermost aggregation.
        kept = [re.search(r"\bby \(([^)]*)\)", target["expr"]) for target in _targets(panel)]
        labels = {label for by in kept if by for label in by[1].split(", ")}
        for link in links:
            uid = link["url"].removeprefix("/d/").partition("?")[0]
            if uid not in uids:
                yield f"{panel['title']}: leads to {uid}"
            for column in re.findall(r"\$\{__data\.fields\.(\w+)", link["url"]):
                if column not in shown:
                    yield f"{panel['title']}: a link with the column {column}"
            for label in re.findall(r"\$\{__field\.labels\.(\w+)", link["url"]):
                if label not in labels:
                    yield f"{panel['title']}: a link with the label {label}"


def _columns(panel: Told) -> set[str]:
    for each in panel.get("transformations", []):
        if each["id"] == "organize" and "indexByName" in each["options"]:
            named = each["options"]["renameByName"]
            return {named.get(field, field) for field in each["options"]["indexByName"]}
    return set()


def _variable(board: Told, name: str) -> Told:
    return next(each for each in _variables(board) if each["name"] == name)


LINTS: tuple[Callable[[Told], Iterator[str]], ...] = (
    the_empty_group_can_be_chosen,
    variables_are_chained,
    variables_exist_and_are_used,
    what_is_seldom_changed_is_in_the_menu,
    rates_know_the_interval,
    sums_over_time_span_a_whole_step,
    links_lead_somewhere,
    boards_lead_to_each_other,
)


def test_each_board_has_a_name_and_an_address_of_its_own() -> None:
    assert set(BOARDS) == NAMES
    assert len({board["uid"] for board in BOARDS.values()}) == len(NAMES)


@pytest.mark.parametrize("board", sorted(NAMES))
def test_the_boards_have_the_variables_that_mean_something_there(board: str) -> None:
    mission = ["group", "job_type", "run", "node", "rank", "local_rank"]
    there = [each["name"] for each in _variables(BOARDS[board]) if each["name"] in mission]

    if board == "fleet":
        # A machine outlives runs, and is not one of their ranks.
        assert there == ["group", "node"]
        return
    assert there == (mission[:3] if board in OF_RUNS else mission)
    # One run at a time where ranks stand side by side: those of two runs have the same numbers.
    assert _variable(BOARDS[board], "run")["multi"] is (board not in ("run", "ranks"))


@pytest.mark.parametrize("lint", LINTS, ids=lambda lint: lint.__name__)
def test_the_boards_keep_the_rule(lint: Callable[[Told], Iterator[str]]) -> None:
    assert {name: found for name, board in BOARDS.items() if (found := list(lint(board)))} == {}


def test_each_recording_rule_is_used_by_a_board_an_alert_a_rule_or_a_page() -> None:
    files = [*DEPLOY.glob("prometheus/[ar][lu]*s/*.yml"), *FOLDER.glob("*.json")]
    text = "\n".join(path.read_text() for path in (*files, *(ROOT / "docs").rglob("*.md")))
    recorded = re.findall(r"record: (\S+)", text)

    used = re.findall(r"(?<!record: )\b[a-z_]+:[a-z_]+:\w+", text)

    assert recorded
    assert set(recorded) - set(used) == set()


GRAFANA = FOLDER.parent


def _yaml(*parts: str) -> Told:
    told: Told = yaml.safe_load(GRAFANA.joinpath(*parts).read_text())
    return told


def test_grafana_finds_boards_and_data_sources_as_compose_sets_them() -> None:
    grafana = yaml.safe_load((GRAFANA.parent / "compose.yaml").read_text())["services"]["grafana"]
    text = (GRAFANA / "provisioning" / "datasources" / "otel-ddp.yaml").read_text()
    # Grafana takes any other $ for a variable of its environment as well, an empty one.
    read = set(re.findall(r"(?<!\$)\$(\w+)", re.sub(r"(?m)^ *#.*$", "", text).replace("$$", "")))
    prometheus, loki, tempo = yaml.safe_load(text)["datasources"]
    (provider,) = _yaml("provisioning", "dashboards", "otel-ddp.yaml")["providers"]
    mounts = {mount["target"]: mount["source"] for mount in grafana["volumes"]}

    assert {"PROMETHEUS_URL", "TEMPO_URL", "LOKI_URL"} == read
    assert read <= set(grafana["environment"])
    assert mounts[provider["options"]["path"]] == "./grafana/dashboards"
    # The interval of the agents.
    assert f"{Settings().interval_s:g}s" == prometheus["jsonData"]["timeInterval"]
    assert prometheus["uid"] == tempo["jsonData"]["tracesToMetrics"]["datasourceUid"]
    assert loki["uid"] == tempo["jsonData"]["tracesToLogsV2"]["datasourceUid"]
    assert tempo["uid"] == loki["jsonData"]["derivedFields"][0]["datasourceUid"]


def test_kubernetes_has_every_board_and_can_hold_them() -> None:
    *boards, sources = _yaml("kubernetes", "kustomization.yaml")["configMapGenerator"]
    files = [GRAFANA / "kubernetes" / name for each in boards for name in each["files"]]

    assert {path.resolve() for path in files} == {path.resolve() for path in FOLDER.iterdir()}
    assert [each["name"] for each in boards] == [f"otel-ddp-dashboard-{p.stem}" for p in files]
    assert all((GRAFANA / "kubernetes" / name).exists() for name in sources["files"])
    # A ConfigMap takes no more, and each has one board.
    assert all(path.stat().st_size < 1024**2 for path in files)


# What the SDK says when it is loaded; its second format is none that Grafana's files take yet.
_OLD_FORMAT = pytest.mark.filterwarnings("ignore:Prefer using dashboardv2:DeprecationWarning")


@_OLD_FORMAT
def test_the_files_are_what_the_generator_writes() -> None:
    pytest.importorskip("grafana_foundation_sdk", reason="the generator's SDK needs Python 3.11")
    from tools.dashboards import __main__ as generator

    made = {name: build() for name, build in generator.BOARDS.items()}

    assert made == {path.stem: path.read_text() for path in FOLDER.glob("*.json")}
