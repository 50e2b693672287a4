"""Who we are on a connection: what both eras tell the peer about us."""

from __future__ import annotations

from enum import Enum

import attrs
import orjson

from trimcp.wire.capabilities import ClientCapabilities, ServerCapabilities
from trimcp.wire.common import Implementation
from trimcp.wire.revisions import REVISIONS, Revision

__all__ = ["Profile", "Role"]


class Role(Enum):
    """Which side of a connection an engine is. The laws are the same; only what may be asked differs."""

    CLIENT = "client"
    SERVER = "server"


@attrs.define(eq=False)
class Profile:
    """Our own introduction, shared by all connections of one server or client and read at every handshake.

    Attributes:
        info: our name and version.
        capabilities: what we can do; replaced, never changed in place, when it grows.
        instructions: a server's advice to the model on how to use it, or None.
        revisions: the revisions we are willing to speak, oldest first.
        named: `info` as JSON text, by revision; filled as needed.
        discover_ttl_ms: for how many milliseconds a client may keep what `server/discover` said.
    """

    info: Implementation
    capabilities: ClientCapabilities | ServerCapabilities
    instructions: str | None = None
    revisions: tuple[Revision, ...] = REVISIONS
    discover_ttl_ms: int = 0
    named: dict[Revision, tuple[Implementation, orjson.Fragment]] = attrs.field(init=False, factory=dict, repr=False)
