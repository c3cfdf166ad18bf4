"""Finds out when no rank of a run moves any more, and which ranks hold up the others."""
