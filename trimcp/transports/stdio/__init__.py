"""MCP over standard input and output: this process as a server, or a child process as one."""
