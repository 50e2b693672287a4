"""Calls of gRPC as bytes, for peers that do no more than send them."""

from __future__ import annotations

import h2.config
import h2.connection

__all__ = ["grpc_call"]


def grpc_call(path: str, *messages: bytes) -> bytes:
    """A connection of HTTP/2 that begins with one call, which stays open: framed messages to this path."""
    frames = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
    frames.initiate_connection()
    head = [(":method", "POST"), (":scheme", "http"), (":authority", "127.0.0.1"), (":path", path)]
    frames.send_headers(1, [*head, ("te", "trailers"), ("content-type", "application/grpc")])
    frames.send_data(1, b"".join(messages))
    return frames.data_to_send()
