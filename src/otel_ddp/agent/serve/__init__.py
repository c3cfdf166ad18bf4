"""Serves /metrics and the page over HTTP."""
