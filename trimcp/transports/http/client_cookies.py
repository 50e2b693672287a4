"""What a client keeps of the cookies a server sets: enough to be led back to the same one of many servers, no more.

Load balancers tell by a cookie which server has a session. But each cookie goes back with every request, and a server
may set as many as it likes in every response. (RFC 6265 section 6.1.)
"""

from __future__ import annotations

from http.cookiejar import Cookie, CookieJar
from typing import Final

__all__ = ["FewCookies"]

_MOST: Final = 50
_MOST_BYTES: Final = 8 * 1024  # together: what many servers take for a head


class FewCookies(CookieJar):
    """A cookie jar that is soon full; what does not fit any more is dropped, and what is there can be replaced."""

    def set_cookie(self, cookie: Cookie) -> None:
        """Keep a cookie if there is room for it."""
        place = _place(cookie)
        others = [kept for kept in self if _place(kept) != place]
        if len(others) < _MOST and sum(map(_size, others)) + _size(cookie) <= _MOST_BYTES:
            super().set_cookie(cookie)


def _place(cookie: Cookie) -> tuple[str, str, str]:
    return cookie.domain, cookie.path, cookie.name


def _size(cookie: Cookie) -> int:
    return len(cookie.name) + len(cookie.value or "") + len(cookie.path)
