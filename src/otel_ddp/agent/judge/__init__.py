"""Feeds the detectors of each run with what was read, and reports their verdicts."""
