"""A server on an old Python SDK, 1.6, whose loop ends on what comes before `initialize`."""

from mcp.server.fastmcp import FastMCP

server = FastMCP("old")


@server.tool()
def add(a: int, b: int) -> int:
    """Add two whole numbers."""
    return a + b


server.run()
