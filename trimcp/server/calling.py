"""A user's function: how it is registered and called, its injected parameters, and where a sync one runs.

Parameters that the user answers before it runs are declared questions, in every revision:

    @server.tool
    async def greet(name: Annotated[str, Elicit("What is your name?")]) -> str: ...

They are not among the arguments that clients see. All are asked at once, and the function runs with the answers.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias, TypedDict, TypeVar, cast, get_args, get_origin

import attrs
import orjson
import trio

from trimcp.errors import McpError, ToolError
from trimcp.nurseries import sole
from trimcp.schema.signature import ResultShape, Signature, describe, describe_result
from trimcp.server.media import is_content
from trimcp.server.threads import ThreadContext, ThreadPortal, in_thread
from trimcp.session.context import Context
from trimcp.session.limits import Quota
from trimcp.values import valued
from trimcp.wire.common import Icon
from trimcp.wire.fields import ABSENT
from trimcp.wire.input_requests import ElicitResult

if TYPE_CHECKING:
    from trimcp.guard.permission import Allow
    from trimcp.server.pools import Pools
    from trimcp.workers.remote import RemoteTool

Handler: TypeAlias = Callable[[Any, Any], Awaitable[Any]]
"""`async def handler(ctx, params)`: what handles the requests of one method, and returns the result."""

_MethodT = TypeVar("_MethodT", bound=Callable[..., Any])
_LITERALS: Final[dict[str, type | tuple[type, ...]]] = {"integer": int, "number": (int, float), "boolean": bool}


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
    """One declared question. `form` is its form, unless the function takes the whole `ElicitResult`."""

    parameter: str
    marker: Elicit
    form: Any
    whole: bool

    async def ask(self, ctx: Context[Any]) -> Any:
        """Ask it and return the value for its parameter. Raises as `value` does."""
        marker = self.marker
        result = await ctx.elicit(marker.message, marker.schema or self.form, key=marker.key or self.parameter)
        return self.value(result)

    def value(self, result: ElicitResult) -> Any:
        """Return the value for its parameter. Raises ToolError if the user declined, or the form does not fit."""
        marker = self.marker
        if self.whole:
            return result
        if result.action != "accept" or result.content is ABSENT:
            raise ToolError(f"the user did not answer {marker.message!r} ({result.action})")
        return self.form.read(marker.message, result).value


def _is_context(parameter: inspect.Parameter, hint: Any) -> bool:
    """Return whether a parameter wants the request's context: by its type, or by the name `ctx` without a type."""
    bare = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    kind = get_origin(bare) or bare
    return kind in (Context, ThreadContext) or (parameter.name == "ctx" and parameter.annotation is parameter.empty)


def _marker_of(hint: Any) -> Elicit | None:
    extras = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
    return next((extra for extra in extras if isinstance(extra, Elicit)), None)


def _is_injected(parameter: inspect.Parameter, hint: Any) -> bool:
    return _is_context(parameter, hint) or _marker_of(hint) is not None


def _question_of(parameter: str, hint: Any) -> Question:
    marker = _marker_of(hint)
    assert marker is not None
    asked, *others = get_args(hint)
    if asked is ElicitResult:
        if marker.schema is None:
            raise TypeError(f"parameter {parameter!r}: Elicit on an ElicitResult needs a schema")
        return Question(parameter, marker, None, whole=True)
    from trimcp.schema.forms import form_for  # a server that asks nothing need not load it

    extras = tuple(extra for extra in others if not isinstance(extra, Elicit))
    form = form_for(Annotated[(asked, *extras)] if extras else asked, name=parameter)
    return Question(parameter, marker, form, whole=False)


async def _answer_all(questions: Sequence[Question], ctx: Context[Any]) -> dict[str, Any]:
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

    async def run(self, pools: Pools, ctx: Context[Any], arguments: Mapping[str, Any]) -> Any:
        """Call it with JSON arguments that its schema has accepted, and return what it returned.

        What ran in a worker process returns its finished result. Raises ConversionError for an argument that fits its
        schema and still cannot be made into its type.
        """
        if self.remote is not None and not virtual_time():
            return await self._run_in_worker(self.remote, pools, ctx, arguments)
        if self.whole_arguments:
            keywords: dict[str, Any] = {"arguments": dict(arguments)}
        else:
            keywords = dict(self.signature.bind(arguments))
        if self.questions:
            keywords.update(await _answer_all(self.questions, ctx))
        if self.is_async:
            if self.context_parameter is not None:
                keywords[self.context_parameter] = ctx
            return await self.function(**keywords)
        in_loop = self.run_mode != "thread" or virtual_time()
        portal = None if in_loop else ThreadPortal(trio.lowlevel.current_trio_token())
        if self.context_parameter is not None:
            keywords[self.context_parameter] = ThreadContext(ctx, portal)
        if in_loop:
            return self.function(**keywords)
        return await in_thread(ctx, functools.partial(self.function, **keywords), pools.use_threads(), portal)

    async def _run_in_worker(
        self, remote: RemoteTool, pools: Pools, ctx: Context[Any], arguments: Mapping[str, Any]
    ) -> Any:
        remote.check()
        # The worker makes the values for the parameters.
        questions = [attrs.evolve(question, whole=True) for question in self.questions]
        answers = await _answer_all(questions, ctx) if questions else {}
        return await remote.run(pools.use_processes(), ctx, arguments, answers)

    def from_texts(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return arguments that came as text as the JSON values the schema wants; unchanged where they are none."""
        properties = self.signature.input_schema["properties"]
        return {name: _from_text(value, properties.get(name, {})) for name, value in values.items()}

    def result_shape(self) -> ResultShape | None:
        """Return how its results are structured, by its return type; None for plain content.

        Raises TypeError for an `Annotated` in the return type that nobody reads.
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
    """Inspect a function once, so that calls need not. Raises TypeError for parameters that JSON cannot fill.

    Args:
        function: async or sync.
        run: where a sync one runs.
        runs: where it may run; for "process" the caller sets `remote`.
        schema_given: its JSON Schema is given by hand; a single parameter `arguments` then takes them whole.
    """
    if run not in runs:
        raise TypeError(f"run must be {' or '.join(map(repr, runs))}, not {run!r}")
    signature = describe(function, injected=_is_injected, loose=schema_given)
    context_parameter = None
    questions = []
    for parameter, hint in signature.injected:
        if _is_context(parameter, hint):
            context_parameter = parameter.name
        else:
            questions.append(_question_of(parameter.name, hint))
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

    For methods that register functions, and for decorators, whose caller's line is the `@` above the function.
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


class ListedOptions(TypedDict, total=False):
    """The options that tools, resources and prompts share, each with a default.

    Attributes:
        name: by default the function's, or the end of a resource's address.
        title: a name for people.
        description: by default the docstring's, without its parameter section.
        icons, meta: sent in the listing.
        quota: how many may run at once, begin per second and wait, of a template all its resources together; by default
            what `Limits.tool`, `Limits.resource` and `Limits.prompt` say.
        scopes: that a token needs to use it, all of them; who lacks one does not see it in the list either.
        allow: a function of the request, sync or async, that allows it, denies it, or has a tool's user asked.
    """

    name: str | None
    title: str | None
    description: str | None
    icons: list[Icon] | None
    meta: Mapping[str, Any] | None
    quota: Quota | None
    scopes: Iterable[str]
    allow: Allow | None


def listed_members(options: ListedOptions, name: str, description: str) -> dict[str, Any]:
    """Return the members that all listings share, from the options and these defaults."""
    meta = options.get("meta")
    return {
        "name": options.get("name") or name,
        "title": options.get("title") or ABSENT,
        "description": options.get("description") or description or ABSENT,
        "icons": options.get("icons") or ABSENT,
        "meta": dict(meta) if meta else ABSENT,
    }


def check_options(options: Mapping[str, Any], known: type) -> None:
    """Raise TypeError for an option that is no key of a TypedDict; the text names what may have been meant."""
    names = list(known.__annotations__)
    for name in options:
        if name not in names:
            from difflib import get_close_matches  # only where something is wrong

            near = get_close_matches(name, names, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(names)}"
            raise TypeError(f"there is no option {name!r}; {hint}")
