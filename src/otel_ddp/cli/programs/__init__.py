"""What programs ask about runs: lists, curves and verdicts as JSON, and a server of MCP."""
