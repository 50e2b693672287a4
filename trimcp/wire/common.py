"""Types shared by the payloads of every feature: `_meta`, names, icons, pages, base classes of params and results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal, TypeAlias, get_args

import attrs

from trimcp.support.slotted import valued
from trimcp.wire.fields import ABSENT, field, wire
from trimcp.wire.revisions import V2025_06_18, V2025_11_25, V2026_07_28

Meta: TypeAlias = dict[str, Any]
"""A `_meta` object, as JSON."""
ProgressToken: TypeAlias = str | int
Role: TypeAlias = Literal["user", "assistant"]
LoggingLevel: TypeAlias = Literal["debug", "info", "notice", "warning", "error", "critical", "alert", "emergency"]
SEVERITY: Final = {level: rank for rank, level in enumerate(get_args(LoggingLevel))}
"""The rank of each level, 0 for "debug" (RFC 5424, most severe last)."""
CacheScope: TypeAlias = Literal["public", "private"]

META_PROGRESS_TOKEN: Final = "progressToken"
META_PROTOCOL_VERSION: Final = "io.modelcontextprotocol/protocolVersion"
META_CLIENT_CAPABILITIES: Final = "io.modelcontextprotocol/clientCapabilities"
META_CLIENT_INFO: Final = "io.modelcontextprotocol/clientInfo"
META_LOG_LEVEL: Final = "io.modelcontextprotocol/logLevel"
META_SERVER_INFO: Final = "io.modelcontextprotocol/serverInfo"
META_SUBSCRIPTION_ID: Final = "io.modelcontextprotocol/subscriptionId"
META_TIMEOUT: Final = "trimcp/timeout"
"""A key of trimcp: the seconds for which the caller still waits for the answer, so that no work is done in vain."""
META_PROGRESS: Final = "trimcp/progress"
"""A key of trimcp: the progress behind the status message of a task, as numbers."""
META_TRACE: Final = ("traceparent", "tracestate", "baggage")
"""The W3C trace context. Only these three keys need no prefix (basic, "_meta")."""

REJECTED: Final = "_rejected"
"""The attribute of a loaded result behind `Result.rejected`. It is no member: neither compared nor dumped."""
RESULT_COMPLETE: Final = "complete"
RESULT_INPUT_REQUIRED: Final = "input_required"
RESULT_TASK: Final = "task"


def only_object(value: Any) -> Any:
    """For `field(narrow=...)`: return the value if it is a JSON object, else `ABSENT`."""
    return value if isinstance(value, dict) else ABSENT


@wire
class Annotations:
    """Hints for displaying or ranking a piece of content (server/resources, "Annotations")."""

    audience: list[Role] | None = field(default=None)
    priority: float | None = field(default=None)
    last_modified: str | None = field(default=None, since=V2025_06_18)


@wire(since=V2025_11_25)
class Icon:
    """An icon: its URL (`https:` or `data:`), and what is known about it."""

    src: str
    mime_type: str | None = field(default=None)
    sizes: list[str] | None = field(default=None)
    theme: Literal["light", "dark"] | None = field(default=None)


@wire
class Implementation:
    """The name and version of a program, as sent by itself: for display, never for decisions."""

    name: str
    version: str
    title: str | None = field(default=None, since=V2025_06_18)
    description: str | None = field(default=None, since=V2025_11_25)
    icons: list[Icon] | None = field(default=None, since=V2025_11_25)
    website_url: str | None = field(default=None, since=V2025_11_25)


@wire
class Params:
    """Base class of all params: `_meta`, raw, which the protocol engine sets and checks."""

    meta: Meta | None = field(default=None, kw_only=True)


@wire
class RequestParams(Params):
    """The params of a request without params of its own: `ping`, `server/discover`, `roots/list`."""

    extra: dict[str, Any] = field(factory=dict, kw_only=True)


@wire
class NotificationParams(Params):
    """The params of a notification without params of its own: `initialized`, `list_changed`."""

    extra: dict[str, Any] = field(factory=dict, kw_only=True)


@wire
class PageParams(Params):
    """The params of every list request: a cursor (server/utilities/pagination)."""

    cursor: str | None = field(default=None)


@attrs.frozen
@valued
class Unreadable:
    """A member of a list in a server's result that could not be read, and was left out.

    Attributes:
        place: where it was, such as `tools[8]`; the name of the list alone for members that are only counted.
        name: its name or URI, cut to 200 characters; None if it has none. Untrusted text.
        reason: what is wrong with it: member names and JSON types, no values.
    """

    place: str
    name: str | None
    reason: str


@wire
class Result:
    """Base class of all results: `_meta` and, since 2026-07-28, the result type."""

    meta: Meta | None = field(default=None, kw_only=True)
    result_type: str = field(default=RESULT_COMPLETE, since=V2026_07_28, required_from=V2026_07_28, kw_only=True)

    @property
    def rejected(self) -> Sequence[Unreadable]:
        """What a client left out of the result because it could not be read; nearly always nothing."""
        found: Sequence[Unreadable] = vars(self).get(REJECTED, ())
        return found


@wire
class EmptyResult(Result):
    """A result without members of its own; other members that a peer sends are kept in `extra`."""

    extra: dict[str, Any] = field(factory=dict, kw_only=True)


@wire
class Cacheable(Result):
    """A result that a client may cache: for how many milliseconds, and for whom (server/utilities/caching).

    The schema requires both members. The page says what their absence means to clients: stale at once, and private.
    """

    ttl_ms: int = field(default=0, since=V2026_07_28, kw_only=True)
    cache_scope: CacheScope = field(default="private", since=V2026_07_28, kw_only=True)
