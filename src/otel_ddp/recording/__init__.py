"""Records steps, phases, values and spans of a training process into its journal."""
