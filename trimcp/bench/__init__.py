"""Load tests of any MCP server: latency, rate, and correctness of its answers. Begin with `measure`."""
