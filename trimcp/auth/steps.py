"""What the way to a token asks for, step by step, and what comes of it: replies, and what they say. See `flow`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, TypeAlias
from urllib.parse import urlsplit

import attrs

from trimcp.auth.metadata import json_object
from trimcp.errors import AuthorizationError


@attrs.frozen
class Fetch:
    """Make one HTTP request, follow no redirect, and send back a `Fetched`."""

    url: str  # where to
    # `method`, `headers`, `body`: of the request
    method: str = "GET"
    headers: Mapping[str, str] = attrs.field(factory=lambda: {"accept": "application/json"}, repr=False)
    body: bytes | None = attrs.field(default=None, repr=False)
    once: bool = False  # whether what it brings cannot be asked for twice, so that it is better not given up


@attrs.frozen
class Fetched:
    """What came of a `Fetch`: a reply, or status 0 where there was none."""

    status: int
    headers: Mapping[str, str] = attrs.field(factory=dict, repr=False)  # by name in lower case
    body: bytes = attrs.field(default=b"", repr=False)
    why: str = ""  # in one line, why there was no reply


@attrs.frozen
class Listen:
    """Be ready to be redirected to, at `preferred` if that can be, and send back the redirect URI."""

    preferred: str | None = None


@attrs.frozen
class Visit:
    """Let the person visit `url`, and send back the URL that they are redirected to, with its query."""

    url: str = attrs.field(repr=False)
    # what that query must hold; what comes with another one is not meant for this login
    state: str = attrs.field(repr=False)


@attrs.frozen
class Obtain:
    """Call a function of the application, await it if it is async, and send back what it returns."""

    function: Callable[[str], str | Awaitable[str]]
    argument: str


Step: TypeAlias = Fetch | Listen | Visit | Obtain


_LONGEST: Final = 200
_NO_RESOURCE: Final = "; if it knows no resources, leave it out: OAuth(resource=False), trimcp login --no-resource"


def object_in(reply: Fetched) -> dict[str, Any] | None:
    """Return the JSON object that a reply holds, or None."""
    return json_object(reply.body)


def accepted(reply: Fetched, otherwise: str, *statuses: int) -> dict[str, Any]:
    """Return the JSON object of a reply that is no refusal: by its status, or with 200 and an `error`, as some do.

    Raises AuthorizationError, whose text begins with `otherwise`.
    """
    said = object_in(reply)
    if said is None or said.get("error") or reply.status not in (statuses or (200,)):
        raise refusal(otherwise, reply, said)
    return said


def refusal(what: str, reply: Fetched, said: dict[str, Any] | None) -> AuthorizationError:
    """Return the error for a refusal, with the reason that the server gives (RFC 6749 section 5.2)."""
    error = said.get("error") if said is not None else None
    about = said.get("error_description") if said is not None else None
    code = code_of(error)
    told = ": ".join(shown(part) for part in (code, about) if isinstance(part, str) and part)
    return AuthorizationError(f"{what}: {told}{hint(code)}" if told else f"{what}: it {came(reply)}", code)


def code_of(error: object) -> str:
    """Return an authorization server's error code, cut; "" where there is none."""
    return error[:_LONGEST] if isinstance(error, str) else ""


def hint(code: str) -> str:
    """Return what to do about an error code, as more of a sentence; "" where nothing is known."""
    return _NO_RESOURCE if code == "invalid_target" else ""


def came(reply: Fetched) -> str:
    """Return what came instead of a good reply, behind "it"."""
    if not reply.status:
        return f"could not be fetched: {reply.why}"
    if reply.status == 200:
        error = (object_in(reply) or {}).get("error")
        return f"answered the error {shown(code_of(error))}" if code_of(error) else "answered what is not meant for us"
    return f"answered {reply.status}"


def shown(text: str) -> str:
    """Return a stranger's text for an error: cut, escaped, and of a URL neither credentials nor query."""
    try:
        parts = urlsplit(text)
        if parts.scheme in ("http", "https") and not {"@", "?", "#"}.isdisjoint(text):
            text = parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()
    except ValueError:
        pass
    text = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
    return "".join(c if c.isprintable() else "?" for c in text)
