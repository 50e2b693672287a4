"""MCP over HTTP as a client: requests, streams and listening."""
