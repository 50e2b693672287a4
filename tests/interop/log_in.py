"""A person before a browser who logs in at `oidc-provider`'s pages and consents to what they ask.

    python tests/interop/log_in.py URL

Prints the address that the browser is sent to at the end, without going there. It stands alone, so that clients that
run elsewhere can start it.
"""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from urllib.parse import urljoin

import httpx2

__all__ = ["PERSON", "log_in"]

PERSON = "ann"
_MOST_PAGES = 20
_SECONDS = 10.0


class _Form(HTMLParser):
    """The form of a page, the links on it, and its text."""

    def __init__(self) -> None:
        super().__init__()
        self.action = ""
        self.fields: dict[str, str] = {}
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        said = {name: value or "" for name, value in attrs}
        if tag == "form":
            self.action = said["action"]
        elif tag == "input":
            self.fields[said["name"]] = said.get("value", "")
        elif tag == "a":
            self.links.append(said.get("href", ""))


def log_in(url: str, *, refuse: bool = False) -> str:
    """Log in as `PERSON` and consent; return the address that the browser is sent to outside the server.

    Args:
        url: the page that a client asks to visit.
        refuse: follow the link that aborts the login.

    Raises:
        RuntimeError: a page is none of those that were expected; the text holds it.
    """
    start = httpx2.URL(url)
    with httpx2.Client(timeout=_SECONDS, follow_redirects=False) as browser:
        reply = browser.get(url)
        for _ in range(_MOST_PAGES):
            if reply.has_redirect_location:
                target = httpx2.URL(urljoin(str(reply.url), reply.headers["location"]))
                if (target.host, target.port) != (start.host, start.port):
                    return str(target)
                reply = browser.get(target)
                continue
            page = _Form()
            page.feed(reply.text)
            if reply.status_code != 200 or not page.action:
                break
            if refuse:
                (abort,) = [link for link in page.links if link.endswith("/abort")]
                reply = browser.get(urljoin(str(reply.url), abort))
                continue
            if page.fields["prompt"] == "login":
                page.fields |= {"login": PERSON, "password": "any"}
            reply = browser.post(urljoin(str(reply.url), page.action), data=page.fields)
    raise RuntimeError(f"{reply.status_code} at {reply.url}: {reply.text}")


if __name__ == "__main__":
    print(log_in(sys.argv[1]))
