"""How a user's function is called: its injected parameters, and where a sync one runs."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import attrs
import orjson
import trio

from trimcp.server.declared import Question, answer_all, is_context, is_injected, question_of
from trimcp.server.media import is_content
from trimcp.server.schema import ResultShape, Signature, describe, describe_result
from trimcp.server.threads import Desk, ThreadContext, in_thread
from trimcp.session.context import Context

if TYPE_CHECKING:
    from trimcp.server.remote import RemoteTool
    from trimcp.server.running import Running

__all__ = ["Calling", "prepare"]

_LITERALS: Final[dict[str, type | tuple[type, ...]]] = {"integer": int, "number": (int, float), "boolean": bool}


@attrs.define(eq=False, repr=False)
class Calling:
    """One function of the user's, looked at once."""

    function: Callable[..., Any]
    signature: Signature
    context_parameter: str | None
    questions: tuple[Question, ...]
    is_async: bool
    run_mode: str
    whole_arguments: bool
    remote: RemoteTool | None = None

    @property
    def in_thread(self) -> bool:
        """Whether it runs in a thread."""
        return self.run_mode == "thread" and not self.is_async

    async def run(self, running: Running, ctx: Context[Any], arguments: Mapping[str, Any]) -> Any:
        """Call it with JSON arguments that its schema has accepted, and return what it returned.

        What ran in a worker process returns its finished result.

        Raises:
            ConversionError: an argument fits its schema and still cannot be made into its type.
        """
        if self.remote is not None and not virtual_time():
            return await self.remote.run(running, ctx, arguments, self.questions)
        if self.whole_arguments:
            keywords: dict[str, Any] = {"arguments": dict(arguments)}
        else:
            keywords = dict(self.signature.bind(arguments))
        if self.questions:
            keywords.update(await answer_all(self.questions, ctx))
        if self.is_async:
            if self.context_parameter is not None:
                keywords[self.context_parameter] = ctx
            return await self.function(**keywords)
        if self.run_mode != "thread" or virtual_time():
            if self.context_parameter is not None:
                keywords[self.context_parameter] = ThreadContext(ctx, None)
            return self.function(**keywords)
        desk = Desk(trio.lowlevel.current_trio_token())
        if self.context_parameter is not None:
            keywords[self.context_parameter] = ThreadContext(ctx, desk)
        return await in_thread(ctx, functools.partial(self.function, **keywords), running.threads, desk)

    def from_texts(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return arguments that came as text as the JSON values the schema wants; unchanged where they are none."""
        properties = self.signature.input_schema["properties"]
        return {name: _from_text(value, properties.get(name, {})) for name, value in values.items()}

    def result_shape(self) -> ResultShape | None:
        """Return how its results are structured, by its return type; None for plain content."""
        return describe_result(self.signature.return_type, is_content=is_content)


def _from_text(value: Any, schema: Mapping[str, Any]) -> Any:
    kinds = {branch.get("type") for branch in schema.get("anyOf", [schema])}
    if type(value) is not str or "string" in kinds:
        return value
    wanted = tuple(python for kind, python in _LITERALS.items() if kind in kinds)
    try:
        parsed = orjson.loads(value)
    except orjson.JSONDecodeError:
        return value
    return parsed if isinstance(parsed, wanted) else value


def prepare(
    function: Callable[..., Any],
    *,
    run: str = "thread",
    runs: Sequence[str] = ("inline", "thread"),
    schema_given: bool = False,
) -> Calling:
    """Look at a function once, so that calls need not.

    Args:
        function: async or sync.
        run: where a sync one runs.
        runs: where one may; for "process" the caller sets `remote`.
        schema_given: its JSON Schema is given by hand; a single parameter `arguments` then takes them whole.

    Raises:
        TypeError: it has parameters that cannot be filled from JSON.
    """
    if run not in runs:
        raise TypeError(f"run must be {' or '.join(map(repr, runs))}, not {run!r}")
    signature = describe(function, injected=is_injected, loose=schema_given)
    context_parameter = None
    questions = []
    for parameter, hint in signature.injected:
        if is_context(parameter, hint):
            context_parameter = parameter.name
            continue
        question = question_of(parameter.name, hint)
        assert question is not None
        questions.append(question)
    whole = schema_given and list(signature.parameters) == ["arguments"]
    return Calling(
        function, signature, context_parameter, tuple(questions), _is_async(function), run, whole_arguments=whole
    )


def _is_async(function: Callable[..., Any]) -> bool:
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def virtual_time() -> bool:
    """Return whether Trio's clock is a test's. Time would jump while a thread works, so none is used."""
    testing = sys.modules.get("trio.testing")
    return testing is not None and isinstance(trio.lowlevel.current_clock(), testing.MockClock)
