"""Encodes and sends the OpenTelemetry protocol; the only package that knows it."""
