"""Finds a board in Grafana, and Prometheus through the data source of that board."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from otel_ddp.cli.drill.boards import Board
from otel_ddp.cli.drill.http_api import HttpApi, NoAnswer
from otel_ddp.cli.drill.prometheus import Prometheus


def deployed(grafana: HttpApi, uid: str, file: str) -> tuple[Board, Prometheus]:
    """A board as it is there, and what answers its queries; *file* is where it comes from."""
    try:
        answer = grafana.get(f"/api/dashboards/uid/{uid}")
    except NoAnswer as why:
        if why.status != 404:
            raise
        sentence = f"Grafana has no board {uid}: import deploy/grafana/dashboards/{file}"
        raise NoAnswer(sentence) from None
    found = Board(answer.get("dashboard") or {} if isinstance(answer, dict) else {})
    if not found.queries:
        raise NoAnswer("the board has no query in Grafana: import it again")
    source = _source(grafana, found)
    return found, Prometheus(grafana.below(f"/api/datasources/proxy/uid/{source}"))


def _source(grafana: HttpApi, board: Board) -> str:
    """The data source that a person sees the board with: its own, else Grafana's default."""
    # What each viewer of a board may read.
    told = grafana.get("/api/frontend/settings")
    sources: Mapping[str, Any] = told.get("datasources") or {} if isinstance(told, dict) else {}
    found = [
        each
        for each in sources.values()
        if isinstance(each, dict) and each.get("type") == "prometheus" and each.get("uid")
    ]
    if not found:
        raise NoAnswer("Grafana has no data source of the type Prometheus")
    for each in found:
        if board.source in (each["uid"], each.get("name")):
            return str(each["uid"])
    return str(next((each for each in found if each.get("isDefault")), found[0])["uid"])
