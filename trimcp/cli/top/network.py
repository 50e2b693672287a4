"""The server at a URL, for `trimcp top`: what it does, asked for over the network with a token."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urljoin

import attrs
import orjson

from trimcp.cli.text import theirs
from trimcp.errors import ConnectionLost, LocalError
from trimcp.transports.http.client.engine import ExchangeBroken
from trimcp.transports.http.client.exchanges import NotAuthorized
from trimcp.watch.admin import Lines
from trimcp.watch.network import PATH, SCOPE

if TYPE_CHECKING:
    from trimcp.transports.http.client.target import HttpServer
    from trimcp.watch.commands import Command, Send

_HEADERS: Final = {"content-type": "application/json", "accept": "application/x-ndjson"}
_LARGEST: Final = 64 * 1024 * 1024  # bytes of a line
_REFUSED: Final = {
    401: "it wants a token: --bearer VARIABLE or --bearer @FILE, or log in: trimcp login URL",
    403: f"the token does not have the scope {SCOPE}, which it has to name",
    404: "nobody can look at it over the network: it runs without --admin-http",
}


@attrs.frozen
class NetworkServer:
    """A server whose endpoint is at a URL."""

    target: HttpServer

    @property
    def url(self) -> str:
        """Where it is looked at: beside its endpoint."""
        return urljoin(self.target.address, PATH.removeprefix("/"))

    @asynccontextmanager
    async def lines(self, members: Mapping[str, Any]) -> AsyncIterator[AsyncIterator[Any]]:
        """Send a command and yield what it is answered with, value by value.

        Raises LocalError: it was refused, and the text says why. ConnectionLost: the server is gone.
        """
        body = orjson.dumps(members)
        try:
            async with self.target.exchanges() as http, http.open("POST", _HEADERS, body, url=self.url) as reply:
                if reply.status != 200:
                    said = (await reply.small_body(1000)).decode(errors="replace")
                    raise LocalError(_REFUSED.get(reply.status, f"it answered {reply.status}: {theirs(said, 200)}"))
                async with reply.chunks() as chunks, aclosing(_values(chunks)) as values:
                    yield values
        except NotAuthorized as error:
            raise LocalError(str(error)) from None
        except ExchangeBroken as error:
            raise ConnectionLost(str(error)) from None

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[_Pictures]:
        """Look at it while the block runs."""
        async with self.lines({"do": "pictures"}) as values:
            yield _Pictures(values)

    async def act(self, source: str, do: str, **members: Any) -> Any:
        """Do something at one of its processes. Raises as `lines`."""
        async with self.lines({"do": do, "source": source, **members}) as values:
            async for value in values:
                if "error" in value:
                    raise LocalError(value["error"])
                return value["done"]
        raise ConnectionLost("the server is gone")

    @property
    def commands(self) -> dict[str, Command]:
        """The commands of the page: it asks the server for the same."""
        return {name: partial(self._pass_on, name) for name in ("pictures", "act", "wire")}

    async def _pass_on(self, name: str, members: Mapping[str, Any], send: Send) -> None:
        async with self.lines({"do": name, **members}) as values:
            async for value in values:
                await send(value)


@attrs.define
class _Pictures:
    values: AsyncIterator[Any]
    pause: float = 0.0  # it sends them when it is time
    why: str = "the server is gone"

    async def pictures(self) -> list[dict[str, Any]]:
        """Return the next ones; none once the server is gone."""
        try:
            found = await anext(self.values)
            if isinstance(found, list) and all(isinstance(each, dict) for each in found):
                return found
            self.why = "what the server says cannot be read"
        except (ConnectionLost, ExchangeBroken) as error:
            self.why = str(error)
        except StopAsyncIteration:
            pass
        return []


async def _values(chunks: AsyncIterator[bytes]) -> AsyncGenerator[Any, None]:
    """Yield the values of lines of JSON."""
    lines = Lines(partial(anext, chunks, b""), _LARGEST)
    while (line := await lines.next()) is not None:
        try:
            value = orjson.loads(line)
        except ValueError:
            raise ConnectionLost("what it says cannot be read") from None
        yield value
