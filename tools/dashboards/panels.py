"""The kinds of panels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from grafana_foundation_sdk.builders import (
    bargauge,
    common,
    dashboard,
    heatmap,
    logs,
    loki,
    nodegraph,
    prometheus,
    statetimeline,
    table,
    tempo,
    timeseries,
    trend,
)
from grafana_foundation_sdk.builders import stat as stat_
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models import common as c
from grafana_foundation_sdk.models import dashboard as m
from grafana_foundation_sdk.models import heatmap as h
from grafana_foundation_sdk.models import loki as lo
from grafana_foundation_sdk.models import prometheus as p
from tools.dashboards.looks import NEUTRAL, PALETTE, fixed, steps
from tools.dashboards.names import mentioned
from tools.dashboards.variables import LOKI, PROMETHEUS, TEMPO

Panel = Builder[m.Panel]
NUMBER_ALONE = c.BigValueTextMode.VALUE
WITH_NAME, NAME_ALONE = c.BigValueTextMode.VALUE_AND_NAME, c.BigValueTextMode.NAME
Transformation = tuple[str, Mapping[str, object]]


class Query(NamedTuple):
    """A query to Prometheus."""

    expr: str
    legend: str = "__auto"
    ref: str = ""
    instant: bool = False
    form: p.PromQueryFormat = p.PromQueryFormat.TIME_SERIES


def over_time(expr: str, legend: str = "__auto", ref: str = "") -> Query:
    return Query(expr, legend, ref)


def now(expr: str, legend: str = "__auto") -> Query:
    return Query(expr, legend, instant=True)


def rows(expr: str, ref: str) -> Query:
    """One row for each series, at the end of the time range."""
    return Query(expr, "__auto", ref, instant=True, form=p.PromQueryFormat.TABLE)


def points(expr: str, ref: str) -> Query:
    """One row for each series and point in time."""
    return Query(expr, "__auto", ref, form=p.PromQueryFormat.TABLE)


class Text(NamedTuple):
    """Title and description of a panel."""

    title: str
    meaning: str
    action: str

    def description(self, expressions: Sequence[str]) -> str:
        names, by_rules = mentioned(list(expressions))
        parts = [self.meaning, f"**What to do:** {self.action}"]
        if names:
            parts.append(f"Metric: {', '.join(names)}")
        if by_rules:
            parts.append("Needs the recording rules of deploy/prometheus/rules.")
        return "\n\n".join(parts)


def _dressed(panel: Any, text: Text, asked: Sequence[Query], size: tuple[int, int]) -> Any:
    width, height = size
    panel = (
        panel.title(text.title)
        .description(text.description([query.expr for query in asked]))
        .datasource(PROMETHEUS)
        .span(width)
        .height(height)
    )
    for index, query in enumerate(asked):
        target = (
            prometheus.Dataquery()
            .expr(query.expr)
            .legend_format(query.legend)
            .ref_id(query.ref or chr(ord("A") + index))
            .format(query.form)
            .editor_mode(p.QueryEditorMode.CODE)
            .datasource(PROMETHEUS)
        )
        panel = panel.with_target(target.instant() if query.instant else target.range())
    return panel


def _valued(panel: Any, unit: str, levels: Sequence[m.Threshold], decimals: int | None) -> Any:
    panel = panel.unit(unit).thresholds(
        dashboard.ThresholdsConfig()
        .mode(m.ThresholdsMode.ABSOLUTE)
        .steps(list(levels or steps(base=NEUTRAL)))
    )
    return panel if decimals is None else panel.decimals(decimals)


def _transformed(panel: Any, transformations: Iterable[Transformation]) -> Any:
    for id_, options in transformations:
        panel = panel.with_transformation(m.DataTransformerConfig(id_val=id_, options=options))
    return panel


def _coloured(panel: Any) -> Any:
    return panel.color_scheme(dashboard.FieldColor().mode(m.FieldColorModeId(PALETTE)))


def _legend(*calcs: str, right: bool = False) -> common.VizLegendOptions:
    return (
        common.VizLegendOptions()
        .show_legend(True)
        .display_mode(c.LegendDisplayMode.TABLE if calcs else c.LegendDisplayMode.LIST)
        .placement(c.LegendPlacement.RIGHT if right else c.LegendPlacement.BOTTOM)
        .calcs(list(calcs))
    )


def _tooltip(order: c.SortOrder = c.SortOrder.DESCENDING) -> common.VizTooltipOptions:
    return common.VizTooltipOptions().mode(c.TooltipDisplayMode.MULTI).sort(order)


def stat(
    text: Text,
    *asked: Query,
    unit: str = "none",
    levels: Sequence[m.Threshold] = (),
    decimals: int | None = None,
    words: m.ValueMap | None = None,
    nothing: str = "–",
    named: c.BigValueTextMode = NUMBER_ALONE,
    link: tuple[str, str] | None = None,
    size: tuple[int, int] = (6, 3),
) -> Panel:
    """One number, its name, or both; with a sparkline for a range query.

    A link is only set for names of ranks.
    """
    panel = _valued(_dressed(stat_.Panel(), text, asked, size), unit, levels, decimals)
    panel = (
        panel.no_value(nothing)
        .graph_mode(c.BigValueGraphMode.NONE)
        .color_mode(c.BigValueColorMode.VALUE)
        .text_mode(named)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]).values(False))
    )
    if words is not None:
        panel = panel.mappings([words])
    if not asked[0].instant:
        panel = panel.graph_mode(c.BigValueGraphMode.AREA).max_data_points(300)
    # Without a rank there are no labels, and the other board would be empty.
    return panel.override_by_regexp("rank .*", [_linked([link])]) if link else panel


def lines(
    text: Text,
    *asked: Query,
    unit: str = "none",
    levels: Sequence[m.Threshold] = (),
    size: tuple[int, int] = (12, 8),
    minimum: float | None = None,
    maximum: float | None = None,
    log: bool = False,
    stacked: bool = False,
    colours: Mapping[str, str] = {},
    legend: Sequence[str] = ("lastNotNull", "max"),
    sort: tuple[str, bool] | None = None,
    max_points: int = 1000,
    decimals: int | None = None,
    band: tuple[str, str] | None = None,
    nothing: str = "",
    link: tuple[str, str] | None = None,
    shortest_step: str = "",
    in_bars: bool = False,
) -> Panel:
    """Values over time.

    `colours`: by name. `band`: the names of its upper and lower edge. `sort`: a column of the
    legend, and whether it is descending. `in_bars`: for values that last only a point or two.
    """
    panel = _valued(_dressed(timeseries.Panel(), text, asked, size), unit, levels, decimals)
    names = _legend(*legend, right=bool(colours))
    if sort is not None:
        names = names.sort_by(sort[0]).sort_desc(sort[1])
    panel = (
        _coloured(panel)
        .max_data_points(max_points)
        .line_width(1.5)
        .fill_opacity(70 if stacked else 0)
        .show_points(c.VisibilityMode.AUTO)
        # On the right if there are as many names as phases or causes.
        .legend(names)
        .tooltip(_tooltip())
        # Exports are 5 s or more apart: connect gaps of a few points.
        .span_nulls(60000)
    )
    if minimum is not None:
        panel = panel.min(minimum)
    if maximum is not None:
        panel = panel.max(maximum)
    elif unit == "percentunit":
        # If all values are 0, Grafana's axis would end at 10000%.
        panel = panel.axis_soft_max(0.01)
    if log:
        panel = panel.scale_distribution(
            common.ScaleDistributionConfig().type(c.ScaleDistribution.LOG).log(10)
        )
    if stacked:
        panel = panel.stacking(common.StackingConfig().mode(c.StackingMode.NORMAL))
    panel = _painted(panel, colours)
    if band is not None:
        panel = _with_band(panel, *band)
    if nothing:
        panel = panel.no_value(nothing)
    if shortest_step:
        panel = panel.interval(shortest_step)
    if in_bars:
        panel = panel.draw_style(c.GraphDrawStyle.BARS)
    return panel.data_links(_links([link])) if link else panel


def _painted(panel: Any, colours: Mapping[str, str]) -> Any:
    for name, colour in colours.items():
        panel = panel.override_by_name(name, [fixed(colour)])
    return panel


def bars(
    text: Text,
    *asked: Query,
    unit: str,
    colours: Mapping[str, str],
    nothing: str,
    size: tuple[int, int],
) -> Panel:
    """Horizontal bars, one for each series."""
    panel = _valued(_dressed(bargauge.Panel(), text, asked, size), unit, (), None)
    return (
        _painted(panel, colours)
        .min(0)
        .no_value(nothing)
        .orientation(c.VizOrientation.HORIZONTAL)
        .display_mode(c.BarGaugeDisplayMode.BASIC)
        .show_unfilled(False)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]).values(False))
    )


def _with_band(panel: Any, top: str, bottom: str) -> Any:
    edge = [_set("custom.lineWidth", 1), fixed("#8AB8FF")]
    fill = [*edge, _set("custom.fillBelowTo", bottom), _set("custom.fillOpacity", 20)]
    return panel.override_by_name(top, fill).override_by_name(bottom, edge)


def against(
    text: Text,
    *asked: Query,
    transformations: Sequence[Transformation],
    size: tuple[int, int] = (24, 12),
    band: tuple[str, str] | None = None,
    legend: Sequence[str] = ("lastNotNull", "min", "max"),
) -> Panel:
    """Values against the first numeric column of the transformed table."""
    panel = _valued(_dressed(trend.Panel(), text, asked, size), "none", (), None)
    panel = (
        _coloured(_transformed(panel, transformations))
        # All points of a run, up to a limit.
        .max_data_points(5000)
        .line_width(2)
        .show_points(c.VisibilityMode.AUTO)
        # A run has gaps at the points of other runs.
        .span_nulls(True)
        # By name, so that curves with the same attribute are adjacent.
        .legend(_legend(*legend, right=size[0] > 12).sort_by("Name").sort_desc(False))
        .tooltip(_tooltip(c.SortOrder.ASCENDING))
    )
    return _with_band(panel, *band) if band else panel


def rank_heatmap(
    text: Text,
    *asked: Query,
    unit: str,
    lowest: float,
    highest: float,
    scheme: str,
    link: tuple[str, str] | None = None,
) -> Panel:
    """Rows are ranks, in numerical order if the legend is the bare number.

    The scheme must pass through white: Grafana inverts others in its light theme.
    """
    panel = _valued(_dressed(heatmap.Panel(), text, asked, (24, 9)), unit, (), None)
    panel = (
        panel.max_data_points(300)
        .calculate(False)
        .rows_frame(heatmap.RowsHeatmapOptions().layout(c.HeatmapCellLayout.AUTO).value("value"))
        .color(
            heatmap.HeatmapColorOptions()
            .mode(h.HeatmapColorMode.SCHEME)
            .scheme(scheme)
            .scale(h.HeatmapColorScale.LINEAR)
            .steps(64)
            .min(lowest)
            .max(highest)
        )
        # Gaps would look like stripes.
        .cell_gap(0)
        # Zero is a value here.
        .filter_values(heatmap.FilterValueRange().le(-1e9))
        .cell_values(heatmap.CellValues().unit(unit))
        .y_axis(heatmap.YAxisConfig().decimals(0).axis_placement(c.AxisPlacement.LEFT))
        .show_value(c.VisibilityMode.NEVER)
        .tooltip(heatmap.HeatmapTooltip().mode(c.TooltipDisplayMode.SINGLE).show_color_scale(True))
    )
    return panel.data_links(_links([link])) if link else panel


def bucket_heatmap(text: Text, *asked: Query, unit: str, size: tuple[int, int] = (12, 8)) -> Panel:
    """Rows are the buckets of a histogram."""
    form = p.PromQueryFormat.HEATMAP
    asked = tuple(query._replace(form=form) for query in asked)
    panel = _valued(_dressed(heatmap.Panel(), text, asked, size), unit, (), None)
    return (
        panel.max_data_points(150)
        .calculate(False)
        .color(
            heatmap.HeatmapColorOptions()
            .mode(h.HeatmapColorMode.SCHEME)
            .scheme("Viridis")
            .scale(h.HeatmapColorScale.EXPONENTIAL)
            .exponent(0.5)
            .steps(64)
        )
        .y_axis(heatmap.YAxisConfig().unit(unit).axis_placement(c.AxisPlacement.LEFT))
        .show_value(c.VisibilityMode.NEVER)
        .tooltip(heatmap.HeatmapTooltip().mode(c.TooltipDisplayMode.SINGLE))
    )


def graph(text: Text, nodes: str, edges: str, *, nothing: str, size: tuple[int, int]) -> Panel:
    """A node graph. Grafana requires these labels, which transformations cannot add: `id`, `title`
    and `subtitle` of a node; `id`, `source` and `target` of an edge."""
    asked = rows(nodes, "nodes"), rows(edges, "edges")
    return _valued(_dressed(nodegraph.Panel(), text, asked, size), "none", (), None).no_value(
        nothing
    )


def states(
    text: Text,
    *asked: Query,
    words: m.ValueMap,
    size: tuple[int, int] = (24, 8),
) -> Panel:
    """A state timeline, one band for each series."""
    panel = _valued(_dressed(statetimeline.Panel(), text, asked, size), "none", (), None)
    return (
        # With the default colours, by thresholds, the legend has no names.
        _coloured(panel)
        .mappings([words])
        .max_data_points(500)
        .merge_values(True)
        .show_value(c.VisibilityMode.NEVER)
        .row_height(0.9)
        .per_page(32)
        .fill_opacity(90)
        .line_width(0)
        .legend(_legend())
        .tooltip(common.VizTooltipOptions().mode(c.TooltipDisplayMode.SINGLE))
    )


# The least width of a column in pixels: with Grafana's default, half of a table is invisible.
_NARROWEST = 110


class Column(NamedTuple):
    """A column of a table: a label, or `Value #` and the ref of a query."""

    field: str
    title: str = ""
    unit: str = "none"
    decimals: int | None = None
    levels: Sequence[m.Threshold] = ()
    words: m.ValueMap | None = None
    links: Sequence[tuple[str, str]] = ()
    width: int | None = None
    out_of_sight: bool = False
    """Hidden, for links."""


def listing(
    text: Text,
    *asked: Query,
    columns: Sequence[Column],
    hidden: Sequence[str] = (),
    sort: tuple[str, bool] | None = None,
    nothing: str = "none",
    size: tuple[int, int] = (24, 9),
) -> Panel:
    """A table. `sort`: the title of a column, and whether it is descending."""
    if len(asked) == 1:
        # Grafana omits the ref of a single query.
        value = f"Value #{asked[0].ref}"
        columns = [c._replace(field="Value") if c.field == value else c for c in columns]
        hidden = ["Value" if name == value else name for name in hidden]
    panel = _valued(_dressed(table.Panel(), text, asked, size), "none", (), None)
    panel = _transformed(
        panel,
        [
            ("merge", {}),
            (
                "organize",
                {
                    "excludeByName": dict.fromkeys(("Time", *hidden), True),
                    "indexByName": {each.field: at for at, each in enumerate(columns)},
                    "renameByName": {each.field: each.title for each in columns if each.title},
                },
            ),
        ],
    )
    # Else the text for an empty table would appear in each empty cell, and in links.
    panel = panel.override_by_regexp(
        ".*", [_set("noValue", ""), _set("custom.minWidth", _NARROWEST)]
    )
    for each in columns:
        if properties := _properties(each):
            panel = panel.override_by_name(each.title or each.field, properties)
    if sort is not None:
        title, falling = sort
        panel = panel.sort_by([common.TableSortByFieldState().display_name(title).desc(falling)])
    return panel.filterable(True).cell_height(c.TableCellHeight.SM).no_value(nothing)


def _properties(column: Column) -> list[m.DynamicConfigValue]:
    parts = [_set("unit", column.unit)] if column.unit != "none" else []
    if column.decimals is not None:
        parts.append(_set("decimals", column.decimals))
    if column.levels:
        parts.append(_set("thresholds", {"mode": "absolute", "steps": list(column.levels)}))
        parts.append(_set("custom.cellOptions", {"type": "color-text"}))
    if column.words is not None:
        parts.append(_set("mappings", [column.words]))
        parts.append(_set("custom.cellOptions", {"type": "color-text"}))
    if column.links:
        parts.append(_linked(column.links))
    if column.out_of_sight:
        # For Grafana before 12.2, and from 12.2 on.
        parts += [_set("custom.hidden", True), _set("custom.hideFrom", {"viz": True})]
    if column.width is not None:
        parts.append(_set("custom.width", column.width))
    return parts


def traces(text: Text, traceql: str) -> Panel:
    panel = _valued(_dressed(table.Panel(), text, (), (24, 9)), "none", (), None)
    target = tempo.Dataquery().ref_id("A").query_type("traceql").query(traceql).limit(50)
    return panel.datasource(TEMPO).with_target(target.datasource(TEMPO)).no_value("no traces")


def log_lines(text: Text, logql: str) -> Panel:
    """Log lines, newest first."""
    panel = _valued(_dressed(logs.Panel(), text, (), (24, 14)), "none", (), None)
    panel = panel.datasource(LOKI).with_target(_logql(logql).max_lines(1000))
    return (
        panel.show_time(True)
        # A stack trace has lines of its own.
        .wrap_log_message(True)
        .enable_log_details(True)
        .sort_order(c.LogsSortOrder.DESCENDING)
        .dedup_strategy(c.LogsDedupStrategy.NONE)
        .no_value("no lines")
    )


def log_bars(
    text: Text, logql: str, legend: str, colours: Mapping[str, str], *, size: tuple[int, int]
) -> Panel:
    """The number of log lines over time, stacked by the legend."""
    panel = _valued(_dressed(timeseries.Panel(), text, (), size), "none", (), 0)
    panel = panel.datasource(LOKI).with_target(_logql(logql).legend_format(legend))
    return (
        _coloured(_painted(panel, colours))
        .max_data_points(200)
        .draw_style(c.GraphDrawStyle.BARS)
        .fill_opacity(80)
        .stacking(common.StackingConfig().mode(c.StackingMode.NORMAL))
        .legend(_legend("sum"))
        .tooltip(_tooltip())
        .no_value("no lines")
    )


def _logql(expr: str) -> loki.Dataquery:
    return (
        loki.Dataquery()
        .ref_id("A")
        .expr(expr)
        .editor_mode(lo.QueryEditorMode.CODE)
        .query_type("range")
        .datasource(LOKI)
    )


def _set(id_: str, value: object) -> m.DynamicConfigValue:
    return m.DynamicConfigValue(id_val=id_, value=value)


def _linked(links: Iterable[tuple[str, str]]) -> m.DynamicConfigValue:
    return _set("links", [link.build() for link in _links(links)])


def _links(links: Iterable[tuple[str, str]]) -> list[dashboard.DashboardLink]:
    return [dashboard.DashboardLink(title).url(url) for title, url in links]
