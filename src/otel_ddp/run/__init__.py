"""The run of a training process: the functions that users call, and how a run opens and ends."""
