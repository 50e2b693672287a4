"""Cookies that a server sets, within bounds. Load balancers use one to find the server that has a session."""

from __future__ import annotations

from collections.abc import Iterable
from email.message import Message
from http.cookiejar import Cookie, CookieJar
from typing import Final
from urllib.request import Request

import attrs

_MAX_COOKIES: Final = 50
_MAX_COOKIE_BYTES: Final = 8 * 1024  # of all cookies: what many servers accept for a whole head


class BoundedCookieJar(CookieJar):
    """A cookie jar of at most 50 cookies and 8 KiB. A cookie beyond that is dropped; existing ones can be replaced.

    Each is sent with every request, and a server may set any number in every response. (RFC 6265 section 6.1.)
    """

    def set_cookie(self, cookie: Cookie) -> None:
        """Keep a cookie if there is room for it."""
        key = _cookie_key(cookie)
        others = [kept for kept in self if _cookie_key(kept) != key]
        if len(others) < _MAX_COOKIES and sum(map(_cookie_size, others)) + _cookie_size(cookie) <= _MAX_COOKIE_BYTES:
            super().set_cookie(cookie)

    def note(self, url: str, values: Iterable[str]) -> None:
        """Keep what a reply from `url` sets with these values of Set-Cookie."""
        message = Message()
        for value in values:
            message["Set-Cookie"] = value
        self.extract_cookies(_ReplyHead(message), _request(url))  # type: ignore[arg-type]  # it calls `info` alone

    def header_for(self, url: str) -> str | None:
        """Return the header Cookie for a request to `url`, or None for none."""
        request = _request(url)
        self.add_cookie_header(request)
        return request.get_header("Cookie")


def _request(url: str) -> Request:
    return Request(url)  # noqa: S310  # a URL of `normal_url`, and nothing is opened


@attrs.frozen
class _ReplyHead:
    _message: Message

    def info(self) -> Message:
        return self._message


def _cookie_key(cookie: Cookie) -> tuple[str, str, str]:
    return cookie.domain, cookie.path, cookie.name


def _cookie_size(cookie: Cookie) -> int:
    return len(cookie.name) + len(cookie.value or "") + len(cookie.path)
