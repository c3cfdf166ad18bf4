"""Verdicts: who holds the others back, who hangs, who died, from what the journals tell."""
