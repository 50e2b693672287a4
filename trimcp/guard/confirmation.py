"""Asking the user for confirmation before a tool runs.

The question is an elicitation, and the tool begins only after the answer. The answer is bound to the tool and all
arguments: if the client repeats the call with other arguments, the user is asked again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Final, Literal, TypeAlias

import attrs
import orjson

from trimcp.errors import CannotAsk, InvalidReply, RemoteError, ToolError
from trimcp.hidden import show_hidden
from trimcp.session.asking import open_questions
from trimcp.session.context import Context
from trimcp.support.cleaning import mask
from trimcp.wire.capabilities import declares
from trimcp.wire.tools import Tool

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
        _forget_unasked(ctx, key)
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


def _forget_unasked(ctx: Context[Any], key: str) -> None:
    """Drop an answer to a question that was not asked: the sealed `requestState` does not contain its key."""
    session, job = ctx.internals
    memory = open_questions(session, job).memory
    if key not in memory.asked:
        memory.answers.pop(key, None)
