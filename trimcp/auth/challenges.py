"""`WWW-Authenticate`, read and written (RFC 9110 section 11.6.1; RFC 6750 section 3)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final

import attrs

_MAX_HEADER: Final = 16 * 1024
_TOKEN: Final = r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
# What may come next: a parameter (name=token or name="text"), the beginning of a challenge (a scheme, perhaps with a
# token68), or a comma. Some servers forget it between parameters, write a semicolon, or leave a URL without quotes.
_NEXT: Final = re.compile(
    rf"[ \t]*(?:(?P<name>{_TOKEN})[ \t]*=[ \t]*(?:\"(?P<text>(?:[^\"\\]|\\.)*)\"|(?P<token>[^ \t,;\"]+))"
    rf"|(?P<scheme>{_TOKEN})(?:[ \t]+(?P<token68>[A-Za-z0-9._~+/-]+=*)[ \t]*(?=,|\Z))?(?=[ \t,;]|\Z)"
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


def find_challenge(header: str, schemes: Iterable[str] = ("dpop", "bearer")) -> AuthChallenge | None:
    """Return the challenge for the first of these schemes that a header has one for, or None."""
    challenges = parse_challenges(header)
    return next((found for scheme in schemes for found in challenges if found.scheme == scheme), None)


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
