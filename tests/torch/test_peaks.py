"""Which device is which, by the names that drivers give them."""

from __future__ import annotations

import pytest

from otel_ddp.torch.readings.devices import _DEVICES, peak


@pytest.mark.parametrize(
    ("name", "dtype", "tera"),
    [
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989.4),
        ("NVIDIA H100 PCIe", "bfloat16", 756),
        ("NVIDIA H100 NVL", "bfloat16", 835.5),
        ("NVIDIA H200", "float8", 1978.9),
        ("NVIDIA H200 NVL", "float8", 1670.5),
        ("NVIDIA A100-SXM4-80GB", "tf32", 156),
        ("NVIDIA A100 80GB PCIe", "float16", 312),
        ("A100-SXM4-40GB", "float32", 19.5),
        ("NVIDIA A10", "bfloat16", 125),
        ("NVIDIA L4", "bfloat16", 121),
        ("NVIDIA L40", "bfloat16", 181.05),
        ("NVIDIA L40S", "bfloat16", 362.05),
        ("Tesla V100-SXM2-32GB", "float16", 125),
        ("Tesla T4", "float16", 65),
        ("NVIDIA GB200", "bfloat16", 2500),
        ("NVIDIA B200", "bfloat16", 2250),
        ("NVIDIA GeForce RTX 4090", "bfloat16", 165.2),
        ("NVIDIA RTX A6000", "bfloat16", 154.8),
        ("NVIDIA RTX 6000 Ada Generation", "bfloat16", 364.2),
        ("AMD Instinct MI250X", "bfloat16", 191.5),
        ("AMD Instinct MI300X", "bfloat16", 1307.4),
    ],
)
def test_a_device_has_the_peak_of_its_data_sheet(name: str, dtype: str, tera: float) -> None:
    assert peak(name, dtype) == pytest.approx(tera * 1e12)


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "NVIDIA A100-SXM-64GB",
        "NVIDIA H100",
        "NVIDIA H1000",
        "NVIDIA A100X",
        "NVIDIA GeForce RTX 3090 Ti",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA A40-48Q",
        "NVIDIA",
        "",
        "cpu",
    ],
)
def test_what_is_only_like_a_device_is_not_known(name: str) -> None:
    assert peak(name, "bfloat16") is None


@pytest.mark.parametrize("dtype", ["bfloat16", "tf32", "float8", "float64", "int8", "", "count"])
def test_a_dtype_that_a_device_does_not_have_is_not_known(dtype: str) -> None:
    assert peak("Tesla V100-SXM2-16GB", dtype) is None


def test_half_the_bits_are_never_slower() -> None:
    for name, peaks in _DEVICES.items():
        steps = [each for each in (peaks.float32, peaks.tf32, peaks.float16) if each is not None]
        assert steps == sorted(steps), name
        assert peaks.bfloat16 in (None, peaks.float16), name
        if peaks.float8 is not None:
            assert peaks.float8 == pytest.approx(2 * peaks.float16, rel=0.02), name
