"""What a training process records, and how that gets into its journal."""
