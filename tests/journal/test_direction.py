"""Which way a logged value gets better: what its name says, and what the user says."""

from __future__ import annotations

import pytest

from otel_ddp.journal.values import direction, guessed

FALLS = """
    loss val_loss eval/loss Loss/train loss/total train_loss_epoch valLoss loss_ema train/box_loss
    losses/value_loss reward_loss MSE perplexity eval/ppl wer test_wer error_rate
    mean_squared_error cross_entropy negative_log_likelihood brier_score val_loss/dataloader_idx_0
"""
GROWS = """
    accuracy train/acc acc@1 top5 val_top1 mAP metrics/mAP50(B) mAP_0.5 f1 f1_macro eval_f1 rouge1
    rougeL BLEU auc roc_auc mIoU r2 reward rewards/accuracies reward/mean rollout/ep_rew_mean
    episode_return score ndcg@10 recall_at_5 success_rate Accuracy/test exact_match
"""
NEITHER = """
    lr learning_rate grad_norm epoch step train / x 日本 loss_scale loss/scale loss_weight
    grad_acc_steps reward_std entropy losses/entropy rewards/chosen rewards/rejected
    tokens_per_second kl gpu_memory glossary maps_loaded temperature loss_ratio
"""


@pytest.mark.parametrize(
    ("names", "best"), [(FALLS, "min"), (GROWS, "max"), (NEITHER, "")], ids=["min", "max", "none"]
)
def test_a_name_says_which_way_is_better(names: str, best: str) -> None:
    assert {name: guessed(name) for name in names.split()} == dict.fromkeys(names.split(), best)
    assert guessed("") == ""


def test_the_user_s_word_counts_more_than_the_name() -> None:
    chosen = {"wer": "max", "loss": "none", "speed": "max", "eval/speed": "min", "acc": "up"}

    assert direction("wer", chosen) == "max"
    assert direction("loss", chosen) == ""
    assert direction("train/speed", chosen) == "max"
    assert direction("eval/speed", chosen) == "min"
    assert direction("acc", chosen) == "max"
    assert direction("val_loss", chosen) == "min"
