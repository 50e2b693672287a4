"""Handler functions: their registration, their injected parameters, and their calls, sync ones inline or in a thread.

A declared question is a parameter that the user answers before the function runs, in every revision:

    @server.tool
    async def greet(name: Annotated[str, Elicit("What is your name?")]) -> str: ...

The input schema does not contain them. All are sent at once, and the function runs with the answers. What other
functions provide (`Depends`) is not in the schema either, and is entered after the answers.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, TypeVar, cast, get_args

import attrs
import trio

from trimcp.errors import LocalError, McpError, ToolError
from trimcp.schema.convert import ConversionError
from trimcp.schema.signature import ResultShape, Signature, describe_result, target_of
from trimcp.schema.validator import Validator, validator_for
from trimcp.server.handlers.media import is_content
from trimcp.server.handlers.needs import Depends, Elicit, Need, inspected, marker_of, need_of
from trimcp.server.handlers.threads import ThreadContext, ThreadPortal, in_thread
from trimcp.session.clock import virtual_time
from trimcp.session.context import Context
from trimcp.support.nurseries import unwrap_single
from trimcp.support.slotted import slotted
from trimcp.wire.given import given_form
from trimcp.wire.input_requests import ElicitResult
from trimcp.wire.jsonrpc import Malformed, parse_value

if TYPE_CHECKING:
    from trimcp.server.handlers.pools import Pools
    from trimcp.workers.remote import RemoteTool

Handler: TypeAlias = Callable[[Any, Any], Awaitable[Any]]
"""`async def handler(ctx, params)`: handles the requests of one method and returns the result."""

Validate: TypeAlias = Callable[[Mapping[str, Any]], object]
"""Checks a tool's arguments, sync or async: raises ToolError or ValueError if they are wrong, and returns nothing."""

_MethodT = TypeVar("_MethodT", bound=Callable[..., Any])


@slotted(frozen=True)
class Question:
    """One declared question. `form` is None if the function takes the whole `ElicitResult`."""

    parameter: str
    marker: Elicit
    form: Any
    whole: bool

    async def ask(self, ctx: Context[Any]) -> Any:
        """Send the question and return the value for its parameter. Raises as `value` does."""
        marker = self.marker
        result = await ctx.elicit(marker.message, marker.schema or self.form, key=marker.key or self.parameter)
        return self.value(result)

    def value(self, result: ElicitResult) -> Any:
        """Return the value for its parameter. Raises ToolError if the user declined, or the answer does not fit."""
        marker = self.marker
        if self.whole:
            return result
        if result.action != "accept" or result.content is None:
            raise ToolError(f"the user did not answer {marker.message!r} ({result.action})")
        return self.form.read(marker.message, result).value


def _question_of(parameter: str, hint: Any) -> Question:
    marker = marker_of(hint, Elicit)
    assert marker is not None
    asked, *others = get_args(hint)
    if marker.schema is not None:
        try:
            given_form(marker.schema)
        except TypeError as error:
            raise TypeError(f"parameter {parameter!r}: {error}") from None
    if asked is ElicitResult:
        if marker.schema is None:
            raise TypeError(f"parameter {parameter!r}: Elicit on an ElicitResult needs a schema")
        return Question(parameter, marker, None, whole=True)
    from trimcp.schema.forms import form_for  # not loaded by a server without questions

    extras = tuple(extra for extra in others if not isinstance(extra, Elicit))
    form = form_for(Annotated[(asked, *extras)] if extras else asked, name=parameter)
    return Question(parameter, marker, form, whole=False)


async def _judge(validate: Validate, arguments: Mapping[str, Any]) -> None:
    """Have a tool's own function check its arguments. Raises ConversionError if it refuses them."""
    try:
        found = validate(dict(arguments))
        if inspect.isawaitable(found):
            found = await found
    except ConversionError:
        raise
    except (ToolError, ValueError) as error:
        from trimcp.schema.problems import shorten  # only needed for errors

        raise ConversionError([shorten(str(error))]) from error
    if found is not None:  # such as False, by which somebody meant to refuse
        raise TypeError(f"validate returned {found!r:.60}: it raises ToolError or ValueError, and returns nothing")


async def answer_all(questions: Sequence[Question], ctx: Context[Any]) -> dict[str, Any]:
    """Send all questions at once and return the answers by parameter. Raises the error of the first that fails."""
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
        raise unwrap_single(group) from None
    if failures:
        raise failures[0]
    return answers


@slotted
class PreparedFunction:
    """One handler function, inspected once instead of at each call."""

    function: Callable[..., Any]
    signature: Signature
    context_parameter: str | None
    questions: tuple[Question, ...]
    needs: tuple[tuple[str, Need], ...]  # what other functions provide, by parameter
    is_async: bool
    run_mode: str
    whole_arguments: bool
    validate: Validate | None = None
    remote: RemoteTool | None = None
    text_validators: dict[str, Validator] | None = attrs.field(init=False, default=None)
    _is_plain: bool = attrs.field(init=False)  # an async function that needs only arguments and context

    def __attrs_post_init__(self) -> None:
        others = self.questions or self.needs or self.whole_arguments or self.run_mode == "process"
        # A `validate` that is callable may be false as a value.
        self._is_plain = self.is_async and not others and self.validate is None

    def run(self, pools: Pools, ctx: Context[Any], arguments: Mapping[str, Any]) -> Awaitable[Any]:
        """Call the function with JSON arguments that its schema has accepted; its value is to be awaited.

        From a worker process it is the finished MCP result. Raises ConversionError, here or then, for an argument that
        fits its schema but cannot be converted to its type, or that `validate` refuses.
        """
        if not self._is_plain:
            return self._run_prepared(pools, ctx, arguments)
        keywords = self.signature.bind(arguments) if self.signature.converts else arguments
        if self.context_parameter is not None:
            keywords = {**keywords, self.context_parameter: ctx}
        value: Awaitable[Any] = self.function(**keywords)
        return value

    async def _run_prepared(self, pools: Pools, ctx: Context[Any], arguments: Mapping[str, Any]) -> Any:
        """Do what comes before most functions: questions, checks, a thread or a worker process."""
        if self.remote is not None and (self.remote.sandbox is not None or not virtual_time()):
            if self.validate is not None:
                await _judge(self.validate, arguments)
            return await self._run_in_worker(self.remote, pools, ctx, arguments)
        if self.whole_arguments:
            keywords: dict[str, Any] = {"arguments": dict(arguments)}
        else:
            keywords = dict(self.signature.bind(arguments))
        if self.validate is not None:
            await _judge(self.validate, keywords["arguments"] if self.whole_arguments else keywords)
        if self.questions:
            keywords.update(await answer_all(self.questions, ctx))
        if not self.needs:
            return await self._call(pools, ctx, keywords)
        from trimcp.server.handlers.provided import provided  # few servers need it

        async with provided(self.needs, ctx) as values:
            return await self._call(pools, ctx, {**keywords, **values})

    async def _call(self, pools: Pools, ctx: Context[Any], keywords: dict[str, Any]) -> Any:
        """Call the function, in the event loop or a thread."""
        if self.is_async:
            if self.context_parameter is not None:
                keywords[self.context_parameter] = ctx
            return await self.function(**keywords)
        in_loop = self.run_mode != "thread" or virtual_time()
        portal = None if in_loop else ThreadPortal(trio.lowlevel.current_trio_token())
        if self.context_parameter is not None:
            keywords[self.context_parameter] = ThreadContext(ctx, portal)
        if in_loop:
            value = self.function(**keywords)
        else:
            # In a list, for Trio takes no coroutine from a thread.
            (value,) = await in_thread(ctx, lambda: [self.function(**keywords)], pools.use_threads(), portal)
        return await value if inspect.isawaitable(value) else value

    async def _run_in_worker(
        self, remote: RemoteTool, pools: Pools, ctx: Context[Any], arguments: Mapping[str, Any]
    ) -> Any:
        if remote.sandbox is not None and virtual_time():
            raise LocalError(f"the tool {remote.name} needs its sandbox, which no test in virtual time can wait for")
        remote.check()
        # The worker process converts the answers.
        questions = [Question(asked.parameter, asked.marker, asked.form, whole=True) for asked in self.questions]
        answers = await answer_all(questions, ctx) if questions else {}
        return await remote.run(pools.use_processes(), ctx, arguments, answers)

    def from_texts(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Convert arguments received as text to the JSON types of the schema, read as JSON where no text is taken.

        What does not fit either way stays text.
        """
        if self.text_validators is None:
            schema = self.signature.input_schema
            shared = {"$defs": schema["$defs"]} if "$defs" in schema else {}
            properties = schema["properties"].items()
            # A plain text is the usual case, and stays as it is.
            others = {name: each for name, each in properties if each.get("type") != "string"}
            self.text_validators = {name: validator_for({**each, **shared}) for name, each in others.items()}
        read = {name: _from_text(value, self.text_validators.get(name)) for name, value in values.items()}
        return {**values, **read}

    def result_shape(self) -> ResultShape | None:
        """Return how results of its return type are structured; None for plain content.

        Raises TypeError for a return type without a JSON form, or an unknown extra of an `Annotated` in it.
        """
        try:
            return describe_result(self.signature.return_type, is_content=is_content)
        except TypeError as error:
            raise TypeError(f"{self.signature.name}(): the result cannot be structured: {error}") from None


def _from_text(value: Any, validator: Validator | None) -> Any:
    if validator is None or type(value) is not str or validator.is_valid(value):
        return value
    parsed = parse_value(value.encode(errors="replace"))
    return parsed if type(parsed) is not Malformed and validator.is_valid(parsed) else value


def prepare(
    function: Callable[..., Any],
    *,
    run: str = "thread",
    runs: Sequence[str] = ("inline", "thread"),
    schema_given: bool = False,
    validate: Validate | None = None,
) -> PreparedFunction:
    """Inspect a function. Raises TypeError for a parameter whose type has no JSON form.

    `runs` are the allowed values of `run`; for "process" the caller sets `remote`. With `schema_given` the author wrote
    the JSON Schema, and a single parameter `arguments` takes all arguments.
    """
    if run not in runs:
        raise TypeError(f"run must be {' or '.join(map(repr, runs))}, not {run!r}")
    signature, context_parameter, others = inspected(function, loose=schema_given)
    _check_callable(function, signature)
    questions, needs = [], []
    for parameter, hint in others:
        marker = marker_of(hint, Depends)
        if marker is None:
            questions.append(_question_of(parameter, hint))
            continue
        if run == "process":
            raise TypeError(
                f"{signature.name}(): the parameter {parameter!r} cannot be handed to a worker process; make it there"
            )
        needs.append((parameter, need_of(marker)))
    whole = schema_given and list(signature.parameters) == ["arguments"]
    is_async = inspect.iscoroutinefunction(function)
    if not is_async and inspect.iscoroutinefunction(target_of(function)):
        is_async = True
        if run != "process":
            function = _awaiting(function)
    return PreparedFunction(
        function, signature, context_parameter, tuple(questions), tuple(needs), is_async, run, whole, validate
    )


def _check_callable(function: Callable[..., Any], signature: Signature) -> None:
    """Raise TypeError for a function that cannot answer a call, with what to write instead."""
    called = target_of(function)
    if inspect.isgeneratorfunction(called) or inspect.isasyncgenfunction(called):
        raise TypeError(
            f"{signature.name}() yields, but a call has one result: return a list, and report progress by the context"
        )
    if hasattr(function, "registry") and hasattr(function, "dispatch"):
        raise TypeError(
            f"{signature.name}() chooses by its first argument, and arguments come by name: wrap it in a function"
        )
    first = "".join(signature.parameters[:1])
    owner = getattr(called, "__qualname__", "").rpartition(".")[0]
    if (
        first in ("self", "cls")
        and first not in getattr(called, "__annotations__", ())
        and owner
        and not owner.endswith("<locals>")
    ):
        raise TypeError(
            f"{owner}.{signature.name}() is a method, and in its class it belongs to no object: register it of one, as"
            f" by server.add_tool({owner.rpartition('.')[2]}().{signature.name})"
        )


def _awaiting(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return an async function that calls another, such as a wrapper of an async one, and awaits its value."""

    @functools.wraps(function)
    async def awaiting(**keywords: Any) -> Any:
        value = function(**keywords)
        return await value if inspect.isawaitable(value) else value

    return awaiting


def at_users_line(method: _MethodT) -> _MethodT:
    """Make a method's exceptions point to its caller's line, with the location of the registered function as a note.

    For methods that register functions; used as decorators, their caller's line is the `@` above the function.
    """

    @functools.wraps(method)
    def registering(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except Exception as error:
            code = next(filter(None, map(_code, args)), None)
            if code is not None:
                note = f'the function is defined in File "{code.co_filename}", line {code.co_firstlineno}'
                if note not in getattr(error, "__notes__", ()):  # decorated methods call each other
                    error.add_note(note)
            error.__traceback__ = None
            raise

    return cast("_MethodT", registering)


def _code(function: Any) -> Any:
    return getattr(target_of(function), "__code__", None) if callable(function) else None
