"""Plays one side of a recorded conversation and compares the other side's messages with the recorded ones.

A message is sent once all messages recorded before it have arrived. These may arrive in any order: responses are
matched by their request, requests by their method, progress by its token. Values that the other side chooses (request
ids, cursors, states) and masked secrets are replaced by the current ones. Pings, times, the number of progress
messages, and responses to cancelled requests may differ. The messages may be those of MCP or of agent tools.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

import attrs
import orjson
import trio

from trimcp.channel import Kind, MessageChannel, Outgoing
from trimcp.framing.headers import request_headers
from trimcp.support.nurseries import open_service_nursery
from trimcp.transports.trace import as_json
from trimcp.wire.codes import METHOD_NOT_FOUND
from trimcp.wire.common import META_PROTOCOL_VERSION, META_TIMEOUT
from trimcp.wire.jsonrpc import Malformed
from trimcp.wire.revisions import find

_LONG_DIGITS: Final = re.compile(r"\d{19}")  # the shortest integers beyond 64 bits have 19 digits
_BITS: Final = 63

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


Alike: TypeAlias = Callable[[Any, Any, str], bool]
"""Returns whether an expected and an actual value at a path count as equal."""

_PATIENCE: Final = 10.0  # seconds
_TOLD: Final = 100  # messages that are not in the journal
_LINGER: Final = 0.3  # seconds in which unexpected messages may still arrive
_CANCELLED: Final = "notifications/cancelled"
_PROGRESS: Final = "notifications/progress"
_CHOSEN: Final = {
    # The member in which one side sends a value of its choice, by the member in which the other side returns it.
    **{key: key for key in ("requestState", "progressToken", "elicitationId", "taskId", "nextCursor")},
    "cursor": "nextCursor",
}
_CHOSEN_BY_SERVICE: Final = {**CHOSEN, "progressToken": "progressToken"}
_MASKED: Final = re.compile(r"\*\*\*\d*")
_TIME: Final = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d(\.\d+)?)?(Z|[+-]\d\d:?\d\d)?")


@attrs.define(eq=False)
class _Awaited:
    """An expected message of the other side."""

    number: int
    message: Any
    optional: bool
    arrived: bool = False


async def play(
    messages: Sequence[tuple[bool, Any]],
    channel: MessageChannel,
    *,
    client: bool = True,
    ignore: Iterable[str] = (),
    patience: float = _PATIENCE,
) -> list[str]:
    """Play the client's side, or the server's, and return a line for each difference.

    `ignore` are JSON Pointers to values that may differ in any message of the other side; "*" matches any one step. The
    next expected message is waited for `patience` seconds.
    """
    agents = of_agent_tools(messages)
    if agents:
        messages = [(from_client, as_mcp(message, from_client)) for from_client, message in messages]
    player = _Player(channel, client, [pointer.strip("/").split("/") for pointer in ignore], patience, agents)
    player.expect(messages)
    async with open_service_nursery() as nursery:
        nursery.start_soon(player.receive)
        await player.send(messages)
    return player.problems


@attrs.define(eq=False)
class _Player:
    channel: MessageChannel
    client: bool
    ignored: list[list[str]]
    patience: float
    agents: bool  # whether these are messages of agent tools, in the shape of MCP's
    problems: list[str] = attrs.field(init=False, factory=list)
    _awaited: list[_Awaited] = attrs.field(init=False, factory=list)
    _ids: dict[Any, Any] = attrs.field(init=False, factory=dict)
    _bound: dict[Any, Any] = attrs.field(init=False, factory=dict)
    _methods: dict[Any, str] = attrs.field(init=False, factory=dict)
    _given_up: set[Any] = attrs.field(init=False, factory=set)
    _changed: trio.lowlevel.ParkingLot = attrs.field(init=False, factory=trio.lowlevel.ParkingLot)
    _sending: trio.Lock = attrs.field(init=False, factory=trio.Lock)
    _marks: set[str] = attrs.field(init=False, factory=set)  # in place of integers beyond 64 bits
    _ended: bool = attrs.field(init=False, default=False)
    _unexpected: int = attrs.field(init=False, default=0)  # messages that are not in the journal

    def expect(self, messages: Sequence[tuple[bool, Any]]) -> None:
        """Add the messages that the other side is expected to send."""
        for from_client, whole in messages:
            for message in _members(whole):
                if from_client == self.client:
                    if "method" in message and "id" in message:
                        self._methods[_key(message["id"])] = message["method"]
                    elif message.get("method") == _CANCELLED:
                        self._given_up.add(_key(_params(message).get("requestId")))
        with_progress: set[Any] = set()
        for number, (from_client, whole) in enumerate(messages, 1):
            if from_client == self.client:
                continue
            for message in _members(whole):
                method, optional = message.get("method"), False
                if method == _PROGRESS:
                    token = _key(_params(message).get("progressToken"))
                    optional = token in with_progress  # once is enough
                    with_progress.add(token)
                elif method == "ping" and "id" in message:
                    optional = True
                elif method is None:
                    optional = _key(message.get("id")) in self._given_up
                self._awaited.append(_Awaited(number, message, optional))

    # Sending

    async def send(self, messages: Sequence[tuple[bool, Any]]) -> None:
        """Send our side's messages, each once all expected messages before it have arrived."""
        for number, (from_client, whole) in enumerate(messages, 1):
            if from_client != self.client:
                continue
            if not await self._until_arrived(number):
                break
            members = [self._translated(member) for member in _members(whole) if self._can_be_sent(member)]
            if not members:
                continue
            try:
                await self._send(members if isinstance(whole, list) else members[0])
            except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
                self.problems.append(f"message {number}: could not be sent, the connection is gone ({error})")
                break
        else:
            await self._until_arrived(len(messages) + 1)
            with trio.move_on_after(_LINGER):
                while not self._ended:
                    await self._changed.park()
        missing = [each for each in self._awaited if not each.arrived and not each.optional]
        self.problems += [f"message {each.number}: {self._name(each.message)} did not come" for each in missing[:1]]
        if self._unexpected > _TOLD:
            self.problems.append(f"and {self._unexpected - _TOLD} more that are not in the journal")
        if missing[1:]:
            self.problems.append(f"and {len(missing) - 1} more that did not come after it")

    async def _send(self, message: Any) -> None:
        """Send one message under a lock: a channel allows one sender at a time, and `receive` also answers pings."""
        async with self._sending:
            await self.channel.send([_of_agent(message) if self.agents else outgoing_of(message)])

    async def _until_arrived(self, number: int) -> bool:
        """Wait for all messages expected before the message of this number; return False after `patience`."""
        with trio.move_on_after(self.patience):
            while any(each.number < number and not each.arrived and not each.optional for each in self._awaited):
                if self._ended:
                    return False
                await self._changed.park()
            return True
        return False

    def _can_be_sent(self, message: Any) -> bool:
        if "method" in message or "id" not in message:
            return True
        return _key(message["id"]) in self._ids  # otherwise its request was not sent this time

    def _translated(self, message: Any) -> Any:
        """Return a recorded message of our side with the current ids, states and secrets."""
        now = self._replaced(message)
        if "method" not in message and "id" in message:
            now["id"] = self._ids[_key(message["id"])]
        return now

    def _replaced(self, value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            return {name: self._replaced(member, name) for name, member in value.items()}
        if isinstance(value, list):
            return [self._replaced(member) for member in value]
        if key.endswith("subscriptionId"):
            return self._ids.get(_key(value), value)
        if isinstance(value, str) and _MASKED.fullmatch(value):
            return self._bound.get(value, value)
        if key in self._chosen and isinstance(value, str | int):
            return self._bound.get((self._chosen[key], value), value)
        return value

    @property
    def _chosen(self) -> Mapping[str, str]:
        return _CHOSEN_BY_SERVICE if self.agents else _CHOSEN

    # Receiving

    async def receive(self) -> None:
        """Compare the messages that arrive, until the other side closes."""
        try:
            while True:
                for incoming in await self.channel.receive():
                    found = as_json(incoming.message)
                    if isinstance(incoming.message, Malformed) and incoming.message.marked is not None:
                        found = incoming.message.marked.value
                        self._marks.add(incoming.message.marked.mark)
                    for message in _members(as_mcp(found, not self.client) if self.agents else found):
                        await self._take(message)
                self._changed.unpark_all()
        except (trio.EndOfChannel, trio.BrokenResourceError):
            self._ended = True
            self._changed.unpark_all()

    async def _take(self, message: Any) -> None:
        candidates = [each for each in self._awaited if not each.arrived and self._is_same_kind(each.message, message)]
        if not candidates:
            await self._take_unexpected(message)
            return
        compared = [(each, *self._compare(each.message, message)) for each in candidates]
        found, problems, chosen = next((each for each in compared if not each[1]), compared[0])
        found.arrived = True
        if "method" in message and "id" in message:
            self._ids[_key(found.message["id"])] = message["id"]
            if self.agents:
                self._bound["progressToken", _key(found.message["id"])] = message["id"]
        if message.get("method") != _PROGRESS:
            name = self._name(found.message)
            self.problems += [f"message {found.number}, {name}: {problem}" for problem in problems]
            self._bound.update(chosen)

    def _is_same_kind(self, expected: Any, actual: Any) -> bool:
        if expected.get("method") != actual.get("method") or ("id" in expected) != ("id" in actual):
            return False
        if actual.get("method") == _PROGRESS:
            left, right = _params(expected), _params(actual)
            return bool(left.get("progressToken") == right.get("progressToken"))
        left, right = expected.get("id"), actual.get("id")
        return "method" in actual or left == right or self._is_beyond(left, right)

    def _is_beyond(self, left: Any, right: Any) -> bool:
        """Return whether the journal has an integer beyond 64 bits where one came, of which nothing more is known."""
        return isinstance(right, str) and right in self._marks and isinstance(left, int) and left.bit_length() > _BITS

    async def _take_unexpected(self, message: Any) -> None:
        method = message.get("method")
        if method == "ping" and "id" in message:
            await self._send({"jsonrpc": "2.0", "id": message["id"], "result": {}})
        elif method == _PROGRESS or (method is None and _key(message.get("id")) in self._given_up):
            pass
        else:
            self._unexpected += 1
            if self._unexpected <= _TOLD:
                self.problems.append(f"not in the journal: {_short(self._plain(message), 200)}")
            if method is not None and "id" in message:
                error = {"code": METHOD_NOT_FOUND, "message": "this was not asked when the conversation was recorded"}
                await self._send({"jsonrpc": "2.0", "id": message["id"], "error": error})

    def _compare(self, expected: Any, actual: Any) -> tuple[list[str], dict[Any, Any]]:
        """Return the differences, and the other side's current values by those in the journal."""
        chosen: dict[Any, Any] = {}
        own, cancelled = ("$.request_id",) * 2 if self.agents else ("$.id", "$.params.requestId")

        def alike(left: Any, right: Any, path: str) -> bool:
            key = path.rpartition(".")[2]
            if self._is_beyond(left, right):
                return True
            if path == cancelled and expected.get("method") == _CANCELLED:
                return bool(self._ids.get(_key(left)) == right)
            if (path == own and "method" in expected) or key == META_TIMEOUT:  # the caller's remaining time
                return True
            if key in self._chosen and isinstance(left, str | int) and isinstance(right, str | int):
                chosen[self._chosen[key], left] = right
                if isinstance(left, str) and _MASKED.fullmatch(left):
                    chosen[left] = right
                return True
            if not isinstance(left, str):
                return False
            if _MASKED.fullmatch(left):
                chosen[left] = right
                return True
            return isinstance(right, str) and _is_same_text(left, right)

        left, right = self._plain(expected), self._plain(actual)
        for pointer in self.ignored:
            left, right = _without(left, pointer), _without(right, pointer)
        return list(differences(left, right, "$", alike)), chosen

    def _plain(self, message: Any) -> Any:
        """Return a message as it was said."""
        return as_agent(message) if self.agents else message

    def _name(self, message: Any) -> str:
        if "method" in message:
            return f"{message['method']}" if "id" not in message else f"the question {message['method']}"
        return f"the answer to {self._methods.get(_key(message.get('id')), 'nothing')}"


def _members(message: Any) -> list[Any]:
    found = message if isinstance(message, list) else [message]
    return [member for member in found if isinstance(member, dict)]


def _key(value: Any) -> Any:
    """Return an id or a token as a key: a broken journal, or a peer, may have any JSON value there."""
    return write_json(value) if isinstance(value, dict | list) else value


def _params(message: Any) -> dict[str, Any]:
    """Return a message's parameters; an empty object where they are none."""
    params = message.get("params")
    return params if isinstance(params, dict) else {}


def _is_same_text(left: str, right: str) -> bool:
    if _TIME.fullmatch(left) and _TIME.fullmatch(right):
        return True
    if "***" not in left:
        return False
    return re.fullmatch(".*".join(map(re.escape, _MASKED.split(left))), right, re.DOTALL) is not None


def _without(value: Any, pointer: list[str]) -> Any:
    """Return a JSON value without the values at a JSON Pointer."""
    step, rest = pointer[0].replace("~1", "/").replace("~0", "~"), pointer[1:]
    if isinstance(value, dict):
        names = list(value) if step == "*" else [step] if step in value else []
        changed = {name: _without(value[name], rest) for name in names} if rest else {}
        return {name: changed.get(name, member) for name, member in value.items() if rest or name not in names}
    if isinstance(value, list) and rest:
        return [_without(each, rest) if step in ("*", str(at)) else each for at, each in enumerate(value)]
    if isinstance(value, list):
        return ["..." if step in ("*", str(at)) else each for at, each in enumerate(value)]
    return value


def read_json(data: str | bytes) -> Any:
    """Return a JSON value with integers of any size. Raises ValueError: it is none."""
    value = orjson.loads(data)
    return json.loads(data) if _LONG_DIGITS.search(data if isinstance(data, str) else data.decode()) else value


def write_json(value: Any) -> bytes:
    """Return a JSON value of `read_json` as text on one line."""
    try:
        return orjson.dumps(value)
    except TypeError:  # an integer beyond 64 bits
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def _of_agent(message: Any) -> Outgoing:
    return Outgoing(write_json(as_agent(message)), Kind.NOTIFICATION)


def outgoing_of(message: Any) -> Outgoing:
    """Return a JSON message to send over a channel, with the request headers of HTTP."""
    data = write_json(message)
    if not isinstance(message, dict):
        return Outgoing(data, Kind.NOTIFICATION)
    method, id, params = message.get("method"), message.get("id"), _params(message)
    if method is None:
        return Outgoing(data, Kind.REPLY, id)
    if method == _CANCELLED:
        return Outgoing(data, Kind.CANCEL, params.get("requestId"))
    meta = params.get("_meta")
    version = meta.get(META_PROTOCOL_VERSION) if isinstance(meta, dict) else None
    revision = find(version) if isinstance(version, str) else None
    headers = None
    if revision is not None and revision.method_headers and isinstance(method, str):
        name = params.get("name") or params.get("uri")
        headers = request_headers(revision.name, method, name if isinstance(name, str) else None)
    return Outgoing(data, Kind.NOTIFICATION if id is None else Kind.REQUEST, id, headers=headers)


def differences(expected: Any, actual: Any, path: str = "$", alike: Alike | None = None) -> Iterator[str]:
    """Yield a line for every place where two JSON values differ, with its path; `alike` may count two as equal."""
    if expected == "..." or (alike is not None and alike(expected, actual, path)):
        return
    if isinstance(expected, dict) and isinstance(actual, dict):
        for key in sorted(expected.keys() | actual.keys()):
            if key not in actual:
                yield f"{path}.{key} is missing"
            elif key not in expected:
                yield f"{path}.{key} should not be there: {_short(actual[key])}"
            else:
                yield from differences(expected[key], actual[key], f"{path}.{key}", alike)
    elif isinstance(expected, list) and isinstance(actual, list):
        if len(expected) != len(actual):
            yield f"{path} has {len(actual)} members, expected {len(expected)}"
        for index, (left, right) in enumerate(zip(expected, actual, strict=False)):
            yield from differences(left, right, f"{path}[{index}]", alike)
    elif type(expected) is not type(actual) or expected != actual:
        yield f"{path} is {_short(actual)}, expected {_short(expected)}"


def _short(value: Any, longest: int = 120) -> str:
    """Return a JSON value as text of at most `longest` characters."""
    text = write_json(value).decode()
    return text if len(text) <= longest else text[: longest - 3] + "..."
