"""Simulates training on devices under NCCL: the work of hosts, and the progress of devices."""
