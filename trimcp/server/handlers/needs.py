"""What handlers need beside arguments: parameters that the user or other functions provide, as they are declared."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Final, Literal, TypeAlias, TypeVar, get_args, get_origin

import attrs

from trimcp.errors import LocalError
from trimcp.schema.hints import is_union, split
from trimcp.schema.signature import Signature, describe, target_of
from trimcp.server.handlers.threads import ThreadContext
from trimcp.server.options import check_schema
from trimcp.session.context import Context
from trimcp.support.slotted import slotted, valued
from trimcp.wire.given import given_name

Owner: TypeAlias = Literal["request", "session", "server"]
_OWNERS: Final = ("request", "session", "server")  # each ends before the next

_MarkerT = TypeVar("_MarkerT")


@attrs.frozen
@valued
class Elicit:
    """Marks a parameter that the user answers: `Annotated[int, Elicit("How many?")]`.

    The type is one that a form field can hold: text, a number, a boolean or an enumeration. For a form of several
    fields it is an attrs class, dataclass, TypedDict or Pydantic model of them. `Annotated[ElicitResult, Elicit("...",
    schema)]` passes the whole result, also if the user declined; with any other type declining is a tool error.

    Args:
        message: the question's text.
        schema: the form as a JSON Schema, if it does not follow from the type.
        key: the question's name in revisions where the client repeats the request with the answers.
    """

    message: str
    schema: dict[str, Any] | None = None
    key: str | None = None

    def __attrs_post_init__(self) -> None:
        given_name("message", self.message)
        check_schema("schema", self.schema)
        if self.key is not None:
            given_name("key", self.key)


@slotted(frozen=True)
class Depends:
    """Marks a parameter that a function provides: `Annotated[Db, Depends(open_db)]`. It is no argument of the tool.

    The function is async or sync. One that yields, with or without `contextlib.asynccontextmanager`, is entered before
    the handler runs and left after it, and sees its exception or cancellation; of any other the result is the value. It
    may need others by such parameters of its own, and take the `Context` of the request.

    Args:
        provider: the function. In one request, session or run it is called once, whoever needs it.
        scope: what the value belongs to. "session" is one connection, or one request where each is a connection by
            itself (HTTP, 2026-07-28); "server" is a run of the server, and entered before anybody is served. The
            function of neither may take a `Context`, nor need what ends earlier.
    """

    provider: Callable[..., Any]
    scope: Owner = "request"


def marker_of(hint: Any, kind: type[_MarkerT]) -> _MarkerT | None:
    return next((extra for extra in getattr(hint, "__metadata__", ()) if isinstance(extra, kind)), None)


def _is_context(parameter: inspect.Parameter, hint: Any) -> bool:
    """Return whether a parameter takes the request's context: by its type, or if untyped by the name `ctx`."""
    bare, _ = split(hint)
    kinds = [split(each)[0] for each in get_args(bare)] if is_union(bare) else [bare]
    named = any((get_origin(kind) or kind) in (Context, ThreadContext) for kind in kinds)
    return named or (parameter.name == "ctx" and parameter.annotation is parameter.empty)


def _is_injected(parameter: inspect.Parameter, hint: Any) -> bool:
    return _is_context(parameter, hint) or marker_of(hint, Elicit) is not None or marker_of(hint, Depends) is not None


def inspected(function: Callable[..., Any], *, loose: bool) -> tuple[Signature, str | None, list[tuple[str, Any]]]:
    """Return a function's signature, the parameter that takes the context, and the other injected ones by name."""
    signature = describe(function, injected=_is_injected, loose=loose)
    context_parameter, others = None, []
    for parameter, hint in signature.injected:
        if _is_context(parameter, hint):
            context_parameter = parameter.name
        else:
            others.append((parameter.name, hint))
    return signature, context_parameter, others


@slotted(frozen=True)
class Need:
    """A function that provides a value, inspected once."""

    name: Callable[..., Any]  # the function it was declared with, under which its value is known
    call: Callable[..., Any]
    entered: bool  # `call` returns a context manager
    owner: Owner
    context_parameter: str | None
    needs: tuple[tuple[str, Need], ...]

    def everything(self) -> list[Need]:
        """Return what it needs, and what that needs, each before who needs it, and itself as the last."""
        return [one for _, need in self.needs for one in need.everything()] + [self]


def need_of(marker: Depends, within: Sequence[Callable[..., Any]] = ()) -> Need:
    """Inspect a function that provides a value for those `within`, outermost first.

    Raises TypeError if it cannot be called, with what to change.
    """
    function, owner = marker.provider, marker.scope
    if owner not in _OWNERS:
        raise TypeError(f"the scope of Depends is 'request', 'session' or 'server', not {owner!r:.60}")
    if not callable(function):
        raise TypeError(f"Depends takes a function that provides the value, not {function!r:.60}")
    signature, context_parameter, others = inspected(function, loose=True)
    name = signature.name
    if function in within:
        raise TypeError(f"{name}() needs itself")
    if required := signature.input_schema.get("required"):
        raise TypeError(
            f"{name}(): nobody fills the parameter {required[0]!r}: give it a default, or Annotated[..., Depends(...)]"
        )
    if context_parameter is not None and owner != "request":
        raise TypeError(f"{name}() belongs to the {owner}, and cannot take the Context of one request")
    needs = []
    for parameter, hint in others:
        needed = marker_of(hint, Depends)
        if needed is None:
            raise TypeError(f"{name}(): only a handler declares questions; take the Context, and ask by it")
        need = need_of(needed, (*within, function))
        if _OWNERS.index(need.owner) < _OWNERS.index(owner):
            raise TypeError(f"{name}() belongs to the {owner}, but its parameter {parameter!r} to a {need.owner}")
        needs.append((parameter, need))
    call, entered = _callable(function)
    return Need(function, call, entered, owner, context_parameter, tuple(needs))


def replacement_of(function: Callable[..., Any]) -> Need:
    """Inspect a function that provides in place of another. Raises TypeError if it takes anything."""
    signature, context_parameter, others = inspected(function, loose=True)
    if context_parameter is not None or others or signature.input_schema.get("required"):
        raise TypeError(f"{signature.name}() stands for another function, and takes nothing")
    call, entered = _callable(function)
    return Need(function, call, entered, "server", None, ())


def _callable(function: Callable[..., Any]) -> tuple[Callable[..., Any], bool]:
    """Return what to call, and whether it returns a context manager."""
    target = target_of(function)
    if inspect.isasyncgenfunction(function):
        return asynccontextmanager(function), True
    if inspect.isgeneratorfunction(function):
        return contextmanager(function), True
    return function, inspect.isasyncgenfunction(target) or inspect.isgeneratorfunction(target)


class Needs:
    """What the functions of a server need that belongs to a run, and what stands in for what."""

    def __init__(self) -> None:
        self.shared: dict[Callable[..., Any], Need] = {}  # in the order in which a run enters it
        self.overrides: dict[Callable[..., Any], Need] = {}

    def add(self, needs: Sequence[tuple[str, Need]], *, live: bool) -> None:
        """Have each run enter what a function needs. Raises LocalError if any is new while the server runs (`live`)."""
        for _, need in needs:
            for provider in need.everything():
                if provider.owner == "server" and provider.name not in self.shared:
                    if live:
                        raise LocalError(
                            f"{provider.name!r} is called when the server starts: add what needs it before"
                        )
                    self.shared[provider.name] = provider
