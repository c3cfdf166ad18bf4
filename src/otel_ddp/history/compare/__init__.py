"""Compares two runs: what differs, by how much, and whether chance explains it."""
