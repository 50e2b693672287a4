"""The messages of the agent-tools protocol: one class each, read from JSON values and written as JSON text.

A class declares its members once: what `read_message` checks, what the published JSON Schema says and what
`encode_message` writes follow from that. Members that a message does not have are ignored, or refused in strict mode.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any, ClassVar, Final, TypeVar, dataclass_transform

import attrs

from trimcp.agent_tools.messages.errors import ERRORS_BY_CODE, MalformedMessage
from trimcp.wire.jsonrpc import DEFAULT_LIMITS, JSON, Malformed, ParseLimits, encode, parse_value

SUBPROTOCOL: Final = "agent-tools"
"""The subprotocol of WebSockets that carry these messages."""

MAX_ID: Final = 256
"""Characters of the longest id or name."""

MAX_TEXT: Final = 4_096
"""Characters of the longest reason or message."""

_ANY: Final = (object,)


@attrs.frozen(eq=False)
class MemberRule:
    """What a member of a message may be."""

    schema: Mapping[str, Any]  # its JSON Schema
    wanted: str  # what it must be, for an error's text
    required: bool  # whether the message is malformed without it
    usual: type  # nearly all values are of this type; they fit
    longest: int  # if they have at most so many characters, and any; 0 for no bound
    fits: Callable[[Any], bool]  # returns whether this is a value of the member


def _fits(types: tuple[type, ...], longest: int, positive: bool, choices: tuple[str, ...], value: Any) -> bool:
    if type(value) not in types and types is not _ANY:
        return False
    if longest and not 0 < len(value) <= longest:
        return False
    if positive and not 0 < value < float("inf"):
        return False
    return not choices or value in choices


_KINDS: Final[Mapping[str, tuple[tuple[type, ...], Mapping[str, Any]]]] = {
    "a text": ((str,), {"type": "string"}),
    "an object": ((dict,), {"type": "object"}),
    "an array": ((list,), {"type": "array", "items": {"type": "object"}}),
    "a number": ((int, float), {"type": "number"}),
    "an integer": ((int,), {"type": "integer"}),
    "a truth value": ((bool,), {"type": "boolean"}),
    "any value": (_ANY, {}),
}


def _member(
    kind: str,
    about: str,
    *,
    required: bool = False,
    longest: int = 0,
    positive: bool = False,
    choices: tuple[str, ...] = (),
) -> Any:
    types, schema = _KINDS[kind]
    wanted = kind
    if choices:
        schema, wanted = {"enum": list(choices)}, " or ".join(f"`{choice}`" for choice in choices)
    elif longest:
        schema, wanted = {**schema, "minLength": 1, "maxLength": longest}, f"{kind} of 1 to {longest} characters"
    elif positive:
        schema, wanted = {**schema, "exclusiveMinimum": 0}, f"{kind} greater than 0"
    usual = MemberRule if types is _ANY or positive or choices else types[0]
    fits = partial(_fits, types, longest, positive, choices)
    rule = MemberRule({**schema, "description": about}, wanted, required, usual, longest, fits)
    return attrs.field(metadata={"rule": rule}) if required else attrs.field(default=None, metadata={"rule": rule})


_text: Final = partial(_member, "a text", longest=MAX_ID)
_object: Final = partial(_member, "an object")
_objects: Final = partial(_member, "an array")
_number: Final = partial(_member, "a number")
_integer: Final = partial(_member, "an integer")
_flag: Final = partial(_member, "a truth value")
_value: Final = partial(_member, "any value")
_context: Final = partial(_text, "the context's id", required=True)


MESSAGES: Final[dict[str, type[AgentMessage]]] = {}
"""The class of each `type`."""

RULES: Final[dict[type, dict[str, MemberRule]]] = {}
"""The members of each class with their rules, in order."""


MessageT = TypeVar("MessageT", bound="AgentMessage")


@dataclass_transform(kw_only_default=True, eq_default=False)
def _message(
    type: str = "", *, answer: str = "", method: str = "", asks: bool = False
) -> Callable[[type[MessageT]], type[MessageT]]:
    """Make a class with members a message, which is known by its `type`; what has an answer asks for something."""

    def declare(cls: Any) -> Any:
        cls.type, cls.answer, cls.method, cls.asks = type, answer, method, asks or bool(answer)
        message: Any = attrs.define(cls, eq=False, kw_only=True)
        rules = RULES[message] = {field.name: field.metadata["rule"] for field in attrs.fields(message)}
        message.required = tuple(name for name, rule in rules.items() if rule.required)
        if type:
            MESSAGES[type] = message
        return message

    return declare


@_message()
class AgentMessage:
    """A message of the protocol.

    Attributes:
        type: the value of its member `type`.
        asks: whether it comes from the agent (or provider) and asks for something.
        answer: the `type` of what answers it.
        method: its method of gRPC.
        required: the members without which it is malformed.
        request_id: repeated in the answer.
    """

    type: ClassVar[str]
    asks: ClassVar[bool]
    answer: ClassVar[str]
    method: ClassVar[str]
    required: ClassVar[tuple[str, ...]]
    request_id: str | None = _text("repeated in the answer")


# From the agent


@_message("tool_request", answer="tool_response", method="Call")
class ToolRequest(AgentMessage):
    """Call a tool."""

    tool_name: str = _text("the tool's name", required=True)
    arguments: dict[str, Any] | None = _object("the tool's arguments")
    request_id: str = _text("chosen by the agent, unique among those under way in the context", required=True)
    context_id: str | None = _context(required=False)
    version: str | None = _text("the tool's version; without it the newest")
    timeout: float | None = _number("seconds after which the call is cancelled", positive=True)
    progress: bool | None = _flag("whether to send `tool_progress`; over HTTP the header `Accept` says it")
    statuses: str | None = _text("`extended` allows more values of `status`", choices=("extended",))
    input_responses: dict[str, Any] | None = _object("answers to the questions of `input_required`, by their keys")
    request_state: str | None = _text("as `input_required` had it", longest=1_048_576)


@_message("tool_cancel")
class ToolCancel(AgentMessage):
    """Cancel a call."""

    request_id: str = _text("the `request_id` of the call", required=True)
    context_id: str | None = _context(required=False)
    reason: str | None = _text("why, for the tool's log", longest=MAX_TEXT)


@_message("context_create", answer="context_state", method="CreateContext")
class ContextCreate(AgentMessage):
    """Make a context."""

    context_id: str | None = _context(required=False)
    state: dict[str, Any] | None = _object("its first state")
    ttl: float | None = _number("seconds after which it ends, at most those that the service allows", positive=True)
    session_id: str | None = _text("the user's session that it belongs to; without it the context is one of its own")


@_message("context_read", answer="context_state", method="ReadContext")
class ContextRead(AgentMessage):
    """Read a context's state."""

    context_id: str = _context()


@_message("context_update", answer="context_update", method="UpdateContext")
class ContextUpdate(AgentMessage):
    """Change a context's state; also the answer, and what watchers get, with the version that it led to."""

    context_id: str = _context()
    updates: dict[str, Any] = _object("a JSON merge patch (RFC 7396)", required=True)
    version: int | None = _integer("from the agent: the version that it changes; from the service: the one it led to")


@_message("context_watch", answer="context_state", method="WatchContext")
class ContextWatch(AgentMessage):
    """Get the state now, and every later update."""

    context_id: str = _context()


@_message("context_unwatch", asks=True)
class ContextUnwatch(AgentMessage):
    """Get no more updates."""

    context_id: str = _context()


@_message("context_destroy", answer="context_destroyed", method="DestroyContext")
class ContextDestroy(AgentMessage):
    """End a context, or all of the agent's in a session: calls are cancelled, states are forgotten."""

    context_id: str | None = _context(required=False)
    session_id: str | None = _text("in place of `context_id`: the session whose contexts end")
    reason: str | None = _text("why, for its calls and watchers", longest=MAX_TEXT)


@_message("list_tools", answer="tools", method="ListTools")
class ListTools(AgentMessage):
    """List the tools' manifests."""

    name: str | None = _text("only the tools of this name, in all versions")
    version: str | None = _text("only this version")


@_message("register_tool", answer="tools_registered", method="RegisterTool")
class RegisterTool(AgentMessage):
    """Register a tool whose implementation the service knows, or that is called at a URL."""

    tool: dict[str, Any] = _object("its manifest", required=True)


@_message("remove_tool", answer="tool_removed", method="RemoveTool")
class RemoveTool(AgentMessage):
    """Remove a tool that this agent registered."""

    name: str = _text("the tool's name", required=True)
    version: str | None = _text("only this version")


@_message("provide_tools", answer="tools_registered")
class ProvideTools(AgentMessage):
    """Offer tools that are called on this very stream, for as long as it lasts."""

    tools: list[dict[str, Any]] = _objects("their manifests", required=True)


# From the service


@_message("tool_response")
class ToolResponse(AgentMessage):
    """The answer to a `tool_request`."""

    status: str = _text(
        "`success` or `error`; the others only where `statuses` was `extended`",
        required=True,
        choices=("success", "error", "cancelled", "timeout", "denied", "input_required"),
    )
    result: JSON = _value("what the tool returned")
    error: dict[str, Any] | None = _object("`code`, `message` and perhaps `data`")


@_message("tool_progress")
class ToolProgress(AgentMessage):
    """How far a call is."""

    request_id: str = _text("the `request_id` of the call", required=True)
    progress: float = _number("grows with each message", required=True)
    total: float | None = _number("its last value, if known")
    message: str | None = _text("one line for a person", longest=MAX_TEXT)


@_message("context_state")
class ContextState(AgentMessage):
    """A context's whole state."""

    context_id: str = _context()
    version: int = _integer("the state's version", required=True)
    state: dict[str, Any] = _object("the state", required=True)


@_message("context_destroyed")
class ContextDestroyed(AgentMessage):
    """A context has ended, or all of a session."""

    context_id: str | None = _context(required=False)
    session_id: str | None = _text("the session, if that was ended")
    reason: str | None = _text("why", longest=MAX_TEXT)


@_message("tools")
class ToolList(AgentMessage):
    """The answer to `list_tools`."""

    tools: list[dict[str, Any]] = _objects("manifests", required=True)


@_message("tools_registered")
class ToolsRegistered(AgentMessage):
    """The answer to `register_tool` and `provide_tools`."""

    tools: list[dict[str, Any]] = _objects("`name`, `version`, `hash` and `status` of each", required=True)


@_message("tool_removed")
class ToolRemoved(AgentMessage):
    """The answer to `remove_tool`."""

    name: str = _text("the tool's name", required=True)
    version: str | None = _text("the version, if only one was removed")


@_message("error")
class ErrorMessage(AgentMessage):
    """The answer to what cannot be carried out; a call has a `tool_response` instead, unless it cannot be read."""

    error: dict[str, Any] = _object("`code`, `message` and perhaps `data`", required=True)


EVENTS: Final = (ContextState, ContextUpdate, ContextDestroyed)
"""What watchers of a context are told."""


# Reading and writing


def read_value(data: bytes, limits: ParseLimits = DEFAULT_LIMITS) -> Any:
    """Return the JSON value of a text, whose size the caller has checked.

    Raises MalformedMessage if it is not JSON, or beyond the limits on depth, members or numbers.
    """
    value = parse_value(data, limits)
    if type(value) is Malformed:
        raise MalformedMessage(value.message)
    return value


def read_message(value: Any, *, strict: bool = False) -> AgentMessage:
    """Return the message that a JSON value is. Raises MalformedMessage, which names the first member that is wrong."""
    if type(value) is not dict:
        raise MalformedMessage("a message is a JSON object")
    kind = value.get("type")
    cls = MESSAGES.get(kind) if type(kind) is str else None
    if cls is None:
        raise MalformedMessage("`type` is none of the protocol's" if "type" in value else "`type` is missing")
    return read_as(cls, value, strict=strict)


def read_as(cls: type[MessageT], value: dict[str, Any], *, strict: bool = False) -> MessageT:
    """Return the message of this class that an object is; its `type` is not looked at. Raises as `read_message`."""
    rules = RULES[cls]
    members: dict[str, Any] = {}
    for name, given in value.items():
        rule = rules.get(name)
        if rule is not None:
            usual = type(given) is rule.usual and (not rule.longest or 0 < len(given) <= rule.longest)  # type: ignore[arg-type]  # a text then
            if not usual and not rule.fits(given):
                raise MalformedMessage(f"{cls.type}: `{name}` must be {rule.wanted}")
            members[name] = given
        elif strict and name != "type":
            raise MalformedMessage(f"{cls.type}: unknown member `{name[:MAX_ID]}`")
    for name in cls.required:
        if name not in members:
            raise MalformedMessage(f"{cls.type}: `{name}` is missing")
    return cls(**members)


def as_json(message: AgentMessage) -> dict[str, Any]:
    """Return a message as a JSON object, without the members that are None."""
    value: dict[str, Any] = {"type": message.type}
    for name in RULES[type(message)]:
        member = getattr(message, name)
        if member is not None:
            value[name] = member
    return value


def encode_message(message: AgentMessage) -> bytes:
    """Return a message as JSON text on one line. Raises `Unencodable` for values that JSON does not have."""
    return encode(as_json(message))


DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"

_FAILURE: Final[dict[str, Any]] = {
    "type": "object",
    "description": "Why there is no result.",
    "properties": {
        "code": {"description": "one of the table of errors; others may be added", "examples": list(ERRORS_BY_CODE)},
        "message": {"type": "string", "description": "one line for a person"},
        "data": {"description": "any value for a program"},
        "retry_after": {"type": "number", "description": "seconds after which to try again"},
    },
    "required": ["code", "message"],
}

_MANIFEST: Final[dict[str, Any]] = {
    "type": "object",
    "description": "A tool.",
    "properties": {
        "name": {"type": "string", "minLength": 1, "description": "letters, digits, points, dashes and underscores"},
        "description": {"type": "string", "description": "for the model"},
        "parameters": {"type": "object", "description": "the JSON Schema of the arguments, which are an object"},
        "version": {"type": "string", "minLength": 1, "default": "1", "description": 'without it "1"'},
        "implementation": {
            "type": "string",
            "description": "the service's function for it; without it that of its name",
        },
        "callback": {"type": "string", "description": "the URL at which it is called; not with `implementation`"},
    },
    "required": ["name", "parameters"],
}

_REGISTERED: Final[dict[str, Any]] = {
    "type": "object",
    "description": "What became of a manifest.",
    "properties": {
        "name": {"type": "string", "description": "the tool's name, with the prefix of who registered it"},
        "version": {"type": "string", "description": "its version"},
        "hash": {"type": "string", "description": "the SHA-256 of the manifest"},
        "status": {"enum": ["registered", "pending"], "description": "`pending` until somebody approves it"},
    },
    "required": ["name", "version", "hash", "status"],
}

_REFERENCES: Final = {"error": "failure", "tool": "manifest"}
"""Members whose values have a schema of their own."""


def schema_of(cls: type[AgentMessage]) -> dict[str, Any]:
    """Return the JSON Schema of one message. Members that it does not name are allowed, and ignored."""
    properties: dict[str, Any] = {"type": {"const": cls.type}}
    for name, rule in RULES[cls].items():
        schema = dict(rule.schema)
        if name == "tools":
            of = "registered" if cls is ToolsRegistered else "manifest"
            schema["items"] = {"$ref": f"#/$defs/{of}"}
        elif name in _REFERENCES:
            schema = {"$ref": f"#/$defs/{_REFERENCES[name]}", "description": schema["description"]}
        properties[name] = schema
    about = (cls.__doc__ or "").partition("\n")[0]
    return {"type": "object", "description": about, "properties": properties, "required": ["type", *cls.required]}


def schemas() -> dict[str, Any]:
    """Return one JSON Schema (2020-12) for any message of the protocol, with that of each in `$defs`."""
    defs: dict[str, Any] = {name: schema_of(cls) for name, cls in MESSAGES.items()}
    any_of = [{"$ref": f"#/$defs/{name}"} for name in MESSAGES]
    return {
        "$schema": DIALECT,
        "title": "Agent tools",
        "oneOf": any_of,
        "$defs": {**defs, "failure": _FAILURE, "manifest": _MANIFEST, "registered": _REGISTERED},
    }


@cache
def published() -> bytes:
    """Return the schemas as JSON text."""
    return encode(schemas())
