"""The run of a training process: what users call, how it opens and how it ends."""
