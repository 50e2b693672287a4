"""What a protected resource and an authorization server say of themselves, where it is found, and their challenges.

RFC 9728 (protected resources), RFC 8414 and OpenID Connect Discovery 1.0 (authorization servers); specification,
"Authorization Server Discovery"; `WWW-Authenticate`, read and written (RFC 9110 section 11.6.1, RFC 6750 section 3).
Nothing here does input or output.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, TypeGuard, TypeVar
from urllib.parse import SplitResult, urlsplit

import attrs

from trimcp.errors import AuthorizationError
from trimcp.support.addresses import PORTS, authority, is_loopback
from trimcp.support.bounds import TOKEN

T = TypeVar("T")

RESOURCE_METADATA: Final = "/.well-known/oauth-protected-resource"
_OAUTH: Final = "/.well-known/oauth-authorization-server"
_OPENID: Final = "/.well-known/openid-configuration"


@attrs.frozen
class ProtectedResource:
    """The metadata of a protected resource (RFC 9728 section 2)."""

    resource: str  # its identifier, a URL
    authorization_servers: tuple[str, ...] = ()  # the issuers whose tokens it takes
    scopes_supported: tuple[str, ...] | None = None  # the scopes that basic use needs, or None where it does not say


@attrs.frozen
class AuthorizationServer:
    """The metadata of an authorization server (RFC 8414 section 2; OpenID Connect Discovery section 3)."""

    issuer: str  # its identifier, a URL; compared by `same_issuer`
    # `authorization_endpoint`, `token_endpoint`, `registration_endpoint`: URLs, "" where there is none
    authorization_endpoint: str = ""
    token_endpoint: str = ""
    registration_endpoint: str = ""
    # `revocation_endpoint`, `jwks_uri`: likewise
    revocation_endpoint: str = ""
    jwks_uri: str = ""
    scopes_supported: tuple[str, ...] | None = None  # the scopes it knows, or None where it does not say
    # how clients may authenticate; None stands for `client_secret_basic`
    token_endpoint_auth_methods_supported: tuple[str, ...] | None = None
    # methods of PKCE; None where it has none, or does not say
    code_challenge_methods_supported: tuple[str, ...] | None = None
    authorization_response_iss_parameter_supported: bool = False  # whether `iss` always comes back (RFC 9207)
    # whether a client id may be the URL of a document about the client
    client_id_metadata_document_supported: bool = False
    dpop_signing_alg_values_supported: tuple[str, ...] | None = None  # algorithms of proofs (RFC 9449), or None


def json_object(text: bytes | str) -> dict[str, Any] | None:
    """Return the JSON object that a text is, or None."""
    try:
        said = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return said if isinstance(said, dict) else None


def read_json(cls: type[T], body: bytes, where: str) -> T:
    """Return metadata of this class, read from a JSON object; members it does not know are ignored.

    Raises AuthorizationError: it is not such an object, or a member has the wrong type.
    """
    said = json_object(body)
    if said is None:
        raise AuthorizationError(f"{where} is not a JSON object")
    members: dict[str, Any] = {}
    for field in attrs.fields(cls):  # type: ignore[arg-type]  # one of the classes above
        value = said.get(field.name)
        if value is None:
            continue
        kind = str(field.type)
        if kind.startswith("tuple"):
            fits = isinstance(value, list) and all(isinstance(item, str) for item in value)
            value = texts_in(value) if fits else value
        else:
            fits = isinstance(value, bool) if kind == "bool" else is_text(value)
        if not fits:
            raise AuthorizationError(f"{field.name!r} of {where} has the wrong type")
        members[field.name] = value
    required = next(field.name for field in attrs.fields(cls))  # type: ignore[arg-type]  # as above
    if not members.get(required):
        raise AuthorizationError(f"{where} has no {required!r}")
    return cls(**members)


def is_text(value: object) -> TypeGuard[str]:
    """Return whether a value is text that can be sent: JSON can also hold half of a character (a lone surrogate)."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def texts_in(value: object) -> tuple[str, ...]:
    """Return the words of a text, or what is text in a list; what cannot be sent is left out."""
    said = value.split() if isinstance(value, str) else value if isinstance(value, list) else ()
    return tuple(filter(is_text, said))


# URLs


def canonical_url(url: str) -> str:
    """Return a server's URL as a resource identifier: scheme and host in lower case, nothing that says nothing.

    Without fragment, credentials and default port, and without a path that is only "/" (specification, "Canonical
    Server URI"; RFC 8707 section 2).
    """
    parts = urlsplit(url)
    path = "" if parts.path == "/" and not parts.query else parts.path
    return parts._replace(scheme=parts.scheme.lower(), netloc=_host(parts), path=path, fragment="").geturl()


def origin_of(url: str) -> str:
    """Return the scheme, host and port of a URL."""
    parts = urlsplit(url)
    return f"{parts.scheme.lower()}://{_host(parts)}"


def _host(parts: SplitResult) -> str:
    return authority((parts.hostname or "").lower(), parts.port, PORTS.get(parts.scheme.lower()))


def host_of(url: str) -> str:
    """Return the host of a URL, in lower case; "" where it has none."""
    return urlsplit(url).hostname or ""


def secure_url(url: str) -> bool:
    """Return whether a URL may carry secrets: it is https, or http on this machine (OAuth 2.1 section 1.5)."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        return False
    if not url.isascii() or not url.isprintable() or " " in url:
        return False  # it may be printed, and is no URL
    if not host or parts.username is not None or parts.password is not None:
        return False
    return parts.scheme == "https" or (parts.scheme == "http" and is_loopback(host))


def covers(resource: str, server: str) -> bool:
    """Return whether a resource identifier is that of a server's URL, or of what contains it.

    It is the URL, or has the same origin and is a whole beginning of the path: a server at "/mcp" may belong to a
    resource that is the whole host (RFC 9728 section 3.3; RFC 8707 section 2). One slash at the end of either makes no
    difference.
    """
    try:
        resource, server = [canonical_url(url).removesuffix("/") for url in (resource, server)]
    except ValueError:
        return False
    return resource == server or server.startswith(resource + "/")


def issuer_name(issuer: str) -> str:
    """Return an issuer without a slash that is all of its path; anything else is left as it is.

    RFC 8414 compares character by character, but URLs with an empty path and with "/" are the same (RFC 3986 section
    6.2.3), and large servers write one here and the other there.
    """
    try:
        parts = urlsplit(issuer)
    except ValueError:
        return issuer
    is_url = parts.scheme in ("http", "https") and bool(parts.netloc) and issuer.isprintable()
    alone = parts.path == "/" and not parts.query and not parts.fragment
    return issuer[:-1] if is_url and alone and issuer.endswith("/") else issuer


def same_issuer(one: str, other: str) -> bool:
    """Return whether two issuers are the same, but for a slash that is all of the path."""
    return issuer_name(one) == issuer_name(other)


def resource_metadata_urls(server: str) -> tuple[str, ...]:
    """Return where the metadata of a server may stand that does not say so, in the order to ask (RFC 9728, 3.1)."""
    path = urlsplit(server).path.rstrip("/")
    root = origin_of(server) + RESOURCE_METADATA
    return (root + path, root) if path else (root,)


def issuer_metadata_urls(issuer: str) -> tuple[str, ...]:
    """Return where the metadata of an issuer may stand, in the order to ask (RFC 8414 section 3.1 and 5)."""
    path = urlsplit(issuer).path.rstrip("/")
    origin = origin_of(issuer)
    if not path:
        return (origin + _OAUTH, origin + _OPENID)
    return (origin + _OAUTH + path, origin + _OPENID + path, origin + path + _OPENID)


_MAX_HEADER: Final = 16 * 1024
# What may come next: a parameter (name=token or name="text"), the beginning of a challenge (a scheme, perhaps with a
# token68), or a comma. Some servers forget it between parameters, write a semicolon, or leave a URL without quotes.
_NEXT: Final = re.compile(
    rf"[ \t]*(?:(?P<name>{TOKEN})[ \t]*=[ \t]*(?:\"(?P<text>(?:[^\"\\]|\\.)*)\"|(?P<token>[^ \t,;\"]+))"
    rf"|(?P<scheme>{TOKEN})(?:[ \t]+(?P<token68>[A-Za-z0-9._~+/-]+=*)[ \t]*(?=,|\Z))?(?=[ \t,;]|\Z)"
    r"|(?P<comma>[,;]))",
    re.ASCII | re.DOTALL,
)
_ESCAPED: Final = re.compile(r"\\(.)", re.DOTALL)


@attrs.frozen
class AuthChallenge:
    """One challenge of a 401 or 403."""

    scheme: str  # in lower case, such as "bearer"
    # by name in lower case. Untrusted text.
    parameters: Mapping[str, str] = attrs.field(factory=lambda: MappingProxyType({}))

    @property
    def scopes(self) -> tuple[str, ...]:
        """The scopes it asks for; none where it names none."""
        return tuple(self.parameters.get("scope", "").split())


def parse_challenges(header: str) -> tuple[AuthChallenge, ...]:
    """Return the challenges that a header holds, as far as it can be read.

    `header`: its value; several headers joined with commas. What follows the first 16 KiB is not read.
    """
    found: list[tuple[str, dict[str, str]]] = []
    at, header = 0, header[:_MAX_HEADER]
    while (match := _NEXT.match(header, at)) is not None and match.end() > at:
        at = match.end()
        if (scheme := match["scheme"]) is not None:
            found.append((scheme.lower(), {}))
        elif (name := match["name"]) is not None and found:
            text = match["token"] if match["text"] is None else _ESCAPED.sub(r"\1", match["text"])
            found[-1][1].setdefault(name.lower(), text)
    return tuple(AuthChallenge(scheme, MappingProxyType(parameters)) for scheme, parameters in found)


def find_challenge(header: str) -> AuthChallenge | None:
    """Return the challenge for DPoP that a header has, else the one for a bearer token, or None."""
    challenges = parse_challenges(header)
    return next((found for scheme in ("dpop", "bearer") for found in challenges if found.scheme == scheme), None)


def challenge_text(scheme: str, parameters: Mapping[str, str | None]) -> str:
    """Return the value of a `WWW-Authenticate` header; parameters that are None are left out.

    Raises ValueError: a parameter holds what cannot stand in a header.
    """
    pairs = []
    for name, text in parameters.items():
        if text is None:
            continue
        if not text.isprintable() or not text.isascii():
            raise ValueError(f"{name} of a challenge is printable ASCII")
        escaped = text.replace("\\", "\\\\").replace('"', '\\"')
        pairs.append(f'{name}="{escaped}"')
    return f"{scheme} {', '.join(pairs)}".rstrip()
