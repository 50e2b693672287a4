"""MCP over HTTP: the application with its routes and streams, the hosts that run it, and the clients."""
