"""Finds out which process of a run died or failed first, and why."""
