"""Every exception trimcp raises on purpose, as one tree.

    McpError
    ├── LocalError            our side asked for something the protocol forbids; nothing was sent
    │   ├── CannotAsk         a handler asked its client something the client never offered to answer
    │   ├── NotInRevision     something for which the revision spoken has no words (`trimcp.wire.converter`)
    │   └── Unencodable       a value JSON cannot carry (defined in `trimcp.wire.jsonrpc`)
    ├── RemoteError           the peer answered a request with an error
    │   └── Overloaded        ... because it has too much under way; trying again later is safe
    ├── InvalidReply          the peer answered with something that is no answer to this request
    ├── ConnectionLost        the peer is gone; the request may or may not have been carried out
    │   └── UpstreamDown      ... and was so before: nothing was sent (supervised upstreams)
    ├── AuthorizationError    no access token could be had, or it does not suffice
    ├── NoGoodAnswer          of several attempts none was answered as the caller wanted it
    ├── ErrorReply            raised *by a handler* to answer with exactly this error
    ├── ResourceNotFound      raised *by a resource* that does not exist
    └── ToolError             raised *by a tool* to tell the model what went wrong

Anything else that leaves trimcp is either Trio's own (`trio.Cancelled`, `trio.TooSlowError`, ...) or a bug of ours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class McpError(Exception):
    """The root of trimcp's exceptions: `except McpError` catches whatever the protocol or the peer did wrong."""


class LocalError(McpError):
    """We asked for something this session may not do, so nothing was sent.

    Examples: calling a method the negotiated revision does not have, a value JSON cannot carry, asking a client for
    sampling when it never declared the capability.
    """


class CannotAsk(LocalError):
    """A handler asked its client something the client never offered to answer, or from where it cannot be asked.

    A handler may catch it and do without. Where it passes, the client gets the error its revision has for a missing
    capability; where it has none, a tool's model is told and any other request gets -32600.

    Attributes:
        required: the capabilities the client would have to declare, in revisions with an error for that; else None.
    """

    def __init__(self, message: str, required: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.required = required


class _CodedError(McpError):
    """An error as JSON-RPC has it: `code`, `message` and `data`."""

    def __init__(self, code: int, message: str, data: Any = None) -> None:
        super().__init__(code, message, data)
        self.code = code
        self.message = message
        self.data = data

    def __str__(self) -> str:
        return f"{self.message} (code {self.code})"


class RemoteError(_CodedError):
    """The peer answered a request with a JSON-RPC error.

    Attributes:
        code: the error's integer code (JSON-RPC 2.0 section 5.1, and the specification's "Error Codes").
        message: the peer's one-line explanation. Untrusted text.
        data: whatever the peer attached, as JSON values, or None.
    """


class Overloaded(RemoteError):
    """The peer refused at once because too much is under way. Nothing was done; trying again later is safe."""

    @property
    def retry_after(self) -> float | None:
        """The seconds after which it would make sense, as the peer says; None where it does not say."""
        seconds: Any = self.data.get("retryAfter") if isinstance(self.data, dict) else None
        return float(seconds) if type(seconds) in (int, float) else None


class InvalidReply(McpError):
    """The peer answered with something that is no valid answer to this request. The connection lives on."""


class ConnectionLost(McpError):
    """The connection ended while this request was under way, so nobody knows whether it was carried out."""


class UpstreamDown(ConnectionLost):
    """A supervised upstream is down, so nothing was sent. The text says why, and when it is tried again.

    Attributes:
        reasons: what went wrong with its last connections, the newest last.
        retry_at: when it is tried again, on Trio's clock; None if it is being tried now, or will not be any more.
        given_up: whether it will not be tried again by itself.
    """

    def __init__(
        self, message: str, reasons: Sequence[str] = (), retry_at: float | None = None, given_up: bool = False
    ) -> None:
        super().__init__(message)
        self.reasons: tuple[str, ...] = tuple(reasons)
        self.retry_at: float | None = retry_at
        self.given_up: bool = given_up


class AuthorizationError(McpError):
    """No access token could be had for a server, or the one there is does not suffice.

    Attributes:
        code: the authorization server's code (RFC 6749 sections 4.1.2.1 and 5.2), such as "access_denied", or "".
    """

    def __init__(self, message: str, code: str = "") -> None:
        super().__init__(message)
        self.code: str = code


class NoGoodAnswer(McpError):
    """Of several attempts none was answered as the caller wanted it.

    Attributes:
        answers: what was answered, in the order in which it came.
    """

    def __init__(self, message: str, answers: Sequence[Any]) -> None:
        super().__init__(message)
        self.answers: tuple[Any, ...] = tuple(answers)


class ErrorReply(_CodedError):
    """Raised inside a handler to answer its request with exactly this JSON-RPC error.

    Args:
        code: an integer. Codes of your own should lie outside -32768..-32000 (specification, "Error Codes").
        message: one line for a person; it is sent to the peer as it is.
        data: any JSON value for a program, or None for no `data` member.
    """


class ResourceNotFound(McpError):
    """Raised inside a resource function: there is no such resource. The peer gets its revision's error for that."""


class ToolError(McpError):
    """Raised inside a tool to tell the model what went wrong: the result carries the text and `isError: true`.

    Unlike any other exception its text is always sent to the peer, so it must not carry secrets.
    """
