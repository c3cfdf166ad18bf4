"""The public names: phases, states, kinds of verdicts, metrics."""
