"""Reports what a node's endpoint serves of a training: its progress, and what was recorded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple
from urllib.request import urlopen

from otel_ddp.vocabulary import catalog
from otel_ddp.vocabulary.words import state_word


class Sample(NamedTuple):
    """One line of the exposition."""

    name: str
    labels: dict[str, str]
    value: float


def samples(url: str) -> list[Sample]:
    """The samples that are served there; none while there is no answer."""
    from otel_ddp.agent.scrape.endpoint import parse

    if not url:
        return []
    try:
        with urlopen(url, timeout=10) as response:
            text = response.read().decode()
    except OSError:
        return []
    return [Sample(*each) for each in parse(text)]


def progress(served: Sequence[Sample]) -> str:
    """A line with each rank's step and loss."""
    ranks = [
        f"rank {each.labels['rank']}: step {step}, loss {each.value:.3f}"
        for each in _of(served, catalog.TRAINING_SCALAR, name="loss")
        for step in [_first(served, catalog.TRAINING_STEP, rank=each.labels["rank"])]
    ]
    return "  " + " | ".join(sorted(ranks)) if ranks else ""


def _of(served: Sequence[Sample], metric: catalog.Metric, **labels: str) -> Iterator[Sample]:
    for sample in served:
        if sample.name == metric.prometheus and labels.items() <= sample.labels.items():
            yield sample


def _first(served: Sequence[Sample], metric: catalog.Metric, **labels: str) -> str:
    return next((f"{each.value:.0f}" for each in _of(served, metric, **labels)), "-")


def summary(served: Sequence[Sample]) -> Iterator[str]:
    """The run; and the state, logged values and time in phases of each rank."""
    for info in _of(served, catalog.TRAINING_RUN_INFO):
        labels = info.labels
        yield f"  run {labels['run']}, group {labels['group']}, job_type {labels['job_type']}"
        config = [key for key in sorted(labels) if key.startswith("config_")]
        yield "  " + ", ".join(f"{key} = {labels[key]}" for key in config)
    for state in sorted(_of(served, catalog.TRAINING_STATE), key=lambda each: each.labels["rank"]):
        rank = state.labels["rank"]
        yield f"  rank {rank} on {state.labels['node']}: {state_word(int(state.value))}"
        for metric, name in (
            (catalog.TRAINING_STEP, "last step"),
            (catalog.OTEL_DDP_RECORDS_LOST, "records lost"),
        ):
            yield f"    {name:24} {_first(served, metric, rank=rank)}"
        for each in _of(served, catalog.TRAINING_SCALAR, rank=rank):
            name = f"{each.labels['name']} ({each.labels['split']})"
            yield f"    {name:24} {each.value:.4f}"
        for each in _of(served, catalog.TRAINING_SCALAR_BEST, rank=rank):
            logged = {"name": each.labels["name"], "split": each.labels["split"]}
            step = _first(served, catalog.TRAINING_SCALAR_BEST_STEP, rank=rank, **logged)
            name = f"best {logged['name']} ({logged['split']})"
            yield f"    {name:24} {each.value:.4f} at step {step}"
        for each in _of(served, catalog.TRAINING_PHASE_TIME, rank=rank):
            yield f"    {'time in ' + each.labels['phase']:24} {each.value:.3f} s"
    yield f"  {len(served)} series in all"
