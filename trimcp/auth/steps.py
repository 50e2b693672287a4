"""What the way to a token asks for, step by step, and what comes of it. See `flow`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import TypeAlias

import attrs


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
