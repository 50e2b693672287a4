"""Glue between servers, clients and the network: what a program that serves or calls over sockets ends with."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from trimcp.session.scopes import open_service_nursery
from trimcp.transports.http.app import HttpFace
from trimcp.transports.http.settings import Settings

if TYPE_CHECKING:
    from trimcp.server.server import Server

__all__ = ["http_face"]


@asynccontextmanager
async def http_face(server: Server[Any], settings: Settings | None = None) -> AsyncIterator[HttpFace]:
    """Run a server for as long as the block runs, and yield its HTTP face for a host.

    Leaving ends every session; `HttpFace.drain` before lets calls under way answer.
    """
    async with server.running() as running:
        face = HttpFace(running, Settings() if settings is None else settings)
        async with open_service_nursery() as nursery:
            nursery.start_soon(face.run)
            try:
                yield face
            finally:
                face.end()
