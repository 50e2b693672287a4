"""Who gives tokens for a server: what it says of itself, what its authorization server says, and whether they agree.

Specification, "Authorization Server Discovery"; RFC 9728 (protected resources), RFC 8414 (authorization servers).
Without input or output, like `flow`.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, Final, TypeAlias, TypeVar

import attrs

from trimcp.auth.metadata import (
    AuthChallenge,
    AuthorizationServer,
    ProtectedResource,
    canonical_url,
    covers,
    issuer_metadata_urls,
    origin_of,
    read_json,
    resource_metadata_urls,
    same_issuer,
    secure_url,
)
from trimcp.auth.steps import Fetch, Fetched, Step, came, object_in, shown
from trimcp.errors import AuthorizationError

T = TypeVar("T")

Flow: TypeAlias = Generator[Step, Any, T]
"""Yields what is to be done, is sent what came of it, and returns a T."""

_MOST_NAMED: Final = 3  # authorization servers of one resource that are asked whether they are the one that was pinned
_ENDPOINTS: Final = ("authorization_endpoint", "token_endpoint", "registration_endpoint", "revocation_endpoint")


@attrs.frozen
class TokenSource:
    """Who is to be asked for a token."""

    resource: str  # what the token is for
    server: AuthorizationServer  # who gives it
    scopes: tuple[str, ...] | None = None  # what basic use needs, or None where nothing was said
    guessed: bool = False  # whether the endpoints are those of 2025-03-26 for servers that publish no metadata
    found_at: str | None = None  # where the server's metadata lies, if that is not its own address


@attrs.define(eq=False)
class Discovery:
    """The way to who gives tokens for one server."""

    server: str  # the URL of the MCP server
    pinned: str | None = None  # the issuer that it has to be, or None for whichever the server names
    secret: bool = False  # whether something is shown to the issuer that another could use in the client's name
    pkce: bool = True  # whether it has to support PKCE with S256
    notes: list[str] = attrs.field(factory=list)  # what was in the way, for an error

    def find(self, challenge: AuthChallenge | None) -> Flow[TokenSource]:
        """Find out who gives tokens for the server."""
        said = yield from self._resource_metadata(challenge)
        if said is None and self.pinned is None:
            return (yield from self._without_metadata())
        named = () if said is None else said.authorization_servers
        resource = canonical_url(self.server) if said is None else said.resource
        scopes = None if said is None else said.scopes_supported
        if self.pinned is not None:
            if (found := (yield from self._pinned(self.pinned, named))) is not None:
                server, at = found
                return TokenSource(resource, server, scopes, found_at=at)
            if said is None:
                return (yield from self._without_metadata())
        if not named:
            raise AuthorizationError("the server's metadata names no authorization server")
        return TokenSource(resource, (yield from self.issuer_metadata(named[0])), scopes)

    # What the server says

    def _resource_metadata(self, challenge: AuthChallenge | None) -> Flow[ProtectedResource | None]:
        """Return what the server says of itself, or None if it does not (2025-03-26).

        What is no metadata is passed over (a page for whatever is asked, a redirect, a failure), unless the challenge
        named the address.
        """
        named = None if challenge is None else challenge.parameters.get("resource_metadata")
        for url in resource_metadata_urls(self.server) if named is None else (named,):
            check_url(url, "the server's metadata")
            reply: Fetched = yield Fetch(url)
            if reply.status == 200 and (named is not None or "resource" in (object_in(reply) or ())):
                found = read_json(ProtectedResource, reply.body, f"the metadata at {shown(url)}")
                if not covers(found.resource, self.server):
                    raise AuthorizationError(
                        f"the metadata at {shown(url)} is about {shown(found.resource)}, not about "
                        f"{shown(canonical_url(self.server))}"
                    )
                return found
            if named is not None or not reply.status:
                raise AuthorizationError(f"the server's metadata at {shown(url)} {came(reply)}")
            self._note(url, reply)
        return None

    def _without_metadata(self) -> Flow[TokenSource]:
        """Ask at the server's own origin, as in 2025-03-26 ("Server Metadata Discovery", and its fallbacks)."""
        origin = origin_of(self.server)
        check_url(origin, "the server")
        found = yield from self._first(issuer_metadata_urls(origin)[:1])
        resource = canonical_url(self.server)
        if found is not None:
            server, _ = found
            check_url(server.issuer, "the authorization server")
            if origin_of(server.issuer) != origin:
                raise AuthorizationError(f"the metadata of {shown(origin)} says that it is of {shown(server.issuer)}")
            return TokenSource(resource, self._checked(server, pkce=False))
        server = AuthorizationServer(origin, f"{origin}/authorize", f"{origin}/token", f"{origin}/register")
        return TokenSource(resource, server, guessed=True)

    # What an authorization server says

    def issuer_metadata(self, issuer: str, at: str | None = None) -> Flow[AuthorizationServer]:
        """Return what an authorization server says of itself."""
        check_url(issuer, "the authorization server")
        if at is not None:
            check_url(at, "its metadata")
        found = yield from self._first(issuer_metadata_urls(issuer) if at is None else (at,))
        if found is None:
            notes = f" ({'; '.join(self.notes)})" if self.notes else ""
            raise AuthorizationError(f"the authorization server {shown(issuer)} publishes no metadata{notes}")
        server, _ = found
        if not same_issuer(server.issuer, issuer):  # RFC 8414 section 3.3
            raise AuthorizationError(
                f"the metadata of {shown(issuer)} says that it is of {shown(server.issuer)}; nothing in it is used. If "
                f"that is who is meant, say so: issuer= (trimcp login --issuer {shown(server.issuer)})"
            )
        return self._checked(server) if at is None else self._elsewhere(server, at)

    def _pinned(self, issuer: str, named: tuple[str, ...]) -> Flow[tuple[AuthorizationServer, str | None] | None]:
        """Return what is said by the issuer that was pinned, and where that lies if not at its own address.

        Its own address comes first, whatever the server names: else whoever the server names could say to be it.
        """
        check_url(issuer, "the authorization server")
        if any(same_issuer(one, issuer) for one in named):
            return (yield from self.issuer_metadata(issuer)), None
        found = yield from self._first(issuer_metadata_urls(issuer), needed=False)
        if found is not None and same_issuer(found[0].issuer, issuer):
            return self._checked(found[0]), None
        others = []
        for other in named[:_MOST_NAMED]:
            check_url(other, "the authorization server")
            found = yield from self._first(issuer_metadata_urls(other))
            if found is not None and same_issuer(found[0].issuer, issuer):
                server, at = found
                return self._elsewhere(server, at), at
            others.append(shown(other if found is None else found[0].issuer))
        if not others:
            return None
        raise AuthorizationError(
            f"the server now names the authorization server {' or '.join(dict.fromkeys(others))}, but the client is "
            f"registered with {shown(issuer)}: register it with the new one"
        )

    def _elsewhere(self, server: AuthorizationServer, at: str) -> AuthorizationServer:
        """Check metadata that does not lie at its issuer's address: anybody could say to be that issuer.

        So all its endpoints are in one place, or a code of one would be shown to another (RFC 9700 section 4.4). And
        what others could use in the client's name is shown only at the issuer's own origin.
        """
        origins = {origin_of(url) for name in _ENDPOINTS if (url := getattr(server, name)) and secure_url(url)}
        allowed = [origin_of(server.issuer)] if self.secret else [origin_of(server.issuer), origin_of(at)]
        if len(origins) > 1 or not origins.issubset(allowed):
            raise AuthorizationError(
                f"the metadata of {shown(server.issuer)} lies at {shown(at)}, and its endpoints are elsewhere: "
                f"{', '.join(map(shown, sorted(origins)))}; nothing in it is used"
            )
        return self._checked(server)

    def _first(self, urls: tuple[str, ...], *, needed: bool = True) -> Flow[tuple[AuthorizationServer, str] | None]:
        """Return the first metadata of an authorization server at these addresses, and where it was.

        Pages for whatever is asked, redirects and failures are passed over. Who cannot be reached at all is an error,
        where it is `needed`.
        """
        for url in urls:
            reply: Fetched = yield Fetch(url)
            if reply.status == 200 and "issuer" in (object_in(reply) or ()):
                return read_json(AuthorizationServer, reply.body, f"the metadata at {shown(url)}"), url
            if not reply.status and needed:
                raise AuthorizationError(f"the metadata at {shown(url)} {came(reply)}")
            self._note(url, reply)
            if not reply.status:
                break
        return None

    def _note(self, url: str, reply: Fetched) -> None:
        if reply.status != 404:
            self.notes.append(f"{shown(url)} {came(reply)}")

    def _checked(self, server: AuthorizationServer, *, pkce: bool = True) -> AuthorizationServer:
        if pkce and self.pkce and "S256" not in (server.code_challenge_methods_supported or ()):
            raise AuthorizationError(f"the authorization server {shown(server.issuer)} does not support PKCE with S256")
        for name in _ENDPOINTS:
            if url := getattr(server, name):
                check_url(url, f"the {name.replace('_', ' ')} of {shown(server.issuer)}")
        return server


def check_url(url: str, what: str) -> None:
    """Check that secrets may be sent to a URL. Raises AuthorizationError: it could be overheard."""
    if not secure_url(url):
        raise AuthorizationError(f"{what} is at {shown(url)}, which is neither https nor on this machine")
