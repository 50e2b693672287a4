"""Declared questions: parameters that the user answers before a function runs, in every revision.

    @server.tool
    async def greet(name: Annotated[str, Elicit("What is your name?")]) -> str: ...

They are not among the arguments that clients see. All are asked at once, and the function runs with the answers.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Annotated, Any, get_args, get_origin

import attrs
import trio

from trimcp.errors import McpError, ToolError
from trimcp.server.threads import ThreadContext
from trimcp.session.context import Context
from trimcp.session.scopes import sole
from trimcp.values import valued
from trimcp.wire.fields import ABSENT
from trimcp.wire.input_requests import ElicitResult

__all__ = ["Elicit", "Question", "answer_all", "is_context", "is_injected", "question_of"]


@attrs.frozen
@valued
class Elicit:
    """Marks a parameter that the user answers: `Annotated[int, Elicit("How many?")]`.

    The type is what a form field can hold: text, a number, yes or no, an enumeration; or an attrs class, dataclass,
    TypedDict or Pydantic model of such fields for a form of several. `Annotated[ElicitResult, Elicit("...", schema)]`
    gives what the user did, declining included; any other type turns declining into a tool error.

    Args:
        message: what the user is asked.
        schema: the form as a JSON Schema, where the type does not say it.
        key: the question's name in revisions where the request is sent again with the answers.
    """

    message: str
    schema: dict[str, Any] | None = None
    key: str | None = None


@attrs.frozen(eq=False, repr=False)
class Question:
    """One declared question, ready to be asked."""

    parameter: str
    marker: Elicit
    form: Any
    whole: bool

    async def ask(self, ctx: Context[Any]) -> Any:
        """Ask it and return the value for its parameter.

        Raises:
            ToolError: the user declined or cancelled, or the client sent what does not fit the form.
        """
        marker = self.marker
        result = await ctx.elicit(marker.message, marker.schema or self.form, key=marker.key or self.parameter)
        return self.value(result)

    def value(self, result: ElicitResult) -> Any:
        """Return the value for its parameter from what the user did; raises as `ask` does."""
        marker = self.marker
        if self.whole:
            return result
        if result.action != "accept" or result.content is ABSENT:
            raise ToolError(f"the user did not answer {marker.message!r} ({result.action})")
        return self.form.read(marker.message, result).value


def is_context(parameter: inspect.Parameter, hint: Any) -> bool:
    """Return whether a parameter wants the request's context: by its type, or by the name `ctx` without a type."""
    bare = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    origin = get_origin(bare) or bare
    return (
        origin is Context
        or origin is ThreadContext
        or (parameter.name == "ctx" and parameter.annotation is inspect.Parameter.empty)
    )


def marker_of(hint: Any) -> Elicit | None:
    """Return the marker of a declared question, or None."""
    if get_origin(hint) is not Annotated:
        return None
    return next((extra for extra in get_args(hint)[1:] if isinstance(extra, Elicit)), None)


def is_injected(parameter: inspect.Parameter, hint: Any) -> bool:
    """Return whether a parameter is filled by us and not by the peer's arguments."""
    return is_context(parameter, hint) or marker_of(hint) is not None


def question_of(parameter: str, hint: Any) -> Question | None:
    """Return the declared question of a parameter, or None."""
    marker = marker_of(hint)
    if marker is None:
        return None
    asked, *others = get_args(hint)
    whole = asked is ElicitResult
    from trimcp.schema.forms import form_for  # a server that asks nothing need not load it

    extras = tuple(extra for extra in others if not isinstance(extra, Elicit))
    form = None if whole else form_for(Annotated[(asked, *extras)] if extras else asked, name=parameter)
    if whole and marker.schema is None:
        raise TypeError(f"parameter {parameter!r}: Elicit on an ElicitResult needs a schema")
    return Question(parameter, marker, form, whole)


async def answer_all(questions: Sequence[Question], ctx: Context[Any]) -> dict[str, Any]:
    """Ask all questions at once and return the answers by parameter. Raises what the first that fails raises."""
    if len(questions) == 1:
        return {questions[0].parameter: await questions[0].ask(ctx)}
    answers: dict[str, Any] = {}
    failures: list[McpError] = []

    async def answer(question: Question) -> None:
        try:
            answers[question.parameter] = await question.ask(ctx)
        except McpError as error:
            failures.append(error)
            nursery.cancel_scope.cancel(reason="another question was not answered")

    try:
        async with trio.open_nursery() as nursery:
            for question in questions:
                nursery.start_soon(answer, question)
    except ExceptionGroup as group:
        raise sole(group) from None
    if failures:
        raise failures[0]
    return answers
