"""Authorization for a tool, resource, prompt or completion: by the token's scopes and by an `allow` function.

A tool's user may be asked for confirmation as well. That question is an elicitation, and the tool begins only after the
answer, which is bound to the tool and all arguments: if the client repeats the call with other arguments, the user is
asked again.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from inspect import isawaitable, iscoroutinefunction
from typing import Any, Final, Literal, TypeAlias

import attrs
import orjson

from trimcp.errors import CannotAsk, ErrorReply, InvalidReply, RemoteError, ToolError
from trimcp.hidden import show_hidden
from trimcp.principal import Principal
from trimcp.protocol.events import Admission
from trimcp.security import security_event
from trimcp.session.context import Context
from trimcp.session.outgoing.asking import open_questions
from trimcp.support.cleaning import log_crash, mask
from trimcp.wire.capabilities import declares
from trimcp.wire.codes import FORBIDDEN
from trimcp.wire.tools import Tool, ToolAnnotations

log: logging.Logger = logging.getLogger("trimcp.server")

_NO_ARGUMENTS: Final[Mapping[str, Any]] = {}


@attrs.frozen
class AccessRequest:
    """The request that an `allow` function decides on.

    Attributes:
        method: "tools/call", "resources/read", "resources/subscribe", "subscriptions/listen" (once for each resource),
            "prompts/get" or "completion/complete" (for the prompt or resource whose argument is completed).
        name: the name of the tool or prompt, or the URI.
        principal: the authenticated sender; None if the server does not authenticate.
        arguments: the arguments of the request; those of a tool are already validated. Of a resource they are the
            variables of its template, of a completion the arguments that are known and the text typed so far.
        annotations: the tool's annotations, if any.
        context: the context of the request.
    """

    method: str
    name: str
    principal: Principal | None
    arguments: Mapping[str, Any]
    annotations: ToolAnnotations | None
    context: Context[Any] = attrs.field(repr=False)


@attrs.frozen
class Denied:
    """Returned by an `allow` function to deny a request, with a reason: one line, sent to the client."""

    reason: str = "this is not allowed"


ASK: Final = "ask"
"""Returned by an `allow` function to ask the user for confirmation first; only for tools."""

Decision: TypeAlias = bool | Denied | Literal["ask"]
"""The result of an `allow` function: True, False, `Denied("why")`, or `ASK`."""

Allow: TypeAlias = Callable[[AccessRequest], Decision | Awaitable[Decision]]
"""Decides on a request, sync or async: True, False, `Denied("why")`, or `ASK`. An exception denies the request."""


Visible: TypeAlias = Callable[[Admission], bool]
"""Decides for each request whether its sender sees something; sync and quick. An exception hides it, and is logged."""


@attrs.frozen(eq=False)
class Permission:
    """The requirements for using one tool, resource, prompt or completion."""

    # the scopes that a token needs, all of them; without them it is not listed either
    scopes: frozenset[str] = frozenset()
    allow: Allow | None = None  # decides on each request, after the scopes were checked
    confirmation: Confirmation | None = None  # asks the user if `allow` returns `ASK`; tools only
    visible: Visible | None = None  # decides who sees it; for others it does not exist

    def hides(self, admission: Admission) -> bool:
        """Return whether it does not exist for this sender."""
        if self.visible is None:
            return False
        try:
            return self.visible(admission) is not True
        except Exception as error:  # the user's function: others see the rest of the list
            log_crash(log, error, "a function that decides who sees something crashed (%s)", self.visible)
            return True

    def shown_to(self, principal: Principal | None) -> bool:
        """Return whether it is listed to this principal."""
        return principal is None or principal.may(self.scopes)

    def check_scopes(self, ctx: Context[Any], name: str) -> None:
        """Refuse a request whose token lacks scopes.

        Raises ErrorReply: scopes are missing; `data` has all that are needed. Over HTTP it is a 403 (RFC 6750 section
        3.1).
        """
        principal = ctx.principal
        if not self.shown_to(principal):
            wanted = sorted(self.scopes)
            security_event("not_allowed", method=ctx.method, name=name, principal=principal, scopes=" ".join(wanted))
            raise ErrorReply(FORBIDDEN, f"this needs the scopes {' '.join(wanted)}", {"requiredScopes": wanted})

    async def require(self, ctx: Context[Any], name: str, arguments: Mapping[str, Any] = _NO_ARGUMENTS) -> None:
        """Return once a request is allowed by its token and by `allow`; raises as `check_scopes` and `obtain` do."""
        self.check_scopes(ctx, name)
        await self.obtain(ctx, name, arguments)

    async def obtain(self, ctx: Context[Any], name: str, arguments: Mapping[str, Any] = _NO_ARGUMENTS) -> None:
        """Return once a request is allowed. Raises ErrorReply if it is denied, else as `Confirmation.obtain`."""
        if self.allow is None:
            return
        confirmation = self.confirmation
        hints = None if confirmation is None else confirmation.tool.annotations or None
        asked = AccessRequest(ctx.method, name, ctx.principal, arguments, hints, ctx)
        await judge(self.allow, asked, confirmation)


async def judge(allow: Callable[[Any], Any], asked: AccessRequest, confirmation: Confirmation | None = None) -> None:
    """Return once an `allow` function allows a request; `confirmation` is None where it may not return `ASK`.

    Raises ErrorReply if the request is denied, else as `Confirmation.obtain`.
    """
    found = allow(asked)
    decision: Any = await found if isawaitable(found) else found
    if decision is True:
        return
    if decision == ASK and confirmation is not None:
        await confirmation.obtain(asked.context, asked.arguments)
        return
    if decision is not False and not isinstance(decision, Denied):
        raise TypeError(f"allow returned {decision!r:.60} for {asked.name}: it decides by True, False, Denied or ASK")
    reason = decision.reason if isinstance(decision, Denied) else Denied().reason
    security_event("not_allowed", method=asked.method, name=asked.name, principal=asked.principal, why=reason)
    raise ErrorReply(FORBIDDEN, reason)


def permission_of(
    scopes: Iterable[str] | None,
    allow: Allow | None,
    tool: Tool | None = None,
    confirmation: Confirmation | None = None,
    visible: Visible | None = None,
) -> Permission:
    """Return a permission.

    Raises TypeError: the scopes are a single string, or `allow` or `visible` is not callable. A `tool` without an own
    confirmation gets one, if `allow` asks for it.
    """
    if isinstance(scopes, str):
        raise TypeError(f"scopes is a list of scopes, such as [{scopes!r}]")
    if allow is not None and not callable(allow):
        raise TypeError("allow is a function of the request")
    given: object = visible
    if given is not None and (not callable(given) or iscoroutinefunction(given)):
        raise TypeError("visible is a sync function of who asks")
    if tool is not None and confirmation is None and allow is not None:
        confirmation = Confirmation(tool)
    return Permission(frozenset(scopes or ()), allow, confirmation, visible)


Fallback: TypeAlias = Literal["refuse", "allow"]

_FIELD: Final = "confirm"
_MOST_SHOWN: Final = 12  # arguments
_LONGEST: Final = 80  # characters of one


@attrs.frozen(eq=False, repr=False)
class Confirmation:
    """The confirmation of one tool's calls. `fallback` is for clients that cannot ask the user."""

    tool: Tool
    fallback: Fallback = "refuse"

    async def obtain(self, ctx: Context[Any], arguments: Mapping[str, Any]) -> None:
        """Return once the user has agreed to this call.

        Raises ToolError if they did not, and CannotAsk if the client cannot ask and `fallback` does not allow the call.
        """
        name = self.tool.name
        if not declares(ctx.capabilities, "elicitation.form"):
            if self.fallback == "allow":
                return
            required: dict[str, Any] | None = None if ctx.revision.server_may_call else {"elicitation": {"form": {}}}
            raise CannotAsk(f"{name} runs only after its user has confirmed it, and this client cannot ask", required)
        key = _key(name, arguments)
        memory = open_questions(*ctx.internals).memory
        if key not in memory.asked:  # then an answer is to no question of ours: the sealed state would have its key
            memory.answers.pop(key, None)
        try:
            answer = await ctx.elicit(self._message(arguments), self._form(), key=key)
        except (RemoteError, InvalidReply) as error:
            raise ToolError(f"{name} was not called: its confirmation was not answered") from error
        if answer.action != "accept":
            done = "declined" if answer.action == "decline" else "cancelled"
            raise ToolError(f"{name} was not called: the user {done} it")
        if answer.content is None or answer.content.get(_FIELD) is not True:
            raise ToolError(f"{name} was not called: the user did not confirm it")

    def _form(self) -> dict[str, Any]:
        title = f"Call {show_hidden(self.tool.name)}"
        return {
            "type": "object",
            "properties": {_FIELD: {"type": "boolean", "title": title, "description": "Yes, do it with these values."}},
            "required": [_FIELD],
        }

    def _message(self, arguments: Mapping[str, Any]) -> str:
        """Return the question: the tool and its arguments on a few short lines, with hidden characters escaped."""
        tool = self.tool
        title = tool.title if tool.title is not None else tool.annotations is not None and tool.annotations.title
        named = f"{tool.name} ({title})" if title else tool.name
        destroys = tool.annotations is not None and tool.annotations.destructive_hint is True
        lines = [f"{show_hidden(named)} is about to be called{', and may destroy something' if destroys else ''}."]
        lines += [
            # Not orjson, which does not escape line separators.
            f"- {_shown(name)}: {_shown(json.dumps(mask(value, name), ensure_ascii=False))}"
            for name, value in list(arguments.items())[:_MOST_SHOWN]
        ]
        if len(arguments) > _MOST_SHOWN:
            lines.append(f"- and {len(arguments) - _MOST_SHOWN} more")
        return "\n".join(lines)


def _shown(text: str) -> str:
    if len(text) > _LONGEST:
        text = f"{text[: _LONGEST // 2]} ... {text[-_LONGEST // 4 :]} ({len(text)} characters)"
    return show_hidden(text)


def _key(name: str, arguments: Mapping[str, Any]) -> str:
    """Return the question's key, a hash of all arguments in full; the message shows long ones shortened."""
    whole = orjson.dumps([name, arguments], option=orjson.OPT_SORT_KEYS)
    return f"confirm-{hashlib.sha256(whole).hexdigest()[:32]}"
