"""The tools a server listed, and a prebuilt validator for what each promises to return."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING

import attrs

from trimcp.errors import InvalidReply
from trimcp.wire.fields import ABSENT
from trimcp.wire.tools import CallToolResult, Tool

if TYPE_CHECKING:
    from trimcp.validation import Validator

__all__ = ["Outputs"]

log: logging.Logger = logging.getLogger("trimcp.client")


@attrs.define(eq=False)
class Outputs:
    """Checks structured results. A tool that was never listed is not checked: nothing is known of it."""

    _tools: dict[str, Tool] = attrs.field(init=False, factory=dict)
    _validators: dict[str, Validator | None] = attrs.field(init=False, factory=dict)

    def listed(self, tools: Iterable[Tool]) -> None:
        """Take a whole new list of tools. Validators of schemas that did not change stay."""
        before = self._tools
        self._tools = {tool.name: tool for tool in tools}
        self._validators = {
            name: validator
            for name, validator in self._validators.items()
            if name in self._tools and self._tools[name].output_schema == before[name].output_schema
        }

    def tool(self, name: str) -> Tool | None:
        """Return a tool as it was listed last, or None."""
        return self._tools.get(name)

    def check(self, name: str, result: CallToolResult) -> None:
        """Check a result against its tool's schema.

        Raises:
            InvalidReply: it does not match; the text names the places.
        """
        tool = self._tools.get(name)
        if tool is None or tool.output_schema is ABSENT or result.is_error is True:
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
    from trimcp.validation import SchemaError, peer_validator  # loads the schema engine, which few clients need

    assert isinstance(tool.output_schema, dict)
    try:
        return peer_validator(tool.output_schema)
    except SchemaError as error:
        from trimcp.security import security_event

        security_event("schema_refused", tool=tool.name, why=str(error))
        log.warning("results of the tool %r are not checked; its output schema is unusable: %s", tool.name, error)
        return None
