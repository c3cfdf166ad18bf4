"""Everything that touches torch."""
