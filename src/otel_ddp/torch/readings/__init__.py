"""Reads FLOPs, loss, gradients, memory and GPUs of a training, between its steps."""
