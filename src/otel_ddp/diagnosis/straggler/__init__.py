"""Finds the rank that keeps the others waiting, its phase, and the time that this costs."""
