"""The history of each run on disk: its file, its writer and its readers."""
