"""Simulates training on devices under NCCL: what the hosts do, and when the devices get there."""
