"""Which arguments a server's tools want repeated in headers, as they were listed last (server/tools, "x-mcp-header").

Only used where the channel carries headers and the revision repeats what requests say. Unlike what a tool promises to
return, it stays when the list is announced to have changed: the specification wants the newest schema there is.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any, Final

import attrs

from trimcp.framing.headers import Mirror, find_mirrors, param_headers
from trimcp.wire.tools import Tool

__all__ = ["Mirrors"]

log: logging.Logger = logging.getLogger("trimcp.client")

_MOST_TOOLS: Final = 4_096
# What a client is willing to repeat is its own choice; servers take 8 KiB to 64 KiB of headers at all.
_MOST_HEADERS: Final = 100
_MOST_NAMES: Final = 8_192
_MOST_WARNINGS: Final = 10


@attrs.define(eq=False)
class Mirrors:
    """What is known of the tools of one server; of too many the oldest give way."""

    _by_tool: dict[str, tuple[Mirror, ...]] = attrs.field(init=False, factory=dict)

    def take(self, tools: Iterable[Tool]) -> list[Tool]:
        """Learn from tools that were just listed, and return those that may be used.

        One whose annotations are invalid is left out and named in the log.
        """
        valid = []
        invalid = 0
        for tool in tools:
            self._by_tool.pop(tool.name, None)
            try:
                mirrors = _bounded(find_mirrors(tool.input_schema))
            except ValueError as error:
                invalid += 1
                if invalid <= _MOST_WARNINGS:
                    log.warning("the tool %s is left out, its inputSchema is invalid: %s", f"{tool.name!r:.200}", error)
                continue
            valid.append(tool)
            if mirrors:
                self._by_tool[tool.name] = mirrors
        if invalid > _MOST_WARNINGS:
            log.warning("%d more tools with an invalid inputSchema are left out", invalid - _MOST_WARNINGS)
        for name in list(self._by_tool)[:-_MOST_TOOLS]:
            del self._by_tool[name]
        return valid

    def keep(self, tools: Iterable[Tool]) -> None:
        """Forget every tool that is not among these."""
        names = {tool.name for tool in tools}
        self._by_tool = {name: mirrors for name, mirrors in self._by_tool.items() if name in names}

    def headers(self, name: str, arguments: Mapping[str, Any]) -> dict[str, str]:
        """Return the headers that repeat arguments of a call; none of a tool that was never listed.

        Raises:
            LocalError: one of them cannot be put in a header.
        """
        return param_headers(self._by_tool.get(name, ()), arguments)


def _bounded(mirrors: tuple[Mirror, ...]) -> tuple[Mirror, ...]:
    names = sum(len(mirror.header) + sum(map(len, mirror.path)) for mirror in mirrors)
    if len(mirrors) > _MOST_HEADERS or names > _MOST_NAMES:
        raise ValueError("it wants more headers than this client sends")
    return mirrors
