"""The client for programs that do not run Trio: `trimcp.blocking` and `trimcp.asyncio`."""
