"""Reads loss, FLOPs, gradients, memory and GPUs, mostly between steps."""
