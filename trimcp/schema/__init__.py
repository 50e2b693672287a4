"""From type hints to JSON Schemas, and values between JSON and Python. Does not depend on MCP."""
