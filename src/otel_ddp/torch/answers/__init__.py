"""Answers questions that the agent and people ask a process while it trains."""
