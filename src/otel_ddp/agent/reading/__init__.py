"""Reads the journals of this node into the ledger."""
