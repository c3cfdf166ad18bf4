"""The host: processors, memory, disks, network, and the limits of our part of it."""
