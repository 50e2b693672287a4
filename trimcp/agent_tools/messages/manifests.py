"""Tool manifests: read, bounded, checked and hashed before anything else looks at them.

A manifest comes from somebody who may be hostile. So its size and depth are bounded before it is walked, its schema is
compiled with the bounds for schemas of peers (no other document, no backtracking, no endless references), and what
nobody can see is refused in the texts that a model reads. Nothing here knows servers, tasks or time.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from functools import cached_property
from typing import Any, Final

import attrs
import orjson

from trimcp.agent_tools.messages.errors import UnfitManifest
from trimcp.framing.headers import find_mirrors
from trimcp.hidden import hidden_text
from trimcp.schema.engine import SchemaError
from trimcp.schema.validator import Validator, peer_validator
from trimcp.support.bounds import checked
from trimcp.support.cleaning import harmless

NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
"""A tool's name: what the Model Context Protocol recommends (SEP-986), beginning with no point or dash."""

_VERSION: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9.+_-]{0,63}")
_MEMBERS: Final = frozenset({"name", "description", "parameters", "version", "implementation", "callback"})
_LONGEST_URL: Final = 2_048
# An object tree takes about twenty times its text, and lists of tools are kept encoded for each revision and each set
# of scopes.
_PER_BYTE: Final = 64


@attrs.frozen(field_transformer=checked())
class ManifestBounds:
    """How large a manifest may be.

    Attributes:
        max_schema: bytes of its parameters as JSON.
        max_depth: levels of objects and arrays in its parameters.
        max_members: values in its parameters.
        max_description: characters of its description.
    """

    max_schema: int = 64 * 1024
    max_depth: int = 32
    max_members: int = 5_000
    max_description: int = 4_096


@attrs.frozen(eq=False)
class Manifest:
    """What somebody says about a tool.

    Attributes:
        name: the tool's name.
        description: for the model, without text that a person cannot see.
        parameters: the JSON Schema of its arguments, which are an object. Do not modify it.
        version: the tool's version.
        implementation: the name of the implementation it asks for, or None.
        callback: the URL at which it is to be called, or None.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = attrs.field(factory=lambda: {"type": "object"})
    version: str = "1"
    implementation: str | None = None
    callback: str | None = attrs.field(default=None, repr=False)
    _compiled: Validator | None = attrs.field(default=None, repr=False, alias="compiled")

    @classmethod
    def parse(cls, raw: Any, bounds: ManifestBounds | None = None, *, strict: bool = False) -> Manifest:
        """Return the manifest that somebody sent as a JSON value.

        Args:
            raw: the JSON value.
            bounds: how large it may be.
            strict: refuse members that a manifest does not have, instead of ignoring them.

        Raises:
            UnfitManifest: it cannot be registered; `data["problems"]` says why, without repeating what was sent.
        """
        problems: list[str] = []
        found = _read(raw, bounds or ManifestBounds(), problems, strict)
        if problems:
            raise UnfitManifest(f"the manifest cannot be registered: {problems[0]}", {"problems": problems})
        return cls(**found)

    @cached_property
    def hash(self) -> str:
        """The SHA-256 of all that it says, as hexadecimal digits: equal manifests have equal ones."""
        return hashlib.sha256(_canonical(self.facts())).hexdigest()

    @cached_property
    def memory(self) -> int:
        """About how many bytes it takes in a server at most: itself, compiled, and in lists of tools."""
        return _PER_BYTE * len(_canonical(self.facts())) + self.validator.memory

    @cached_property
    def validator(self) -> Validator:
        """The schema of its arguments, compiled with the bounds for schemas of peers. Raises SchemaError."""
        return self._compiled or peer_validator(dict(self.parameters))

    def named(self, name: str) -> Manifest:
        """Return this manifest under another name."""
        if name == self.name:
            return self
        renamed: Manifest = attrs.evolve(self, name=name)
        return renamed

    def to_json(self) -> dict[str, Any]:
        """Return what everybody may know about the tool: not where it is carried out."""
        return {
            "name": self.name,
            "description": self.description,
            "parameters": self.parameters,
            "version": self.version,
        }

    def facts(self) -> dict[str, Any]:
        """Return everything that `hash` covers."""
        where = {"implementation": self.implementation, "callback": self.callback}
        return {**self.to_json(), **{name: value for name, value in where.items() if value is not None}}


def _canonical(value: Any) -> bytes:
    """Return the one JSON text of equal values: keys in order, no spaces."""
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)


def _read(raw: Any, bounds: ManifestBounds, problems: list[str], strict: bool) -> dict[str, Any]:
    """Return the members of a manifest; what is wrong with them is added to `problems`."""
    if type(raw) is not dict:
        problems.append("a manifest is an object")
        return {}
    found: dict[str, Any] = {"name": raw.get("name")}
    if not _matches(NAME, found["name"]):
        problems.append("name is 1 to 128 letters, digits, points, dashes and underscores")
    found["description"] = _text(raw.get("description", ""), "description", bounds.max_description, problems)
    found["version"] = raw.get("version", "1")
    if not _matches(_VERSION, found["version"]):
        problems.append('version is a text of 1 to 64 letters, digits, points, dashes and underscores, such as "1.2"')
    for member, longest in (("implementation", 128), ("callback", _LONGEST_URL)):
        if raw.get(member) is not None:
            found[member] = _text(raw[member], member, longest, problems, least=1)
    if len(found.keys() & {"implementation", "callback"}) == 2:
        problems.append("implementation and callback cannot both be given")
    if strict and (more := sorted(harmless(str(name), 40) for name in raw.keys() - _MEMBERS)):
        problems.append(f"unknown members: {', '.join(more[:10])}")
    schema: Any = raw.get("parameters")
    problem = _schema_problem(schema, bounds)
    if problem is None:
        found["parameters"] = schema
        try:
            found["compiled"] = peer_validator(schema)
        except SchemaError as error:
            problem = f"parameters: {error}"
    if problem is not None:
        problems.append(problem)
    return found


def _matches(pattern: re.Pattern[str], text: Any) -> bool:
    return type(text) is str and pattern.fullmatch(text) is not None


def _text(value: Any, member: str, longest: int, problems: list[str], *, least: int = 0) -> Any:
    if type(value) is not str or not least <= len(value) <= longest:
        problems.append(f"{member} is a text of at most {longest:,} characters")
    elif hidden := hidden_text(value):
        problems.append(f"{member} holds text that a person cannot see ({hidden[0].kind})")
    else:
        try:
            value.encode()
        except UnicodeEncodeError:
            problems.append(f"{member} is not Unicode")
    return value


def _schema_problem(schema: Any, bounds: ManifestBounds) -> str | None:
    """Return why parameters are no schema of an object within the bounds; None if they are worth compiling."""
    if type(schema) is not dict:
        return "parameters is a JSON Schema: an object"
    if schema.get("type") != "object":
        return 'parameters is the schema of an object: it needs "type": "object"'
    problem = _size_problem(schema, bounds)
    if problem is not None:
        return problem
    try:
        text = _canonical(schema)
    except (orjson.JSONEncodeError, RecursionError) as error:
        return f"parameters is not JSON: {harmless(str(error), 80)}"
    if len(text) > bounds.max_schema:
        return f"parameters is larger than {bounds.max_schema:,} bytes"
    try:
        find_mirrors(schema)
    except ValueError as error:
        return f"parameters: {harmless(str(error))}"
    return None


def _size_problem(schema: dict[str, Any], bounds: ManifestBounds) -> str | None:
    """Return which bound a schema exceeds, or that it has hidden text. It walks no further than the bounds allow."""
    members = size = 0
    level: list[Any] = [schema]
    for _ in range(bounds.max_depth):
        below: list[Any] = []
        for container in level:
            members += len(container)
            if members > bounds.max_members:
                return f"parameters has more than {bounds.max_members:,} members"
            for value in (*container, *container.values()) if type(container) is dict else container:
                if type(value) is str:
                    size += len(value)
                    if size > bounds.max_schema:
                        return f"parameters is larger than {bounds.max_schema:,} bytes"
                    if hidden := hidden_text(value):
                        return f"parameters holds text that a person cannot see ({hidden[0].kind})"
                elif type(value) is dict or type(value) is list:
                    below.append(value)
        if not below:
            return None
        level = below
    return f"parameters is nested deeper than {bounds.max_depth} levels"
