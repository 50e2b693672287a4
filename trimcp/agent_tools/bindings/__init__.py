"""Agent tools on a port: HTTP, WebSocket and gRPC. Each translates, and has no rule of its own."""
