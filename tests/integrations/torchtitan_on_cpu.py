"""Lets torchtitan train without a GPU: what it asks of a device, the CPU and gloo answer here.

The first line of a program. The trainer itself, its model and its FSDP2 stay torchtitan's.
"""

from __future__ import annotations

import json
import random
import types
from pathlib import Path
from typing import Any

import torch
import torch._utils
import torch.distributed.fsdp

WORDS = (
    "a",
    "all",
    "data",
    "end",
    "learns",
    "model",
    "ranks",
    "say",
    "step",
    "the",
    "wait",
    "what",
)


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
) -> tuple[torch.Tensor, Any]:
    """Flex attention has no backward on a CPU."""
    groups = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(groups, 1) for each in (key, value))
    found = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    return found, types.SimpleNamespace(lse=None, max_scores=None)


def prepare() -> None:
    """Before torchtitan is imported, in each rank."""
    device: Any = torch.cpu
    device.get_device_name = lambda *_: "cpu"
    device.get_device_properties = lambda *_: types.SimpleNamespace(total_memory=2**34)
    device.reset_peak_memory_stats = device.empty_cache = lambda *_: None
    device.memory_stats = lambda *_: {}
    device.current_device = lambda: 0
    found: Any = torch._utils
    found._get_available_device_type = lambda: "cpu"
    # Gloo cannot divide while it sums up.
    fsdp: Any = torch.distributed.fsdp.FSDPModule
    fsdp.set_gradient_divide_factor = lambda *_: None

    from torchtitan.models.common.attention import FlexAttention

    FlexAttention.compiled_flex_attn = staticmethod(_attend)


def write_assets(folder: Path) -> None:
    """A tokenizer and texts, where torchtitan's small configuration looks for them."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    known = {
        word: number for number, word in enumerate(["<|end|>", "<|begin|>", *sorted({*WORDS})])
    }
    tokenizer = Tokenizer(models.WordLevel(known, unk_token="<|end|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<|begin|>", "<|end|>"])
    at = folder / "tests" / "assets"
    (at / "tokenizer").mkdir(parents=True)
    tokenizer.save(str(at / "tokenizer" / "tokenizer.json"))
    special = {"bos_token": "<|begin|>", "eos_token": "<|end|>"}
    (at / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(special))
    (at / "c4_test").mkdir()
    chance = random.Random(0)
    texts = [{"text": " ".join(chance.choices(WORDS, k=200))} for _ in range(2000)]
    (at / "c4_test" / "data.json").write_text("\n".join(map(json.dumps, texts)))
