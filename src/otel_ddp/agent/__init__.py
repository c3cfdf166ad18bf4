"""The node agent: it reads the journals of its node and exports OpenTelemetry."""
