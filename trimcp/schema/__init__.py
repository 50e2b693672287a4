"""From type hints to JSON Schemas, and values between JSON and Python. Knows types; nothing of functions or MCP."""
