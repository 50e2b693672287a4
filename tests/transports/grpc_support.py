"""Both ends of MCP's tunnel over a real connection, and gRPC's own client, which nobody here wrote, in a thread."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeVar

import grpc
import trio

from tests.transports.http.asgi_support import DummyFace
from tests.transports.websocket_support import Meeting
from trimcp.transports.grpc.client import GrpcServer
from trimcp.transports.grpc.server import GrpcRoutes, refused_call
from trimcp.transports.http.h1.listener import serve_http1
from trimcp.transports.http.interfaces import Admitted, Head, HttpResponse, Upgrade

AnswerT = TypeVar("AnswerT")


class MeetingFace(DummyFace):
    """Admits everybody to the channels of a meeting.

    Attributes:
        refused: the response to everybody, if there is one.
    """

    def __init__(self, meeting: Meeting) -> None:
        super().__init__()
        self.meeting = meeting
        self.refused: HttpResponse | None = None
        self.grpc = GrpcRoutes(self.upgrade, trio.Event(), 100, {})

    async def admit(self, head: Head) -> Admitted:
        return self.grpc.admit(head) if self.refused is None else refused_call(self.refused)

    def upgrade(self, head: Head, subprotocol: str | None = None) -> Upgrade:
        return self.meeting.upgrade(None)


@asynccontextmanager
async def meeting_served(meeting: Meeting, **options: Any) -> AsyncIterator[tuple[str, MeetingFace]]:
    """Serve the tunnel for a meeting, and yield the address; options are those of `serve_http1`."""
    face = MeetingFace(meeting)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(face.deadlines.run)
        urls = await nursery.start(partial(serve_http1, face, port=0, **options))
        yield urls[0], face
        meeting.done.set()
        nursery.cancel_scope.cancel()


def target_at(url: str, **options: Any) -> GrpcServer:
    return GrpcServer(url.replace("http", "grpc", 1), **options)


async def foreign(url: str, use: Callable[[grpc.Channel], AnswerT]) -> AnswerT:
    """Let gRPC's own client talk to a server, in a thread."""

    def run() -> AnswerT:
        with grpc.insecure_channel(url.partition("://")[2]) as channel:
            return use(channel)

    return await trio.to_thread.run_sync(run, abandon_on_cancel=True)
