"""What has a name here: phases, states and verdicts, and each metric."""
