"""The other side: one client of agent tools over HTTP, WebSocket and gRPC."""
