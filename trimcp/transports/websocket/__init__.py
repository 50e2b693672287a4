"""MCP over WebSocket: frames, connections, and both ends of a channel."""
