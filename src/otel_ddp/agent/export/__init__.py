"""Sends the ledger by OTLP, and keeps on disk what cannot be delivered."""
