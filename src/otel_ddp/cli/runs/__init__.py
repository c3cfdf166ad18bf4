"""The commands that look at past runs, and at the page of a node."""
