"""What is read of models and devices between steps."""
