"""Tells people what happens to runs, where OTEL_DDP_NOTIFY says so."""
