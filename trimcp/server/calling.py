"""A user's function: how it is registered and called, its injected parameters, and where a sync one runs."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar, cast

import attrs
import orjson
import trio

from trimcp.schema.signature import ResultShape, Signature, describe, describe_result
from trimcp.server.declared import Question, answer_all, is_context, is_injected, question_of
from trimcp.server.media import is_content
from trimcp.server.threads import ThreadContext, ThreadPortal, in_thread
from trimcp.session.context import Context
from trimcp.wire.fields import ABSENT

if TYPE_CHECKING:
    from trimcp.server.pools import Pools
    from trimcp.workers.remote import RemoteTool

__all__ = ["Handler", "PreparedFunction", "at_users_line", "check_options", "listed_members", "prepare"]

Handler: TypeAlias = Callable[[Any, Any], Awaitable[Any]]
"""`async def handler(ctx, params)`: what handles the requests of one method, and returns the result."""

_MethodT = TypeVar("_MethodT", bound=Callable[..., Any])
_LITERALS: Final[dict[str, type | tuple[type, ...]]] = {"integer": int, "number": (int, float), "boolean": bool}


@attrs.define(eq=False, repr=False)
class PreparedFunction:
    """One function of the user's, inspected once so that calls need not."""

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

    async def run(self, pools: Pools, ctx: Context[Any], arguments: Mapping[str, Any]) -> Any:
        """Call it with JSON arguments that its schema has accepted, and return what it returned.

        What ran in a worker process returns its finished result.

        Raises:
            ConversionError: an argument fits its schema and still cannot be made into its type.
        """
        if self.remote is not None and not virtual_time():
            return await self._run_in_worker(self.remote, pools, ctx, arguments)
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
        portal = ThreadPortal(trio.lowlevel.current_trio_token())
        if self.context_parameter is not None:
            keywords[self.context_parameter] = ThreadContext(ctx, portal)
        return await in_thread(ctx, functools.partial(self.function, **keywords), pools.use_threads(), portal)

    async def _run_in_worker(
        self, remote: RemoteTool, pools: Pools, ctx: Context[Any], arguments: Mapping[str, Any]
    ) -> Any:
        remote.check()
        # The worker makes the values for the parameters.
        questions = [attrs.evolve(question, whole=True) for question in self.questions]
        answers = await answer_all(questions, ctx) if questions else {}
        return await remote.run(pools.use_processes(), ctx, arguments, answers)

    def from_texts(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return arguments that came as text as the JSON values the schema wants; unchanged where they are none."""
        properties = self.signature.input_schema["properties"]
        return {name: _from_text(value, properties.get(name, {})) for name, value in values.items()}

    def result_shape(self) -> ResultShape | None:
        """Return how its results are structured, by its return type; None for plain content.

        Raises:
            TypeError: an `Annotated` in its return type holds something that nobody reads.
        """
        try:
            return describe_result(self.signature.return_type, is_content=is_content)
        except TypeError as error:
            raise TypeError(f"{self.signature.name}(): the result cannot be structured: {error}") from None


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
) -> PreparedFunction:
    """Inspect a function once, so that calls need not.

    Args:
        function: async or sync.
        run: where a sync one runs.
        runs: where it may run; for "process" the caller sets `remote`.
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
    return PreparedFunction(
        function, signature, context_parameter, tuple(questions), _is_async(function), run, whole_arguments=whole
    )


def _is_async(function: Callable[..., Any]) -> bool:
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def virtual_time() -> bool:
    """Return whether Trio's clock is a test's. Time would jump while a thread works, so threads are not used then."""
    testing = sys.modules.get("trio.testing")
    return testing is not None and isinstance(trio.lowlevel.current_clock(), testing.MockClock)


def at_users_line(method: _MethodT) -> _MethodT:
    """Make a method's exceptions point to its caller's line, with the place of the user's function as a note.

    For what registers functions, and for decorators, whose caller's line is the `@` above the function.
    """

    @functools.wraps(method)
    def registering(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except Exception as error:
            code = next(filter(None, map(_code, args)), None)
            if code is not None:
                note = f'the function is defined in File "{code.co_filename}", line {code.co_firstlineno}'
                if note not in getattr(error, "__notes__", ()):  # one of these calls another
                    error.add_note(note)
            error.__traceback__ = None
            raise

    return cast("_MethodT", registering)


def _code(function: Any) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None


def listed_members(options: Mapping[str, Any], name: str, description: str) -> dict[str, Any]:
    """Return the members that all listings share, from the options of an entry and these defaults."""
    meta = options.get("meta")
    return {
        "name": options.get("name") or name,
        "title": options.get("title") or ABSENT,
        "description": options.get("description") or description or ABSENT,
        "icons": options.get("icons") or ABSENT,
        "meta": dict(meta) if meta else ABSENT,
    }


def check_options(options: Mapping[str, Any], known: type) -> None:
    """Check that all options are keys of a TypedDict, for users who run no type checker.

    Raises:
        TypeError: one is not; the text names what it may have meant.
    """
    names = list(known.__annotations__)
    for name in options:
        if name not in names:
            from difflib import get_close_matches  # only where something is wrong

            near = get_close_matches(name, names, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(names)}"
            raise TypeError(f"there is no option {name!r}; {hint}")
