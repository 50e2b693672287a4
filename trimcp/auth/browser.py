"""How a person comes to the page where they log in, and how their answer comes back."""

from __future__ import annotations

import html
import logging
import sys
import webbrowser
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from functools import partial
from typing import Final
from urllib.parse import parse_qs, urlsplit

import attrs
import trio

from trimcp.errors import AuthorizationError
from trimcp.support.bounds import checked

_MAX_HEAD: Final = 16 * 1024
_PATIENCE: Final = 5.0  # seconds for a browser to send its request, once it has connected
_MOST: Final = 16  # connections at a time: a browser opens a few, and whoever else finds the port
_PATH: Final = "/callback"

_log = logging.getLogger("trimcp.auth")


class Redirect(ABC):
    """A place to which a person is sent back, while its block runs.

    Attributes:
        uri: what the authorization server is told.
    """

    uri: str

    @abstractmethod
    async def visit(self, url: str, state: str) -> str:
        """Let the person visit `url`, and return the URL they came back to, with its query.

        Args:
            url: the page to log in at. It holds no secret of the client.
            state: what that query must hold; what comes with another one is ignored.
        """


class UserAgent(ABC):
    """How a person is asked to log in. Implement it for a program with windows of its own."""

    @abstractmethod
    def redirect(self, preferred: str | None) -> AbstractAsyncContextManager[Redirect]:
        """Return an async context manager that yields a place to come back to.

        Args:
            preferred: where it was the last time, or None.
        """


@attrs.frozen(field_transformer=checked(zero=("port",)))
class Browser(UserAgent):
    """Opens the page in the person's browser, and waits for them on a port of this machine (RFC 8252 section 7.3).

    Attributes:
        open: opens a URL, and may be async; by default `webbrowser.open`. What it raises ends the login.
        host: "127.0.0.1", or "localhost" where an authorization server takes only that.
        port: to listen on; 0 for the one used before, or any.
        notify: called with a line for the person, which has the URL in it; by default written to standard error.
    """

    open: Callable[[str], object] | None = None
    host: str = "127.0.0.1"
    port: int = 0
    notify: Callable[[str], object] | None = None

    @asynccontextmanager
    async def redirect(self, preferred: str | None) -> AsyncIterator[Redirect]:
        """Listen on a port of this machine for as long as the block runs."""
        port = self.port
        if not port and preferred is not None:
            with suppress(ValueError):  # of a damaged file
                parts = urlsplit(preferred)
                port = (parts.port or 0) if (parts.hostname, parts.path) == (self.host, _PATH) else 0
        try:
            listeners = await trio.open_tcp_listeners(port, host=self.host)
        except OSError:
            if self.port:
                raise AuthorizationError(f"port {self.port} is in use; choose another, or 0 for a free one") from None
            listeners = await trio.open_tcp_listeners(0, host=self.host)
        try:
            number = listeners[0].socket.getsockname()[1]
            yield _Loopback(f"http://{self.host}:{number}{_PATH}", listeners[0], self)
        finally:
            for listener in listeners:
                listener.socket.close()


@attrs.define(eq=False)
class _Loopback(Redirect):
    uri: str
    _listener: trio.SocketListener
    _browser: Browser

    async def visit(self, url: str, state: str) -> str:
        """Open the page, and wait until a browser comes back with `state`. Waits as long as the person takes."""
        notify = self._browser.notify or partial(print, file=sys.stderr, flush=True)
        notify(f"Log in at {url}")
        came: list[str] = []
        room = trio.Semaphore(_MOST)
        async with trio.open_nursery() as nursery:

            async def serve(stream: trio.SocketStream) -> None:
                answer = await self._answer(stream, state)
                room.release()
                if answer is not None:
                    came.append(answer)
                    nursery.cancel_scope.cancel(reason="the person came back")

            # A task of its own: whoever opens a page may take as long as the browser does to start.
            nursery.start_soon(self._open, url)
            while not came:
                await room.acquire()  # further connections wait in the system's queue
                nursery.start_soon(serve, await self._listener.accept())
        return came[0]

    async def _open(self, url: str) -> None:
        if self._browser.open is None:
            await trio.to_thread.run_sync(webbrowser.open, url, abandon_on_cancel=True)
            return
        opened = self._browser.open(url)
        if isinstance(opened, Awaitable):
            await opened

    async def _answer(self, stream: trio.SocketStream, state: str) -> str | None:
        """Answer one request; return its URL if it is the one that is waited for."""
        came: str | None = None
        try:
            with trio.move_on_after(_PATIENCE):
                head = bytearray()
                while b"\r\n\r\n" not in head and len(head) < _MAX_HEAD:
                    data = await stream.receive_some(4096)
                    if not data:
                        return None
                    head += data
                query = _query_of(bytes(head).partition(b"\r\n")[0].decode("latin-1"))
                fields = parse_qs(query, max_num_fields=50)
                if fields.get("state") != [state]:
                    # A stranger on this machine, a page that guesses, or the browser asking for an icon.
                    _log.debug("a request that is not the answer of this login was refused")
                    await stream.send_all(_page(404, "This is not the page you are looking for."))
                    return None
                came = f"{self.uri}?{query}"  # whether or not its page can still be shown
                text = "The login was refused." if "error" in fields else "You are logged in."
                await stream.send_all(_page(200, f"{text} You can close this window."))
        except (trio.BrokenResourceError, ValueError):
            pass
        finally:
            await trio.aclose_forcefully(stream)
        return came


def _query_of(line: str) -> str:
    """Return the query of a GET of our page, from the first line of a request; "" of any other."""
    method, _, rest = line.partition(" ")
    parts = urlsplit(rest.partition(" ")[0])
    return parts.query if (method, parts.path) == ("GET", _PATH) else ""


@attrs.frozen
class PastedUrl(UserAgent):
    """Shows the address of the page, and asks the person to paste the one they were sent back to.

    For machines without a browser: the page that is sent back to need not load.

    Attributes:
        ask: async; shown the text for the person, returns what they pasted.
        uri: what the authorization server is told; nothing listens there.
    """

    ask: Callable[[str], Awaitable[str]]
    uri: str = "http://127.0.0.1:8765/callback"

    @asynccontextmanager
    async def redirect(self, preferred: str | None) -> AsyncIterator[Redirect]:
        """Yield a place to which nobody has to come."""
        yield _Pasted(self.uri, self.ask)


@attrs.define(eq=False)
class _Pasted(Redirect):
    uri: str
    _ask: Callable[[str], Awaitable[str]]

    async def visit(self, url: str, state: str) -> str:
        """Ask until what is pasted is the address that this login ends at."""
        text = (
            f"Open this page in a browser, on any machine, and log in:\n\n  {url}\n\nThen paste the address it ends at"
        )
        while True:
            came = (await self._ask(text)).strip()
            try:
                fields = parse_qs(urlsplit(came).query, max_num_fields=50)
            except ValueError:
                fields = {}
            if fields.get("state") == [state]:
                return came
            what = "the address of another login" if "state" in fields else f"no address like {self.uri}?code=..."
            text = f"That was {what}\nPaste the address that the browser ended at"


def _page(status: int, text: str) -> bytes:
    body = f"<!doctype html><meta charset=utf-8><title>trimcp</title><p>{html.escape(text)}".encode()
    reason = "OK" if status == 200 else "Not Found"
    lines = (
        f"HTTP/1.1 {status} {reason}",
        "Content-Type: text/html; charset=utf-8",
        "Content-Security-Policy: default-src 'none'",
        "Referrer-Policy: no-referrer",
        "Cache-Control: no-store",
        f"Content-Length: {len(body)}",
        "Connection: close",
    )
    return "\r\n".join((*lines, "", "")).encode() + body
