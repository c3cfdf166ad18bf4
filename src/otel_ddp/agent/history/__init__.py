"""Writes the histories of the runs on this node."""
