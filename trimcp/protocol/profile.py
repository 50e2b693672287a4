"""Who we are on a connection: what both eras tell the peer about us."""

from __future__ import annotations

from enum import Enum
from typing import Any

import attrs
import orjson

from trimcp.wire.capabilities import ClientCapabilities, ServerCapabilities
from trimcp.wire.common import Implementation
from trimcp.wire.revisions import REVISIONS, Revision

__all__ = ["Heard", "Profile", "Role"]


class Role(Enum):
    """Which side of a connection an engine is. The laws are the same; only what may be asked differs."""

    CLIENT = "client"
    SERVER = "server"


def _all_revisions(profile: Profile, attribute: Any, revisions: tuple[Any, ...]) -> None:
    for each in revisions:
        if not isinstance(each, Revision):
            raise TypeError(f"revisions are members of trimcp.REVISIONS, not {each!r}")


@attrs.define(eq=False, repr=False)
class Heard:
    """What was loaded last, each with what it was loaded from."""

    capabilities: tuple[Any, ClientCapabilities] | None = None
    info: tuple[Any, Implementation] | None = None


@attrs.define(eq=False, repr=False)
class Profile:
    """Our own introduction, shared by all connections of one server or client and read at every handshake.

    Attributes:
        info: our name and version.
        capabilities: what we can do; replaced, never changed in place, when it grows.
        instructions: a server's advice to the model on how to use it, or None.
        revisions: the revisions we are willing to speak, oldest first.
        discover_ttl_ms: for how many milliseconds a client may keep what `server/discover` said.
        max_peer_info: bytes of memory that may be kept of how the peer introduces itself.
        legacy, modern: those of `revisions` that belong to either era, since every request asks.
        named: `info` as JSON text, by revision; filled as needed.
        heard: the last capabilities and the last name that a peer's envelope brought, raw and loaded. Clients say the
            same with each request, and over HTTP each of those may be a connection of its own.
    """

    info: Implementation
    capabilities: ClientCapabilities | ServerCapabilities
    instructions: str | None = None
    revisions: tuple[Revision, ...] = attrs.field(default=REVISIONS, validator=_all_revisions)
    discover_ttl_ms: int = 0
    max_peer_info: int = 64 * 1024
    legacy: tuple[Revision, ...] = attrs.field(init=False, repr=False)
    modern: tuple[Revision, ...] = attrs.field(init=False, repr=False)
    named: dict[Revision, tuple[Implementation, orjson.Fragment]] = attrs.field(init=False, factory=dict, repr=False)
    heard: Heard = attrs.field(init=False, factory=Heard, repr=False)

    def __attrs_post_init__(self) -> None:
        self.legacy = tuple(r for r in self.revisions if not r.modern)
        self.modern = tuple(r for r in self.revisions if r.modern)
