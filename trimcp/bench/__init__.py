"""Load on any MCP server: how fast it answers, and how often rightly. `measure` is the way in."""
