"""Authentication: a hook that checks the head of each request, and static bearer tokens for small deployments.

The hook returns the principal that owns sessions, streams, events and sealed state. No token is ever logged. (RFC 6750;
specification, "Authorization".)
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Final, Protocol, TypeAlias

import attrs
import trio

from trimcp.principal import Principal
from trimcp.support.bounds import TOKEN, check_texts
from trimcp.support.cleaning import log_crash
from trimcp.support.nurseries import contained, innermost_scope, split_own_failures
from trimcp.transports.http.interfaces import Head, HttpResponse

_log = logging.getLogger("trimcp.http")

_CREDENTIALS: Final = re.compile(rf"({TOKEN})(?: +(.*))?", re.ASCII | re.DOTALL)
_TOKEN: Final = re.compile(r"[A-Za-z0-9._~+/-]+=*", re.ASCII)
_REALM: Final = re.compile(r"[ !#-\[\]-~]*", re.ASCII)


@attrs.frozen
class Refused:
    """The return value of an identity hook that refuses a request.

    Attributes:
        status: 401 for an unknown caller, 403 for a known one without the rights, 400 for malformed credentials.
        headers: of the response; a 401 needs `WWW-Authenticate`.
        message: one line for the client.
    """

    status: int = 401
    headers: tuple[tuple[str, str], ...] = (("WWW-Authenticate", "Bearer"),)
    message: str = "authentication is required"


Identity: TypeAlias = Principal | Refused

Authenticate: TypeAlias = Callable[[Head], Identity | Awaitable[Identity]]
"""The application's check, sync or async. It gets the head of each request before the body is read."""


class SharedUses(Protocol):
    """What several processes that check tokens know together; a `SharedStore` is one."""

    async def agree(self, name: str, data: bytes, /) -> bytes:
        """Return what is kept under a name: what the first process to ask for it proposed as `data`. Raises OSError."""
        ...

    async def first_use(self, owner: str, mark: str, seconds: float, /) -> bool:
        """Note the use of something that is good once, and return whether it is the first one. Raises OSError."""
        ...


class TokenAuth(Protocol):
    """Checks access tokens; `trimcp.auth.ResourceServer` is one. An `Authenticate` with a lifetime and metadata."""

    @property
    def metadata_paths(self) -> Collection[str]:
        """The paths of its public metadata."""
        ...

    def running(self) -> AbstractAsyncContextManager[None]:
        """Return a context manager, inside which tokens can be checked."""
        ...

    async def share(self, uses: SharedUses, /) -> None:
        """Keep there what has to hold for all processes. Called before requests come. Raises OSError."""

    async def describe(self, head: Head, /) -> HttpResponse:
        """Answer a request for its metadata."""
        ...

    def insufficient(self, scopes: Sequence[str], /) -> Refused:
        """Return the refusal of a request whose token lacks some of these scopes."""
        ...

    def __call__(self, head: Head, /) -> Identity | Awaitable[Identity]:
        """Return the principal of a request, or its refusal."""
        ...


async def identify(hook: Authenticate, head: Head) -> Identity:
    """Return the principal of a request, or its refusal, from the hook.

    A hook that raises, or returns a wrong type, admits nobody: the client gets a 500 without details, which are logged.
    This waits only where the hook does; cancelling it cancels the hook.
    """
    try:
        found = hook(head)
        if isinstance(found, Principal):  # at once, as for each call of somebody known
            return found
        if isinstance(found, Awaitable):
            found = await contained(_authenticate, found)
        if not isinstance(found, Principal | Refused):
            raise TypeError(f"authenticate returned {type(found).__name__}, neither a Principal nor Refused")
    except BaseException as error:  # the hook is the user's function; a check that crashed admits nobody
        crash = split_own_failures(error, innermost_scope(trio.lowlevel.current_task()))[0]
        if crash is None:
            raise  # cancelled
        log_crash(_log, crash, "the identity check failed; the request was refused")
        return Refused(500, (), "the identity check failed")
    return found


async def _authenticate(found: Awaitable[Identity]) -> Identity:
    return await found


def bearer_tokens(tokens: Mapping[str, str], *, realm: str | None = None) -> Callable[[Head], Identity]:
    """Return a hook that identifies callers by fixed tokens (`Authorization: Bearer ...`).

    Made for tests and small deployments. Each request is compared with every token, in a time that depends only on
    their number. A token stays valid until the program is restarted without it. Only digests are kept in memory.

    Args:
        tokens: the id of a principal by token, or a `Principal`. Several tokens may have the same one.
        realm: a name for the protected area, for the client to show.

    Raises:
        TypeError: they are no dict of texts.
        ValueError: a token or id is empty or cannot be sent in a header; the text does not contain the token.
    """
    known = []
    check_texts("tokens", tokens, "the principal by token")
    for token, id in tokens.items():
        if not id:
            raise ValueError("a bearer token belongs to nobody: give its principal an id")
        if not _TOKEN.fullmatch(token):
            raise ValueError(f"the bearer token of {id!r} must be letters, digits and any of -._~+/, then perhaps =")
        known.append((_digest(token), id if isinstance(id, Principal) else Principal(id)))
    if realm is not None and not _REALM.fullmatch(realm):
        raise ValueError(f"{realm!r} cannot be a realm: write printable ASCII without quotes and backslashes")
    shown = () if realm is None else (f'realm="{realm}"',)

    def refused(status: int, message: str, error: str | None = None) -> Refused:
        details = shown if error is None else (*shown, f'error="{error}"', f'error_description="{message}"')
        return Refused(status, (("WWW-Authenticate", f"Bearer {', '.join(details)}".rstrip()),), message)

    def identify_bearer(head: Head) -> Identity:
        match = _CREDENTIALS.fullmatch(head.headers.get("authorization", ""))
        if match is None or match[1].lower() != "bearer":  # RFC 6750, 3: no token was sent, so no error code
            return refused(401, "a bearer token is required")
        token = match[2] or ""
        if not _TOKEN.fullmatch(token):
            return refused(400, "the bearer token is malformed", "invalid_request")
        presented = _digest(token)
        found: Principal | None = None
        for digest, principal in known:  # compare all: the time must not reveal which token matched
            if hmac.compare_digest(digest, presented):
                found = principal
        return found or refused(401, "the bearer token is not valid", "invalid_token")

    return identify_bearer


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("ascii")).digest()
