"""Exports the ledger: by OTLP to the configured collector, or to disk."""
