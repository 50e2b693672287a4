"""What carries HTTP requests for a client: the interface that its two engines share, and how an exchange fails."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from typing import Final, Protocol

import attrs

from trimcp.channel import HttpClientStatistics
from trimcp.transports.descriptors import AnySocket

TRUSTING: Final = "name what to trust in SSL_CERT_FILE, or pass an httpx2.AsyncClient of your own"
"""What a user can do about a certificate that is not trusted."""


class ExchangeBroken(Exception):
    """An exchange failed below HTTP; `why` is one line of text, `nothing_sent` means that no byte was sent."""

    def __init__(self, why: str, nothing_sent: bool = False) -> None:
        super().__init__(why)
        self.why = why
        self.nothing_sent = nothing_sent


@attrs.define(eq=False)
class ClientRequest:
    """A request to send."""

    method: str
    url: str
    headers: Mapping[str, str] = attrs.field(repr=False)  # by name in lower case
    content: bytes | None = attrs.field(repr=False)
    written: Callable[[], object] | None  # called when the last byte of the request was written


class RawReply(Protocol):
    """A reply whose head has arrived, with its body as it was sent."""

    status: int
    headers: Mapping[str, str]  # by name in lower case; the values of a repeated header are joined with ", "
    http2: bool  # whether it came over HTTP/2

    @property
    def socket(self) -> AnySocket | None:
        """The socket that it comes from, for the functions of `descriptors`; None if there is none."""
        ...

    def pieces(self) -> AsyncIterator[bytes]:
        """Return the pieces of the body. They raise `ExchangeBroken`."""
        ...

    async def abandon(self) -> None:
        """Read no more: the connection is closed unless the reply was received to its end. Safe to call twice."""
        ...


class HttpEngine(Protocol):
    """Sends requests to one server, any number at a time, over connections that it keeps."""

    async def send(self, request: ClientRequest) -> RawReply:
        """Send a request and return its reply once its head has arrived. Cancelling closes the connection.

        Raises ExchangeBroken: no reply was received.
        """
        ...

    def statistics(self) -> HttpClientStatistics:
        """Return a snapshot of the connections."""
        ...
