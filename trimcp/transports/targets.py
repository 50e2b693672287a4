"""What targets on a network have in common: headers that may be sent, and URLs that may be shown."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final
from urllib.parse import urlsplit

from trimcp.errors import LocalError

__all__ = ["checked_headers", "masked_url"]

_TOKEN: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")  # RFC 9110 section 5.6.2


def checked_headers(headers: Mapping[str, str] | None) -> dict[str, str]:
    """Return headers by lower-case name.

    Raises:
        LocalError: a name or value cannot be sent. Values may be secrets, so the text does not quote them.
    """
    checked: dict[str, str] = {}
    for name, value in (headers or {}).items():
        if not _TOKEN.fullmatch(name):
            raise LocalError(f"{name!r:.60} cannot be the name of a header")
        if not (value.isascii() and value.isprintable()):
            raise LocalError(f"the value of the header {name} must be a string of printable ASCII characters")
        checked[name.lower()] = value
    return checked


def masked_url(url: str) -> str:
    """Return the part of a URL that is no secret: many services put a key into the path or the query."""
    parts = urlsplit(url)
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    return f"{parts.scheme}://{host}{f':{parts.port}' if parts.port else ''}/..."
