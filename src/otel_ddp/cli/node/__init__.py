"""The commands that look at a running node."""
