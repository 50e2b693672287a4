"""A server whose tools are the operations of an HTTP API."""

from __future__ import annotations

import base64
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from http.cookiejar import CookieJar, DefaultCookiePolicy
from inspect import isawaitable
from pathlib import Path
from typing import Annotated, Any, Final, TypeAlias

import attrs
import httpx2
import trio

from trimcp.errors import LocalError, ToolError
from trimcp.rest.document import Place, UnfitOperation, open_document
from trimcp.rest.operations import ApiCall, ApiOperation, ApiRequest, operations, read_operation
from trimcp.schema.engine import SchemaError
from trimcp.schema.validator import peer_validator
from trimcp.server.handlers.media import Audio, Image, json_text
from trimcp.server.handlers.needs import Depends
from trimcp.server.server import Server
from trimcp.server.tools import ToolOptions
from trimcp.session.context import Context
from trimcp.support.bounds import check_callable, check_number
from trimcp.support.cleaning import one_line
from trimcp.transports.http.client.engine import ExchangeBroken
from trimcp.transports.http.client.exchanges import Http, OpenReply, TooLarge
from trimcp.transports.http.client.httpx_engine import HttpxEngine
from trimcp.transports.targets import checked_url, status_text
from trimcp.wire.content import TextContent
from trimcp.wire.jsonrpc import Malformed, parse_value
from trimcp.wire.tools import CallToolResult

_log = logging.getLogger("trimcp.server")

Secret: TypeAlias = str | tuple[str, str]
"""A key or a token; for basic authentication name and password."""

Credential: TypeAlias = Secret | Callable[[Context[Any]], Secret | Awaitable[Secret]]
"""A secret, or a function that returns the one for a request, for example by its principal."""

Expose: TypeAlias = Callable[[ApiOperation], bool | Mapping[str, Any]]
"""Decides whether an operation becomes a tool: False, True, or the options of its tool, see `ToolOptions`."""

_LONGEST_ERROR: Final = 2_000  # characters of an answer that tells an error
_HINTS: Final[Mapping[str, dict[str, bool]]] = {
    "GET": {"readOnlyHint": True},
    "HEAD": {"readOnlyHint": True},
    "PUT": {"idempotentHint": True, "destructiveHint": True},
    "DELETE": {"idempotentHint": True, "destructiveHint": True},
}


@attrs.define(eq=False)
class Api:
    """The API behind the tools of one server."""

    base: str
    schemes: Mapping[str, Place]
    credentials: Mapping[str, Credential] = attrs.field(repr=False)
    client: httpx2.AsyncClient | None
    timeout: float
    max_response: int

    async def connection(self) -> AsyncIterator[Http]:
        """Yield what carries out requests during a run. A client of the user's own is not closed."""
        timeout = httpx2.Timeout(self.timeout, pool=None)
        headers = {"user-agent": "trimcp", "accept-encoding": "gzip"}
        if self.client is not None:
            yield Http(self.base, HttpxEngine(self.client, timeout), headers, max_redirects=0)
            return
        nothing_kept = CookieJar(policy=DefaultCookiePolicy(allowed_domains=[]))  # they would be one user's
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=20)
        verify = self.base.startswith("https:")
        async with httpx2.AsyncClient(cookies=nothing_kept, limits=limits, verify=verify) as own:
            yield Http(self.base, HttpxEngine(own, timeout), headers, max_redirects=0)

    async def answer(
        self, call: ApiCall, ctx: Context[Any], http: Http, arguments: Mapping[str, Any]
    ) -> CallToolResult:
        """Return the result of a call. Raises ToolError for what the API refuses or does not answer."""
        request = call.request(arguments)
        await self._authorize(call, ctx, request)
        url, headers = request.target(self.base), request.all_headers()
        try:
            with trio.fail_after(self.timeout):
                async with http.open(request.method, headers, request.body, url=url) as reply:
                    return await self._result(reply)
        except trio.TooSlowError:
            raise ToolError(f"the API did not answer within {self.timeout:g} s") from None
        except TooLarge:
            raise ToolError(f"the API's answer is larger than {self.max_response:,} bytes; ask for less") from None
        except (ExchangeBroken, httpx2.InvalidURL):
            raise ToolError("the API could not be reached, or its answer broke off") from None

    async def _result(self, reply: OpenReply) -> CallToolResult:
        kind, body = reply.content_type, await reply.body(self.max_response)
        status = status_text(reply.status)
        if reply.status >= 300:
            text = body.decode(errors="replace")[:_LONGEST_ERROR] if _is_text(kind) else ""
            moved = ", and redirects are not followed" if reply.status < 400 else ""
            raise ToolError(f"the API answered {status}{moved}{': ' if text else ''}{text}")
        if not body:
            return CallToolResult([TextContent(f"the API answered {status}, without content")], is_error=False)
        if kind == "application/json" or kind.endswith("+json"):
            value = parse_value(body)
            if not isinstance(value, Malformed):
                structured = value if isinstance(value, dict) else {"result": value}
                return CallToolResult([TextContent(json_text(value))], structured_content=structured, is_error=False)
        if _is_text(kind):
            return CallToolResult([TextContent(body.decode(errors="replace"))], is_error=False)
        if kind.startswith(("image/", "audio/")):
            content = (Image if kind.startswith("image/") else Audio)(body, kind).content()
            return CallToolResult([content], is_error=False)
        raise ToolError(f"the API answered {len(body):,} bytes of {one_line(kind, 60) or 'no type'}, which are no text")

    async def _authorize(self, call: ApiCall, ctx: Context[Any], request: ApiRequest) -> None:
        """Add the credentials of the first alternative for which there are all."""
        for alternative in call.security:
            if all(name in self.credentials for name in alternative):
                for name in alternative:
                    given: Any = self.credentials[name]
                    found = given(ctx) if callable(given) else given
                    _add(self.schemes[name], await found if isawaitable(found) else found, request)
                return


def _is_text(kind: str) -> bool:
    return (
        kind.startswith("text/")
        or kind in ("", "application/json", "application/xml")
        or kind.endswith(("+json", "+xml"))
    )


def _add(scheme: Place, secret: Any, request: ApiRequest) -> None:
    kind, way = scheme.member("type", str, ""), scheme.member("scheme", str, "").lower()
    if kind == "apiKey":
        name, where = scheme.member("name", str, ""), scheme.member("in", str, "")
        if where == "header":
            request.headers[name.lower()] = secret
        else:
            (request.query if where == "query" else request.cookies).append((name, secret))
    elif way == "basic":
        request.headers["authorization"] = f"Basic {base64.b64encode(':'.join(secret).encode()).decode()}"
    else:
        request.headers["authorization"] = f"Bearer {secret}"


def _base_url(root: Place, given: str | None, client: httpx2.AsyncClient | None) -> str:
    """Return where the API is. Raises LocalError: nothing says it."""
    url = given or (str(client.base_url) if client is not None else "")
    if not url:
        server = root.of(next(iter(root.member("servers", list, [])), {}))
        url = server.member("url", str, "")
        for name, variable in server.member("variables", dict, {}).items():
            url = url.replace(f"{{{name}}}", str(server.of(variable).member("default", str, "")))
    needed = "the address of the API has to be http:// or https://; give it by url="
    parts = checked_url(url, ("http", "https"), needed)
    if parts.query or parts.fragment or "{" in url:
        raise LocalError(f"{needed}, without query and placeholders")
    return url


def _schemes(root: Place, credentials: Mapping[str, Credential]) -> dict[str, Place]:
    """Return the security schemes that credentials are for. Raises ValueError: there is no such scheme."""
    components = root.of(root.member("components", dict, {}))
    known = components.member("securitySchemes", dict, {})
    for name, given in credentials.items():
        if name not in known:
            raise ValueError(f"the document has no security scheme {name!r}; it has {', '.join(known) or 'none'}")
        basic = components.of(known[name]).member("scheme", str, "").lower() == "basic"
        if not callable(given) and not isinstance(given, tuple if basic else str):
            raise TypeError(f"the credential for {name} is {'(name, password)' if basic else 'a text'}, or a function")
    return {name: components.of(known[name]) for name in credentials}


def openapi(
    spec: Mapping[str, Any] | Path | str | bytes,
    *,
    client: httpx2.AsyncClient | None = None,
    url: str | None = None,
    credentials: Mapping[str, Credential] | None = None,
    expose: Expose | None = None,
    documents: Mapping[str, Mapping[str, Any] | Path | str | bytes] | None = None,
    timeout: float = 30.0,
    max_response: int = 1024 * 1024,
) -> Server[Any]:
    """Return a server whose tools are the operations of an HTTP API, from its OpenAPI document (3.0 or 3.1).

    Serve it, or `include` it in another. Nothing is fetched to read the document. An operation that cannot be a tool is
    left out with a warning that says why.

    Args:
        spec: the document: a dict, a `Path`, or its text, in JSON or YAML (the extra `skills`).
        client: carries out the requests, with its own headers, authentication and proxies; you close it. By default
            one that keeps no cookies.
        url: where the API is; by default the client's `base_url`, or the first server of the document.
        credentials: secrets by the names of the document's security schemes: a key or token, name and password for
            basic authentication, or a function of the request's `Context` that returns them. Callers' own tokens are
            never passed on.
        expose: a function that decides for each `ApiOperation`: False leaves it out, True offers it, and options (as a
            dict) offer it with these, such as `{"name": "find", "scopes": ["read"]}`.
        documents: other documents that this one refers to, by the names it has for them.
        timeout: seconds for one request.
        max_response: bytes of the largest answer.

    Raises:
        TypeError, ValueError: an argument is none of these, or the document is no OpenAPI 3.0 or 3.1.
        OSError: a file cannot be read.
        LocalError: nothing says where the API is; the document is in YAML, and no reader of YAML is installed; or two
            tools have one name.
    """
    check_number("timeout", timeout)
    check_number("max_response", max_response, whole=True)
    if expose is not None:
        check_callable("expose", expose)
    root = open_document(spec, documents or {})
    secrets = dict(credentials or {})
    api = Api(_base_url(root, url, client), _schemes(root, secrets), secrets, client, timeout, max_response)
    info = root.of(root.member("info", dict, {}))
    server: Server[Any] = Server(info.member("title", str, "API")[:100], info.member("version", str, "0")[:100] or "0")
    for about, place, item in operations(root):
        chosen: Any = True if expose is None else expose(about)
        if chosen is False:
            continue
        try:
            call = read_operation(about, place, item, root)
            bounded = peer_validator(call.schema)  # a stranger's schema may take for ever to judge a value
            options: Any = {**_options(call), **({} if chosen is True else chosen)}
            server.add_tool(_function(api, call), **options)
            entry = server.tools.get(options["name"] or about.name)
            if entry is not None:
                entry.validator = bounded
        except (UnfitOperation, SchemaError) as error:
            _log.warning("%s is left out: %s", one_line(f"{about.method} {about.path}"), one_line(str(error)))
    return server


def _options(call: ApiCall) -> ToolOptions:
    about = call.about
    return {
        "name": about.name,
        "title": about.summary,
        "description": about.description or about.summary or f"{about.method} {about.path}",
        "annotations": {**_HINTS.get(about.method, {"destructiveHint": True}), "openWorldHint": True},
        "input_schema": call.schema,
        "tags": about.tags,
    }


def _function(api: Api, call: ApiCall) -> Callable[..., Awaitable[Any]]:
    """Return the function of the tool of one operation."""

    async def function(arguments: Any, ctx: Any, http: Any) -> CallToolResult:
        return await api.answer(call, ctx, http, arguments)

    function.__name__ = call.about.name
    needed = Annotated[Http, Depends(api.connection, scope="server")]
    function.__annotations__ = {"arguments": dict, "ctx": Context, "http": needed, "return": CallToolResult}
    return function
