"""MCP over HTTP: the face with its routes and streams, the hosts that run it, and the clients."""
