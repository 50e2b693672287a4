"""Both ends of MCP's tunnel over a real connection, and gRPC's own client, which nobody here wrote, in a thread."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import grpc
import trio

from tests.transports.http.asgi_support import DummyFace
from tests.transports.http.hypercorn_support import Served, serving
from tests.transports.websocket_support import Meeting
from trimcp.transports.grpc.client import GrpcServer
from trimcp.transports.grpc.server import GrpcApp
from trimcp.transports.http.seams import Head, HttpResponse, Upgrade
from trimcp.transports.http.settings import HttpLimits

AnswerT = TypeVar("AnswerT")


class MeetingFace(DummyFace):
    """Admits everybody to the channels of a meeting.

    Attributes:
        refused: the response to everybody, if there is one.
    """

    def __init__(self, meeting: Meeting) -> None:
        super().__init__()
        self.meeting = meeting
        self.draining = trio.Event()
        self.max_calls = 100
        self.refused: HttpResponse | None = None

    async def authorize(self, head: Head) -> HttpResponse | None:
        return self.refused

    def upgrade(self, head: Head, subprotocol: str | None = None) -> Upgrade:
        return self.meeting.upgrade(None)


@asynccontextmanager
async def meeting_served(meeting: Meeting, **options: Any) -> AsyncIterator[tuple[Served, MeetingFace]]:
    """Serve the tunnel for a meeting on Hypercorn; options are those of `serve_hypercorn`."""
    face = MeetingFace(meeting)

    @asynccontextmanager
    async def running() -> AsyncIterator[MeetingFace]:
        yield face

    limits = options.get("limits") or HttpLimits()
    async with serving(GrpcApp(running, limits=limits), **options) as served:
        yield served, face
        meeting.done.set()


def target_at(served: Served, **options: Any) -> GrpcServer:
    return GrpcServer(served.address.replace("http", "grpc", 1), **options)


async def foreign(url: str, use: Callable[[grpc.Channel], AnswerT]) -> AnswerT:
    """Let gRPC's own client talk to a server, in a thread."""

    def run() -> AnswerT:
        with grpc.insecure_channel(url.partition("://")[2]) as channel:
            return use(channel)

    return await trio.to_thread.run_sync(run, abandon_on_cancel=True)
