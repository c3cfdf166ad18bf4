"""Everything that uses PyTorch: hooks, the phases of a step, readings."""
