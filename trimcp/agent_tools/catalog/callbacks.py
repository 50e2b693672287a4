"""Tools that are called at a URL: to hosts that are allowed by name, at addresses that are resolved once.

A manifest with a `callback` comes from somebody who may be hostile and knows our network, so: https only, no port or
host that is not on the list, no credentials, no redirects. The host is resolved when the tool is registered, none of
its addresses may be private, and every call goes to these addresses, whatever the name stands for later. A call carries
no token of the caller; it is signed instead (`messages.signatures`). The answer is bounded in size and time.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Collection, Mapping
from functools import cached_property
from typing import Any, Final

import attrs
import httpx2
import trio

from trimcp.agent_tools.messages import errors, messages
from trimcp.agent_tools.messages.manifests import Manifest
from trimcp.agent_tools.messages.signatures import Secret, secret_bytes, signed_headers
from trimcp.auth.fetching import AddressedTransport, PrivateAddress, addresses_of
from trimcp.security import security_event
from trimcp.support.bounds import checked
from trimcp.support.cleaning import harmless
from trimcp.transports.http.client.engine import ExchangeBroken
from trimcp.transports.http.client.exchanges import Http, TooLarge
from trimcp.transports.http.client.httpx_engine import HttpxEngine

log: logging.Logger = logging.getLogger("trimcp.server")

_PORT: Final = 443
_MOST_ADDRESSES: Final = 4
_LONGEST_MESSAGE: Final = 4_096
# What a callback may say of itself. Any other error of its own is one of the tool.
_ITS_OWN: Final = (errors.ToolFailed, errors.InvalidArguments, errors.TooMuch)


@attrs.define(eq=False, field_transformer=checked(), slots=False)
class Callbacks:
    """Allows tools that are called at URLs: `Callbacks(hosts={"tools.example.com": secret})`.

    Attributes:
        hosts: the hosts that may be called, each with its secret or None for `secret`; or only their names. An entry
            allows port 443, or the one that it has: "tools.example.com:8443".
        secret: signs the calls to hosts without a secret of their own. Whoever knows a secret can sign calls to every
            host that shares it.
        private: those of the hosts whose addresses need not be public, such as your own.
        timeout: seconds for one call, and for resolving a name.
        max_body: bytes of the largest answer.
        tls: verifies the hosts; by default with the usual authorities.

    Raises:
        ValueError: a host has no secret, or one that is too short, or it is no host.
    """

    hosts: Mapping[str, Secret | None] | Collection[str] = attrs.field(repr=False)
    secret: Secret | None = attrs.field(default=None, repr=False)
    private: Collection[str] = ()
    timeout: float = 30.0
    max_body: int = 1024 * 1024
    tls: ssl.SSLContext | None = attrs.field(default=None, repr=False)
    _secrets: dict[str, bytes] = attrs.field(init=False, repr=False)

    def __attrs_post_init__(self) -> None:
        if isinstance(self.hosts, str) or isinstance(self.private, str):
            raise TypeError("hosts and private are several names")
        given = self.hosts if isinstance(self.hosts, Mapping) else dict.fromkeys(self.hosts)
        self._secrets = {}
        for name, own in given.items():
            secret = self.secret if own is None else own
            if secret is None:
                raise ValueError(f"the host {name} has no secret")
            try:
                place = _place(httpx2.URL(f"https://{name}"))
            except (httpx2.InvalidURL, ValueError):
                raise ValueError(f"{name!r:.100} is no host") from None
            self._secrets[place] = secret_bytes(secret)

    def check(self, url: str) -> httpx2.URL:
        """Return a URL that may be called. Raises UnfitManifest or, for a host that is not on the list, NotAllowed."""
        # One parser decides and connects: two could see two hosts in one text.
        try:
            parsed = httpx2.URL(url) if url.isascii() and url.isprintable() else httpx2.URL("")
        except (httpx2.InvalidURL, ValueError):
            parsed = httpx2.URL("")
        if parsed.scheme != "https" or not parsed.raw_host or parsed.userinfo or parsed.fragment:
            raise errors.UnfitManifest("a callback is an https URL without credentials and fragment")
        if _place(parsed) not in self._secrets:
            security_event("not_allowed", what="callback", host=_place(parsed))
            raise errors.NotAllowed("callbacks to this host are not allowed")
        return parsed

    async def resolve(self, url: str) -> CallbackTarget:
        """Return where a URL is called from now on. Raises as `check`, also without a public address."""
        parsed = self.check(url)
        host = parsed.raw_host.decode("ascii")
        private = host in self.private
        try:
            with trio.fail_after(self.timeout):
                addresses = await addresses_of(host, parsed.port or _PORT, private=private)
        except PrivateAddress:
            security_event("not_allowed", what="callback", host=host, why="its address is not public")
            raise errors.NotAllowed("callbacks to this host are not allowed: its address is not a public one") from None
        except (httpx2.ConnectError, trio.TooSlowError) as error:
            log.info("the host of a callback, %s, cannot be resolved: %s", harmless(host), harmless(str(error)))
            raise errors.UnfitManifest("the host of the callback cannot be resolved") from None
        return CallbackTarget(self, parsed, tuple(dict.fromkeys(addresses))[:_MOST_ADDRESSES])

    def secret_of(self, url: httpx2.URL) -> bytes:
        """Return the secret for calls to a URL that was checked."""
        return self._secrets[_place(url)]

    @cached_property
    def context(self) -> ssl.SSLContext:
        """What verifies the hosts."""
        return self.tls or httpx2.create_ssl_context(trust_env=False)


@attrs.frozen(eq=False)
class CallbackTarget:
    """A URL with the addresses that its host had when the tool was registered."""

    callbacks: Callbacks
    url: httpx2.URL = attrs.field(repr=False)
    addresses: tuple[str, ...]

    async def call(
        self, manifest: Manifest, arguments: Mapping[str, Any], *, progress: object = None, request_id: str
    ) -> Any:
        """Carry out a call, whose progress nobody is told, and return its result. Cancelling it cuts the connection.

        Raises ToolFailed, InvalidArguments or TooMuch if the callback says so, DeadlinePassed, and else ProviderGone.
        """
        message = messages.ToolRequest(
            tool_name=manifest.name, version=manifest.version, arguments=dict(arguments), request_id=request_id
        )
        timeout = self.callbacks.timeout
        try:
            with trio.fail_after(timeout):
                answer = await self._exchange(messages.encode_message(message), request_id)
            return _result(answer, request_id)
        except trio.TooSlowError:
            raise errors.DeadlinePassed(f"the callback did not answer within {timeout:g} seconds") from None
        except _NoAnswer as problem:
            log.warning("the callback of %s at %s failed: %s", manifest.name, _place(self.url), problem)
            raise errors.ProviderGone("the callback of this tool did not answer as it should") from None

    async def _exchange(self, body: bytes, request_id: str) -> bytes:
        """Send a call to the first address that can be reached, and return the body of the answer."""
        headers = {
            "content-type": "application/json",
            "accept": "application/json",
            "accept-encoding": "identity",
            "user-agent": "trimcp",
            "connection": "close",
            **signed_headers(self.callbacks.secret_of(self.url), request_id, body),
        }
        for address in self.addresses:

            async def pinned(host: str, port: int, address: str = address) -> str:
                return address

            verified = httpx2.AsyncHTTPTransport(verify=self.callbacks.context, trust_env=False)
            transport = AddressedTransport(verified, pinned)
            timeout = httpx2.Timeout(self.callbacks.timeout)
            async with httpx2.AsyncClient(transport=transport, timeout=timeout, trust_env=False) as client:
                http = Http(str(self.url), HttpxEngine(client, timeout), headers, max_redirects=0)
                try:
                    async with http.open("POST", {}, body) as reply:
                        if reply.status != 200:
                            raise _NoAnswer(f"it answered with status {reply.status}")
                        return await reply.body(self.callbacks.max_body)
                except TooLarge:
                    raise _NoAnswer(f"its answer is larger than {self.callbacks.max_body:,} bytes") from None
                except ExchangeBroken as broken:
                    if not broken.nothing_sent or address == self.addresses[-1]:
                        raise _NoAnswer(broken.why) from None
        raise AssertionError("there is an address")


class _NoAnswer(Exception):
    """There was no answer, or none that can be used. The text is for the log."""


def _place(url: httpx2.URL) -> str:
    return f"{url.raw_host.decode('ascii').lower()}:{url.port or _PORT}"


def _result(answer: bytes, request_id: str) -> Any:
    """Return the result in a `tool_response`. Raises the error in it."""
    try:
        message = messages.read_value(answer)
    except errors.MalformedMessage as error:
        raise _NoAnswer(error.message) from None
    if type(message) is not dict or message.get("type", "tool_response") != "tool_response":
        raise _NoAnswer("its answer is no tool_response")
    if message.get("request_id", request_id) != request_id:
        raise _NoAnswer("its answer is for another request")
    status = message.get("status")
    if status == "success":
        return message.get("result")
    if status != "error":
        raise _NoAnswer("its answer has no status that is known")
    raise _own_error(message.get("error"))


def _own_error(body: Any) -> errors.AgentToolsError:
    """Return what a callback says went wrong; it cannot speak for the service."""
    error = errors.error_from(body)
    error.message = error.message[:_LONGEST_MESSAGE]
    return error if isinstance(error, _ITS_OWN) else errors.ToolFailed(error.message)
