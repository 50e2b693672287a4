"""A server's tools, resources and prompts, as text for users or as JSON for programs.

It requests lists and completions of prompt arguments; it calls no tool.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from itertools import islice
from typing import Any, Final

import attrs
import trio

from trimcp.cli.exits import Failure
from trimcp.cli.schemas import describe_properties, describe_result
from trimcp.cli.text import Line, theirs, told
from trimcp.client.session import ClientSession
from trimcp.errors import InvalidReply, McpError
from trimcp.support.cleaning import clean
from trimcp.wire.capabilities import declares
from trimcp.wire.codes import METHOD_NOT_FOUND
from trimcp.wire.converter import converter_for
from trimcp.wire.prompts import Completion, Prompt
from trimcp.wire.resources import Resource, ResourceTemplate
from trimcp.wire.tools import Tool

_NAMES_SHOWN: Final = 20
_CHOICES_SHOWN: Final = 10
_ARGUMENTS_ASKED: Final = 50
_PATIENCE: Final = 5.0
_INDENT: Final = "      "

# Of each list, by its name in JSON, its method, its title, and what requests it.
_LISTS: Final[Mapping[str, tuple[str, str, Callable[[ClientSession], Awaitable[list[Any]]]]]] = {
    "tools": ("tools/list", "Tools", ClientSession.list_tools),
    "resources": ("resources/list", "Resources", ClientSession.list_resources),
    "resourceTemplates": ("resources/templates/list", "Resource templates", ClientSession.list_resource_templates),
    "prompts": ("prompts/list", "Prompts", ClientSession.list_prompts),
}
_HINTS = (
    ("read_only_hint", "reads only", "writes"),
    ("destructive_hint", "may destroy", "destroys nothing"),
    ("idempotent_hint", "is repeatable", "is not repeatable"),
    ("open_world_hint", "reaches out", "reaches nothing outside"),
)


@attrs.define
class Offer:
    """All lists of a server by their names in JSON, and the suggestions for arguments of prompts, by name."""

    lists: dict[str, list[Any]] = attrs.field(factory=dict)
    choices: dict[tuple[str, str], Completion] = attrs.field(factory=dict)
    failures: dict[str, str] = attrs.field(factory=dict)  # why a list is missing or incomplete, by its method
    failed: bool = False  # whether one is missing


async def take_stock(session: ClientSession, *, choices: bool = False) -> Offer:
    """Request all lists, and completions of prompts unless the server has none or is slow."""
    offer = Offer()
    for name, (method, _, fetch) in _LISTS.items():
        try:
            offer.lists[name] = await fetch(session)
        except McpError as error:
            known = error.listed if isinstance(error, InvalidReply) else None
            offer.lists[name] = known or []
            if getattr(error, "code", None) != METHOD_NOT_FOUND:  # else it declared more than it has
                offer.failures[method] = told(error)
                offer.failed = offer.failed or known is None
    if not choices or not declares(session.server_capabilities, "completions"):
        return offer
    asked = ((prompt, argument) for prompt in offer.lists["prompts"] for argument in prompt.arguments or ())
    with trio.move_on_after(_PATIENCE):
        for prompt, argument in islice(asked, _ARGUMENTS_ASKED):
            try:
                completion = await session.complete_prompt(prompt.name, argument.name, "")
            except McpError:
                continue
            if completion.values:
                offer.choices[prompt.name, argument.name] = completion
    return offer


def offer_json(session: ClientSession, offer: Offer) -> dict[str, Any]:
    """Return it as JSON, in the form of the session's revision."""
    dump = converter_for(session.revision).dump
    rejected = [attrs.asdict(each) for items in offer.lists.values() for each in getattr(items, "rejected", ())]
    return {
        "protocolVersion": session.revision.name,
        "serverInfo": dump(session.server_info) if session.server_info is not None else None,
        "instructions": session.instructions,
        "capabilities": dump(session.server_capabilities),
        **{name: [dump(each) for each in items] for name, items in offer.lists.items()},
        **({"errors": offer.failures} if offer.failures else {}),
        **({"rejected": rejected} if rejected else {}),
    }


def describe(session: ClientSession, offer: Offer) -> Iterator[Line]:
    """Yield it as escaped lines, each with a rich style."""
    info = session.server_info
    name = f"{theirs(info.name)} {theirs(info.version)}" if info is not None else "a server without a name"
    if info is not None and info.title and info.title != info.name:
        name += f" ({theirs(info.title, 100)})"
    yield name, "bold"
    yield f"speaks {session.revision.name}; declares {_capabilities(session)}", "dim"
    if session.instructions:
        yield "", ""
        for line in clean(session.instructions).splitlines():
            yield f"  {line}", ""
    described: dict[str, Any] = {"tools": _tool, "prompts": partial(_prompt, choices=offer.choices)}
    for name, (method, title, _) in _LISTS.items():
        yield from _section(title, offer.lists[name], described.get(name, _resource), offer.failures.get(method))


def _capabilities(session: ClientSession) -> str:
    declared: Mapping[str, Any] = converter_for(session.revision).dump(session.server_capabilities)
    words = []
    for name, settings in declared.items():
        told = [theirs(key) for key, value in settings.items() if value] if isinstance(settings, Mapping) else []
        words.append(theirs(name) + (f" ({', '.join(told)})" if told else ""))
    return ", ".join(words) or "nothing"


def _section(title: str, items: list[Any], lines: Any, failure: str | None) -> Iterator[Line]:
    rejected = getattr(items, "rejected", ())
    if not items and not rejected and failure is None:
        return
    yield "", ""
    yield f"{title} ({'?' if failure is not None and not items else len(items)})", "bold"
    for item in items:
        yield from lines(item)
    for each in rejected:
        named = "" if each.name is None else f" {theirs(each.name)}"
        yield f"  {each.place}{named} cannot be read: {theirs(each.reason)}", "yellow"
    if failure is not None:
        yield f"  {'the list is incomplete' if items else 'cannot be listed'}: {theirs(failure, 300)}", "yellow"


def _headline(name: str, title: str | None, about: str | None, otherwise: str = "") -> Line:
    """Return an entry's first line: its name, its title beside or instead of a description, and that."""
    if title and title != name and about:
        name = f"{name} ({theirs(title, 100)})"
    about = about or title or otherwise
    return f"  {theirs(name, 300)}" + (f": {theirs(about, 300)}" if about else ""), "cyan"


def _tool(tool: Tool) -> Iterator[Line]:
    said = tool.annotations
    yield _headline(tool.name, tool.title or (None if said is None else said.title), tool.description)
    hints = [yes if getattr(said, field) else no for field, yes, no in _HINTS if getattr(said, field, None) is not None]
    if hints:
        yield f"      says that it {', '.join(hints)}", "dim"
    for line in describe_properties(tool.input_schema, _INDENT):
        yield line, ""
    if tool.output_schema is not None:
        for line in describe_result(tool.output_schema, _INDENT):
            yield line, "dim"


def _resource(resource: Resource | ResourceTemplate) -> Iterator[Line]:
    address = resource.uri if isinstance(resource, Resource) else resource.uri_template
    yield _headline(address, resource.title, resource.description, resource.name)
    size, said = getattr(resource, "size", None), resource.annotations
    notes = [resource.mime_type, None if size is None else f"{size:,} bytes"]
    if said is not None:
        notes.append(f"for the {' and the '.join(said.audience)}" if said.audience else None)
        notes.append(None if said.priority is None else f"priority {said.priority:g}")
        notes.append(f"changed {said.last_modified}" if said.last_modified else None)
    if any(notes):
        yield f"      {theirs(', '.join(note for note in notes if note))}", "dim"


def _prompt(prompt: Prompt, choices: Mapping[tuple[str, str], Completion]) -> Iterator[Line]:
    yield _headline(prompt.name, prompt.title, prompt.description)
    for argument in prompt.arguments or ():
        note = " (required)" if argument.required is True else ""
        about = f": {theirs(argument.description)}" if argument.description else ""
        yield f"{_INDENT}{theirs(argument.name)}{note}{about}", ""
        completion = choices.get((prompt.name, argument.name))
        if completion is not None:
            shown = [theirs(value, 40) for value in completion.values[:_CHOICES_SHOWN]]
            total = completion.total if isinstance(completion.total, int) else len(completion.values)
            more = " and more" if completion.has_more is True else ""
            more = f" and {total - len(shown):,} more" if total > len(shown) else more
            yield f"{_INDENT}    choices: {', '.join(shown)}{more}", "dim"


async def list_tools(session: ClientSession) -> list[Tool]:
    """Return all tools; of a list that does not end, those that came."""
    try:
        return await session.list_tools()
    except InvalidReply as error:
        if error.listed is None:
            raise
        return error.listed


def find_tool(tools: Sequence[Tool], name: str) -> Tool:
    """Return the tool of that name. Raises Failure: there is none; the text says which there are."""
    names = [tool.name for tool in tools]
    if name in names:
        return tools[names.index(name)]
    near = get_close_matches(name, names, n=3)
    if near:
        raise Failure(f"the server has no tool {name!r}; did you mean {', '.join(map(theirs, near))}?")
    raise Failure(f"the server has no tool {name!r}; it has {name_tools(tools)}")


def name_tools(tools: Sequence[Tool]) -> str:
    """Return the names of tools for a sentence, only the first of many."""
    names = [theirs(tool.name) for tool in tools]
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return (", ".join(names[:_NAMES_SHOWN]) or "none") + more
