"""What a client stores from a server's lists: output schemas, header parameters, what could not be read."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final, TypeVar

import attrs
import orjson

from trimcp.errors import InvalidReply
from trimcp.framing.headers import Mirror, find_mirrors, param_headers
from trimcp.security import security_event
from trimcp.support.cleaning import in_quotes, one_line
from trimcp.wire.common import Unreadable
from trimcp.wire.converter import converter_for
from trimcp.wire.fields import ABSENT
from trimcp.wire.revisions import LATEST
from trimcp.wire.tools import CallToolResult, Tool

if TYPE_CHECKING:
    from trimcp.schema.validator import Validator

log: logging.Logger = logging.getLogger("trimcp.client")

T = TypeVar("T")

_MOST_TOOLS: Final = 4_096
# How many headers a client repeats is its own choice; servers accept 8 KiB to 64 KiB of headers in all.
_MOST_HEADERS: Final = 100
_MOST_NAMES: Final = 8_192
_MOST_WARNINGS: Final = 10
_NO_PART: Final = ("_meta", "icons")  # not part of a fingerprint


class Listing(list[T]):
    """What a server lists, and in `rejected` what was left out of it because it could not be read."""

    rejected: tuple[Unreadable, ...] = ()


@attrs.define(eq=False)
class Rejections:
    """Warns of what was left out of a server's results, once of each. The server's texts are escaped."""

    _said: set[tuple[str, Unreadable]] = attrs.field(init=False, factory=set)

    def warn(self, server: str, method: str, rejected: Iterable[Unreadable]) -> None:
        """Log what was left out of the answer to a request."""
        new = [each for each in rejected if (method, each) not in self._said]
        if not new or len(self._said) >= _MOST_TOOLS:
            return
        self._said.update((method, each) for each in new)
        for each in new[:_MOST_WARNINGS]:
            named = "" if each.name is None else f" ({in_quotes(each.name)})"
            text = "%s answered %s with something that cannot be read, and is left out: %s%s %s"
            log.warning(text, in_quotes(server), method, each.place, named, one_line(each.reason))
        if len(new) > _MOST_WARNINGS:
            log.warning("%d more, see `rejected`", len(new) - _MOST_WARNINGS)


@attrs.define(eq=False)
class Outputs:
    """The tools that a server listed, and checks of results by their output schemas; unlisted tools are not checked."""

    _tools: dict[str, Tool] = attrs.field(init=False, factory=dict)
    _validators: dict[str, Validator | None] = attrs.field(init=False, factory=dict)

    def listed(self, tools: Iterable[Tool]) -> None:
        """Replace the list of tools. Validators of unchanged schemas are kept."""
        before = self._tools
        self._tools = {tool.name: tool for tool in tools}
        self._validators = {
            name: validator
            for name, validator in self._validators.items()
            if name in self._tools and self._tools[name].output_schema == before[name].output_schema
        }

    def tool(self, name: str) -> Tool | None:
        """Return a tool as last listed, or None."""
        return self._tools.get(name)

    def check(self, name: str, result: CallToolResult) -> None:
        """Check a result against its tool's schema.

        Raises InvalidReply: it does not match; the text names the places.
        """
        tool = self._tools.get(name)
        if tool is None or tool.output_schema is None or result.is_error is True:
            return
        if name not in self._validators:
            self._validators[name] = _build(tool)
        validator = self._validators[name]
        if validator is None:
            return
        if result.structured_content is ABSENT:
            raise InvalidReply(f"the tool {name!r} promises structured content, but its result has none")
        problems = validator.problems(result.structured_content)
        if problems:
            raise InvalidReply(f"the tool {name!r} broke its own output schema: {'; '.join(problems)}"[:1000])


def _build(tool: Tool) -> Validator | None:
    from trimcp.schema.engine import SchemaError  # few clients need the engine
    from trimcp.schema.validator import peer_validator

    assert isinstance(tool.output_schema, dict)
    try:
        return peer_validator(tool.output_schema)
    except SchemaError as error:
        security_event("schema_refused", tool=tool.name, why=str(error))
        why = one_line(str(error))
        log.warning("results of the tool %r are not checked; its output schema is unusable: %s", tool.name, why)
        return None


@attrs.define(eq=False)
class Mirrors:
    """The arguments that tools require in headers (server/tools, "x-mcp-header"); the oldest of too many are dropped.

    Only used if the channel sends headers and the revision requires them. Unlike output schemas, it is kept when the
    server notifies that the list changed: the specification requires the newest schema known.
    """

    _by_tool: dict[str, tuple[Mirror, ...]] = attrs.field(init=False, factory=dict)

    def take(self, tools: Iterable[Tool]) -> Listing[Tool]:
        """Store the tools of a new list, and return those that may be used; `rejected` has those that may not."""
        valid = Listing[Tool]()
        for place, tool in enumerate(tools):
            self._by_tool.pop(tool.name, None)
            try:
                mirrors = _bounded(find_mirrors(tool.input_schema))
            except ValueError as error:
                valid.rejected += (Unreadable(f"tools[{place}]", tool.name[:200], one_line(str(error))),)
                continue
            valid.append(tool)
            if mirrors:
                self._by_tool[tool.name] = mirrors
        for name in list(self._by_tool)[:-_MOST_TOOLS]:
            del self._by_tool[name]
        return valid

    def keep(self, tools: Iterable[Tool]) -> None:
        """Drop every tool that is not in `tools`."""
        names = {tool.name for tool in tools}
        self._by_tool = {name: mirrors for name, mirrors in self._by_tool.items() if name in names}

    def headers(self, name: str, arguments: Mapping[str, Any]) -> dict[str, str]:
        """Return the headers for the arguments of a call; none for a tool that was never listed.

        Raises LocalError: an argument cannot be sent in a header.
        """
        return param_headers(self._by_tool.get(name, ()), arguments)


def _bounded(mirrors: tuple[Mirror, ...]) -> tuple[Mirror, ...]:
    names = sum(len(mirror.header) + sum(map(len, mirror.path)) for mirror in mirrors)
    if len(mirrors) > _MOST_HEADERS or names > _MOST_NAMES:
        raise ValueError("it wants more headers than this client sends")
    return mirrors


def fingerprint(tool: Tool) -> str:
    """Return a digest of everything in a tool's listing that a model or a user reads: name, texts, schemas and hints.

    Store it when the user approves a tool, and compare it before each call: a server may change the listing of a tool
    once it is trusted. The order of members, icons and `_meta` are ignored. Compare only listings of the same revision:
    older revisions omit members.

    Args:
        tool: as listed by the server.
    """
    listed = {name: value for name, value in converter_for(LATEST).dump(tool).items() if name not in _NO_PART}
    return f"sha256:{hashlib.sha256(orjson.dumps(listed, option=orjson.OPT_SORT_KEYS)).hexdigest()}"
