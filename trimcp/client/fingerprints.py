"""What tells one listing of a tool from another, so that a change after its approval does not go unseen."""

from __future__ import annotations

import hashlib
from typing import Final

import orjson

from trimcp.wire.converter import converter_for
from trimcp.wire.revisions import LATEST
from trimcp.wire.tools import Tool

__all__ = ["fingerprint"]

_NO_PART: Final = ("_meta", "icons")


def fingerprint(tool: Tool) -> str:
    """Return a digest of everything a tool's listing says to a model or a user: name, texts, schemas and hints.

    Keep it when the user approves a tool, and compare it before each call: a server may change what it says of a tool
    once it is trusted. The order of members does not count, nor do icons and `_meta`. Compare only what was listed in
    the same revision: older ones leave members out.

    Args:
        tool: as the server lists it.
    """
    listed = {name: value for name, value in converter_for(LATEST).dump(tool).items() if name not in _NO_PART}
    return f"sha256:{hashlib.sha256(orjson.dumps(listed, option=orjson.OPT_SORT_KEYS)).hexdigest()}"
