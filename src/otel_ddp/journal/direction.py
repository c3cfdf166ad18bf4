"""Which way a logged value gets better, by its name, and whether it still does."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from math import isfinite
from typing import Any

from otel_ddp.vocabulary import catalog


def _set(words: str) -> frozenset[str]:
    return frozenset(words.split())


# Words in which people name what gets better as it falls, and as it grows.
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
# A name with one of these is about something else: `loss_scale`, `reward_std`, `grad_acc_steps`.
_ELSE = _set(
    "scale scaler scaling weight weights coef coefficient factor lr norm grad gradient count num "
    "number time seconds ms std var variance threshold temperature rejected delta change gap steps "
    "ratio"
)
# These say of which values, or how they were put together: `Loss/train`, `reward/mean`.
_QUALIFIERS = _set(
    "train training val valid validation eval evaluation test dev epoch step batch mean avg "
    "average ema total sum dataloader idx macro micro"
)
# Pairs of words that mean something else than each of the two.
_PAIRS = (
    (("cross", "entropy"), "crossentropy"),
    (("log", "loss"), "logloss"),
    (("negative", "log", "likelihood"), "nll"),
    (("false", "positive"), "fpr"),
    (("false", "negative"), "fnr"),
)
_TOP = re.compile(r"top\d+")
_CAPITAL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_ENDING_NUMBER = re.compile(r"\d+$")


def direction(name: str, chosen: Mapping[str, Any]) -> str:
    """`min` or `max`; empty if neither is known to be better.

    *chosen*: what the user says, by the name or by its last part.
    """
    said = chosen.get(name, chosen.get(name.rpartition("/")[2]))
    if said in catalog.BEST:
        return "" if said == "none" else str(said)
    return guessed(name)


@lru_cache(maxsize=10_000)
def guessed(name: str) -> str:
    """The direction that people mean by this name: loss falls, accuracy grows."""
    # The last part says what it is (`losses/entropy`), unless it only says of which values.
    for part in reversed(name.split("/")):
        words = _words(part)
        if not words <= _QUALIFIERS:
            return _of_words(words)
    return ""


def _words(part: str) -> set[str]:
    found: set[str] = set()
    pieces = [piece for piece in re.split(r"[^A-Za-z0-9]+", part) if piece]
    # `mAP50` is one word, `valLoss` are two.
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
    # `brier_score` and `reward_loss` fall.
    if words & _FALLS:
        return "min"
    return "max" if words & _GROWS else ""


class EarlyStop:
    """Whether to stop: so many evaluations have brought nothing better. One a metric."""

    def __init__(self, direction: str, patience: int, min_delta: float) -> None:
        """*direction*: `min` or `max`, whichever is better."""
        self.patience = max(1, patience)
        self.best: float | None = None
        self.stopped = False
        self._sign = 1.0 if direction == "min" else -1.0
        self._min_delta = min_delta
        self._without = 0

    def feed(self, value: float) -> bool:
        """Takes the value of one evaluation; true from the one on after which to stop."""
        # NaN and infinities are no better than anything.
        better = isfinite(value) and (
            self.best is None or self._sign * (self.best - value) > self._min_delta
        )
        if better:
            self.best, self._without = value, 0
        else:
            self._without += 1
        self.stopped = self.stopped or self._without >= self.patience
        return self.stopped
