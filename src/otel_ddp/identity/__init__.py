"""Who a process is: its run, group, node and ranks, and which launcher started it."""
