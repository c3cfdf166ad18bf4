"""The logged values of a process: last, lowest and highest, and in which direction they improve."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from otel_ddp import plain
from otel_ddp.journal.parser import Journal, Name
from otel_ddp.vocabulary import catalog


def _set(words: str) -> frozenset[str]:
    return frozenset(words.split())


# If one of these words is in the name of a value, lower values are better (_FALLS), or higher ones
# (_GROWS).
_FALLS = _set(
    "loss losses error errors err perplexity perplexities ppl wer cer ter rmse rmsle mse mae mape "
    "smape nll bpb bpc bpd fid lpips brier ece eer regret fpr fnr logloss crossentropy xent"
)
_GROWS = _set(
    "accuracy accuracies acc f1 fscore precision recall reward rewards rew return returns score "
    "scores auc auroc auprc bleu sacrebleu chrf rouge rougel meteor cider bertscore comet map iou "
    "miou dice jaccard ndcg mrr hits psnr ssim mcc kappa pearson spearman r2 tpr tnr specificity "
    "sensitivity success win exact elbo likelihood"
)
# A name with one of these words has no direction, whatever its other words are: `loss_scale` is no
# loss, and `reward_std` is no reward.
_ELSE = _set(
    "scale scaler scaling weight weights coef coefficient factor lr norm grad gradient count num "
    "number time seconds ms std var variance threshold temperature rejected delta change gap steps "
    "ratio"
)
# Words that name only the data set or the aggregation of a value, as in `Loss/train` and
# `reward/mean`. They say nothing about its direction.
_QUALIFIERS = _set(
    "train training val valid validation eval evaluation test dev epoch step batch mean avg "
    "average ema total sum dataloader idx macro micro"
)
# Words that together mean something else than each alone, and the word that replaces them.
_PAIRS = (
    (("cross", "entropy"), "crossentropy"),
    (("negative", "log", "likelihood"), "nll"),
)
_TOP = re.compile(r"top\d+")
_CAPITAL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_ENDING_NUMBER = re.compile(r"\d+$")


def direction(name: str, chosen: Mapping[str, Any]) -> str:
    """`min` if lower values of this name are better, `max` if higher ones are; empty if unknown.

    *chosen*: the user's choices. A key is the name of a value, or the last part of the name.
    """
    way = chosen.get(name, chosen.get(name.rpartition("/")[2]))
    if way in catalog.BEST:
        return "" if way == "none" else str(way)
    return guessed(name)


@lru_cache(maxsize=10_000)
def guessed(name: str) -> str:
    """Guess from a name which values are better: `min` for a loss, `max` for an accuracy."""
    # The last part of the name says what the value is, as in `losses/entropy`. If it consists of
    # qualifiers only, the part before it does.
    for part in reversed(name.split("/")):
        words = _words(part)
        if not words <= _QUALIFIERS:
            return _of_words(words)
    return ""


def _words(part: str) -> set[str]:
    found: set[str] = set()
    pieces = [piece for piece in re.split(r"[^A-Za-z0-9]+", part) if piece]
    # Use each piece as a whole, and its parts between capitals: `mAP50` is one word, and `valLoss`
    # contains two.
    for piece in (*pieces, *(word for each in pieces for word in _CAPITAL.split(each))):
        word = piece.lower()
        if _TOP.fullmatch(word):
            word = "accuracy"
        elif word not in _GROWS:
            word = _ENDING_NUMBER.sub("", word)
        if len(word) > 1:
            found.add(word)
    for pair, meaning in _PAIRS:
        if found.issuperset(pair):
            found = found.difference(pair) | {meaning}
    return found


def _of_words(words: set[str]) -> str:
    if words & _ELSE:
        return ""
    # Test this before _GROWS: of `brier_score` and `reward_loss`, lower values are better.
    if words & _FALLS:
        return "min"
    return "max" if words & _GROWS else ""


# -- the last, the lowest and the highest value of each name


class Point(NamedTuple):
    """A logged value."""

    value: float
    step: int | None
    time_ns: int


class Extremes(NamedTuple):
    """The lowest and the highest value of a name. Of equal values, the first one is used."""

    lowest: Point
    highest: Point

    def best(self, way: str) -> Point:
        """The better extreme. *way*: `min` if lower values are better, `max` if higher ones are."""
        return self.lowest if way == "min" else self.highest


def chosen_directions(reader: Journal) -> Mapping[str, Any]:
    """For names of values: the user's choice whether lower or higher values are better."""
    return plain.mapping(reader.facts.get("best"))


def last_values(reader: Journal) -> dict[Name, Point]:
    """The value that was last logged under each name."""
    last: dict[Name, Point] = {}
    for record in reader.latest():
        for number, value in zip(record.names, record.values, strict=True):
            if (name := reader.names.get(number)) is not None:
                known = last.get(name)
                if known is None or record.time_ns >= known.time_ns:
                    last[name] = Point(value, record.step, record.time_ns)
    return last


def described(reader: Journal, extremes: Mapping[Name, Extremes]) -> list[dict[str, Any]]:
    """The summary of a process's values: for each name, the lowest, highest and last value."""
    last, chosen = last_values(reader), chosen_directions(reader)
    return [
        {
            "name": name.text,
            "split": name.split,
            "direction": direction(name.text, chosen),
            "last": last[name]._asdict() if name in last else None,
            "min": lowest._asdict(),
            "max": highest._asdict(),
        }
        # Iterate over a copy: the agent's loop may add names at the same time.
        for name, (lowest, highest) in list(extremes.items())
    ]


def extremes_of(summary: Sequence[Mapping[str, Any]] | None) -> dict[Name, Extremes]:
    """The extremes in a summary that `described` has made."""
    return {
        Name(row["name"], row["split"]): Extremes(Point(**row["min"]), Point(**row["max"]))
        for row in summary or ()
    }
