"""The commands that set up what stands beside the agents, and check it."""
