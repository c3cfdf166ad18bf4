"""Divides training steps into phases, from what the hooks report."""
