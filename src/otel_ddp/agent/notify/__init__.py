"""Sends notifications on runs to the addresses in OTEL_DDP_NOTIFY."""
