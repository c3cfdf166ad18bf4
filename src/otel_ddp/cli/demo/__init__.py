"""The demo: its command, its training, and the faults that it makes."""
