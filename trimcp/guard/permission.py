"""Who may use a tool, resource, prompt or completion: by their token's scopes, and by a function of the request."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from inspect import isawaitable
from typing import Any, Final, Literal, TypeAlias

import attrs

from trimcp.errors import ErrorReply
from trimcp.guard.confirmation import Confirmation
from trimcp.principal import Principal
from trimcp.security import security_event
from trimcp.session.context import Context
from trimcp.wire.codes import FORBIDDEN
from trimcp.wire.tools import Tool, ToolAnnotations

_NO_ARGUMENTS: Final[Mapping[str, Any]] = {}


@attrs.frozen
class AccessRequest:
    """A request on which an `allow` function decides.

    Attributes:
        method: "tools/call", "resources/read", "prompts/get" or "completion/complete".
        name: of the tool or prompt, or the URI.
        principal: who asks; None where nobody is asked who they are.
        arguments: that the request has; of a tool they are valid.
        annotations: hints on what a tool does, where it has them.
        context: the request's.
    """

    method: str
    name: str
    principal: Principal | None
    arguments: Mapping[str, Any]
    annotations: ToolAnnotations | None
    context: Context[Any] = attrs.field(repr=False)


@attrs.frozen
class Denied:
    """What an `allow` function returns to deny a request: why, in one line that the client is told."""

    reason: str = "this is not allowed"


ASK: Final = "ask"
"""What an `allow` function returns to have the user asked first: of tools, by a confirmation."""

Decision: TypeAlias = bool | Denied | Literal["ask"]
"""What an `allow` function returns: True, False, `Denied("why")`, or `ASK`."""

Allow: TypeAlias = Callable[[AccessRequest], Decision | Awaitable[Decision]]
"""Decides on a request, sync or async: True, False, `Denied("why")`, or `ASK`. What it raises denies the request."""


@attrs.frozen(eq=False)
class Permission:
    """What somebody needs to use one tool, resource, prompt or completion.

    Attributes:
        scopes: all of which a token has to have. Without them it does not stand in the list either.
        allow: decides on each request, after the scopes.
        confirmation: asks the user where `allow` wants it; tools only.
    """

    scopes: frozenset[str] = frozenset()
    allow: Allow | None = None
    confirmation: Confirmation | None = None

    def shown_to(self, principal: Principal | None) -> bool:
        """Return whether somebody may see that it exists."""
        return principal is None or principal.may(self.scopes)

    def check_scopes(self, ctx: Context[Any], name: str) -> None:
        """Refuse a request whose token lacks scopes.

        Raises:
            ErrorReply: with all scopes that it needs in `data`; over HTTP it is a 403 (RFC 6750 section 3.1).
        """
        principal = ctx.principal
        if not self.shown_to(principal):
            wanted = sorted(self.scopes)
            security_event("not_allowed", method=ctx.method, name=name, principal=principal, scopes=" ".join(wanted))
            raise ErrorReply(FORBIDDEN, f"this needs the scopes {' '.join(wanted)}", {"requiredScopes": wanted})

    async def obtain(self, ctx: Context[Any], name: str, arguments: Mapping[str, Any] = _NO_ARGUMENTS) -> None:
        """Return once a request is allowed.

        Raises:
            ErrorReply: it is not.
            ToolError, CannotAsk: the user was asked; see `Confirmation.obtain`.
        """
        if self.allow is None:
            return
        confirmation = self.confirmation
        hints = None if confirmation is None else confirmation.tool.annotations or None
        asked = AccessRequest(ctx.method, name, ctx.principal, arguments, hints, ctx)
        found = self.allow(asked)
        decision: Any = await found if isawaitable(found) else found
        if decision is True:
            return
        if decision == ASK and confirmation is not None:
            await confirmation.obtain(ctx, arguments)
            return
        if decision is not False and not isinstance(decision, Denied):
            raise TypeError(f"allow returned {decision!r:.60} for {name}: it decides by True, False, Denied or ASK")
        reason = decision.reason if isinstance(decision, Denied) else Denied().reason
        security_event("not_allowed", method=ctx.method, name=name, principal=ctx.principal, why=reason)
        raise ErrorReply(FORBIDDEN, reason)


def permission_of(
    scopes: Iterable[str] | None,
    allow: Allow | None,
    tool: Tool | None = None,
    confirmation: Confirmation | None = None,
) -> Permission | None:
    """Return what is needed to use something, or None where everybody may.

    Args:
        scopes, allow: see `Permission`.
        tool: the tool that it is, to ask its user.
        confirmation: what asks already.

    Raises:
        TypeError: the scopes are one text, or `allow` cannot be called.
    """
    if isinstance(scopes, str):
        raise TypeError(f"scopes is a list of scopes, such as [{scopes!r}]")
    if allow is not None and not callable(allow):
        raise TypeError("allow is a function of the request")
    wanted = frozenset(scopes or ())
    if not wanted and allow is None:
        return None
    if tool is not None and confirmation is None and allow is not None:
        confirmation = Confirmation(tool)
    return Permission(wanted, allow, confirmation)
