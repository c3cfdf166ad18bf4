"""The journal: a memory-mapped file that a training process writes, and the node agent reads."""
