"""The folder that `otel-ddp run` puts on PYTHONPATH. Python imports its one file at the start."""
