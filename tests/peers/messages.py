"""JSON-RPC messages as bytes, for peers without a library, and parsed ones as JSON."""

from __future__ import annotations

from typing import Any

import orjson

from trimcp.wire.jsonrpc import Batch, ErrorResponse, Message, Notification, Request, Response
from trimcp.wire.revisions import LATEST, LATEST_LEGACY

__all__ = ["as_json", "call", "initialize", "modern_request", "notification", "reported_call", "request", "text_of"]

_ENVELOPE = {
    "io.modelcontextprotocol/protocolVersion": LATEST.name,
    "io.modelcontextprotocol/clientInfo": {"name": "attacker", "version": "0"},
    "io.modelcontextprotocol/clientCapabilities": {},
}


def request(id: Any, method: str, **params: Any) -> bytes:
    """A request."""
    return orjson.dumps({"jsonrpc": "2.0", "id": id, "method": method, "params": params})


def modern_request(id: Any, method: str, **params: Any) -> bytes:
    """A request of the newest revision, which says who asks."""
    params["_meta"] = {**_ENVELOPE, **params.get("_meta", {})}
    return request(id, method, **params)


def notification(method: str, **params: Any) -> bytes:
    """A notification."""
    return orjson.dumps({"jsonrpc": "2.0", "method": method, "params": params})


def call(id: Any, tool: str, **arguments: Any) -> bytes:
    """A tool call, for a connection that was initialized."""
    return request(id, "tools/call", name=tool, arguments=arguments)


def reported_call(id: Any, tool: str, *, modern: bool = False, **arguments: Any) -> bytes:
    """A tool call that wants to be told of its progress."""
    make = modern_request if modern else request
    return make(id, "tools/call", name=tool, arguments=arguments, _meta={"progressToken": 1})


def initialize(revision: str = LATEST_LEGACY.name, **capabilities: Any) -> bytes:
    """The request that begins a session of the legacy era; its id is "hello"."""
    info = {"name": "attacker", "version": "0"}
    return request("hello", "initialize", protocolVersion=revision, capabilities=capabilities, clientInfo=info)


def as_json(message: Message) -> Any:
    """A parsed message as the JSON it was."""
    if isinstance(message, Batch):
        return [as_json(member) for member in message.members]
    if isinstance(message, Request):
        return {"id": message.id, "method": message.method, "params": message.params}
    if isinstance(message, Notification):
        return {"method": message.method, "params": message.params}
    if isinstance(message, Response):
        return {"id": message.id, "result": message.result}
    if isinstance(message, ErrorResponse):
        return {"id": message.id, "error": {"code": message.code, "message": message.message, "data": message.data}}
    return {"malformed": message.message}


def text_of(result: Any) -> str:
    """The text of a tool's result, parsed or as the JSON of its reply."""
    if isinstance(result, dict):
        return "".join(block["text"] for block in result["result"]["content"])
    return "".join(block.text for block in result.content)
