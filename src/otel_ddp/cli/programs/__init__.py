"""What people and programs ask about kept runs: a list, goodput, documents, a server of MCP."""
