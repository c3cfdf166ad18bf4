"""Limits for a job that tests each change: how much slower or worse a run may be."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from otel_ddp.history.compare.comparison import Comparison
from otel_ddp.history.compare.row import Row

_AMOUNT = re.compile(r"([+-])(\d+(?:\.\d*)?|\.\d+)(%?)")


class BadLimit(ValueError):
    """What was asked cannot be understood, or is not in both runs."""


class Limit(NamedTuple):
    """`loss:+1%`: the second run's loss may be 1 % higher, and no more."""

    name: str
    split: str | None
    up: bool
    amount: float
    is_share: bool

    @property
    def shown(self) -> str:
        name = f"{self.split}/{self.name}" if self.split else self.name
        size = f"{self.amount * 100:g}%" if self.is_share else f"{self.amount:g}"
        return f"{name}:{'+' if self.up else '-'}{size}"


class Result(NamedTuple):
    """How a limit was kept."""

    limit: Limit
    row: Row
    change: float
    outcome: str
    """`kept`, `exceeded`, or `uncertain`: beyond it, but chance may explain that."""

    @property
    def sentence(self) -> str:
        size = f"{self.change * 100:+.1f} %" if self.limit.is_share else f"{self.change:+.4g}"
        beside = "" if self.row.beside is None else " beside the other phases"
        words = f"{self.row.shown} changed by {size}{beside}, the limit is {self.limit.shown}"
        if self.outcome == "kept":
            return f"kept: {words}"
        if self.outcome == "uncertain":
            # One run on each side is tested by blocks of it.
            by_blocks = self.row.difference is not None and self.row.difference.block
            machine = ", or the pace of the machine" if by_blocks and not self.row.of_value else ""
            return f"not significant: {words}; p = {self.row.p:.2g}, so this may be chance{machine}"
        if self.row.p is None:
            return f"EXCEEDED: {words} (there is no test: {self.row.untested})"
        return f"EXCEEDED: {words}; p {shown_p(self.row.p)}"


def shown_p(p: float) -> str:
    """`< 0.0001`, or `= 0.02`."""
    return "< 0.0001" if p < 1e-4 else f"= {p:.2g}"


def parse(text: str) -> list[Limit]:
    """The limits in `step_time:+5%,val/loss:+0.02`; raises BadLimit."""
    return [_parse_one(each.strip()) for each in text.split(",") if each.strip()]


def _parse_one(text: str) -> Limit:
    name, _, size = text.rpartition(":")
    found = _AMOUNT.fullmatch(size.replace(" ", ""))
    if not name or found is None:
        raise BadLimit(
            f"{text!r} is no limit. Write a name, a colon, + or -, and how much: step_time:+5%, "
            "accuracy:-0.01."
        )
    share = bool(found[3])
    return Limit(name, None, found[1] == "+", float(found[2]) / (100 if share else 1), share)


def check(limits: Sequence[Limit], comparison: Comparison) -> list[Result]:
    """Each limit with what became of it; raises BadLimit for a name that is not in both runs."""
    return [_result(limit, row) for limit in limits for row in _rows(limit, comparison)]


def _rows(limit: Limit, comparison: Comparison) -> list[Row]:
    found = comparison.named(limit.name)
    if not found:
        split, _, name = limit.name.partition("/")
        found = comparison.named(name, split) if name else []
    # A phase and a logged value may share a name: the phase is meant.
    found = [row for row in found if not row.of_value] or found
    if not found:
        names = ", ".join(dict.fromkeys(row.name for row in comparison.rows)) or "nothing"
        raise BadLimit(f"{limit.shown}: not both runs have {limit.name!r}. Both have: {names}.")
    for row in found:
        if row.before is None or row.after is None or (limit.is_share and not row.before):
            raise BadLimit(f"{limit.shown}: {row.shown} has no value that a share could be of.")
    return found


def _result(limit: Limit, row: Row) -> Result:
    # _rows() has refused a row without values.
    change = (row.change if limit.is_share else row.apart) or 0.0
    beyond = change > limit.amount if limit.up else -change > limit.amount
    if not beyond:
        return Result(limit, row, change, "kept")
    # A single value, or a few, are what they are.
    certain = row.significant or row.p is None
    return Result(limit, row, change, "exceeded" if certain else "uncertain")
