"""The operations of an API: what each takes, and the request that it makes of arguments."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, TypeAlias
from urllib.parse import quote, urlencode

import attrs
import orjson

from trimcp.errors import ToolError
from trimcp.hidden import strip_hidden
from trimcp.rest.document import Place, SchemaReader, UnfitOperation
from trimcp.support.bounds import is_token

_METHODS: Final = ("get", "put", "post", "delete", "options", "head", "patch", "trace")
_STYLES: Final = {"path": ("simple",), "header": ("simple",), "cookie": ("form",)}
_QUERY_STYLES: Final = {"form": ",", "spaceDelimited": " ", "pipeDelimited": "|", "deepObject": ","}
# Of HTTP itself, or described elsewhere in the document (OpenAPI, "Parameter Object").
_NOT_TAKEN: Final = frozenset(
    {"accept", "content-type", "authorization", "host", "content-length", "transfer-encoding", "connection", "cookie"}
)
_LONGEST_TEXT: Final = 4_000
_FORM: Final = "application/x-www-form-urlencoded"
_MOST_OPERATIONS: Final = 5_000

_Pairs: TypeAlias = list[tuple[str, str]]


@attrs.frozen
class ApiOperation:
    """One operation of an API, for the function that decides which are offered.

    Attributes:
        id: its `operationId`, or None.
        method: "GET", "POST", ...
        path: such as `/users/{id}`.
        name: the name of its tool, made of the id, or of method and path.
        summary: one line, or None.
        description: more, or None.
        tags: by which the document groups its operations.
        deprecated: whether it is.
    """

    id: str | None
    method: str
    path: str
    name: str
    summary: str | None
    description: str | None
    tags: tuple[str, ...]
    deprecated: bool


@attrs.frozen(eq=False)
class ApiParameter:
    """One parameter: the argument that it takes, and where its value goes."""

    name: str
    argument: str
    place: str  # "path", "query", "header" or "cookie"
    style: str
    explode: bool
    as_json: bool

    def pairs(self, value: Any) -> _Pairs:
        """Return what a value is, as names and texts."""
        separator = _QUERY_STYLES.get(self.style, ",")
        if self.as_json:
            return [(self.name, orjson.dumps(value).decode())]
        if isinstance(value, list):
            texts = [_text(each) for each in value]
            if self.explode and self.place == "query":
                return [(self.name, each) for each in texts]
            return [(self.name, separator.join(texts))] if texts else []
        if isinstance(value, dict):
            members = [(key, _text(each)) for key, each in value.items()]
            if self.style == "deepObject":
                return [(f"{self.name}[{key}]", text) for key, text in members]
            if self.explode and self.place == "query":
                return members
            joined = (
                [f"{key}={text}" for key, text in members] if self.explode else [t for pair in members for t in pair]
            )
            return [(self.name, separator.join(joined))]
        return [(self.name, _text(value))]

    def text(self, value: Any) -> str:
        """Return what a value is outside of a query, as one text."""
        return "".join(text for _, text in self.pairs(value))


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None:
        return ""
    return value if isinstance(value, str) else orjson.dumps(value).decode()


@attrs.define
class ApiRequest:
    """What is sent."""

    method: str
    path: str
    query: _Pairs
    headers: dict[str, str] = attrs.field(repr=False)
    cookies: _Pairs = attrs.field(repr=False)
    body: bytes | None

    def target(self, base: str) -> str:
        """Return its URL at an API."""
        query = urlencode(self.query, quote_via=quote)
        return f"{base.rstrip('/')}{self.path}{'?' if query else ''}{query}"

    def all_headers(self) -> dict[str, str]:
        """Return its headers, the cookies among them. Raises ToolError for a value that no header can have."""
        headers = dict(self.headers)
        if self.cookies:
            headers["cookie"] = "; ".join(f"{quote(name)}={quote(value)}" for name, value in self.cookies)
        for name, value in headers.items():
            if not value.isprintable() or not value.isascii():
                raise ToolError(f"the header {name} cannot have a value with control characters or beyond ASCII")
        return headers


@attrs.frozen(eq=False)
class ApiCall:
    """How arguments become the request of one operation."""

    about: ApiOperation
    schema: dict[str, Any]  # of the arguments
    security: tuple[Mapping[str, list[str]], ...]  # alternatives, by the names of security schemes
    _parameters: tuple[ApiParameter, ...]
    _body: str | None  # its media type; the value is the argument "body"

    def request(self, arguments: Mapping[str, Any]) -> ApiRequest:
        """Return the request. Raises ToolError for a value that would change its path."""
        path, body = self.about.path, None
        made = ApiRequest(self.about.method, path, [], {"accept": "application/json, */*;q=0.5"}, [], None)
        for parameter in self._parameters:
            if parameter.argument not in arguments:
                continue
            value = arguments[parameter.argument]
            if parameter.place == "path":
                text = parameter.text(value)
                if text in ("", ".", ".."):
                    raise ToolError(f"{parameter.argument} is a part of a path, and must not be {text!r}")
                path = path.replace(f"{{{parameter.name}}}", quote(text, safe=""))
            elif parameter.place == "query":
                made.query += parameter.pairs(value)
            elif parameter.place == "cookie":
                made.cookies += parameter.pairs(value)
            else:
                made.headers[parameter.name.lower()] = parameter.text(value)
        if self._body is not None and "body" in arguments:
            body = _encoded(arguments["body"], self._body)
            made.headers["content-type"] = self._body
        made.path, made.body = path, body
        return made


def _encoded(value: Any, kind: str) -> bytes:
    if kind.startswith(_FORM) and isinstance(value, dict):
        pairs = [(key, each) for key, some in value.items() for each in (some if isinstance(some, list) else [some])]
        return urlencode([(key, _text(each)) for key, each in pairs]).encode()
    if kind.startswith("text/plain") and isinstance(value, str):
        return value.encode()
    return orjson.dumps(value)


def operations(root: Place) -> Iterator[tuple[ApiOperation, Place, Place]]:
    """Yield the operations of a document, each with its place and that of its path. Raises ValueError: too many."""
    names: set[str] = set()
    for path, item in root.member("paths", dict, {}).items():
        item = root.of(item)
        if not isinstance(path, str) or not path.startswith("/"):
            continue
        for method in _METHODS:
            place = item.of(item.member(method, dict, None))
            if not isinstance(place.value, dict):
                continue
            if len(names) >= _MOST_OPERATIONS:
                raise ValueError(f"the document has more than {_MOST_OPERATIONS} operations")
            id = place.member("operationId", str, None)
            base = re.sub(r"[^A-Za-z0-9]+", "_", f"{method} {path}") if id is None else id
            base = re.sub(r"[^A-Za-z0-9_-]+", "_", base).strip("_")[:60] or method
            name, number = base, 1
            while name in names:
                number += 1
                name = f"{base}_{number}"
            names.add(name)
            yield (
                ApiOperation(
                    id,
                    method.upper(),
                    path,
                    name,
                    _shown(place.member("summary", str, "")),
                    _shown(place.member("description", str, "")),
                    tuple(tag for tag in place.member("tags", list, []) if isinstance(tag, str)),
                    place.member("deprecated", bool, False),
                ),
                place,
                item,
            )


def _shown(text: str) -> str | None:
    return strip_hidden(text[:_LONGEST_TEXT]).strip() or None


def read_operation(about: ApiOperation, place: Place, item: Place, root: Place) -> ApiCall:
    """Return how an operation is called. Raises UnfitOperation: it cannot be."""
    reader = SchemaReader(old=str(root.value["openapi"]).startswith("3.0"))
    found: dict[tuple[str, str], Place] = {}
    for owner in (item, place):  # those of the operation have precedence
        for each in owner.member("parameters", list, []):
            parameter = owner.of(each)
            name, where = parameter.member("name", str, ""), parameter.member("in", str, "")
            if not name or where not in ("path", "query", "header", "cookie"):
                raise UnfitOperation("it has a parameter without name, or in a place that is none")
            found[where, name] = parameter
    properties: dict[str, Any] = {}
    required: list[str] = []
    parameters: list[ApiParameter] = []
    body_type, body = _body_of(place)
    taken = {name for _, name in found}
    for (where, name), each in found.items():
        if where == "header" and (name.lower() in _NOT_TAKEN or not is_token(name)):
            continue
        twice = sum(other == name for _, other in found) > 1 or (name == "body" and body is not None)
        argument = f"{name}_{where}" if twice and f"{name}_{where}" not in taken else name
        if argument in properties:
            raise UnfitOperation(f"two of its parameters would be the argument {argument!r}")
        parameters.append(_parameter(each, name, argument, where))
        properties[argument] = _described(each, reader.read(_schema_of(each)))
        if each.member("required", bool, False) or where == "path":
            required.append(argument)
    if body is not None:
        properties["body"] = _described(body, reader.read(_schema_of(body.of(body.value["content"][body_type]))))
        if body.member("required", bool, False):
            required.append("body")
    missing = {*re.findall(r"\{([^{}]+)\}", about.path)} - {each.name for each in parameters if each.place == "path"}
    if missing:
        raise UnfitOperation(f"nothing says what {{{min(missing)}}} in its path is")
    schema: dict[str, Any] = {"type": "object", "properties": properties, "additionalProperties": False}
    if required:
        schema["required"] = required
    if reader.definitions:
        schema["$defs"] = reader.definitions
    security = place.member("security", list, root.member("security", list, []))
    alternatives = tuple(each for each in security if isinstance(each, dict))
    return ApiCall(about, schema, alternatives, tuple(parameters), body_type or None)


def _parameter(place: Place, name: str, argument: str, where: str) -> ApiParameter:
    usual = "form" if where in ("query", "cookie") else "simple"
    style = place.member("style", str, usual)
    if style not in _STYLES.get(where, tuple(_QUERY_STYLES)):
        raise UnfitOperation(f"its parameter {name!r} is written in the style {style[:40]!r}, which is not known here")
    explode = place.member("explode", bool, style == "form")
    return ApiParameter(name, argument, where, style, explode, as_json="content" in place.value)


def _schema_of(place: Place) -> Place:
    """Return the schema of a parameter or a media type; one that has none takes anything."""
    content = place.member("content", dict, None)
    if content is not None:
        place = place.of(next(iter(content.values()), {}))
    return Place(place.member("schema", (dict, bool), True), place.resolver)  # type: ignore[arg-type]  # as isinstance


def _described(place: Place, schema: Any) -> Any:
    """Return a schema with the description that stands beside it."""
    text = _shown(place.member("description", str, ""))
    if text is None or schema is False:
        return schema
    return {"description": text} if schema is True else {"description": text, **schema}


def _body_of(place: Place) -> tuple[str, Place | None]:
    """Return the media type in which a body is sent, and its place; "" and None without one."""
    body = place.of(place.member("requestBody", dict, None))
    content = body.member("content", dict, {})
    plain = {kind.partition(";")[0].strip().lower(): kind for kind in content if isinstance(kind, str)}
    for wanted in ("application/json", *(each for each in plain if each.endswith("+json")), _FORM, "text/plain"):
        if wanted in plain:
            return plain[wanted], body
    if content or body.member("required", bool, False):
        raise UnfitOperation(
            f"its body is sent as {', '.join(map(str, content))[:100] or 'nothing'}, which no tool can make"
        )
    return "", None
