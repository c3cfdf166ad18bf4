"""What is known of devices: which GPUs they are, their memory, and their peak FLOP/s."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple

import torch

from otel_ddp import errors
from otel_ddp.recording.device_scalars import module_of
from otel_ddp.recording.progress import Progress
from otel_ddp.vocabulary import catalog

_MOST_GPUS = 64


def _properties(device: torch.device) -> Any:
    return module_of(device).get_device_properties(device)


def gpu_facts(
    devices: Iterable[torch.device], properties: Callable[[torch.device], Any] = _properties
) -> dict[str, Any]:
    """The facts that the agent finds the GPUs by; none where no device is one.

    Called when the model is on its devices: this starts none of them.
    """
    found = sorted({each for each in devices if each.type == "cuda"}, key=str)[:_MOST_GPUS]
    if not found:
        return {}

    def uuid(device: torch.device) -> str:
        # torch 2.4 does not know it: then the agent goes by what the driver sees.
        return errors.attempt(lambda: str(properties(device).uuid), "")

    return {"boards": [{"index": each.index or 0, "uuid": uuid(each)} for each in found]}


# -- memory

_READ_EVERY_S = 5.0


# What the allocator says -> where it says it. A number that it does not count is left out.
_STATISTICS = {
    catalog.TRAINING_DEVICE_MEMORY_ALLOCATED: "allocated_bytes.all.current",
    catalog.TRAINING_DEVICE_MEMORY_RESERVED: "reserved_bytes.all.current",
    catalog.TRAINING_DEVICE_MEMORY_PEAK: "allocated_bytes.all.peak",
    catalog.TRAINING_DEVICE_MEMORY_ALLOC_RETRIES: "num_alloc_retries",
    catalog.TRAINING_OOMS: "num_ooms",
}
# CUDA's own allocator (cudaMallocAsync) has these keys as well, but never counts.
_COUNTS = (catalog.TRAINING_DEVICE_MEMORY_ALLOC_RETRIES, catalog.TRAINING_OOMS)


def memory(
    device: torch.device, *, module: Callable[[torch.device], Any] = module_of
) -> dict[catalog.Metric, int]:
    """What its allocator holds now; nothing before it is in use, or without such statistics."""
    torchs = module(device)
    ask = getattr(torchs, "memory_stats", None)
    is_initialized = getattr(torchs, "is_initialized", None)
    # Reading must not create a context on the device: without its word, that cannot be known.
    if ask is None or is_initialized is None or not is_initialized():
        return {}
    backend_of = getattr(torchs, "get_allocator_backend", lambda: "native")
    # An allocator of the user's own that keeps no statistics, or a failed device, raises.
    nothing: tuple[dict[str, Any], str] = {}, ""
    said, backend = errors.attempt(lambda: (dict(ask(device)), backend_of()), nothing)
    found = {
        metric: number
        for metric, key in _STATISTICS.items()
        if isinstance(number := said.get(key), int)
        and (backend == "native" or metric not in _COUNTS)
    }
    if found and (limit := errors.attempt(lambda: _limit(torchs, device), 0)):
        found[catalog.TRAINING_DEVICE_MEMORY_LIMIT] = limit
    return found


def _limit(torchs: Any, device: torch.device) -> int:
    """Of older torch and of other modules than `torch.cuda` the program's share is not known."""
    share_of = getattr(torchs, "get_per_process_memory_fraction", lambda device: 1.0)
    return int(torchs.get_device_properties(device).total_memory * share_of(device))


class MemoryReadings:
    """Records what the allocator of one device holds, every few seconds."""

    def __init__(self, device: torch.device, progress: Progress) -> None:
        self._device = device
        self._progress = progress
        self._next_s = 0.0
        self._known: set[catalog.Metric] = set()
        self._retries: int | None = None

    def poll(self) -> None:
        """Read and record, if it is time."""
        now = time.monotonic()
        if now < self._next_s:
            return
        self._next_s = now + _READ_EVERY_S
        found = memory(self._device)
        self._known |= found.keys()
        for metric, number in found.items():
            self._progress.recorder.totals.stamp(metric, float(number))
        retries = found.get(catalog.TRAINING_DEVICE_MEMORY_ALLOC_RETRIES)
        if retries is not None:
            if self._retries is not None and retries > self._retries:
                self._progress.work.retries += retries - self._retries
            self._retries = retries

    def capability(self) -> dict[str, str]:
        """What is read (with an empty reason), and what is not; nothing before the first poll."""
        if not self._next_s:
            return {}
        if not self._known:
            return dict.fromkeys(("memory", "out_of_memory"), "no_statistics")
        return {
            "memory": "",
            "out_of_memory": "" if self._known.issuperset(_COUNTS) else "no_counts",
        }


# -- peaks, by the name of a device and a dtype, from its vendor's data sheet


class _Peaks(NamedTuple):
    """TFLOP/s without sparsity; where products are added up in another precision, in float32."""

    float32: float | None = None
    tf32: float | None = None
    float16: float | None = None
    bfloat16: float | None = None
    float8: float | None = None


# Whole names and no patterns: a slice of a GPU (MIG), a laptop's GPU and a special edition all have
# the name of the full GPU in theirs, and other peaks. What is not here is not known.
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
    # The sheets of Blackwell differ about float32.
    "B200":                     _Peaks(None,    1100,   2250,    2250,     4500),
    "GB200":                    _Peaks(None,    1250,   2500,    2500,     5000),
    "RTX 3090":                 _Peaks(35.6,    35.6,   71,      71),
    "RTX 4090":                 _Peaks(82.6,    82.6,   165.2,   165.2,    330.3),
    "RTX 5090":                 _Peaks(104.8,   104.8,  209.5,   209.5,    419),
    "RTX A6000":                _Peaks(38.7,    77.4,   154.8,   154.8),
    "RTX 6000 Ada Generation":  _Peaks(91.1,    182.1,  364.2,   364.2,    728.5),
    # Two dies, each a device of its own to torch: half of what the sheet says of the package.
    "AMD Instinct MI250X":      _Peaks(47.9,    None,   191.5,   191.5),
    "AMD Instinct MI300X":      _MI300X,
    "AMD Instinct MI325X":      _MI300X,
}  # fmt: skip

# It depends on the driver, not on the device, which of these a name begins with.
_MAKERS: Final = ("NVIDIA ", "Tesla ", "GeForce ")


def peak(device_name: str, dtype: str) -> float | None:
    """FLOP/s at most, without sparsity; None where that is not known for sure."""
    name = device_name.strip()
    for maker in _MAKERS:
        name = name.removeprefix(maker)
    tera = getattr(_DEVICES.get(name), dtype, None) if dtype in _Peaks._fields else None
    return tera * 1e12 if tera is not None else None
