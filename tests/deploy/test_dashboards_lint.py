"""What no schema of Grafana's finds: each rule is shown to fail on a board that breaks it."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import yaml
from tools.dashboards import names, queries
from tools.dashboards.queries import FOLDER, panels

from otel_ddp.settings import Settings
from otel_ddp.vocabulary import catalog
from otel_ddp.vocabulary.words import PHASES

Told = dict[str, Any]

BOARDS: dict[str, Told] = {
    path.stem: json.loads(path.read_text()) for path in FOLDER.glob("*.json")
}
SINGLE = {"Run", "Ranks"}
SIX = {"compare", "gpus", "pipeline", "ranks", "run", "runs"}

UNITS = {
    *("none", "short", "sishort", "sci", "percentunit", "s", "h", "cps", "flops"),
    *("bytes", "Bps", "celsius", "watt", "hertz", "kwatth", "dateTimeAsIso", "dateTimeFromNow"),
}
TRANSFORMATIONS = {
    "filterByValue",
    "groupBy",
    "groupingToMatrix",
    "merge",
    "organize",
    "partitionByValues",
    "sortBy",
}
DATA_SOURCES = ("${datasource}", "${traces}", "${logs}")


def _targets(panel: Told) -> Iterator[Told]:
    """What is asked of Prometheus."""
    for target in panel.get("targets", []):
        if target["datasource"]["type"] == "prometheus":
            yield target


def _variables(board: Told) -> Iterator[Told]:
    yield from board["templating"]["list"]


def units_are_known(board: Told) -> Iterator[str]:
    for _, panel in panels(board):
        used = [panel["fieldConfig"]["defaults"].get("unit", "missing")]
        for override in panel["fieldConfig"]["overrides"]:
            used += [each["value"] for each in override["properties"] if each["id"] == "unit"]
        yield from (f"{panel['title']}: unit {unit}" for unit in used if unit not in UNITS)


def transformations_are_known(board: Told) -> Iterator[str]:
    for _, panel in panels(board):
        for each in panel.get("transformations", []):
            if each["id"] not in TRANSFORMATIONS:
                yield f"{panel['title']}: {each['id']}"


_CHOOSING = re.compile(r"\b(topk|bottomk|limitk)\b(?:\s*(?:by|without)\s*\([^)]*\))?")


def the_worst_are_chosen_once(board: Told) -> Iterator[str]:
    """In a range, topk chooses anew at every step unless it looks at one moment."""
    for _, panel in panels(board):
        for target in _targets(panel):
            for match in _CHOOSING.finditer(target["expr"]):
                chosen = _within_brackets(target["expr"], match.end())
                if not target["instant"] and "@ end()" not in chosen:
                    yield f"{panel['title']}: {match[1]} without @ end()"


def panels_do_not_overlap(board: Told) -> Iterator[str]:
    ids = [each["id"] for each in board["panels"]]
    ids += [each["id"] for row in board["panels"] for each in row.get("panels", [])]
    if len(ids) != len(set(ids)):
        yield "two panels have one id"
    shown = list(board["panels"])
    for sheet in (shown, *(row["panels"] for row in board["panels"] if row["type"] == "row")):
        taken: dict[tuple[int, int], str] = {}
        for panel in sheet:
            at = panel["gridPos"]
            for x in range(at["x"], at["x"] + at["w"]):
                for y in range(at["y"], at["y"] + at["h"]):
                    if x >= 24:
                        yield f"{panel['title']}: beyond the right edge"
                    if (other := taken.setdefault((x, y), panel["title"])) != panel["title"]:
                        yield f"{panel['title']} lies on {other}"


def panels_say_what_they_mean(board: Told) -> Iterator[str]:
    if board["title"] != board["title"].strip() or "?" not in board["description"]:
        yield "the board says no question"
    for _, panel in panels(board):
        meaning, _, action = panel.get("description", "").partition("\n\n**What to do:** ")
        if not panel.get("title"):
            yield "a panel without a title"
        if not (meaning.endswith((".", "?")) and action):
            yield f"{panel['title']}: no meaning, or nothing to do"


def descriptions_name_the_metrics(board: Told) -> Iterator[str]:
    for _, panel in panels(board):
        used, by_rules = names.mentioned([target["expr"] for target in _targets(panel)])
        for name in used:
            if name not in panel["description"]:
                yield f"{panel['title']}: does not name {name}"
        if by_rules != ("Needs the recording rules" in panel["description"]):
            yield f"{panel['title']}: does not say whether it needs the rules"


def all_is_one_pattern(board: Told) -> Iterator[str]:
    for variable in _variables(board):
        if (variable["multi"] or variable["includeAll"]) and variable.get("allValue") != ".*":
            yield f"{variable['name']}: All would be every value"


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


def rates_know_the_interval(board: Told) -> Iterator[str]:
    asked = [(p["title"], t["expr"]) for _, p in panels(board) for t in _targets(p)]
    for title, expr in asked:
        for match in re.finditer(r"\b(?:rate|irate|increase)\(", expr):
            window = re.search(r"\[([^\]]*)\]", expr[match.end() :])
            if window is None or window[1] not in ("$__rate_interval", "$__range"):
                yield f"{title}: a rate over {window[1] if window else 'nothing'}"


def data_sources_can_be_chosen(board: Told) -> Iterator[str]:
    holders: list[tuple[str, Told]] = [
        *((p["title"], p) for _, p in panels(board)),
        *((p["title"], t) for _, p in panels(board) for t in p.get("targets", [])),
        *((mark["name"], mark) for mark in board["annotations"]["list"]),
        *((v["name"], v) for v in _variables(board) if v["type"] == "query"),
    ]
    for name, holder in holders:
        if holder.get("datasource", {}).get("uid") not in DATA_SOURCES:
            yield f"{name}: a data source of its own"


def names_are_known(board: Told) -> Iterator[str]:
    """Whatever looks like a metric is the catalogue's, a rule's, Prometheus' or the collector's."""
    asked = [t["expr"] for _, p in panels(board) for t in _targets(p)]
    asked += [mark["expr"] for mark in board["annotations"]["list"]]
    for expr in asked:
        bare = re.sub(r'"(?:[^"\\]|\\.)*"', '""', expr)
        found = set(re.findall(r"[a-zA-Z_][\w:]*(?=\{)", bare)) - {"x"}
        known, _ = names.mentioned([bare])
        yield from (
            name
            for name in found - {*known, "ALERTS", "ALERTS_FOR_STATE"}
            if not name.startswith("otelcol_")
        )


def phases_have_one_colour(board: Told) -> Iterator[str]:
    for _, panel in panels(board):
        for phase, colour in _phase_colours(panel):
            if colour != PHASE_COLOURS[phase]:
                yield f"{panel['title']}: {phase} in {colour}"


def _phase_colours(panel: Told) -> Iterator[tuple[str, str]]:
    """By the name of a series, and by its value."""
    config = panel["fieldConfig"]
    for override in config["overrides"]:
        name = override["matcher"]["options"]
        for each in override["properties"]:
            if name in PHASES and each["id"] == "color":
                yield name, each["value"]["fixedColor"]
            if each["id"] == "mappings":
                yield from _mapped(each["value"])
    yield from _mapped(config["defaults"].get("mappings", []))


def _mapped(mappings: list[Told]) -> Iterator[tuple[str, str]]:
    for mapping in mappings:
        for shown in mapping["options"].values():
            if shown["text"] in PHASES:
                yield shown["text"], shown["color"]


# The first board's are those that all must have.
PHASE_COLOURS = dict(found for _, panel in panels(BOARDS["run"]) for found in _phase_colours(panel))


def open_rows_limit_ranks(board: Told) -> Iterator[str]:
    for row, panel in panels(board):
        for target in _targets(panel):
            if not row["collapsed"] and _unlimited(target["expr"]):
                yield f"{panel['title']}: a series for each of ten thousand ranks"


def _within_brackets(expr: str, at: int) -> str:
    """From the next bracket to the one that closes it, strings left alone."""
    start = expr.index("(", at)
    return expr[start + 1 : _closing(expr, start)]


def _closing(expr: str, start: int) -> int:
    depth, at = 0, start
    while True:
        if expr[at] == '"':
            at += len(re.match(r'"(?:[^"\\]|\\.)*"', expr[at:])[0]) - 1
        depth += {"(": 1, ")": -1}.get(expr[at], 0)
        if depth == 0:
            return at
        at += 1


_AGGREGATION = re.compile(
    r"\b(sum|min|max|avg|count|quantile|topk|bottomk|limitk)\b\s*(?:(by|without)\s*\(([^)]*)\)\s*)?\("
)
_BY_RANK = {metric.prometheus for metric in catalog.METRICS if metric.labels in ("rank", "gpu")}


def _unlimited(expr: str) -> bool:
    """Whether the answer has a series a rank, however many there are."""
    left = _without_rank_free(expr)
    if "LIMITED" in left:
        return False
    if "EACH_RANK" in left:
        return True
    for match in re.finditer(r"([a-zA-Z_][\w:]*)(\{[^}]*\})", left):
        of_rank = match[1].startswith(("rank", "gpu:")) or any(
            match[1].startswith(name) for name in _BY_RANK
        )
        if of_rank and 'rank="0"' not in match[2]:
            return True
    return False


def _without_rank_free(expr: str) -> str:
    """What is added up over ranks, or limited to a few, taken out."""
    found = _AGGREGATION.search(expr)
    if found is None:
        return expr
    start = found.end() - 1
    end = _closing(expr, start)
    operation, kind, labels = found[1], found[2], {*re.split(r"[, ]+", found[3] or "")}
    inner = _without_rank_free(expr[start + 1 : end])
    if operation in ("topk", "bottomk", "limitk"):
        kept = "LIMITED"
    elif kind is None or (kind == "by") != ("rank" in labels):
        kept = ""
    # A name that is made of run and rank is one series a rank all the same.
    else:
        kept = "LIMITED" if "LIMITED" in inner else "" if 'rank="0"' in inner else "EACH_RANK"
    return expr[: found.start()] + kept + _without_rank_free(expr[end + 1 :])


def rank_pictures_are_of_ranks(board: Told) -> Iterator[str]:
    """Buckets are subtracted from each other, and names sort as text."""
    for _, panel in panels(board):
        for target in _targets(panel):
            buckets = "by (le)" in target["expr"]
            said = (target["format"], target["legendFormat"])
            of_ranks = panel["type"] == "heatmap" and not buckets
            if of_ranks and said != ("time_series", "{{rank}}"):
                yield f"{panel['title']}: {target['format']} of {target['legendFormat']}"


def lines_of_ranks_name_the_node(board: Told) -> Iterator[str]:
    for _, panel in panels(board):
        for target in _targets(panel):
            legend = target["legendFormat"]
            if "rank {{rank}}" in legend and "{{node}}" not in legend and "{{phase}}" not in legend:
                yield f"{panel['title']}: ranks without their node"


def boards_lead_to_each_other(board: Told) -> Iterator[str]:
    leads = {link["url"].partition("?")[0] for link in board["links"]}
    others = {f"/d/{each['uid']}" for each in BOARDS.values()} - {f"/d/{board['uid']}"}
    yield from (f"no way to {url}" for url in others - leads)
    for link in board["links"]:
        if not (link["keepTime"] and "${group:queryparam}" in link["url"]):
            yield f"{link['title']}: forgets time or selection"
        if not re.search(r"\$\{run:queryparam\}|var-run=\$\{newest:", link["url"]):
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


Lint = Callable[[Told], Iterator[str]]


def _first(board: Told, type_: str = "") -> Told:
    return next(p for _, p in panels(board) if p["type"] == type_ or not type_)


def _ask(board: Told, expr: str, **more: Any) -> None:
    target = next(t for r, p in panels(board) if not r["collapsed"] for t in _targets(p))
    target.update({"expr": expr, "instant": False, **more})


def _variable(board: Told, name: str) -> Told:
    return next(each for each in _variables(board) if each["name"] == name)


def _lead(board: Told, title: str, this: str, that: str) -> None:
    link = next(each for each in board["links"] if each["title"] == title)
    link["url"] = link["url"].replace(this, that)


def _move(board: Told) -> None:
    open_ = [each for each in board["panels"] if each["type"] != "row"]
    open_[1]["gridPos"] = open_[0]["gridPos"]


def _recolour(board: Told) -> None:
    panel = next(p for _, p in panels(board) if list(_phase_colours(p)))
    text = json.dumps(panel["fieldConfig"]).replace(PHASE_COLOURS["backward"], "#000000")
    panel["fieldConfig"] = json.loads(text)


_RAW = 'training_phase{run="$run"}'
_BROKEN: list[tuple[Lint, str, Callable[[Told], object]]] = [
    (units_are_known, "run", lambda b: _first(b)["fieldConfig"]["defaults"].update(unit="seconds")),
    (
        transformations_are_known,
        "compare",
        lambda b: _first(b, "trend")["transformations"][0].update(id="mergeAll"),
    ),
    (the_worst_are_chosen_once, "ranks", lambda b: _ask(b, f"topk($topn, {_RAW})")),
    (
        the_worst_are_chosen_once,
        "ranks",
        lambda b: _ask(b, f"{_RAW} and topk(3, a) and max(b @ end())"),
    ),
    (panels_do_not_overlap, "run", _move),
    (panels_do_not_overlap, "run", lambda b: _first(b)["gridPos"].update(x=22)),
    (panels_do_not_overlap, "run", lambda b: _first(b).update(id=1)),
    (panels_say_what_they_mean, "run", lambda b: _first(b).update(description="The state.")),
    (panels_say_what_they_mean, "run", lambda b: _first(b).update(title="")),
    (descriptions_name_the_metrics, "run", lambda b: _ask(b, "max(training_epoch)")),
    (descriptions_name_the_metrics, "run", lambda b: _ask(b, "run:training_step:max")),
    (all_is_one_pattern, "gpus", lambda b: _variable(b, "rank").pop("allValue")),
    (the_empty_group_can_be_chosen, "runs", lambda b: _variable(b, "group").pop("staticOptions")),
    (variables_are_chained, "runs", lambda b: b["templating"]["list"].reverse()),
    (variables_exist_and_are_used, "runs", lambda b: b["templating"]["list"].pop()),
    (
        variables_exist_and_are_used,
        "runs",
        lambda b: b["templating"]["list"].append({**_variable(b, "name"), "name": "spare"}),
    ),
    (rates_know_the_interval, "run", lambda b: _ask(b, f"max(rate({_RAW}[1m]))")),
    (
        data_sources_can_be_chosen,
        "run",
        lambda b: _first(b)["targets"][0]["datasource"].update(uid="${DS_PROMETHEUS}"),
    ),
    (names_are_known, "run", lambda b: _ask(b, 'max(training_loss{run="$run"})')),
    (phases_have_one_colour, "ranks", _recolour),
    (open_rows_limit_ranks, "ranks", lambda b: _ask(b, _RAW)),
    (open_rows_limit_ranks, "ranks", lambda b: _ask(b, f"max by (node, rank) ({_RAW})")),
    (open_rows_limit_ranks, "ranks", lambda b: _ask(b, f"sum without (phase) (rate({_RAW}[1m]))")),
    (open_rows_limit_ranks, "ranks", lambda b: _ask(b, f"max({_RAW}) or max by (rank) ({_RAW})")),
    (
        open_rows_limit_ranks,
        "ranks",
        lambda b: _ask(b, 'rank:training_work:per_step2m{run="$run"} / on () group_left () max(x)'),
    ),
    (
        rank_pictures_are_of_ranks,
        "ranks",
        lambda b: _first(b, "heatmap")["targets"][0].update(format="heatmap"),
    ),
    (
        rank_pictures_are_of_ranks,
        "ranks",
        lambda b: _first(b, "heatmap")["targets"][0].update(legendFormat="rank {{rank}}"),
    ),
    (
        lines_of_ranks_name_the_node,
        "ranks",
        lambda b: _ask(b, "topk(1, x)", legendFormat="rank {{rank}}"),
    ),
    (
        links_lead_somewhere,
        "runs",
        lambda b: _first(b, "table")["transformations"][1]["options"]["renameByName"].update(
            {"Value #start": "Began"}
        ),
    ),
    (
        links_lead_somewhere,
        "run",
        lambda b: _first(b)["fieldConfig"]["defaults"].update(
            links=[{"url": "/d/otel-ddp-nodes?"}]
        ),
    ),
    (
        links_lead_somewhere,
        "run",
        lambda b: _first(b)["fieldConfig"]["defaults"].update(
            links=[{"url": "/d/otel-ddp-run?var-node=${__field.labels.node}"}]
        ),
    ),
    (boards_lead_to_each_other, "runs", lambda b: b["links"].pop()),
    (boards_lead_to_each_other, "runs", lambda b: b["links"][0].update(keepTime=False)),
    (boards_lead_to_each_other, "gpus", lambda b: _lead(b, "Ranks", "&var-run=", "&var-walk=")),
    (
        boards_lead_to_each_other,
        "gpus",
        lambda b: _lead(b, "Ranks", "var-run=${newest:percentencode}", "${run:queryparam}"),
    ),
    (
        boards_lead_to_each_other,
        "compare",
        lambda b: _lead(b, "GPUs & nodes", "${run:", "${rank:queryparam}&${run:"),
    ),
]
LINTS = list(dict.fromkeys(lint for lint, _, _ in _BROKEN))


def _name(thing: object) -> str | None:
    return getattr(thing, "__name__", None) if callable(thing) else None


def test_there_are_six_boards() -> None:
    assert set(BOARDS) == SIX
    assert len({board["uid"] for board in BOARDS.values()}) == len(SIX)


@pytest.mark.parametrize("board", sorted(SIX))
def test_the_boards_have_the_variables_that_mean_something_there(board: str) -> None:
    mission = ["group", "job_type", "run", "node", "rank", "local_rank"]
    there = [each["name"] for each in _variables(BOARDS[board]) if each["name"] in mission]

    assert there == (mission[:3] if board == "runs" else mission)
    # One run at a time where ranks stand side by side: those of two runs have the same numbers.
    assert _variable(BOARDS[board], "run")["multi"] is (board not in ("run", "ranks"))


def test_the_board_of_gpus_begins_with_the_four_numbers_that_trackers_show() -> None:
    first = [panel for _, panel in panels(BOARDS["gpus"])][:4]

    assert [(p["title"], p["fieldConfig"]["defaults"]["unit"]) for p in first] == [
        ("GPU utilisation", "percentunit"),
        ("GPU temperature", "celsius"),
        ("Time spent accessing memory", "percentunit"),
        ("GPU memory allocated", "percentunit"),
    ]
    asked = [names.mentioned([target["expr"] for target in _targets(p)])[0] for p in first]
    assert [set(each) for each in asked] == [
        {"hw_gpu_utilization_ratio"},
        {"hw_temperature_celsius"},
        {"otel_ddp_gpu_mem_controller_utilization_ratio"},
        {"hw_gpu_memory_usage_bytes", "hw_gpu_memory_limit_bytes"},
    ]


@pytest.mark.parametrize("lint", LINTS, ids=_name)
@pytest.mark.parametrize("board", sorted(SIX))
def test_the_boards_keep_the_rule(lint: Lint, board: str) -> None:
    assert list(lint(BOARDS[board])) == []


@pytest.mark.parametrize(("lint", "board", "breaks"), _BROKEN, ids=_name)
def test_the_rule_finds_a_board_that_breaks_it(
    lint: Lint, board: str, breaks: Callable[[Told], object]
) -> None:
    broken = copy.deepcopy(BOARDS[board])
    breaks(broken)

    assert list(lint(broken))


@pytest.mark.parametrize(
    "expr",
    [
        f"count(max by (node, rank) ({_RAW})) or vector(0)",
        f"topk(3, max by (node, rank) ({_RAW}))",
        f"max by (rank) ({_RAW}) and on (rank) topk(3, max by (rank) ({_RAW}))",
        'max by (rank) (training_phase{run="$run",rank="0"})',
        'rate(training_steps_total{run="$run",rank="0"}[1m])',
        f"max without (node, rank, local_rank) ({_RAW})",
        "max by (node) (node:training_work:max2m{})",
    ],
)
def test_what_is_limited_passes(expr: str) -> None:
    assert not _unlimited(expr)


def test_phases_have_colours_and_no_two_the_same() -> None:
    assert set(PHASE_COLOURS) == set(PHASES)
    assert len(set(PHASE_COLOURS.values())) == len(PHASES)


def test_every_metric_of_the_catalogue_is_on_some_board() -> None:
    asked = [t["expr"] for board in BOARDS.values() for _, p in panels(board) for t in _targets(p)]
    chosen = [
        option.value for each in queries.boards() for v in each.variables for option in v.options
    ]
    shown, _ = names.mentioned([*asked, *chosen])

    parts = ("", "_bucket", "_sum", "_count")
    missing = [
        metric.prometheus
        for metric in catalog.METRICS
        if not {f"{metric.prometheus}{part}" for part in parts} & set(shown)
    ]

    assert missing == []


def test_a_name_that_nobody_emits_or_records_is_refused() -> None:
    with pytest.raises(names.UnknownName, match=r"training\.loss"):
        names.metric("training.loss")
    with pytest.raises(names.UnknownName, match="run:training_loss:max"):
        names.recorded("run:training_loss:max")
    with pytest.raises(names.UnknownName, match="histogram"):
        names.metric("training.step.duration")
    assert (
        names.metric("training.step.duration", part="sum") == "training_step_duration_seconds_sum"
    )


GRAFANA = FOLDER.parent


def _yaml(*parts: str) -> Told:
    told: Told = yaml.safe_load(GRAFANA.joinpath(*parts).read_text())
    return told


def test_data_sources_read_what_compose_sets() -> None:
    text = (GRAFANA / "provisioning" / "datasources" / "otel-ddp.yaml").read_text()
    compose = yaml.safe_load((GRAFANA.parent / "compose.yaml").read_text())

    # Grafana takes any other $ for a variable of its environment as well, an empty one.
    read = set(re.findall(r"(?<!\$)\$(\w+)", re.sub(r"(?m)^ *#.*$", "", text).replace("$$", "")))

    assert {"PROMETHEUS_URL", "TEMPO_URL", "LOKI_URL"} == read
    assert read <= set(compose["services"]["grafana"]["environment"])


def test_the_data_source_has_the_interval_of_the_agents() -> None:
    prometheus, loki, tempo = _yaml("provisioning", "datasources", "otel-ddp.yaml")["datasources"]
    exports_every_s = Settings().interval_s

    assert f"{exports_every_s:g}s" == prometheus["jsonData"]["timeInterval"]
    assert prometheus["uid"] == tempo["jsonData"]["tracesToMetrics"]["datasourceUid"]
    assert loki["uid"] == tempo["jsonData"]["tracesToLogsV2"]["datasourceUid"]
    assert tempo["uid"] == loki["jsonData"]["derivedFields"][0]["datasourceUid"]


def test_boards_lie_where_grafana_is_told_to_look() -> None:
    (provider,) = _yaml("provisioning", "dashboards", "otel-ddp.yaml")["providers"]
    compose = yaml.safe_load((GRAFANA.parent / "compose.yaml").read_text())

    mounts = {
        mount["target"]: mount["source"] for mount in compose["services"]["grafana"]["volumes"]
    }

    assert mounts[provider["options"]["path"]] == "./grafana/dashboards"


def test_kubernetes_has_every_board_and_can_hold_them() -> None:
    boards, sources = _yaml("kubernetes", "kustomization.yaml")["configMapGenerator"]
    files = [GRAFANA / "kubernetes" / name for name in boards["files"]]

    assert {path.resolve() for path in files} == {path.resolve() for path in FOLDER.iterdir()}
    assert all((GRAFANA / "kubernetes" / name).exists() for name in sources["files"])
    # A ConfigMap takes no more.
    assert sum(path.stat().st_size for path in files) < 1024**2


# What the SDK says when it is loaded; its second format is none that Grafana's files take yet.
_OLD_FORMAT = pytest.mark.filterwarnings("ignore:Prefer using dashboardv2:DeprecationWarning")


@_OLD_FORMAT
def test_the_files_are_what_the_generator_writes() -> None:
    pytest.importorskip("grafana_foundation_sdk", reason="the generator's SDK needs Python 3.11")
    from tools.dashboards.__main__ import differences

    assert differences() == []
