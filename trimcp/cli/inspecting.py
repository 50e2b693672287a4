"""What a server offers, as text for people or as JSON for programs. It asks for lists and calls nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Final

import attrs

from trimcp.cli.exits import USAGE, Failure
from trimcp.cli.text import clean, one_line
from trimcp.client.facade import ClientSession
from trimcp.wire.converter import converter_for
from trimcp.wire.prompts import Prompt
from trimcp.wire.resources import Resource, ResourceTemplate
from trimcp.wire.tools import Tool

__all__ = ["Offer", "describe", "find_tool", "name_tools", "offer_json", "take_stock"]

_NAMES_SHOWN: Final = 20

_HINTS = (
    ("read_only_hint", "reads only"),
    ("destructive_hint", "may destroy"),
    ("idempotent_hint", "repeatable"),
    ("open_world_hint", "reaches out"),
)


@attrs.frozen
class Offer:
    """Everything a server lists."""

    tools: list[Tool]
    resources: list[Resource]
    templates: list[ResourceTemplate]
    prompts: list[Prompt]


async def take_stock(session: ClientSession) -> Offer:
    """Ask for all lists. Raises what `ClientSession.list_tools` raises."""
    return Offer(
        await session.list_tools(),
        await session.list_resources(),
        await session.list_resource_templates(),
        await session.list_prompts(),
    )


def offer_json(session: ClientSession, offer: Offer) -> dict[str, Any]:
    """Return it all as JSON, in the words of the revision spoken."""
    dump = converter_for(session.revision).dump
    return {
        "protocolVersion": session.revision.name,
        "serverInfo": dump(session.server_info) if session.server_info is not None else None,
        "instructions": session.instructions,
        "capabilities": dump(session.server_capabilities),
        "tools": [dump(tool) for tool in offer.tools],
        "resources": [dump(resource) for resource in offer.resources],
        "resourceTemplates": [dump(template) for template in offer.templates],
        "prompts": [dump(prompt) for prompt in offer.prompts],
    }


def describe(session: ClientSession, offer: Offer) -> Iterator[tuple[str, str]]:
    """Yield it all as harmless lines, each with a style of rich's."""
    info = session.server_info
    name = f"{one_line(info.name)} {one_line(info.version)}" if info is not None else "a server without a name"
    yield name, "bold"
    yield f"speaks {session.revision.name}; declares {_capabilities(session)}", "dim"
    if session.instructions:
        yield "", ""
        for line in clean(session.instructions).splitlines():
            yield f"  {line}", ""
    yield from _section("Tools", offer.tools, _tool)
    yield from _section("Resources", offer.resources, _resource)
    yield from _section("Resource templates", offer.templates, _template)
    yield from _section("Prompts", offer.prompts, _prompt)


def _capabilities(session: ClientSession) -> str:
    declared: Mapping[str, Any] = converter_for(session.revision).dump(session.server_capabilities)
    words = []
    for name, settings in declared.items():
        told = [one_line(key) for key, value in settings.items() if value] if isinstance(settings, Mapping) else []
        words.append(one_line(name) + (f" ({', '.join(told)})" if told else ""))
    return ", ".join(words) or "nothing"


def _section(title: str, items: list[Any], lines: Any) -> Iterator[tuple[str, str]]:
    if not items:
        return
    yield "", ""
    yield f"{title} ({len(items)})", "bold"
    for item in items:
        yield from lines(item)


def _headline(name: str, about: str) -> tuple[str, str]:
    return f"  {one_line(name)}" + (f": {one_line(about, 300)}" if about else ""), "cyan"


def _tool(tool: Tool) -> Iterator[tuple[str, str]]:
    yield _headline(tool.name, tool.description or tool.title or "")
    hints = [word for field, word in _HINTS if tool.annotations and getattr(tool.annotations, field) is True]
    if hints:
        yield f"      says that it {', '.join(hints)}", "dim"
    schema = tool.input_schema
    required = schema.get("required", [])
    properties = schema.get("properties", {})
    for name, property_schema in properties.items() if isinstance(properties, Mapping) else ():
        shape = property_schema if isinstance(property_schema, Mapping) else {}
        notes = [_type(shape), "required" if name in required else _default(shape)]
        about = shape.get("description")
        yield (
            f"      {one_line(name)} ({', '.join(note for note in notes if note)})"
            + (f": {one_line(about)}" if isinstance(about, str) else ""),
            "",
        )


def _type(shape: Mapping[str, Any]) -> str:
    if isinstance(choices := shape.get("enum"), list):
        return one_line(" | ".join(map(str, choices)), 100)
    for keyword in ("anyOf", "oneOf"):
        if isinstance(branches := shape.get(keyword), list):
            return " or ".join(_type(branch) for branch in branches[:10] if isinstance(branch, Mapping))
    kind = shape.get("type")
    if kind == "array" and isinstance(items := shape.get("items"), Mapping):
        return f"list of {_type(items)}"
    if isinstance(kind, list):
        return one_line(" or ".join(map(str, kind)))
    if isinstance(reference := shape.get("$ref"), str):
        return one_line(reference.rpartition("/")[2])
    return one_line(str(kind)) if kind is not None else "anything"


def _default(shape: Mapping[str, Any]) -> str:
    return one_line(f"default {shape['default']!r}", 60) if "default" in shape else ""


def _resource(resource: Resource) -> Iterator[tuple[str, str]]:
    size = resource.size if isinstance(resource.size, int) else None
    notes = [resource.mime_type or "", f"{size:,} bytes" if size is not None else ""]
    yield _headline(resource.uri, resource.description or resource.title or resource.name)
    if any(notes):
        yield f"      {one_line(', '.join(note for note in notes if note))}", "dim"


def _template(template: ResourceTemplate) -> Iterator[tuple[str, str]]:
    yield _headline(template.uri_template, template.description or template.title or template.name)


def _prompt(prompt: Prompt) -> Iterator[tuple[str, str]]:
    yield _headline(prompt.name, prompt.description or prompt.title or "")
    for argument in prompt.arguments or ():
        note = " (required)" if argument.required is True else ""
        about = f": {one_line(argument.description)}" if argument.description else ""
        yield f"      {one_line(argument.name)}{note}{about}", ""


def find_tool(tools: Sequence[Tool], name: str) -> Tool:
    """Return the tool of that name.

    Raises:
        Failure: there is none; the text says which there are.
    """
    names = [tool.name for tool in tools]
    if name in names:
        return tools[names.index(name)]
    near = get_close_matches(name, names, n=3)
    if near:
        raise Failure(f"the server has no tool {name!r}; did you mean {', '.join(map(one_line, near))}?", USAGE)
    raise Failure(f"the server has no tool {name!r}; it has {name_tools(tools)}", USAGE)


def name_tools(tools: Sequence[Tool]) -> str:
    """Return the names of tools for a sentence, of many only the first."""
    names = [one_line(tool.name) for tool in tools]
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return (", ".join(names[:_NAMES_SHOWN]) or "none") + more
