"""MCP over WebSocket: frames, the opening handshake, and the channels of client and server."""
