"""Estimates a model's FLOPs from parameters and tokens, and looks up devices' peak FLOP/s."""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import nn

from otel_ddp import errors
from otel_ddp.recording.device_scalars import module_of
from otel_ddp.recording.progress import Progress
from otel_ddp.torch.steps.watched_model import WatchedModel, shares_its_batch
from otel_ddp.vocabulary import catalog


class ModelFlops:
    """Estimates the FLOPs of each model once, at the end of its first training forward.

    Only then do lazy modules have all their parameters.
    """

    def __init__(self, progress: Progress) -> None:
        self._work, self._recorder = progress.work, progress.recorder
        # FLOPs of forward and backward, as passed by the user.
        self.given_per_sample: float | None = None
        self.device: torch.device | None = None
        # Whether any model shares its batches with other ranks.
        self.any_shared = False

    def forward_began(self, watched: WatchedModel, module: nn.Module) -> None:
        """A training forward of a model begins whose FLOPs are not estimated yet."""
        watched.shared = shares_its_batch(module)
        self.any_shared |= watched.shared

    def forward_ended(self, watched: WatchedModel, module: nn.Module) -> None:
        """The forward reported to `forward_began` has returned: estimate the model's FLOPs."""
        word = _dtype_of(module)
        if word == "float32" and self.device is not None and _uses_tf32(self.device):
            word = "tf32"
        if self.given_per_sample is not None:
            watched.flops_per_unit, watched.by_samples = float(self.given_per_sample), True
            self._work.flops_method = "given"
        # Make no estimate if ranks share a batch: each rank would count the whole batch.
        elif watched.tokens and not watched.shared and not _holds_shards(module):
            watched.flops_per_unit = by_parameters(module)
            self._work.flops_method = "6pt"
        else:
            watched.flops_per_unit = 0.0
        self._work.flops += watched.flops
        self._recorder.documents.facts({"precision": word})
        if watched.flops_per_unit and (device := self.device) is not None:
            # Without a device module or a name, the peak is unknown.
            name = errors.attempt(lambda: str(module_of(device).get_device_name(device)), "")
            if (most := peak(name, word)) is not None:
                self._recorder.totals.stamp(
                    catalog.TRAINING_FLOPS_PEAK, most, dtype=word, device=name
                )


def by_parameters(module: nn.Module) -> float:
    """The usual estimate for a transformer, per token: 2 FLOPs per parameter forward, 4 backward.

    Attention is not included, nor is backward for frozen parameters, although gradients may pass
    through these to trained ones (as in LoRA, for 2 more FLOPs).
    """
    # Skip embeddings, as a lookup multiplies nothing. A weight that an embedding shares with the
    # output layer is counted there.
    multiplied = {
        id(each): each
        for owner in module.modules()
        if not isinstance(owner, (nn.Embedding, nn.EmbeddingBag))
        for each in owner.parameters(False)
    }
    return float(sum((6 if e.requires_grad else 2) * e.numel() for e in multiplied.values()))


def _holds_shards(module: nn.Module) -> bool:
    """Whether this rank holds only shards of parameters, as with FSDP1 and ZeRO-3."""
    kinds = {base.__name__ for each in module.modules() for base in type(each).__mro__}
    empty = any(not each.numel() for each in module.parameters())
    return empty or "FullyShardedDataParallel" in kinds


def _uses_tf32(device: torch.device) -> bool:
    """Whether float32 products use TF32 tensor cores."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    if torch.cuda.get_device_capability(device) < (8, 0):
        return False
    backend = torch.backends.cuda.matmul
    # Newer versions of torch have this setting; if it is set, reading the older one raises.
    precision = getattr(backend, "fp32_precision", None)
    return bool(backend.allow_tf32 if precision is None else precision == "tf32")


def _dtype_of(module: nn.Module) -> str:
    parameter = next((p for p in module.parameters() if p.is_floating_point()), None)
    if parameter is None:
        return "float32"
    kind = parameter.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else parameter.dtype
    return str(dtype).removeprefix("torch.")


# -- peaks of devices per dtype, from the vendors' data sheets


class _Peaks(NamedTuple):
    """Peak TFLOP/s per data type, without sparsity, and accumulating in float32 if possible."""

    float32: float | None = None
    tf32: float | None = None
    float16: float | None = None
    bfloat16: float | None = None
    float8: float | None = None


# Names must match exactly: the name of a MIG slice, a laptop GPU or a special edition contains the
# full GPU's name, but its peak is another. A name that is not listed has no known peak.
_A100 = _Peaks(19.5, 156, 312, 312)
_H100_SXM = _Peaks(67, 494.7, 989.4, 989.4, 1978.9)
_HOPPER_NVL = _Peaks(60, 417.5, 835.5, 835.5, 1670.5)
_MI300X = _Peaks(163.4, None, 1307.4, 1307.4, 2614.9)
_DEVICES: Final = {
    #                                 float32   tf32    float16  bfloat16  float8
    "V100-PCIE-16GB":           _Peaks(14.0,    None,   112),
    "V100-PCIE-32GB":           _Peaks(14.0,    None,   112),
    "V100-SXM2-16GB":           _Peaks(15.7,    None,   125),
    "V100-SXM2-32GB":           _Peaks(15.7,    None,   125),
    "T4":                       _Peaks(8.1,     None,   65),
    "A10":                      _Peaks(31.2,    62.5,   125,     125),
    "A30":                      _Peaks(10.3,    82,     165,     165),
    "A40":                      _Peaks(37.4,    74.8,   149.7,   149.7),
    "A100-PCIE-40GB":           _A100,
    "A100 80GB PCIe":           _A100,
    "A100-SXM4-40GB":           _A100,
    "A100-SXM4-80GB":           _A100,
    "L4":                       _Peaks(30.3,    60,     121,     121,      242.5),
    "L40":                      _Peaks(90.5,    90.5,   181.05,  181.05,   362),
    "L40S":                     _Peaks(91.6,    183,    362.05,  362.05,   733),
    "H100 PCIe":                _Peaks(51,      378,    756,     756,      1513),
    "H100 80GB HBM3":           _H100_SXM,
    "H100 NVL":                 _HOPPER_NVL,
    "H200":                     _H100_SXM,
    "H200 NVL":                 _HOPPER_NVL,
    "GH200 120GB":              _H100_SXM,
    "GH200 144G HBM3e":         _H100_SXM,
    "GH200 480GB":              _H100_SXM,
    # Data sheets of Blackwell disagree about float32.
    "B200":                     _Peaks(None,    1100,   2250,    2250,     4500),
    "GB200":                    _Peaks(None,    1250,   2500,    2500,     5000),
    "RTX 3090":                 _Peaks(35.6,    35.6,   71,      71),
    "RTX 4090":                 _Peaks(82.6,    82.6,   165.2,   165.2,    330.3),
    "RTX 5090":                 _Peaks(104.8,   104.8,  209.5,   209.5,    419),
    "RTX A6000":                _Peaks(38.7,    77.4,   154.8,   154.8),
    "RTX 6000 Ada Generation":  _Peaks(91.1,    182.1,  364.2,   364.2,    728.5),
    # Half of the package's peak, as torch shows its two dies as two devices.
    "AMD Instinct MI250X":      _Peaks(47.9,    None,   191.5,   191.5),
    "AMD Instinct MI300X":      _MI300X,
    "AMD Instinct MI325X":      _MI300X,
}  # fmt: skip

# Prefixes of device names, which depend on the driver.
_MAKERS: Final = ("NVIDIA ", "Tesla ", "GeForce ")


def peak(device_name: str, dtype: str) -> float | None:
    """Peak FLOP/s without sparsity; None if unknown."""
    name = device_name.strip()
    for maker in _MAKERS:
        name = name.removeprefix(maker)
    tera = getattr(_DEVICES.get(name), dtype, None) if dtype in _Peaks._fields else None
    return tera * 1e12 if tera is not None else None
