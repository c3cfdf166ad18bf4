"""The variables of the boards, in their order: each is filtered by those before it."""

from __future__ import annotations

from collections.abc import Sequence

from grafana_foundation_sdk.builders import dashboard as build
from grafana_foundation_sdk.models.common import DataSourceRef
from grafana_foundation_sdk.models.dashboard import (
    VariableHide,
    VariableOption,
    VariableRefresh,
    VariableSort,
)
from tools.dashboards.names import metric, recorded
from tools.dashboards.roles import IN_RANGE, having_role, last
from tools.dashboards.selectors import (
    GROUPS,
    NODES,
    RANKS_OF_GROUPS,
    RUN,
    RUNS,
    WHOLE_RUN,
    WHOLE_RUNS,
)

PROMETHEUS = DataSourceRef(type_val="prometheus", uid="${datasource}")
TEMPO = DataSourceRef(type_val="tempo", uid="${traces}")
LOKI = DataSourceRef(type_val="loki", uid="${logs}")

# For variables that are seldom changed. Older Grafana shows them with the others.
IN_MENU = VariableHide.IN_CONTROLS_MENU
_ALL = VariableOption(text=["All"], value=["$__all"])
_KINDS = {"label_names": 0, "label_values": 1, "query_result": 3}
_AS_IS, _NUMERICAL, _NATURAL = (
    VariableSort.DISABLED,
    VariableSort.NUMERICAL_ASC,
    VariableSort.NATURAL_ASC,
)


def datasource() -> build.DatasourceVariable:
    return build.DatasourceVariable("datasource").type("prometheus").label("Metrics").hide(IN_MENU)


def traces() -> build.DatasourceVariable:
    return build.DatasourceVariable("traces").type("tempo").label("Traces").hide(IN_MENU)


def logs() -> build.DatasourceVariable:
    return build.DatasourceVariable("logs").type("loki").label("Logs").hide(IN_MENU)


def service() -> build.TextBoxVariable:
    # A store that many programs share is searched faster by service.
    description = "In Loki: a pattern for `service_name`; `.+` searches all of them."
    return text("service", "Service", ".+", description).hide(IN_MENU)


def severity() -> build.CustomVariable:
    """By Loki's level, which it derives from the number of each record."""
    errors = "error|critical|fatal"
    options = [
        ("info and above", f"info|warn|{errors}"),
        ("warnings and above", f"warn|{errors}"),
        ("errors", errors),
        ("everything", ".*"),
    ]
    return choice("severity", "Severity", options, "Of events.").hide(IN_MENU)


def _query(
    name: str, label: str, query: str, description: str, *, sort: VariableSort
) -> build.QueryVariable:
    return (
        build.QueryVariable(name)
        .label(label)
        .description(description)
        .datasource(PROMETHEUS)
        .definition(query)
        .query({"qryType": _KINDS[query.partition("(")[0]], "query": query, "refId": name})
        # Else runs outside of the initial time range would never be listed.
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(sort)
    )


def _several(
    name: str,
    label: str,
    query: str,
    description: str,
    *,
    sort: VariableSort = _NATURAL,
    first: str = "",
) -> build.QueryVariable:
    return (
        _query(name, label, query, description, sort=sort)
        .multi(True)
        .include_all(True)
        # Else All would be a pattern of all values: 49 kB at ten thousand ranks.
        .all_value(".*")
        .current(VariableOption(text=[first], value=[first]) if first else _ALL)
    )


def _one(
    name: str,
    label: str,
    query: str,
    description: str,
    *,
    first: str = "",
    sort: VariableSort = _NATURAL,
) -> build.QueryVariable:
    variable = _query(name, label, query, description, sort=sort)
    return variable.current(VariableOption(text=first, value=first)) if first else variable


def group(of: str = metric("training.run.info")) -> build.QueryVariable:
    query = f"label_values({of}, group)"
    # To Prometheus an empty label is absent, so no query returns it.
    none = VariableOption(text="(no group)", value="")
    variable = _several("group", "Group", query, "The experiment that runs belong to.")
    return variable.static_options([none]).static_options_order("before")


def job_type() -> build.QueryVariable:
    # Of all ranks: rank 0 may be the only one of its role.
    query = f"label_values({metric('training.state', GROUPS)}, job_type)"
    return _several(
        "job_type", "Job type", query, "The role of a process: train, worker, eval, ..."
    )


def _runs_newest_first(runs: str = GROUPS, ranks: str = RANKS_OF_GROUPS) -> str:
    began = last(metric("training.run.start.timestamp", runs))
    # A query, as label values cannot be sorted by time: users look for the newest run.
    chosen = having_role(began, IN_RANGE, ranks)
    return f"query_result(sort_desc({_named(f'max by (run) ({chosen})')}))"


def _named(runs: str) -> str:
    """With the text of the menu: the user's name for the run, if any, and the run."""
    info = last(metric("training.run.info", GROUPS))
    both = f'label_join({info}, "shown", " · ", "name", "run")'
    shown = f'label_replace({both}, "shown", "$1", "shown", " · (.*)")'
    # One of them if the name has changed.
    return f"{runs} * on (run) group_left (shown) topk by (run) (1, max by (run, shown) ({shown}))"


# Grafana shows results as {run="...",shown="..."} and escapes nothing there: a name may have quotes
# in it. It puts them into queries rightly with its toggle prometheusSpecialCharsInLabelValues only.
_RUN_OF_RESULT = r'/run="(?<value>.+)",shown="(?<text>.+)"\}/'


def runs() -> build.QueryVariable:
    description = "Launches, the newest first."
    return _several("run", "Run", _runs_newest_first(), description, sort=_AS_IS).regex(
        _RUN_OF_RESULT
    )


def run() -> build.QueryVariable:
    description = "One launch; the newest of this time range comes first."
    return _one("run", "Run", _runs_newest_first(), description, sort=_AS_IS).regex(_RUN_OF_RESULT)


def before() -> build.QueryVariable:
    """The run before the selected one, or itself if it is the first; then all others."""
    began = last(metric("training.run.start.timestamp", GROUPS))
    this = last(metric("training.run.start.timestamp", WHOLE_RUN))
    # Sorted by when they began, after those that began earlier the run itself, then the others.
    query = (
        f"max by (run) ({began} < on () group_left () max({this})) "
        f"or max by (run) ({this}) - 1e10 or max by (run) ({began}) - 2e10"
    )
    query = f"query_result(sort_desc({_named(f'({query})')}))"
    variable = _one("before", "Before", query, "What this run is compared with.", sort=_AS_IS)
    return variable.regex(_RUN_OF_RESULT).hide(IN_MENU)


def newest() -> build.QueryVariable:
    """Hidden: the selected run to which a link to a board of one run leads."""
    description = "The newest of the chosen runs, for links."
    variable = _one(
        "newest", "Newest run", _runs_newest_first(WHOLE_RUNS, RUNS), description, sort=_AS_IS
    )
    return variable.regex(_RUN_OF_RESULT).hide(VariableHide.HIDE_VARIABLE)


def places(selector: str, *, first_rank: str = "") -> list[build.QueryVariable]:
    """Node, rank and local rank."""
    state = "training.state"
    nodes = metric(state, selector)
    ranks = metric(state, selector, 'node=~"$node"')
    local = metric(state, selector, 'node=~"$node",rank=~"$rank"')
    return [
        _several("node", "Node", f"label_values({nodes}, node)", "Machines of these runs."),
        _several(
            "rank",
            "Rank",
            f"label_values({ranks}, rank)",
            "Global ranks on these nodes.",
            sort=_NUMERICAL,
            first=first_rank,
        ),
        _several(
            "local_rank",
            "Local rank",
            f"label_values({local}, local_rank)",
            "Ranks as counted on their node.",
            sort=_NUMERICAL,
        ),
    ]


def nodes_of_agents() -> build.QueryVariable:
    """All nodes, also without training."""
    query = f"label_values({metric('system.memory.limit', NODES.rpartition(',')[0])}, node)"
    return _several("node", "Node", query, "Machines with an agent.")


def of_machines() -> list[build.QueryVariable]:
    """Over the whole time, from series that are stored for months: most have no rank now."""
    seen = "node:training_seen:timestamp"
    query = f"label_values({recorded(seen, GROUPS)}, node)"
    return [
        group(recorded(seen)),
        _several("node", "Node", query, "Machines on which ranks were seen."),
    ]


def name(selector: str) -> build.QueryVariable:
    query = f"label_values({metric('training.scalar', selector)}, name)"
    return _one("name", "Value", query, "A value as the script logged it.", first="loss")


def split(selector: str) -> build.QueryVariable:
    logged = metric("training.scalar", selector, 'name="$name"')
    query = f"label_values({logged}, split)"
    return _one("split", "Split", query, "train, val, test, or the script's word.", first="train")


def attribute() -> build.QueryVariable:
    """Any label of training_run_info, including scalars of the configuration."""
    query = f"label_names({metric('training.run.info')})"
    description = (
        "What the curves are named, sorted and averaged by: anything the run says of itself."
    )
    variable = _one("by", "By", query, description, first="group")
    return variable.regex("/^(?!__|job$|instance$|otel_scope|node$|rank$|local_rank$)(.*)/")


def choice(
    name: str, label: str, options: Sequence[tuple[str, str]], description: str, *, first: int = 0
) -> build.CustomVariable:
    """One of a few options, each with its text."""
    listed = [VariableOption(text=text, value=value) for text, value in options]
    chosen = VariableOption(selected=True, text=listed[first].text, value=listed[first].value)
    return (
        build.CustomVariable(name)
        .label(label)
        .description(description)
        .values(", ".join(t if t == v else f"{t} : {v}" for t, v in options))
        .options(listed)
        .current(chosen)
    )


def numbers(name: str, label: str, description: str, *values: int) -> build.CustomVariable:
    return choice(name, label, [(str(value), str(value)) for value in values], description)


def text(name: str, label: str, default: str, description: str) -> build.TextBoxVariable:
    chosen = VariableOption(text=default, value=default)
    return (
        build.TextBoxVariable(name)
        .label(label)
        .description(description)
        .default_value(default)
        .current(chosen)
    )


def of_runs() -> list[build.QueryVariable]:
    return [group(), job_type(), runs(), newest()]


def of_run() -> list[build.QueryVariable]:
    return [group(), job_type(), run(), *places(RUN)]
