"""Timeouts, the outcome of an attempt to send a request, and the decision whether to try again.

Pure decisions, with texts for users. A request is sent again in two cases: no byte of it was sent, so the server cannot
have acted on it; or it only reads. A tool is never called twice unless the caller allows it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from email.utils import parsedate_to_datetime
from typing import Final, Literal, TypeAlias

import attrs

from trimcp.support.bounds import checked
from trimcp.support.cleaning import one_line
from trimcp.transports.targets import status_text
from trimcp.wire.jsonrpc import Batch, ErrorResponse, Malformed, Message, RequestId, Response, own_id, parse

Mode: TypeAlias = Literal["auto", "streamable", "sse"]
"""Streamable HTTP, the HTTP+SSE of 2024-11-05, or the one of the two that the server supports."""

REPEATABLE: Final = frozenset(
    (
        *("tools/list", "resources/list", "resources/templates/list", "prompts/list"),
        *("resources/read", "prompts/get", "completion/complete", "server/discover", "ping"),
    )
)
"""Methods that only read, so sending them twice does no harm."""

PASSING: Final = frozenset((429, 502, 503, 504))
"""Statuses of a temporary refusal."""

_LONGEST: Final = 200
_ANSWERS: Final = (Response, ErrorResponse)  # the usual ones


@attrs.frozen(field_transformer=checked(zero=("close",)))
class Timeouts:
    """How long the steps of an exchange may take, in seconds; `math.inf` for no limit.

    The time limit of a whole call is an argument of the call.

    Attributes:
        connect: to connect, with TLS.
        write: for the server to accept the next piece of a request.
        silence: without a byte of a reply, after which the connection counts as lost.
        notice: for the server to accept a notification or an answer of ours.
        endpoint: for a server of the HTTP+SSE transport to send its endpoint.
        close: when the channel is closed, for messages still being sent and for the end of the session.
    """

    connect: float = 10.0
    write: float = 60.0
    silence: float = math.inf
    notice: float = 30.0
    endpoint: float = 10.0
    close: float = 1.0


@attrs.frozen
class AttemptFailure:
    """Why an attempt brought no answer."""

    why: str  # one line of text for the user
    untouched: bool = False  # the server cannot have acted on the request
    passing: bool = False  # another attempt may succeed
    after: float | None = None  # seconds the server asks to wait before it, or None
    answer: ErrorResponse | None = None  # the error with which the server refused the request, or None
    nonsense: bool = False  # the reply was not a valid answer
    status: int = 0  # the status of its reply, or 0 without one
    # if no access token could be obtained: the authorization server's code, or ""; else None
    authorization: str | None = None
    # the id of the session that the server does not know (any more), or None
    forgotten: str | None = attrs.field(default=None, repr=False)


@attrs.frozen
class Backoff:
    """The number of attempts, and the pauses between them, in seconds."""

    retries: int  # attempts after the first
    # varies the pauses, so that many clients do not reconnect at the same time
    random: random.Random = attrs.field(factory=random.Random)
    first: float = 0.25  # the first pause; each further one is twice as long
    longest: float = 30.0  # the longest pause
    asked: float = 30.0  # the longest pause a server may request; after a longer request there is no other attempt

    def pause(self, attempt: int) -> float:
        """Return the pause after the `attempt`-th attempt (from 0): random, between half and all of the full pause."""
        due = min(self.longest, self.first * 2.0 ** min(attempt, 32))
        return due * self.random.uniform(0.5, 1.0)

    def before_next(
        self, attempt: int, failure: AttemptFailure, method: str = "", repeatable: bool = False
    ) -> float | None:
        """Return how long to wait before a message is sent again, or None if it is not.

        `repeatable`: it may be carried out twice, whatever its method.
        """
        if attempt >= self.retries or not failure.passing:
            return None
        if not (failure.untouched or repeatable or method in REPEATABLE):
            return None
        pause = self.pause(attempt)
        if failure.after is None:
            return pause
        return None if failure.after > self.asked else max(pause, failure.after)


def seconds_to_wait(retry_after: str, now: Callable[[], float]) -> float | None:
    """Return the seconds of a Retry-After header (RFC 9110 section 10.2.3), or None if it is unreadable."""
    text = retry_after.strip()
    if text.isascii() and text.isdigit():
        return float(text[:10])
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - now())
    except (ValueError, TypeError, OverflowError):
        return None


def refusal(
    status: int,
    error: ErrorResponse | None = None,
    elsewhere: str | None = None,
    at: str | None = None,
    said: str = "",
    moved: str | None = None,
) -> str:
    """Return what a status means for the request, and what to do if that is known.

    `at`, `moved`: URLs without secrets: of the request, and where a redirect in the same origin points to. `elsewhere`:
    another origin that one points to. `said`: the body, if that is plain text.
    """
    text = f"the server answered {status_text(status)}{'' if at is None else f' at {at}'}"
    if error is not None:
        text += f": {error.message[:_LONGEST]!r}"
    elif said:
        text += f": {one_line(said, _LONGEST)!r}"
    if status == 401:
        return f"{text}; it wants credentials that were not sent or are not valid (see the `headers` of the server)"
    if status == 403:
        return f"{text}; it knows who asks and does not allow it, or does not accept this address as its own"
    if elsewhere is not None:
        return f"{text} and points to {elsewhere!r:.200}, where nothing is sent; connect to that if you trust it"
    return text if moved is None else f"{text} and points to {moved!r:.200}, which does not repeat the request there"


def error_in(body: bytes, id: RequestId | None) -> ErrorResponse | None:
    """Return the JSON-RPC error in a refusing reply, as the answer to request `id`; None if there is none.

    Such an error often has no id, or a different one. It still answers this request, because it is in its reply.
    """
    message = parse(body) if body[:1] else None
    if not isinstance(message, ErrorResponse):
        return None
    return ErrorResponse(id, message.code, message.message, message.data)


def answers(message: Message, id: RequestId | None) -> bool:
    """Whether this message, or one in it, answers the request `id`."""
    if isinstance(message, _ANSWERS):
        return _is(message.id, id)
    if isinstance(message, Batch):
        return any(answers(member, id) for member in message.members)
    # A request of the server's own may have the same id.
    return isinstance(message, Malformed) and not message.is_request and _is(message.id, id)


def in_reply_to(message: Message, id: RequestId | None) -> Message | None:
    """Return the message without answers to other requests than `id`; None if nothing is left.

    Each request is answered in the reply to its own POST (specification, "Transports", "Sending Messages to the
    Server"), so that a reply which a server mixes up is taken for nobody's.
    """
    if isinstance(message, Batch):
        members = tuple(member for member in message.members if in_reply_to(member, id) is not None)
        return Batch(members) if members else None
    if not isinstance(message, Response | ErrorResponse | Malformed):
        return message
    if isinstance(message, Malformed) and message.is_request:
        return message  # the server's own
    return message if message.id is None or _is(message.id, id) else None


def _is(given: RequestId | None, id: RequestId | None) -> bool:
    return given == id or (given is not None and own_id(given) == id)
