"""Which of several servers behind a balancer answered, by what its answers say.

A client sees no balancer: it knows a replica only by a header that the balancer or the server puts into each response,
by the name and version that the server gives of itself, or by a member of `_meta` in its results.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from trimcp.wire.common import META_SERVER_INFO

UNTOLD: Final = "not told"
"""Whoever answered, where the answer does not say so, or there is none."""

_SERVER_INFO: Final = "serverInfo"
_META: Final = "_meta:"


def reads_header(by: str | None) -> bool:
    """Whether a response header tells replicas apart."""
    return by is not None and by != _SERVER_INFO and not by.startswith(_META)


def named_by_headers(by: str | None, headers: Mapping[str, str]) -> str | None:
    """Return the replica that response headers, by lower-case name, tell of."""
    return headers.get((by or "").lower()) if reads_header(by) else None


def named_by_message(by: str | None, message: Mapping[str, Any]) -> str | None:
    """Return the replica that a response tells of: a result's `_meta`, or the `serverInfo` of `initialize`."""
    result = message.get("result")
    if by is None or reads_header(by) or not isinstance(result, dict):
        return None
    meta = result.get("_meta")
    told = meta if isinstance(meta, dict) else {}
    if by != _SERVER_INFO:
        value = told.get(by.removeprefix(_META))
        return value if value is None or isinstance(value, str) else json.dumps(value)
    info = told.get(META_SERVER_INFO) or result.get(_SERVER_INFO)
    return f"{info.get('name')} {info.get('version') or ''}".strip() if isinstance(info, dict) else None
