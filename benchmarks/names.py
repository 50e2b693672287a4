"""What the implementations are called in results, tables and plots."""

from __future__ import annotations

__all__ = [
    "BEFORE",
    "COMPILED",
    "FASTMCP",
    "FLOOR",
    "GO_SDK",
    "GRPCIO",
    "GRPC_GO",
    "HTTP1",
    "HYPERCORN",
    "LOW_LEVEL",
    "MCP",
    "MCP_1",
    "OF_GRPC",
    "ONLY_THERE",
    "ORDER",
    "OURS",
    "RMCP",
    "TYPESCRIPT",
]

OURS = "trimcp"
BEFORE = "trimcp before"
HYPERCORN = "trimcp on Hypercorn"
MCP = "mcp 2.3"
LOW_LEVEL = "mcp 2.3 low level"
FASTMCP = "fastmcp 4.1"
MCP_1 = "mcp 1.30"
TYPESCRIPT = "TypeScript SDK 2.4"
GO_SDK = "go-sdk 1.8"
RMCP = "rmcp 3.11"
COMPILED = (GO_SDK, RMCP)
"""Which are built where there is a toolchain, and left out elsewhere."""
FLOOR = "minimal server"
GRPCIO = "grpcio 1.85, asyncio"
GRPC_GO = "grpc-go 1.78"
OF_GRPC = (GRPCIO, GRPC_GO)
"""Which are only measured beside our gRPC."""
HTTP1 = "trimcp over HTTP/1.1"
ONLY_THERE = (*OF_GRPC, HTTP1)
"""Which are measured in a few cells of their own."""

ORDER = (OURS, BEFORE, HYPERCORN, MCP, LOW_LEVEL, FASTMCP, MCP_1, TYPESCRIPT, *COMPILED, FLOOR)
