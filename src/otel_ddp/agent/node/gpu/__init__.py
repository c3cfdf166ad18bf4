"""The GPUs of the node."""
