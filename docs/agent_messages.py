"""Writes what the reference of agent tools says of messages and errors, and the file of JSON Schemas, from the code.

python docs/agent_messages.py            write them
python docs/agent_messages.py --check    fail if one is not what would be written

In the page a part stands between `<!-- written: NAME -->` and `<!-- end -->`; the rest of it is left alone.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from trimcp.agent_tools.messages.errors import ERRORS_BY_CODE
from trimcp.agent_tools.messages.messages import schemas

REFERENCE: Final = Path(__file__).parent / "reference"
PAGE: Final = REFERENCE / "agent-tools.md"
SCHEMAS: Final = REFERENCE / "agent-tools.schema.json"

_PART: Final = re.compile(r"^(<!-- written: (\w+) -->\n).*?^(<!-- end -->)$", re.MULTILINE | re.DOTALL)


def messages() -> str:
    """Return a section for each message, in the order of their declarations, and for what they hold."""
    found = schemas()["$defs"]
    return "\n".join(_section(name, schema) for name, schema in found.items())


def errors() -> str:
    """Return the table of errors."""
    lines = ["| code | HTTP | gRPC | extended status | class | when |", "| --- | --- | --- | --- | --- | --- |"]
    for code, cls in ERRORS_BY_CODE.items():
        when = " ".join((cls.__doc__ or "").split())
        name = f"[`{cls.__name__}`](#trimcp.agent_tools.messages.errors.{cls.__name__})"
        lines.append(
            f"| `{code}` | {cls.http_status} | `{cls.grpc_status}` | `{cls.extended_status}` | {name} | {when} |"
        )
    return "\n".join(lines) + "\n"


def page(text: str) -> str:
    """Return the page with its written parts as they have to be."""

    def written(part: re.Match[str]) -> str:
        return f"{part[1]}\n{_PARTS[part[2]]()}\n{part[3]}"

    return _PART.sub(written, text)


def schema_file() -> str:
    """Return the text of the file of schemas."""
    return json.dumps(schemas(), indent=2) + "\n"


def _section(name: str, schema: Mapping[str, Any]) -> str:
    required = schema.get("required", ())
    lines = [f"### {name}", "", schema["description"], "", "| member | JSON | |", "| --- | --- | --- |"]
    for member, about in schema["properties"].items():
        if "const" in about:
            lines.append(f'| **`{member}`** | `"{about["const"]}"` | |')
            continue
        shown = f"**`{member}`**" if member in required else f"`{member}`"
        lines.append(f"| {shown} | {_kind(about)} | {about.get('description', '')} |")
    return "\n".join(lines) + "\n"


def _kind(schema: Mapping[str, Any]) -> str:
    """Return what a member may be, in words."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name})"
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    kind = schema.get("type", "any")
    if kind == "string":
        return f"text, 1 to {schema['maxLength']:,} characters" if "maxLength" in schema else "text"
    if kind == "array":
        return f"array: each {_kind(schema['items'])}"
    return f"{kind} above {schema['exclusiveMinimum']}" if "exclusiveMinimum" in schema else kind


_PARTS: Final[dict[str, Callable[[], str]]] = {"messages": messages, "errors": errors}


def stale() -> dict[Path, str]:
    """Return the files that are not what they have to be, with what that is."""
    wanted = {SCHEMAS: schema_file(), PAGE: page(PAGE.read_text("utf-8"))}
    return {path: text for path, text in wanted.items() if not path.exists() or path.read_text("utf-8") != text}


def main() -> int:
    found = stale()
    for path, text in found.items():
        if "--check" not in sys.argv:
            path.write_text(text, "utf-8")
        print(path.relative_to(REFERENCE.parent.parent))
    return int(bool(found) and "--check" in sys.argv)


if __name__ == "__main__":
    sys.exit(main())
