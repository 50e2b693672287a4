"""Requests to authorization servers: one at a time, bounded, without redirects, and not into somebody's own network.

The addresses come from strangers: a server names its authorization server, and that names its endpoints. So a name is
resolved here, every address is checked, and the connection goes to the one that was checked.
"""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Container
from contextlib import asynccontextmanager
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address
from typing import Any, Final

import attrs
import httpx2
import trio

from trimcp.auth.metadata import secure_url
from trimcp.auth.steps import Fetch, Fetched
from trimcp.transports.http.client.engine import ExchangeBroken
from trimcp.transports.http.client.exchanges import Http, TooLarge
from trimcp.transports.http.client.httpx_engine import HttpxEngine

_TRANSLATED: Final = IPv6Network("64:ff9b::/96")  # NAT64 (RFC 6052)


class PrivateAddress(httpx2.ConnectError):
    """A name stands for an address that is not public, and is not allowed by name."""


@attrs.define(eq=False)
class Fetcher:
    """Carries out `Fetch`."""

    _client: httpx2.AsyncClient
    max_body: int = 1024 * 1024  # bytes of the largest reply that is read
    timeout: float = 30.0  # seconds for one request, from its beginning to the end of its reply

    async def fetch(self, step: Fetch) -> Fetched:
        """Make one request; what goes wrong below HTTP is status 0. Cancelling it cuts the connection."""
        if not secure_url(step.url):
            return Fetched(0, why="it is neither https nor on this machine")
        try:
            with trio.fail_after(self.timeout):
                return await self._fetch(step)
        except trio.TooSlowError:
            return Fetched(0, why=f"it took longer than {self.timeout:g} s")
        except TooLarge:
            return Fetched(0, why=f"its reply is larger than {self.max_body:,} bytes")
        except ExchangeBroken as broken:
            return Fetched(0, why=broken.why)
        except httpx2.InvalidURL:
            return Fetched(0, why="it is no URL")

    async def _fetch(self, step: Fetch) -> Fetched:
        timeout = httpx2.Timeout(self.timeout)
        headers = {"user-agent": "trimcp", "accept-encoding": "gzip"}
        http = Http(str(httpx2.URL(step.url)), HttpxEngine(self._client, timeout), headers, max_redirects=0)
        async with http.open(step.method, step.headers, step.body) as reply:
            return Fetched(reply.status, reply.headers, await reply.body(self.max_body))


@asynccontextmanager
async def opened_fetcher(
    allowed: Container[str] = (),
    *,
    private: bool = False,
    client: httpx2.AsyncClient | None = None,
    timeout: float = 30.0,
) -> AsyncIterator[Fetcher]:
    """Yield what carries out requests.

    Hosts that are `allowed` by name may have addresses that are not public; with `private` all may. A `client` of the
    user's own has proxies and certificates of its own: it is not closed, and no address is checked, since it may be a
    proxy that resolves names.
    """

    async def address_of(host: str, port: int) -> str | None:
        return None if private or host in allowed else (await addresses_of(host, port))[0]

    if client is not None:
        yield Fetcher(client, timeout=timeout)
        return
    transport = AddressedTransport(httpx2.AsyncHTTPTransport(), address_of)
    async with httpx2.AsyncClient(transport=transport, timeout=timeout, trust_env=False) as own:
        yield Fetcher(own, timeout=timeout)


@attrs.define(eq=False)
class AddressedTransport(httpx2.AsyncBaseTransport):
    """Sends each request to an address that was checked, as the host that its URL has."""

    _transport: httpx2.AsyncHTTPTransport
    # returns the address for a host and a port; None for whatever the name stands for
    _address_of: Callable[[str, int], Awaitable[str | None]]

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        url = request.url
        address = await self._address_of(url.host, url.port or 443)
        if address is not None:
            # The name stays in `Host`, and is what the certificate is checked for.
            request.extensions = {**request.extensions, "sni_hostname": url.raw_host.decode("ascii")}
            request.url = url.copy_with(host=address)
        return await self._transport.handle_async_request(request)

    async def aclose(self) -> None:
        await self._transport.aclose()


def _is_public(text: str) -> bool:
    """Return whether an address is one of the internet; one that carries another stands for that."""
    address = ip_address(text)
    if isinstance(address, IPv6Address):
        carried = IPv4Address(int(address) & 0xFFFF_FFFF) if address in _TRANSLATED else None
        address = address.ipv4_mapped or address.sixtofour or carried or address
    site_local = isinstance(address, IPv6Address) and address.is_site_local
    return address.is_global and not (address.is_multicast or address.is_reserved or site_local)


async def addresses_of(host: str, port: int, *, private: bool = False) -> list[str]:
    """Return the addresses that a name stands for, at least one.

    Raises PrivateAddress if one of them is not public, and httpx2.ConnectError if the name cannot be resolved.
    """
    try:
        found: list[Any] = await trio.socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise httpx2.ConnectError(f"the name cannot be resolved: {error.strerror}") from None
    addresses = [str(entry[4][0]) for entry in found]
    for text in addresses:
        if not (private or _is_public(text.partition("%")[0])):
            raise PrivateAddress("its address is not a public one; allow its host by name if it is meant")
    if not addresses:
        raise httpx2.ConnectError("the name has no address")
    return addresses
