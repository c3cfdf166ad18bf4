"""What the agents of one run on several nodes tell each other, and what each makes of it."""
