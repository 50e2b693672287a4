"""One request of the mix, prepared so that only two numbers are filled in per call; and the check of its responses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import attrs

from trimcp.bench.plan import NUMBER, MixEntry
from trimcp.errors import LocalError
from trimcp.framing.headers import Mirror, decode_value, param_headers, request_headers
from trimcp.wire.common import META_CLIENT_CAPABILITIES, META_CLIENT_INFO, META_PROTOCOL_VERSION, RESULT_COMPLETE
from trimcp.wire.jsonrpc import JSON, encode
from trimcp.wire.methods import METHODS
from trimcp.wire.revisions import Revision

CLIENT: Final = {"name": "trimcp-bench", "version": "1"}
"""The `clientInfo` of the load."""

_MEMBER: Final = {
    "tools/call": "content",
    "tools/list": "tools",
    "prompts/list": "prompts",
    "prompts/get": "messages",
    "resources/list": "resources",
    "resources/templates/list": "resourceTemplates",
    "resources/read": "contents",
    "completion/complete": "completion",
}
"""The required member of a result, by method."""

Trouble = tuple[str, Any]
"""An error in a response: its kind, and an example text."""


@attrs.define(eq=False)
class PreparedRequest:
    """One request of the mix."""

    entry: MixEntry  # the entry of the mix
    _body: bytes = attrs.field(alias="body")
    _is_plain: bool = attrs.field(alias="is_plain")
    headers: bytes  # the lines of its additional HTTP headers, or b""
    _headers_vary: bool = attrs.field(alias="headers_vary")
    _expect_varies: bool = attrs.field(alias="expect_varies")
    _member: str | None = attrs.field(alias="member")

    def render(self, id: int, number: int) -> bytes:
        """Return the request's text with its id and the call's number filled in."""
        if self._is_plain:
            return self._body % id
        return self._body % {b"i": id, b"n": number}

    def render_headers(self, number: int) -> bytes:
        """Return the header lines with the call's number filled in."""
        return self.headers % {b"n": number} if self._headers_vary else self.headers

    def trouble(self, message: Mapping[str, Any], number: int) -> Trouble | None:
        """Return the error in the response to the call of this number, or None if it is right."""
        result = message.get("result")
        if type(result) is not dict or "error" in message or message.get("jsonrpc") != "2.0":
            return _refusal(message)
        if result.get("isError", False) is not False:
            return "tool error", _first_text(self._member, result) or result
        if result.get("resultType", RESULT_COMPLETE) != RESULT_COMPLETE:
            return "no result but a question", result
        expected = self.entry.expect
        if expected is None:
            if self._member is not None and self._member not in result:
                return f"no {self._member} in the result", result
            return None
        text = _first_text(self._member, result)
        if text is None:
            return "no text", result
        if self._expect_varies:
            expected = expected.replace(NUMBER, str(number))
        return None if text == expected else ("wrong text", text)


def _refusal(message: Mapping[str, Any]) -> Trouble:
    error = message.get("error")
    if isinstance(error, dict) and type(error.get("code")) is int and "result" not in message:
        return f"error {error['code']}", error.get("message")
    return "no JSON-RPC", dict(message)


def _first_text(member: str | None, result: Mapping[str, Any]) -> str | None:
    """Return the first text of a result; its place depends on the method."""
    try:
        first = result[member or ""][0]
        text = first["content"]["text"] if member == "messages" else first["text"]
    except (LookupError, TypeError):
        return None
    return text if isinstance(text, str) else None


def prepare(
    entry: MixEntry, revision: Revision, *, progress: bool, http: bool, mirrors: tuple[Mirror, ...] = ()
) -> PreparedRequest:
    """Return a request ready to be sent many times.

    `mirrors`: the arguments that the tool's schema mirrors in headers. Raises LocalError: it cannot be sent over this
    transport.
    """
    params = dict(entry.params)
    meta: dict[str, JSON] = dict(params.pop("_meta", None) or {})
    if revision.modern:
        meta |= {META_PROTOCOL_VERSION: revision.name, META_CLIENT_INFO: CLIENT, META_CLIENT_CAPABILITIES: {}}
    text = b'{"jsonrpc":"2.0","id":%%(i)d,"method":%b' % _format(encode(entry.method))
    if params or meta or progress:
        members = _format(encode(params))[1:-1]
        if meta or progress:
            known = _format(encode(meta))[1:-1]
            token = b'"progressToken":%(i)d' if progress else b""
            members += b',"_meta":{%b}' % b",".join(filter(None, (known, token)))
        text += b',"params":{%b}' % members.removeprefix(b",")
    text += b"}"
    is_plain = text.count(b"%(") == 1
    lines = _header_lines(entry, revision, mirrors) if http else b""
    return PreparedRequest(
        entry=entry,
        body=text.replace(b"%(i)d", b"%d") if is_plain else text,
        is_plain=is_plain,
        headers=lines if b"%(n)d" in lines else lines.replace(b"%%", b"%"),
        headers_vary=b"%(n)d" in lines,
        expect_varies=entry.expect is not None and NUMBER in entry.expect,
        member=_MEMBER.get(entry.method),
    )


def _format(text: bytes) -> bytes:
    """Turn JSON into a format for the operator %, with the call's number for `{n}`, which occurs in strings only."""
    return text.replace(b"%", b"%%").replace(NUMBER.encode(), b"%(n)d")


def _header_lines(entry: MixEntry, revision: Revision, mirrors: tuple[Mirror, ...]) -> bytes:
    if not revision.method_headers:
        return b""
    method = METHODS.get(entry.method)
    named = None if method is None or method.mirrored is None else entry.params.get(method.mirrored)
    headers = request_headers(revision.name, entry.method, named if isinstance(named, str) else None)
    headers |= param_headers(mirrors, entry.params.get("arguments") or {})
    for name, value in headers.items():
        if NUMBER in decode_value(value) and NUMBER not in value:
            raise LocalError(f"{NUMBER} cannot stand in {name}, which travels in base64")
    return _format("".join(f"{name}: {value}\r\n" for name, value in headers.items()).encode())


def cancellation(id: int) -> bytes:
    """Return the notification that cancels a call."""
    return b'{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":%d}}' % id
