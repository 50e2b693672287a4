"""What our own requests repeat in headers where the channel carries them (2026-07-28 streamable-http).

Only requests of a session whose channel says `mirrors_headers` come here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trimcp.framing.headers import request_headers
from trimcp.protocol.vocabulary import Verb
from trimcp.wire.revisions import Revision

__all__ = ["mirrored"]


def mirrored(
    revision: Revision | None, verb: Verb, params: Any, more: Mapping[str, str] | None = None
) -> Mapping[str, str] | None:
    """Return the headers of a request, or what was given in revisions that repeat nothing.

    Args:
        revision: what it is spoken in.
        verb: its method.
        params: its payload, or None.
        more: what it carries besides, such as repeated arguments.

    Raises:
        LocalError: its name cannot be put in a header.
    """
    if revision is None or not revision.method_headers:
        return more
    name = None if verb.method.mirrored is None else getattr(params, verb.method.mirrored)
    return {**request_headers(revision.name, verb.name, name), **(more or {})}
