"""How long a server is waited for, what an attempt at a request came to, and whether to make another one.

Pure decisions, with texts for people. A request is sent again in two cases: nothing of it was sent, so that the server
cannot have done anything; or it only reads. A tool is never called twice unless the caller says that it may be.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from email.utils import parsedate_to_datetime
from typing import Final, Literal, TypeAlias

import attrs

from trimcp.bounds import checked
from trimcp.transports.targets import status_text
from trimcp.wire.jsonrpc import Batch, ErrorResponse, Malformed, Message, RequestId, Response, parse

Mode: TypeAlias = Literal["auto", "streamable", "sse"]
"""Streamable HTTP, the HTTP+SSE of 2024-11-05, or whichever of the two the server turns out to speak."""

REPEATABLE: Final = frozenset(
    (
        *("tools/list", "resources/list", "resources/templates/list", "prompts/list"),
        *("resources/read", "prompts/get", "completion/complete", "server/discover", "ping"),
    )
)
"""Methods that change nothing, so that asking twice does no harm."""

PASSING: Final = frozenset((429, 502, 503, 504))
"""Statuses that say: not now."""

_LONGEST: Final = 200


@attrs.frozen(field_transformer=checked(zero=("close",)))
class Timeouts:
    """How long the steps of an exchange may take, in seconds; `math.inf` for as long as it takes.

    How long a call may take is said at the call.

    Attributes:
        connect: to connect, with TLS.
        write: for the server to take the next piece of a request.
        silence: without a byte of a reply before the connection counts as lost.
        notice: for the server to take a notification or an answer of ours.
        endpoint: for a server of the HTTP+SSE transport to name its endpoint.
        close: for what is still being sent, and for the end of the session, when the channel is closed.
    """

    connect: float = 10.0
    write: float = 60.0
    silence: float = math.inf
    notice: float = 30.0
    endpoint: float = 10.0
    close: float = 1.0


@attrs.frozen
class Trouble:
    """Why an attempt brought no answer.

    Attributes:
        why: one line for a person.
        untouched: the server cannot have done anything.
        passing: another attempt may do better.
        after: seconds the server asks to wait before it, or None.
        answer: the error it refused the request with, or None.
        nonsense: it replied with something that is no answer.
        status: the status of its reply, or 0 without one.
        authorization: where no access token could be had: the authorization server's code, or ""; else None.
        forgotten: the id of the session that the server does not know (any more), or None.
    """

    why: str
    untouched: bool = False
    passing: bool = False
    after: float | None = None
    answer: ErrorResponse | None = None
    nonsense: bool = False
    status: int = 0
    authorization: str | None = None
    forgotten: str | None = attrs.field(default=None, repr=False)


@attrs.frozen
class Backoff:
    """How often to try, and how long to wait in between, in seconds.

    Attributes:
        retries: attempts after the first.
        random: what makes pauses differ, so that many clients do not come back at once.
        first: the first pause; each further one is twice as long.
        longest: the longest pause.
        asked: the longest pause a server may ask for; if it wants more there is no other attempt.
    """

    retries: int
    random: random.Random = attrs.field(factory=random.Random)
    first: float = 0.25
    longest: float = 30.0
    asked: float = 30.0

    def pause(self, attempt: int) -> float:
        """Return how long to wait after the `attempt`-th attempt (from 0): between half and all of what is due."""
        due = min(self.longest, self.first * 2.0 ** min(attempt, 32))
        return due * self.random.uniform(0.5, 1.0)

    def before_next(self, attempt: int, trouble: Trouble, method: str = "", repeatable: bool = False) -> float | None:
        """Return how long to wait before a message is sent again, or None if it is not.

        Args:
            attempt: how many attempts were made before this one.
            trouble: what this one came to.
            method: what is asked, if it is a request.
            repeatable: it may be carried out twice, whatever its method.
        """
        if attempt >= self.retries or not trouble.passing:
            return None
        if not (trouble.untouched or repeatable or method in REPEATABLE):
            return None
        pause = self.pause(attempt)
        if trouble.after is None:
            return pause
        return None if trouble.after > self.asked else max(pause, trouble.after)


def seconds_to_wait(retry_after: str, now: Callable[[], float]) -> float | None:
    """Return what a Retry-After header asks for (RFC 9110 section 10.2.3), or None where it says nothing readable."""
    text = retry_after.strip()
    if text.isascii() and text.isdigit():
        return float(text[:10])
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - now())
    except (ValueError, TypeError, OverflowError):
        return None


def refusal(
    status: int, error: ErrorResponse | None = None, elsewhere: str | None = None, at: str | None = None
) -> str:
    """Say what a status means for the request, and what to do where that is known.

    Args:
        status: of the reply, no success.
        error: the JSON-RPC error in its body, or None.
        elsewhere: the origin that a redirect points to, or None.
        at: the URL that was asked, without secrets.
    """
    text = f"the server answered {status_text(status)}{'' if at is None else f' at {at}'}"
    if error is not None:
        text += f": {error.message[:_LONGEST]!r}"
    if status == 401:
        return f"{text}; it wants credentials that were not sent or are not valid (see the `headers` of the server)"
    if status == 403:
        return f"{text}; it knows who asks and does not allow it, or does not accept this address as its own"
    if elsewhere is not None:
        return f"{text} and points to {elsewhere!r:.200}, where nothing is sent; connect to that if you trust it"
    return text


def error_in(body: bytes, id: RequestId | None) -> ErrorResponse | None:
    """Return the JSON-RPC error that a refusing reply carries, as the answer to request `id`; None if there is none.

    Such an error often has no id, or one of its own. It came in the reply to this request, so it answers this request.
    """
    message = parse(body) if body[:1] else None
    return attrs.evolve(message, id=id) if isinstance(message, ErrorResponse) else None


def answers(message: Message, id: RequestId | None) -> bool:
    """Whether this message, or one in it, settles the request `id`."""
    if isinstance(message, Batch):
        return any(answers(member, id) for member in message.members)
    if isinstance(message, Malformed) and message.is_request:
        return False  # the server's own request, which may have the same id
    return isinstance(message, Response | ErrorResponse | Malformed) and message.id == id
