"""What runs once on every node: reads the journals, speaks OpenTelemetry."""
