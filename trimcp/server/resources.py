"""Resources: fixed contents, functions and templates, matched by URI and read (server/resources)."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote, urlsplit, urlunsplit

import attrs

from trimcp.errors import ErrorReply, ResourceNotFound
from trimcp.schema.convert import ConversionError, to_json
from trimcp.schema.validator import Validator, validator_for
from trimcp.server.handlers.calling import PreparedFunction, prepare
from trimcp.server.handlers.media import json_text
from trimcp.server.handlers.threads import in_thread
from trimcp.server.options import ListedOptions, listed_members
from trimcp.session.context import Context
from trimcp.session.limits import Quota
from trimcp.wire.common import Annotations, CacheScope
from trimcp.wire.content import BlobResourceContents, TextResourceContents
from trimcp.wire.input_requests import InputRequiredResult
from trimcp.wire.resources import ReadResourceResult, Resource, ResourceTemplate

if TYPE_CHECKING:
    from trimcp.guard.permission import Permission
    from trimcp.server.handlers.pools import Pools
    from trimcp.server.uri_template import UriTemplate

_CONTENTS = (TextResourceContents, BlobResourceContents)

_ESCAPED: Final = re.compile("%([0-9A-Fa-f]{2})")
_PRINTABLE: Final = "!#$%&'()*+,/:;=?@[]~"


@attrs.define(eq=False, repr=False)
class ResourceEntry:
    """A resource with a fixed URI, or a resource template."""

    address: str  # the URI, or the text of the template
    listed: Resource | ResourceTemplate  # its entry in the listing
    source: str | bytes | Path | PreparedFunction  # its text or bytes, or a file or function to read for each request
    # `ttl_ms`, `cache_scope`: how long (milliseconds) and for whom clients may cache it
    ttl_ms: int
    cache_scope: CacheScope
    quota: Quota | None  # its own quota, if it has one
    template: UriTemplate | None = None  # the RFC 6570 template; `source` is then a function of its variables
    validator: Validator | None = None  # checks the variables of a template
    guard: bool = True  # refuse variables that leave a directory (`..`)
    permission: Permission | None = None  # needed to read it; None if every client may

    def match(self, uri: str) -> Mapping[str, Any] | None:
        """Return the template's variables in a URI, or None if the URI does not match."""
        assert self.template is not None
        assert self.validator is not None
        assert isinstance(self.source, PreparedFunction)
        found = self.template.match(uri, guard=self.guard)
        if found is None:
            return None
        variables = self.source.from_texts(found)
        return variables if self.validator.is_valid(variables) else None

    async def read(self, pools: Pools, ctx: Context[Any], uri: str, variables: Mapping[str, Any]) -> Any:
        """Return the contents of one resource.

        Raises ResourceNotFound if the function returned None, or a variable cannot be converted to its type.
        """
        source, mime_type = self.source, self.listed.mime_type or None
        value: Any = source
        if isinstance(source, PreparedFunction):
            try:
                value = await source.run(pools, ctx, variables)
            except ConversionError as error:
                if self.template is None:
                    raise
                raise ResourceNotFound(uri) from error
        elif isinstance(source, Path):
            value = await in_thread(ctx, source.read_bytes, pools.use_threads())
            if mime_type is not None and mime_type.startswith("text/"):
                value = value.decode()
        return read_result(value, uri, mime_type, self.ttl_ms, self.cache_scope)


class ResourceOptions(ListedOptions, total=False):
    """The options of a resource, each with a default, beside those of `ListedOptions`.

    Attributes:
        mime_type: such as "text/markdown"; a file is sent as text only if this is a text type.
        size: in bytes, if known and fixed.
        annotations: sent in its listing: an `Annotations`, or a dict such as `{"audience": ["user"]}`.
        ttl_ms, cache_scope: for how many milliseconds and for whom clients may cache it (2026-07-28).
    """

    mime_type: str | None
    size: int | None
    annotations: Annotations | Mapping[str, Any] | None
    ttl_ms: int
    cache_scope: CacheScope


def from_function(
    uri: str, function: Callable[..., Any], options: ResourceOptions, *, run: str, guard: bool
) -> ResourceEntry:
    """Build a resource from a function and checked options; braces in the URI make it a template.

    Raises TypeError if the template's variables and the function's parameters differ.
    """
    prepared = prepare(function, run=run)
    signature = prepared.signature
    name = _last_part(uri) if signature.name == "<lambda>" else signature.name
    listed = _listed_members(options, name, signature.description)
    template: UriTemplate | None = None
    if "{" in uri or "}" in uri:
        from trimcp.server.uri_template import UriTemplate  # loaded with the first template

        template = UriTemplate(uri)
    found = () if template is None else template.variables
    if set(found) != set(signature.parameters):
        variables = ", ".join(found) or "no variables"
        raise TypeError(
            f"{uri} has {variables}, but {signature.name} takes {', '.join(signature.parameters) or 'none'}"
        )
    if template is None:
        size = options.get("size")
        resource = Resource(uri=uri, size=size, **listed)
        return ResourceEntry(uri, resource, prepared, *_kept_by(options))
    family = ResourceTemplate(uri_template=uri, **listed)
    validator = validator_for(signature.input_schema)
    return ResourceEntry(uri, family, prepared, *_kept_by(options), template, validator, guard)


def from_content(uri: str, content: str | bytes | Path, options: ResourceOptions) -> ResourceEntry:
    """Build a resource from fixed text or bytes, or from a file that is read for each request; options are checked.

    Raises TypeError for any other content.
    """
    if not isinstance(content, str | bytes | Path):
        raise TypeError(f"the content of a resource is text, bytes or a Path, not {content!r:.60}")
    size: int | None = None  # a file's size may change before it is read
    if not isinstance(content, Path):
        size = len(content.encode()) if isinstance(content, str) else len(content)
    listed = _listed_members(options, _last_part(uri), "")
    return ResourceEntry(uri, Resource(uri=uri, size=size, **listed), content, *_kept_by(options))


def _last_part(uri: str) -> str:
    return uri.rstrip("/").rsplit("/", 1)[-1]


def _listed_members(options: ResourceOptions, name: str, description: str) -> dict[str, Any]:
    """Return the members common to the listings of resources and templates, with these defaults."""
    own = {key: options.get(key) for key in ("mime_type", "annotations")}
    return listed_members(options, name, description) | own


def _kept_by(options: ResourceOptions) -> tuple[int, CacheScope, Quota | None]:
    return options.get("ttl_ms", 0), options.get("cache_scope", "private"), options.get("quota")


def normal_uri(uri: str) -> str:
    """Return a URI in the form that many clients make of it (RFC 3986 section 6.2.2), to compare it.

    Scheme and host are in lower case, no path is "/", and only what needs it is percent-encoded.
    """
    try:
        parts = urlsplit(uri)
    except ValueError:
        return uri
    user, at, host = parts.netloc.rpartition("@")
    path = parts.path or ("/" if parts.netloc else "")
    whole = urlunsplit((parts.scheme.lower(), user + at + host.lower(), path, parts.query, parts.fragment))
    return quote(_ESCAPED.sub(_unescaped, whole), safe=_PRINTABLE, errors="backslashreplace")


def _unescaped(escaped: re.Match[str]) -> str:
    character = chr(int(escaped[1], 16))
    return character if character.isascii() and (character.isalnum() or character in "-._~") else escaped[0].upper()


def missing(ctx: Context[Any], uri: str) -> ErrorReply:
    """Return the error for a resource that does not exist; its code depends on the revision."""
    return ErrorReply(ctx.revision.resource_missing_code, "resource not found", {"uri": uri})


def read_result(value: Any, uri: str, mime_type: str | None, ttl_ms: int, cache_scope: CacheScope) -> Any:
    """Convert a resource function's return value to a result: text, bytes, contents, a list of them, or JSON.

    Raises ResourceNotFound for None.
    """
    if isinstance(value, ReadResourceResult | InputRequiredResult):
        return value
    if value is None:
        raise ResourceNotFound(uri)
    several = isinstance(value, list | tuple) and all(isinstance(item, (*_CONTENTS, str, bytes)) for item in value)
    contents = [_contents(item, uri, mime_type) for item in (value if several and value else [value])]
    return ReadResourceResult(contents=contents, ttl_ms=ttl_ms, cache_scope=cache_scope)


def _contents(value: Any, uri: str, mime_type: str | None) -> TextResourceContents | BlobResourceContents:
    if isinstance(value, _CONTENTS):
        return value
    if isinstance(value, bytes | bytearray | memoryview):
        blob = base64.b64encode(value).decode("ascii")
        return BlobResourceContents(uri=uri, blob=blob, mime_type=mime_type or "application/octet-stream")
    if isinstance(value, str):
        return TextResourceContents(uri=uri, text=value, mime_type=mime_type)
    return TextResourceContents(uri=uri, text=json_text(to_json(value)), mime_type=mime_type or "application/json")
