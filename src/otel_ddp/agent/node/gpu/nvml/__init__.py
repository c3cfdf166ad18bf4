"""NVIDIA's GPUs, read through NVML."""
