"""Judges the runs: feeds the detectors, and reports their verdicts."""
