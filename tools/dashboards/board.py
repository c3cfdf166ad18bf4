"""Joins rows of panels to a dashboard, and sets what the SDK leaves out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from grafana_foundation_sdk.builders import dashboard as build
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import DashboardCursorSync, DashboardLinkType
from tools.dashboards.links import TAG, to_the_others, uid
from tools.dashboards.panels import Panel

# Without a version Grafana migrates an xychart as one from before 11.1, and breaks it.
PLUGIN_VERSION = "11.6.0"
COLUMNS = 24


class Row(NamedTuple):
    """Panels under a heading. A collapsed row sends no queries until it is opened."""

    title: str
    panels: Sequence[Panel]
    collapsed: bool = False


def board(
    title: str,
    question: str,
    rows: Sequence[Row],
    *,
    variables: Sequence[Any],
    annotations: Sequence[build.AnnotationQuery] = (),
    since: str = "now-3h",
) -> str:
    """The JSON of one board."""
    made = (
        build.Dashboard(title)
        .uid(uid(title))
        .description(
            f"{question} Generated from tools/dashboards of otel_ddp: edits here are overwritten."
        )
        .tags([TAG])
        .timezone("browser")
        .refresh("30s")
        .time(since, "now")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .readonly()
        .variables(list(variables))
        .annotations(list(annotations))
    )
    names = {variable.build().name for variable in variables}
    made = made.links([_link(other, url) for other, url in to_the_others(title, names)])
    dashboard = json.loads(JSONEncoder(sort_keys=True).encode(made.build()))
    dashboard["panels"] = [json.loads(JSONEncoder().encode(_as_dict(row))) for row in rows]
    return json.dumps(finish(dashboard), indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def _link(title: str, url: str) -> build.DashboardLink:
    return build.DashboardLink(title).type(DashboardLinkType.LINK).url(url).keep_time(True)


def _as_dict(row: Row) -> dict[str, Any]:
    return {
        "type": "row",
        "title": row.title,
        "collapsed": row.collapsed,
        "panels": [panel.build() for panel in row.panels],
    }


def finish(dashboard: dict[str, Any]) -> dict[str, Any]:
    """Set ids, plugin versions and the grid; panels of open rows follow their row."""
    y, next_id, flat = 0, 1, []
    for row in dashboard["panels"]:
        row["gridPos"], row["id"] = {"h": 1, "w": COLUMNS, "x": 0, "y": y}, next_id
        next_id += 1
        # Also in a collapsed row: Grafana moves the panels down when it is opened.
        bottom = _lay_out(row["panels"], y + 1)
        for panel in row["panels"]:
            panel["id"], panel["pluginVersion"] = next_id, PLUGIN_VERSION
            next_id += 1
            _slim_links(panel["fieldConfig"])
        flat.append(row)
        if row["collapsed"]:
            y += 1
        else:
            flat.extend(row["panels"])
            row["panels"], y = [], bottom
    dashboard["panels"] = flat
    # It would move the links into the menu of controls.
    for each in dashboard["links"]:
        each.pop("placement", None)
    return dashboard


def _slim_links(config: dict[str, Any]) -> None:
    """Remove keys from links of values that only links of boards have."""
    properties = [each for override in config["overrides"] for each in override["properties"]]
    holders = [config["defaults"], *(each for each in properties if each["id"] == "links")]
    for holder in holders:
        for key in ("links", "value"):
            if key in holder:
                holder[key] = [{"title": link["title"], "url": link["url"]} for link in holder[key]]


def _lay_out(panels: list[dict[str, Any]], top: int) -> int:
    """Place panels from left to right, line by line; returns the y of the next row."""
    x = line = 0
    for panel in panels:
        width, height = panel["gridPos"]["w"], panel["gridPos"]["h"]
        if x + width > COLUMNS:
            x, top, line = 0, top + line, 0
        panel["gridPos"] = {"h": height, "w": width, "x": x, "y": top}
        x, line = x + width, max(line, height)
    return top + line
