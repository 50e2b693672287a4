"""URLs of a server as text: in one form, without credentials, and what a server means by a reference.

One parser decides and connects, so that two cannot see two hosts in one text.
"""

from __future__ import annotations

import base64
from typing import Final
from urllib.parse import quote, unquote, urljoin, urlsplit, urlunsplit

from trimcp.support.addresses import bracketed

PORTS: Final = {"http": 80, "https": 443}
_LONGEST: Final = 65_536
_PATH: Final = "/%:@!$&'()*+,;=~-._"
_QUERY: Final = _PATH + "?[]|"


def normal_url(url: str) -> str | None:
    """Return an http or https URL in one form, without credentials and fragment; None if it is no such URL.

    Credentials are removed because a server could use them to read them in its own logs.
    """
    if len(url) > _LONGEST or not url.isprintable():
        return None
    try:
        parts = urlsplit(url)
        port, host = parts.port, (parts.hostname or "").encode("ascii" if parts.netloc.isascii() else "idna").decode()
    except ValueError:  # UnicodeError is one
        return None
    if parts.scheme not in PORTS or not host or port == 0 or any(each in host for each in ' "<>\\^`{|}'):
        return None
    place = bracketed(host)
    if port is not None and port != PORTS[parts.scheme]:
        place += f":{port}"
    path = quote(parts.path or "/", safe=_PATH)
    return urlunsplit((parts.scheme, place, path, quote(parts.query, safe=_QUERY), ""))


def credentials(url: str) -> tuple[str, str] | None:
    """Return the name and the password in a URL, or None."""
    parts = urlsplit(url)
    return (unquote(parts.username or ""), unquote(parts.password or "")) if "@" in parts.netloc else None


def basic_authorization(name: str, password: str) -> str:
    """Return the value of the header Authorization that says them (RFC 7617)."""
    return "Basic " + base64.b64encode(f"{name}:{password}".encode()).decode()


def resolved(reference: str, base: str) -> str | None:
    """Return the URL that a server means by `reference` in a reply from `base`, or None if it is invalid."""
    if len(reference) > _LONGEST or not reference.isprintable():
        return None
    try:
        return normal_url(urljoin(base, reference))
    except ValueError:
        return None


def origin(url: str) -> str:
    """Return a URL's scheme, host and port, which contain no secret. The URL is one of `normal_url`."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}"


def request_target(url: str) -> str:
    """Return what a request line has of a URL of `normal_url`: the path and the query."""
    return url[len(origin(url)) :]
