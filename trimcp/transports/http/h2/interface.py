"""What the engine of HTTP/2 tells its user: of each stream, and of the connection."""

from __future__ import annotations

from typing import Any

from trimcp.transports.http.h2.frames import Code, Http2Error


class Http2Stream:
    """A stream as its engine sees it. Whoever uses the engine makes a class of it."""

    __slots__ = ("id", "left", "owed", "receive_window", "receives", "send_window", "sends")

    def __init__(self) -> None:
        self.id: int = 0  # its number; 0 before it was opened
        self.send_window: int = 0  # bytes that may be sent on it
        self.receive_window: int = 0  # bytes that the peer may send
        self.owed: int = 0  # bytes that were used, and not allowed again yet
        self.left: int | None = None  # bytes of the body that are still to come, if the head said how many
        self.sends: bool = True  # whether this side has not ended yet
        self.receives: bool = True  # whether the peer has not ended yet

    def response(self, head: Any) -> bool:
        """Take the head of a response; return whether it is an interim one, before the real one (clients)."""
        raise Http2Error(Code.PROTOCOL_ERROR, "a second head", self.id)

    def trailers(self, headers: dict[str, str]) -> None:
        """Take the last head."""

    def arrived(self, data: bytes) -> None:
        """Take bytes of the body. What was used of them is to be credited, see `Engine.credit`."""

    def peer_ended(self) -> None:
        """Note that the peer sends nothing more."""

    def was_reset(self, code: int, reason: str) -> None:
        """Note that the stream has ended at once, by the peer, or because it broke the protocol."""

    def window_opened(self) -> None:
        """Note that more may be sent on it."""


class EngineUser:
    """The connection that an engine belongs to."""

    __slots__ = ()

    def request(self, id: int, head: Any, ended: bool) -> Http2Stream | None:
        """Return the stream of a new request (servers); None refuses it. `ended`: whether it has no body."""
        return None

    def began(self, stream: Http2Stream, ended: bool) -> None:
        """Go on with a request that was just opened; `ended`: it has no body."""

    def windows_opened(self) -> None:
        """Note that the connection's window, or those of all streams, have grown."""

    def settings_came(self) -> None:
        """Note that the peer's settings have arrived, or changed."""

    def went_away(self, last: int, code: int) -> None:
        """Note that the peer serves no stream after this one."""
