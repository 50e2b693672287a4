"""Request headers that repeat parts of the body (2026-07-28 basic/transports/streamable-http, "Request Metadata").

With `Mcp-Method`, `Mcp-Name` and `MCP-Protocol-Version` proxies can route without reading bodies, and with
`Mcp-Param-*` also by arguments that a tool's schema marks with `x-mcp-header`. A client writes them; a server that
reads the body must compare them. Headers are mappings by lower-case name; their values have no surrounding white
space.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any, Final, TypeAlias

import attrs

from trimcp.errors import LocalError
from trimcp.support.bounds import is_token
from trimcp.support.slotted import slotted, valued
from trimcp.wire.jsonrpc import Unencodable
from trimcp.wire.subschemas import subschemas

ANNOTATION: Final = "x-mcp-header"
"""The keyword of a property's schema that names the header for its value."""
VERSION: Final = "mcp-protocol-version"
METHOD: Final = "mcp-method"
NAME: Final = "mcp-name"

_PREFIX: Final = "Mcp-Param-"
_LENIENT: Final = "taskId"  # clients that do not know the extension's rule leave the header out; a wrong one is refused
_HEAD: Final = "=?base64?"
_TAIL: Final = "?="
_LARGEST: Final = 2**53 - 1  # "Integer values MUST be within the safe range for JavaScript"
_LONGEST_NUMBER: Final = 64  # characters; longer than any number in that range, and fast to compute with
_CARRIED: Final = r"[\t\x20-\x7e]*"
_PLAIN: Final = re.compile(r"(?!=\?base64\?)[\t\x20-\x7e]*")  # what means itself
_NUMBER: Final = r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]{1,4})?"


# Values


def encode_value(value: str | float) -> str:
    """Return a string, integer or boolean as a header value, in base64 if plain text could not be sent unchanged.

    Raises LocalError: an integer beyond 53 bits, which some readers of headers would round, or a lone surrogate.
    """
    if isinstance(value, str):
        return _encode_text(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if value % 1:
        return repr(value)  # no annotation allows it; the server reports that an integer is required
    if abs(value) > _LARGEST:
        raise LocalError("an integer beyond 53 bits cannot be repeated in a header")
    return str(int(value))


def _encode_text(text: str) -> str:
    if text.isascii() and text.isprintable() and text == text.strip(" ") and not _looks_encoded(text):
        return text
    try:
        data = text.encode()
    except UnicodeEncodeError:
        raise Unencodable("a header cannot carry a lone surrogate") from None
    return f"{_HEAD}{base64.b64encode(data).decode()}{_TAIL}"


def _looks_encoded(text: str) -> bool:
    return text.startswith(_HEAD) and text.endswith(_TAIL)


def decode_value(text: str) -> str:
    """Return the meaning of a header value, decoded from base64 if necessary.

    Raises ValueError: it has characters that are not allowed in headers, or invalid base64 or UTF-8.
    """
    if not re.fullmatch(_CARRIED, text):
        raise ValueError("it has characters a header cannot carry")
    if not _looks_encoded(text) or len(text) < len(_HEAD) + len(_TAIL):
        return text
    inner = text[len(_HEAD) : -len(_TAIL)].encode()
    try:
        data = binascii.a2b_base64(inner)
    except binascii.Error:
        raise ValueError("it is not valid base64") from None
    if base64.b64encode(data) != inner:  # a less strict reader would decode other texts to the same
        raise ValueError("it is not valid base64")
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise ValueError("its base64 is not UTF-8") from None


# Headers of every request


def request_headers(version: str, method: str, name: str | None = None) -> dict[str, str]:
    """Return the headers of a request; `name` is the value for `Mcp-Name`, in methods that have one.

    Raises LocalError: as `encode_value`.
    """
    headers = {VERSION: version, METHOD: method}
    if name is not None:
        headers[NAME] = encode_value(name)
    return headers


def check_request(
    headers: Mapping[str, str], method: str, params: Mapping[str, Any] | None, *, named: str | None, version: str
) -> str | None:
    """Return what is wrong with a request's headers, as the message of a HeaderMismatch error, or None.

    `named` is the parameter that `Mcp-Name` repeats (`Method.mirrored`); None if that header is to be ignored.
    `version` is the revision in the body's `_meta`.
    """
    if headers.get(VERSION) != version:
        return _mismatch("MCP-Protocol-Version", headers.get(VERSION), version)
    if headers.get(METHOD) != method:
        return _mismatch("Mcp-Method", headers.get(METHOD), method)
    if named is None:
        return None
    sent = headers.get(NAME)
    value = params.get(named) if params is not None else None
    if sent == value and sent is not None and _PLAIN.fullmatch(sent):  # nearly always
        return None
    if not isinstance(value, str):
        # Without the header only the body is wrong, and the code that reads the parameters reports that.
        return None if sent is None else f"Header mismatch: Mcp-Name is sent, but the body has no {named}"
    if sent is None:
        return None if named == _LENIENT else _mismatch("Mcp-Name", None, value)
    try:
        return None if decode_value(sent) == value else _mismatch("Mcp-Name", sent, value)
    except ValueError as error:
        return _malformed("Mcp-Name", error)


def _mismatch(name: str, sent: str | None, value: str) -> str:
    if sent is None:
        return f"Header mismatch: the {name} header is missing"
    return f"Header mismatch: {name} header value {sent!r:.100} does not match body value {value!r:.100}"


def _malformed(name: str, error: ValueError) -> str:
    return f"Header mismatch: {name:.100} header is malformed: {error}"


# Headers for a tool's arguments


@slotted(frozen=True)
@valued
class Mirror:
    """An argument that is repeated in a header."""

    header: str  # the header's name as in the schema ("Mcp-Param-Region")
    path: tuple[str, ...]  # the properties that lead to the argument, from the outermost in
    # the header's name in lower case
    key: str = attrs.field(init=False, default=attrs.Factory(lambda mirror: mirror.header.lower(), takes_self=True))

    def value(self, arguments: Any) -> Any:
        """Return the argument in a call, or None if it is missing."""
        for step in self.path:
            if not isinstance(arguments, Mapping):
                return None
            arguments = arguments.get(step)
        return arguments


_Path: TypeAlias = tuple[str, ...] | None
"""The properties that lead to a schema from the outermost in, or None if its path has other keywords."""

_PRIMITIVE: Final = ("string", "integer", "boolean")


def find_mirrors(schema: Any) -> tuple[Mirror, ...]:
    """Return the arguments of a tool that are repeated in headers, by its input schema.

    Raises ValueError: an annotation breaks a rule of the specification, so the whole tool is invalid: its value is not
    a header name or is used twice, its property is not a string, integer or boolean, or its path has other keywords
    than `properties`. The text says which.
    """
    found: dict[str, Mirror] = {}
    for place, path in _places(schema):
        if ANNOTATION in place:
            mirror = _mirror(place, path)
            if mirror.key in found:
                raise ValueError(f"{ANNOTATION} {mirror.header[len(_PREFIX) :]!r:.100} is there twice")
            found[mirror.key] = mirror
    return tuple(found.values())


def _places(schema: Any) -> Iterator[tuple[dict[str, Any], _Path]]:
    """Yield every schema in this one, itself first, at any depth; the memory depends on its depth only."""
    if not isinstance(schema, dict):
        return
    yield schema, ()
    levels: list[tuple[_Path, Iterator[tuple[str, str, dict[str, Any]]]]] = [((), subschemas(schema))]
    while levels:
        path, inside = levels[-1]
        for keyword, name, place in inside:
            below = None if path is None or keyword != "properties" else (*path, name)
            yield place, below
            levels.append((below, subschemas(place)))
            break
        else:
            levels.pop()


def _mirror(schema: dict[str, Any], path: _Path) -> Mirror:
    if not path:
        raise ValueError(f"{ANNOTATION} stands where not `properties` alone lead to it")
    where = f"{'.'.join(path)!r:.100}"
    name = schema[ANNOTATION]
    if not isinstance(name, str) or not is_token(name):
        raise ValueError(f"{ANNOTATION} of {where} is no name of an HTTP header (RFC 9110, 5.1)")
    if schema.get("type") not in _PRIMITIVE:
        raise ValueError(f"{ANNOTATION} of {where}: only a string, integer or boolean can be mirrored in a header")
    return Mirror(_PREFIX + name, path)


def param_headers(mirrors: tuple[Mirror, ...], arguments: Mapping[str, Any]) -> dict[str, str]:
    """Return the headers for the arguments of a call. Absent and null arguments, arrays and objects have none.

    Raises LocalError: as `encode_value`.
    """
    headers = {}
    for mirror in mirrors:
        value = mirror.value(arguments)
        if isinstance(value, Enum):  # in JSON, a member is written as its value
            value = value.value
        if isinstance(value, (str, int, float)):
            headers[mirror.key] = encode_value(value)
    return headers


def check_params(mirrors: tuple[Mirror, ...], arguments: Any, headers: Mapping[str, str]) -> str | None:
    """Return what is wrong with the headers that repeat arguments, as the message of a HeaderMismatch error, or None.

    A header for an absent or null argument is as wrong as a different value: proxies would route by it.
    Numbers are compared as numbers. Headers that no annotation names are ignored.
    """
    for mirror in mirrors:
        sent = headers.get(mirror.key)
        value = mirror.value(arguments)
        if not isinstance(value, (str, int, float)):
            # An array or object cannot be repeated; the tool's schema refuses it.
            if sent is not None:
                return f"Header mismatch: {mirror.header:.100} is sent, but the body has no value for it"
        elif sent is None:
            return f"Header mismatch: the {mirror.header:.100} header is missing"
        else:
            try:
                if not _says(decode_value(sent), value):
                    return f"Header mismatch: {mirror.header:.100} header does not match the body"
            except ValueError as error:
                return _malformed(mirror.header, error)
    return None


def _says(text: str, value: str | float) -> bool:
    """Return whether a header value matches this argument."""
    if isinstance(value, str):
        return text == value
    if isinstance(value, bool):
        return text == ("true" if value else "false")
    if len(text) > _LONGEST_NUMBER or not re.fullmatch(_NUMBER, text):
        return False
    if isinstance(value, int):
        from decimal import Decimal  # loaded with the first number in a header

        return Decimal(text) == value
    return float(text) == value
