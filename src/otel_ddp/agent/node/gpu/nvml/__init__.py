"""NVIDIA's GPUs, as their driver's library tells of them."""
