"""What the agent reads of its node by itself: devices, host, processes."""
