"""MCP through gRPC, as a transport on both sides, and the HTTP/2 connection on which clients of gRPC call."""
