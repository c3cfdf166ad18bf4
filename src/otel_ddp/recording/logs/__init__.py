"""What the program says by Python's logging: a handler, and records of its lines."""
