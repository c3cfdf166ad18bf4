"""Serves the ledger to Prometheus."""
