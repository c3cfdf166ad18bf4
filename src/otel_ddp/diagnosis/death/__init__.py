"""Decides which process of a run died or failed first, and words why."""
