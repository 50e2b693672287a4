"""MCP over HTTP behind ASGI: the application, and Hypercorn with its guards."""
