"""Callbacks, loggers and trackers for frameworks: a module for each, which imports it."""
