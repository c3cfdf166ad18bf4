"""Checks that trouble is seen: servers, rules, then verdict, series and alert, then the boards."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from otel_ddp import catalog
from otel_ddp.cli import shipped
from otel_ddp.cli.drill.boards import Board, answers
from otel_ddp.cli.drill.grafana import deployed
from otel_ddp.cli.drill.http_api import HttpApi, NoAnswer
from otel_ddp.cli.drill.plays import GROUP, NODE, RANKS, Play
from otel_ddp.cli.drill.prometheus import Prometheus, Rule, missing_rules

_LOOK_EVERY_S = 1.0
_STATE = catalog.TRAINING_STATE.prometheus
_MOST_NAMED = 5
_RULES = "load deploy/prometheus/rules and deploy/prometheus/alerts of this version, and reload"


Found = tuple[bool, str]
"""Whether all is well, and a sentence."""


class Check(NamedTuple):
    """One line of the answer."""

    what: str
    ok: bool
    seconds: float
    """Since the drill began."""
    sentence: str
    """What was found; where it is not as it should be, also where to look."""


class _Awaited(NamedTuple):
    """One check of one play, which is answered some time or never."""

    what: str
    play: Play
    look: Callable[[Play], Found | None]
    why_not: Callable[[Play], str]


class Drill:
    """The checks of one drill, in the order in which they can be answered."""

    def __init__(
        self,
        prometheus: Prometheus,
        grafana: HttpApi | None,
        limit_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._prometheus, self._grafana, self._limit_s = prometheus, grafana, limit_s
        self._clock, self._sleep, self._now = clock, sleep, now
        self._began, self._start_s = clock(), now()
        self._rules: list[Rule] = []

    # -- before anything is played

    def servers(self, reached: Found) -> Iterator[Check]:
        """Whether there is what the drill needs, without which nothing is played."""
        yield self._check("collector", *reached)
        try:
            self._prometheus.query("vector(1)")
        except NoAnswer as why:
            yield self._check("Prometheus", False, f"{self._asked}: {_advised(why)}")
        else:
            yield self._check("Prometheus", True, f"{self._asked} answers")

    def rules(self) -> Check:
        """Whether all rules of this version are loaded, and none fails."""
        try:
            self._rules = self._prometheus.rules()
        except NoAnswer as why:
            return self._check("rules", False, f"cannot be listed at {self._asked}: {why}")
        shipped_rules = shipped.rule_names()
        loaded = {each.name for each in self._rules}
        if missing := [
            f"{name} ({shipped_rules[name]})" for name in sorted(shipped_rules.keys() - loaded)
        ]:
            return self._check("rules", False, f"not loaded: {_few(missing)}; {_RULES}")
        failing = [f"{each.name} ({each.error})" for each in self._rules if each.error]
        if failing:
            return self._check("rules", False, f"evaluation fails: {_few(failing)}")
        return self._check("rules", True, f"all {len(shipped_rules)} rules and alerts are loaded")

    # -- while plays go on

    def plays(self, plays: Sequence[Play]) -> Iterator[Check]:
        """Verdict, series and alert of each, as they come; red for what has not come in time."""
        waiting = [each for play in plays for each in self._awaited(play)]
        while waiting and self._clock() - self._began < self._limit_s:
            left = []
            for each in waiting:
                if (found := _looked(each)) is None:
                    left.append(each)
                else:
                    yield self._check(each.what, *found)
            waiting = left
            if waiting:
                self._sleep(_LOOK_EVERY_S)
        for each in waiting:
            try:
                why = each.why_not(each.play)
            except NoAnswer as refused:
                why = f"{self._asked}: {_advised(refused)}"
            yield self._check(each.what, False, why)

    def _awaited(self, play: Play) -> Iterator[_Awaited]:
        yield _Awaited(f"verdict {play.run}", play, _verdict, _why_no_verdict)
        yield _Awaited(f"series {play.run}", play, self._series, self._why_no_series)
        yield _Awaited(f"alert {play.alert}", play, self._alert, self._why_no_alert)

    def _series(self, play: Play) -> Found | None:
        found = self._prometheus.query(f'{_STATE}{{group="{GROUP}",run="{play.run}"}}')
        ranks = {
            labels["rank"]
            for labels in found
            if all(labels.get(name) for name in catalog.RANK_LABELS)
        }
        if len(ranks) < RANKS:
            return None
        return True, f"{len(ranks)} ranks with {', '.join(catalog.RANK_LABELS)}"

    def _alert(self, play: Play) -> Found | None:
        if self._rules and play.alert not in {each.name for each in self._rules}:
            return False, f"there is no such alert in {self._asked}: {_RULES}"
        if self._firing(play, "firing"):
            return True, f"fires for {play.run}"
        return None

    def _firing(self, play: Play, state: str) -> bool:
        chosen = f'alertname="{play.alert}",alertstate="{state}",run="{play.run}"'
        return bool(self._prometheus.query(f"ALERTS{{{chosen}}}"))

    # -- what to look at

    def _why_no_series(self, play: Play) -> str:
        found = self._prometheus.query(f'{{run="{play.run}"}}')
        names = {each.get("__name__", "") for each in found}
        if not found:
            return (
                f"nothing of this run has come to {self._asked}: look at the log of the collector, "
                "and whether it sends to this Prometheus"
            )
        if _STATE not in names:
            return (
                f"there is no {_STATE}, but {_few(sorted(names))}: see translation_strategy in "
                "deploy/prometheus/prometheus.yml"
            )
        lacking = [
            name
            for name in catalog.RANK_LABELS
            if not all(each.get(name) for each in found if each.get("__name__") == _STATE)
        ]
        if lacking:
            return f"series have no {', '.join(lacking)}: does the collector drop or rename labels?"
        return f"one of the {RANKS} ranks has not come: look at the log of the collector"

    def _why_no_alert(self, play: Play) -> str:
        if self._firing(play, "pending"):
            return "pending, as its `for` has not passed yet: try a longer --seconds"
        queries = [each.query for each in self._rules if each.name == play.alert]
        if missing := missing_rules(queries, self._rules):
            return f"asks for what no rule records: {_few(sorted(missing))}; {_RULES}"
        for each in self._rules:
            if each.name == play.alert and each.error:
                return f"its evaluation fails: {each.error}"
        return (
            f"its expression brings nothing for {play.run}: see Status, Rule health in Prometheus, "
            f"and evaluate it there ({_few(queries[:1]) or 'the alert'})"
        )

    # -- at the end

    def boards(self, runs: Sequence[str]) -> Iterator[Check]:
        """Whether the queries of each board bring something for these runs."""
        for file, definition in shipped.board_files().items():
            board = Board(definition)
            try:
                prometheus = self._prometheus
                if self._grafana is not None:
                    board, prometheus = deployed(self._grafana, board.uid, file)
                yield self._check(f"board {board.title}", *self._asks(board, prometheus, runs))
            except NoAnswer as why:
                yield self._check(f"board {board.title}", False, _advised(why))

    def _asks(self, board: Board, prometheus: Prometheus, runs: Sequence[str]) -> Found:
        full: set[int] = set()
        for values in board.values(runs, GROUP, NODE):
            for number, query in enumerate(board.queries):
                if number in full:
                    continue
                try:
                    found = answers(query, prometheus, values, self._start_s, self._now())
                except NoAnswer as why:
                    if why.status not in (400, 422):
                        raise
                    return False, f"a query of {query.panel!r} is refused: {why}"
                if found:
                    full.add(number)
        told = f"{len(full)} of {len(board.queries)} queries bring something"
        missing = missing_rules((each.expr for each in board.queries), self._rules)
        if self._rules and missing:
            return False, f"{told}; no rule records {_few(sorted(missing))}: {_RULES}"
        if not any(board.queries[number].asks_for_a_run for number in full):
            return False, f"{told}, and none of these runs: is its data source this Prometheus?"
        return True, told

    @property
    def _asked(self) -> str:
        return self._prometheus.api.name

    def _check(self, what: str, ok: bool, sentence: str) -> Check:
        return Check(what, ok, self._clock() - self._began, sentence)


def _verdict(play: Play) -> Found | None:
    return (True, sentence) if (sentence := play.verdict()) else None


def _why_no_verdict(_: Play) -> str:
    return (
        "the agent of this node has not found it: the machine may be too busy for the drill; try "
        "again, or with a longer --seconds"
    )


def _looked(each: _Awaited) -> Found | None:
    try:
        found = each.look(each.play)
    except NoAnswer:
        # Servers are away for moments; at the end of the time it is said.
        return None
    if found is None and (failure := each.play.failure()):
        return False, f"the drill's own training went wrong: {failure}"
    return found


def _advised(why: NoAnswer) -> str:
    if why.status in (401, 403):
        return f"{why}: give a token (--prometheus-token-file, --grafana-token-file) that may read"
    if "certificate" in str(why).lower():
        return f"{why}: name the authority that signed it in SSL_CERT_FILE"
    return str(why)


def _few(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
