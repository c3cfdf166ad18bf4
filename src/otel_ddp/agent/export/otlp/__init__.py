"""Everything that knows the OpenTelemetry protocol: how it is written and how it is sent."""
