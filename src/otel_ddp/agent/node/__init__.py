"""Samples the node: GPUs, host, processes."""
