"""Messages of agent tools in the shape of MCP's, so that one player replays the recordings of both protocols."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

CHOSEN: Final = {key: key for key in ("context_id", "session_id", "request_state")}
"""The members in which the service sends a value of its choice and the agent returns it."""

_OF_NOTIFICATION: Final = {
    "tool_progress": ("notifications/progress", "progressToken"),
    "tool_cancel": ("notifications/cancelled", "requestId"),
}
_TYPES: Final = {method: (type, member) for type, (method, member) in _OF_NOTIFICATION.items()}


def of_agent_tools(messages: Sequence[tuple[bool, Any]]) -> bool:
    """Return whether a recorded conversation is one of agent tools, not of MCP."""
    return any(isinstance(said, dict) and "type" in said and "jsonrpc" not in said for _, said in messages)


def as_mcp(message: Any, from_client: bool) -> Any:
    """Return a message of agent tools as a request, an answer or a notification of MCP; `as_agent` undoes it."""
    if not isinstance(message, dict) or not isinstance(message.get("type"), str):
        return {"method": "", "params": message}
    type, id = message["type"], message.get("request_id")
    rest = {name: value for name, value in message.items() if name not in ("type", "request_id")}
    if type in _OF_NOTIFICATION:
        method, member = _OF_NOTIFICATION[type]
        return {"method": method, "params": {**rest, member: id}}
    if id is None:
        return {"method": type, "params": rest}
    if type == "tool_request" or (from_client and type != "tool_response"):
        return {"id": id, "method": type, "params": rest}
    return {"id": id, "result": {"type": type, **rest}}


def as_agent(message: dict[str, Any]) -> Any:
    """Return the message of agent tools that `as_mcp` has shaped; an error becomes the answer to a call."""
    id = {"request_id": message["id"]} if "id" in message else {}
    if "error" in message:
        error = {"code": "INTERNAL_ERROR", "message": message["error"]["message"]}
        return {"type": "tool_response", **id, "status": "error", "error": error}
    if "method" not in message:
        return {**id, **message["result"]}
    method, params = message["method"], message["params"]
    if not method:
        return params
    type, member = _TYPES.get(method, (method, ""))
    if member:
        params = dict(params)
        id = {"request_id": params.pop(member)}
    return {"type": type, **id, **params}
