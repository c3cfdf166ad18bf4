"""The panels of the board Run about the sets that a run goes through, and each rank's part."""

from __future__ import annotations

from tools.dashboards.names import metric
from tools.dashboards.panels import Column, Panel, Text, listing, rows
from tools.dashboards.selectors import BY_RUN, RUN, WHOLE_RUN


def data_sets() -> list[Panel]:
    def last(how: str, name: str) -> str:
        return f"{how} by (split) (last_over_time({metric(name, RUN)}[$__range]))"

    share = "training.set.rank_samples"
    return [
        listing(
            Text(
                "Data sets",
                "The sets that torch's loaders go through, and how much of them the rank with "
                "fewest and the one with most take in an epoch.",
                "Fewest and most differ: ranks with less data are done earlier, and the others "
                "wait for them at the end of the epoch, or for ever.",
            ),
            rows(last("max", "training.set.size"), "size"),
            rows(last("max", "training.set.batches"), "batches"),
            rows(last("min", share), "fewest"),
            rows(last("max", share), "most"),
            columns=[
                Column("split"),
                Column("Value #size", "Samples", "short"),
                Column("Value #batches", "Batches of a rank", "short"),
                Column("Value #fewest", "Fewest of a rank", "short"),
                Column("Value #most", "Most of a rank", "short"),
            ],
            size=(14, 6),
        ),
        listing(
            Text(
                "Samples of an epoch",
                "The ranks that trained on fewest samples in their last whole epoch, and what "
                "they lack of the rank with most.",
                "A rank apart: its shard is smaller, or it has skipped files.",
            ),
            rows(_fewest(), "samples"),
            rows(_lacking(), "lacks"),
            columns=[
                Column("rank", width=75),
                Column("node"),
                Column("Value #samples", "Samples", "short"),
                Column("Value #lacks", "Lacks", "percentunit", decimals=1),
            ],
            sort=("Samples", False),
            nothing="no epoch has ended",
            size=(10, 6),
        ),
    ]


def _of_ranks() -> str:
    return f"last_over_time({metric('training.epoch.samples', RUN)}[$__range])"


def _fewest() -> str:
    return f"bottomk($topn, max by (node, rank) ({_of_ranks()}))"


def _lacking() -> str:
    whole = metric("training.epoch.samples", WHOLE_RUN)
    most = f"max by ({BY_RUN}) (last_over_time({whole}[$__range]))"
    each = f"max by ({BY_RUN}, node, rank) ({_of_ranks()})"
    lacks = f"max by (node, rank) (1 - {each} / on ({BY_RUN}) group_left () {most})"
    return f"{lacks} and on (node, rank) {_fewest()}"
