"""MCP over standard input and output: as a server, and of a child process."""
