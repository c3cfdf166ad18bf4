"""Speaks the OpenTelemetry protocol."""
