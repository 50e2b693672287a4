"""The five dated revisions of the specification, and their differences in behaviour, as data.

Which methods, fields and content types a revision has is declared with those; this module has the switches.
To add a sixth revision, begin with one more constant in this file.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import Enum
from typing import Final

import attrs

from trimcp.errors import LocalError


class Era(Enum):
    """The two protocol eras, named as in the specification (basic/versioning)."""

    LEGACY = "legacy"
    """A handshake (`initialize`) fixes revision and capabilities for the whole connection."""
    MODERN = "modern"
    """No handshake: every request carries revision and capabilities in its `_meta`."""


def _switch(default: bool = False) -> bool:
    value: bool = attrs.field(default=default, kw_only=True)
    return value


def _date(value: object) -> str:
    """Return a date that a revision is compared with. Raises TypeError for any other value."""
    if isinstance(value, str) and re.fullmatch(r"\d{4}-\d\d-\d\d", value):
        return value
    raise TypeError(f"a revision is compared with a revision or a date such as '2025-06-18', not {value!r:.60}")


@attrs.frozen(eq=False, repr=False)
class Revision:
    """One dated revision. Compares by age, also with a date as text: `V2025_03_26 < V2025_06_18 == "2025-06-18"`.

    Attributes:
        name: the date that names it on the wire.
        era: its era; `modern` is whether that is the modern one.
        batching: a JSON array of messages is allowed (2025-03-26 alone).
        sessions: Streamable HTTP keeps sessions, `Mcp-Session-Id` (basic/transports).
        resumable: Streamable HTTP events have ids and can be replayed with `Last-Event-ID`.
        priming_event: an SSE stream begins with an empty event that has an id, and may be closed early.
        version_header: HTTP requests after the handshake carry `MCP-Protocol-Version`.
        method_headers: HTTP requests carry `Mcp-Method`, `Mcp-Name` and the headers that tools require.
        disconnect_cancels: on HTTP, a closed connection means that the caller cancelled. On Streamable HTTP it
            SHOULD NOT until 2025-11-25. In 2024-11-05 the stream is the session, later the request.
        server_may_call: the server may send requests (sampling, elicitation, roots, ping).
        error_without_id: an error omits `id` if the request's id could not be read; otherwise it is null.
        invalid_arguments_are_tool_errors: arguments that do not match a tool's schema are reported to the model as
            a tool error instead of -32602 (SEP-1303).
        logs_on_request: log messages are sent only for requests with a level in `_meta`; otherwise the level is the
            connection's (`logging/setLevel`) and the server may choose one until it is set.
        tasks: the extension "Tasks" is defined for it. In others, a client that declares it gets none.
        url_elicitation_error: -32042 may answer a request that needs the user to visit a URL first.
        resource_missing_code: the error code for a resource that does not exist.
    """

    name: str
    era: Era = Era.LEGACY
    batching: bool = _switch()
    sessions: bool = _switch()
    resumable: bool = _switch()
    priming_event: bool = _switch()
    version_header: bool = _switch()
    method_headers: bool = _switch()
    disconnect_cancels: bool = _switch()
    server_may_call: bool = _switch(True)
    error_without_id: bool = _switch()
    invalid_arguments_are_tool_errors: bool = _switch()
    logs_on_request: bool = _switch()
    tasks: bool = _switch()
    url_elicitation_error: bool = _switch()
    resource_missing_code: int = attrs.field(default=-32002, kw_only=True)
    modern: bool = attrs.field(
        init=False, default=attrs.Factory(lambda revision: revision.era is Era.MODERN, takes_self=True)
    )

    def __eq__(self, other: object) -> bool:
        return self.name == (other.name if isinstance(other, Revision) else other)

    def __hash__(self) -> int:
        return hash(self.name)

    def __lt__(self, other: Revision | str) -> bool:
        return self.name < (other.name if isinstance(other, Revision) else _date(other))

    def __le__(self, other: Revision | str) -> bool:
        return self.name <= (other.name if isinstance(other, Revision) else _date(other))

    def __gt__(self, other: Revision | str) -> bool:
        return self.name > (other.name if isinstance(other, Revision) else _date(other))

    def __ge__(self, other: Revision | str) -> bool:
        return self.name >= (other.name if isinstance(other, Revision) else _date(other))

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"<Revision {self.name}>"


V2024_11_05: Final = Revision("2024-11-05", disconnect_cancels=True)
V2025_03_26: Final = Revision("2025-03-26", batching=True, sessions=True, resumable=True)
V2025_06_18: Final = Revision("2025-06-18", sessions=True, resumable=True, version_header=True)
V2025_11_25: Final = Revision(
    "2025-11-25",
    sessions=True,
    resumable=True,
    priming_event=True,
    version_header=True,
    error_without_id=True,
    invalid_arguments_are_tool_errors=True,
    url_elicitation_error=True,
)
V2026_07_28: Final = Revision(
    "2026-07-28",
    Era.MODERN,
    version_header=True,
    method_headers=True,
    disconnect_cancels=True,
    server_may_call=False,
    error_without_id=True,
    invalid_arguments_are_tool_errors=True,
    logs_on_request=True,
    tasks=True,
    resource_missing_code=-32602,
)

REVISIONS: Final = (V2024_11_05, V2025_03_26, V2025_06_18, V2025_11_25, V2026_07_28)
"""Every revision trimcp supports, oldest first."""

OLDEST: Final = REVISIONS[0]
LATEST: Final = REVISIONS[-1]
"""The newest revision, which both sides prefer."""
LEGACY: Final = tuple(revision for revision in REVISIONS if not revision.modern)
"""Those that begin with a handshake (`initialize`), oldest first."""
LATEST_LEGACY: Final = LEGACY[-1]
"""The revision that a legacy server offers to a client with an unknown revision (basic/lifecycle)."""
UNNAMED: Final = V2025_03_26
"""The revision of an HTTP request without `MCP-Protocol-Version` (2025-11-25 basic/transports)."""

_BY_NAME: Final = {revision.name: revision for revision in REVISIONS}


def find(name: str) -> Revision | None:
    """Return the revision of that name, or None if trimcp does not support it."""
    return _BY_NAME.get(name)


def revisions_of(given: Iterable[Revision | str]) -> tuple[Revision, ...]:
    """Return revisions, of which some may be given by name, oldest first.

    Raises TypeError: one is no revision, or it is one text instead of several. Raises ValueError: there is none.
    """
    found = []
    for each in [given] if isinstance(given, str) or not hasattr(given, "__iter__") else given:
        revision = find(each) if isinstance(each, str) else each
        if not isinstance(revision, Revision) or given is each:
            known = ", ".join(_BY_NAME)
            raise TypeError(
                f"revisions are members of trimcp.REVISIONS, not {each!r}, or their names in a list: {known}"
            )
        found.append(revision)
    if not found:
        raise ValueError("revisions are some of trimcp.REVISIONS: without any, nobody can be talked to")
    return tuple(sorted(found))


def revision_named(revision: Revision | str) -> Revision:
    """Return the revision with that name. Raises LocalError: there is none."""
    if isinstance(revision, Revision):
        return revision
    found = find(revision)
    if found is None:
        raise LocalError(f"there is no revision {revision!r}; trimcp speaks {', '.join(r.name for r in REVISIONS)}")
    return found
