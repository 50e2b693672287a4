"""Our server for those who have logged in at an authorization server.

    python tests/interop/protected_server.py own|hypercorn ISSUER [dpop|introspection]

Prints its address. With "dpop" it takes only tokens that are bound to a key, and asks for nonces; with "introspection"
its resource ends in "/opaque", and it asks the issuer about tokens.
"""

from __future__ import annotations

import logging
import socket
import sys
from typing import Any

import trimcp
from trimcp.auth import Introspection, ResourceServer

server = trimcp.Server("protected", version="1.0")


@server.tool
async def whoami(*, ctx: trimcp.Context) -> str:
    """Say whom the token lets in."""
    assert ctx.principal is not None
    return str(ctx.principal.subject)


@server.tool
async def token_id(*, ctx: trimcp.Context) -> str:
    """Tell one token from the next."""
    assert ctx.principal is not None
    return str(ctx.principal.claims["jti"])


@server.tool(scopes=["files:write"])
async def write() -> str:
    """Do what not every token allows."""
    return "written"


def main(software: str, issuer: str, kind: str = "") -> None:
    """Serve over HTTP on a free port."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    listener = socket.create_server(("127.0.0.1", 0))
    path = "/opaque" if kind == "introspection" else "/mcp"
    options: dict[str, Any] = {"scopes": ("files:read",), "scopes_supported": ("files:read",)}
    if kind == "dpop":
        options |= {"binding": "required", "nonces": True}
    if kind == "introspection":
        options["introspection"] = Introspection(f"{issuer}/token/introspection", "the-server", "hush", issuer)
    auth = ResourceServer(f"http://127.0.0.1:{listener.getsockname()[1]}{path}", [issuer], **options)
    settings = trimcp.HttpSettings(path=path)
    trimcp.run_http(
        server,
        sockets=[listener],
        auth=auth,
        settings=settings,
        software=software,
        ready=lambda urls: print(*urls, flush=True),
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
