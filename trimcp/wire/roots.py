"""Roots: which places a client works on (client/roots)."""

from __future__ import annotations

from typing import Literal

from trimcp.wire.common import Meta, NotificationParams, RequestParams
from trimcp.wire.fields import ABSENT, Absent, field, wire
from trimcp.wire.revisions import V2025_06_18, V2026_07_28

__all__ = ["ListRootsParams", "ListRootsRequest", "ListRootsResult", "Root", "RootsListChangedParams"]


@wire
class Root:
    """A place a server may work in; a `file://` address for now."""

    uri: str
    name: str | Absent = field(default=ABSENT)
    meta: Meta | Absent = field(default=ABSENT, since=V2025_06_18)


ListRootsParams = RequestParams


@wire
class ListRootsResult:
    """The client's roots."""

    roots: list[Root]
    meta: Meta | Absent = field(default=ABSENT, until=V2026_07_28)


@wire(since=V2026_07_28)
class ListRootsRequest:
    """The question as it stands inside an `InputRequiredResult`."""

    params: RequestParams | Absent = field(default=ABSENT)
    method: Literal["roots/list"] = field(default="roots/list", required=True)


RootsListChangedParams = NotificationParams
