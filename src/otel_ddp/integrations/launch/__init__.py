"""Measures a program that has no line of ours: `otel-ddp run`, and OpenTelemetry's instrumentor."""
