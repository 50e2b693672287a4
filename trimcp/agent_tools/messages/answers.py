"""Answers of calls: from a reply of MCP to a `tool_response`, and progress from one protocol to the other."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import attrs
import orjson

from trimcp.agent_tools.messages import errors, messages
from trimcp.channel import Outgoing
from trimcp.server.handlers.media import json_text
from trimcp.wire import codes
from trimcp.wire.common import RESULT_INPUT_REQUIRED
from trimcp.wire.jsonrpc import encode

if TYPE_CHECKING:
    from trimcp.server.tools import ToolEntry

_loads: Final[Callable[[bytes], Any]] = orjson.loads
_dumps: Final[Callable[..., bytes]] = orjson.dumps

_ELSEWHERE: Final[dict[str, type[errors.AgentToolsError]]] = {
    cls.code: cls for cls in (errors.DeadlinePassed, errors.Draining, errors.ProviderGone)
}
"""What may have become of a call that another program carries out, by the reason that `entries` gives."""

_ITS_OWN: Final = (errors.ToolFailed, errors.ToolCrashed)
_SHORT: Final = 256  # bytes of a text that is kept as it is, rather than as its digest
_OBJECT: Final = 600  # bytes of memory that an answer takes beside its text

_HEAD: Final = b'{"type":"tool_response","request_id":'


@attrs.define(eq=False)
class CallAnswer:
    """What a call led to."""

    result: bytes | None = None  # the result as JSON text, or None with an error
    error: errors.AgentToolsError | None = None  # why there is no result
    asks: bool = False  # the result is questions: `input_requests` and `request_state`

    @property
    def size(self) -> int:
        """About how many bytes of memory it takes."""
        return _OBJECT + len(self.result or b"")

    def lasting(self) -> CallAnswer | None:
        """Return it, in little memory, if the same request gets it again; else None.

        It does if the tool has answered, with a result or an error of its own.
        """
        if self.error is None:
            self.result = b"%b" % (self.result or b"")  # orjson's buffers are larger than their texts
            return None if self.asks else self
        return self if isinstance(self.error, _ITS_OWN) else None

    def again(self) -> CallAnswer:
        """Return it for another request. An error is a new one, because each is raised somewhere."""
        error = self.error
        return self if error is None else CallAnswer(error=type(error)(error.message, error.data))

    def status(self, *, extended: bool) -> str:
        """Return the `status` of the `tool_response`."""
        if self.error is not None:
            return self.error.extended_status if extended else "error"
        return "input_required" if self.asks else "success"

    def encode(self, request: messages.ToolRequest) -> bytes:
        """Return the `tool_response` as JSON text."""
        id = _dumps(request.request_id)
        if self.error is None:
            status = b'"input_required"' if self.asks else b'"success"'
            return b"".join((_HEAD, id, b',"status":', status, b',"result":', self.result or b"null", b"}"))
        status = _dumps(self.status(extended=request.statuses is not None))
        return b"".join((_HEAD, id, b',"status":', status, b',"error":', encode(self.error.body()), b"}"))


def asked_by(request: messages.ToolRequest) -> bytes:
    """Return what a request asks for, as a short text that is the same in whatever order its members came."""
    of = request.tool_name, request.version, request.arguments, request.input_responses, request.request_state
    text = _dumps(of, None, orjson.OPT_SORT_KEYS)
    # Copied, because orjson returns its whole buffer, in which a short text takes 1 KiB.
    return b"%b" % text if len(text) <= _SHORT else hashlib.sha256(text).digest()


def answer_to(outgoing: Outgoing, entry: ToolEntry, cancelled: str | None) -> CallAnswer:
    """Return the answer that a reply to `tools/call` is; `cancelled` is why the call was cancelled, or None."""
    if cancelled is not None:
        return CallAnswer(error=errors.RequestCancelled(cancelled))
    if outgoing.error is not None:
        return CallAnswer(error=_error(outgoing))
    result: dict[str, Any] = _loads(outgoing.data)["result"]
    if result.get("isError"):
        return CallAnswer(error=errors.ToolFailed(_text(result.get("content", ()))))
    if result.get("resultType") == RESULT_INPUT_REQUIRED:
        asked = {"input_requests": result.get("inputRequests", {}), "request_state": result.get("requestState")}
        return CallAnswer(_dumps(asked), asks=True)
    if "structuredContent" in result:
        structured = result["structuredContent"]
        wrapped = entry.shape is not None and entry.shape.wrapped and structured.keys() == {"result"}
        return CallAnswer(_dumps(structured["result"] if wrapped else structured))
    content = result.get("content", ())
    if len(content) == 1 and content[0].get("type") == "text":
        return CallAnswer(_value_of(content[0]["text"]))
    return CallAnswer(_dumps(content) if content else b"null")


def _value_of(text: str) -> bytes:
    """Return the value that a tool without a return type returned, as JSON: MCP has its objects and arrays as text."""
    if text[:1] in ("{", "["):
        try:
            value = _loads(text.encode())
            if json_text(value) == text:
                return _dumps(value)
        except ValueError:
            pass
    return _dumps(text)


_KINDS: Final[dict[int, type[errors.AgentToolsError]]] = {
    codes.FORBIDDEN: errors.NotAllowed,
    codes.CANCELLED_BY_DRAIN: errors.Draining,
    codes.TIMED_OUT: errors.DeadlinePassed,
    codes.CANCELLED_BY_OPERATOR: errors.RequestCancelled,
}
"""The errors of codes; every other one is what the tool itself answered."""


def _error(outgoing: Outgoing) -> errors.AgentToolsError:
    body = _loads(outgoing.data)["error"]
    code, message, data = outgoing.error, body["message"], body.get("data")
    facts = data if isinstance(data, dict) else {}
    if code == codes.INVALID_PARAMS:
        return (errors.InvalidArguments if "problems" in facts else errors.MalformedMessage)(message, data)
    if code == codes.OVERLOADED:
        after = (outgoing.headers or {}).get("retry-after")
        return errors.TooMuch(message, retry_after=float(after) if after else 1)
    if code == codes.INTERNAL_ERROR:
        kind = _ELSEWHERE.get(str(facts.get("reason")))
        return errors.ToolCrashed(message, data) if kind is None else kind(message)
    if code == codes.MISSING_CAPABILITY:
        return errors.ToolFailed(
            'the tool has a question: ask with `"statuses": "extended"` to get it as `input_required`'
        )
    if code == codes.INVALID_REQUEST:
        return errors.ToolFailed(message)
    return _KINDS.get(code or 0, errors.ToolFailed)(message, data)


def _text(content: Any) -> str:
    texts = [block["text"] for block in content if block.get("type") == "text"]
    return "\n".join(texts) or "the tool reports an error without a text"


def progress_of(data: bytes, request_id: str) -> bytes:
    """Return a progress notification as a `tool_progress`."""
    params = _loads(data)["params"]
    progress = {"type": "tool_progress", "request_id": request_id, "progress": params["progress"]}
    for name in ("total", "message"):
        if name in params:
            progress[name] = params[name]
    return encode(progress)  # it may be kept for long: it takes no more memory than its text
