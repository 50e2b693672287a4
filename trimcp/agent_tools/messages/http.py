"""Messages as requests of HTTP: which method and path each has, and where its members stand. Both sides go by this.

An update names the version that it changes in the header If-Match; every other member stands where its form says.
"""

from __future__ import annotations

from typing import Final

import attrs

from trimcp.agent_tools.messages import messages

MERGE_PATCH: Final = "application/merge-patch+json"
"""The content type of an update's body (RFC 7396)."""


@attrs.frozen(eq=False)
class HttpForm:
    """How a message is a request."""

    cls: type[messages.AgentMessage]
    method: str
    path: str  # all of it, or what is before `named`
    named: str = ""  # the member that the path goes on with, which may have slashes of its own; "" for none
    after: str = ""  # what follows that
    query: tuple[str, ...] = ()  # members in the query
    body: str = ""  # the member that is the body; "*" for an object of all members, "" for no body
    repeatable: bool = False  # it may be carried out twice


FORMS: Final = (
    HttpForm(messages.ToolRequest, "POST", "/tools/call", body="*"),
    HttpForm(messages.RegisterTool, "POST", "/tools/register", body="tool"),
    HttpForm(messages.ListTools, "GET", "/tools/", "name", query=("version",), repeatable=True),
    HttpForm(messages.ListTools, "GET", "/tools", query=("name", "version"), repeatable=True),
    HttpForm(messages.RemoveTool, "DELETE", "/tools/", "name", query=("version",)),
    HttpForm(messages.ContextCreate, "POST", "/contexts", body="*"),
    HttpForm(messages.ContextRead, "GET", "/contexts/", "context_id", repeatable=True),
    HttpForm(messages.ContextUpdate, "PATCH", "/contexts/", "context_id", body="updates"),
    HttpForm(messages.ContextDestroy, "DELETE", "/contexts/", "context_id", query=("reason",), repeatable=True),
    HttpForm(messages.ContextDestroy, "DELETE", "/contexts", query=("session_id", "reason"), repeatable=True),
    HttpForm(messages.ContextWatch, "GET", "/contexts/", "context_id", "/events", repeatable=True),
)
"""Every form; of a message with two the first that has what it is named by."""


def form_of(message: messages.AgentMessage) -> HttpForm | None:
    """Return the form of a message, or None if it has none."""
    for form in FORMS:
        if form.cls is type(message) and (not form.named or getattr(message, form.named) is not None):
            return form
    return None
