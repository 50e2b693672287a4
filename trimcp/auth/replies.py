"""What an authorization server's replies say: their JSON, the reason of a refusal, and what of it may be shown."""

from __future__ import annotations

import json
from typing import Any, Final
from urllib.parse import urlsplit

from trimcp.auth.steps import Fetched
from trimcp.errors import AuthorizationError

_LONGEST: Final = 200
_NO_RESOURCE: Final = "; if it knows no resources, leave it out: OAuth(resource=False), trimcp login --no-resource"


def object_in(reply: Fetched) -> dict[str, Any] | None:
    """Return the JSON object that a reply holds, or None."""
    try:
        said = json.loads(reply.body)
    except (ValueError, RecursionError):
        return None
    return said if isinstance(said, dict) else None


def failed(reply: Fetched, said: dict[str, Any] | None, *statuses: int) -> bool:
    """Return whether a reply is a refusal: by its status, or with 200 and an `error`, as some servers do."""
    return reply.status not in (statuses or (200,)) or said is None or bool(said.get("error"))


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
