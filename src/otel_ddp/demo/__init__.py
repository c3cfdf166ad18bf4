"""A training small enough for any machine, to see what otel_ddp records."""
