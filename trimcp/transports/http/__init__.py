"""MCP over HTTP: one face that knows routes and streams, the hosts it runs on, and the clients."""
