"""What is kept of each run on its node's disk: a file a run, its writer and its readers."""
