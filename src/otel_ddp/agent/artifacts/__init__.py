"""Reads the files that went into runs and came out of them, and stores copies."""
