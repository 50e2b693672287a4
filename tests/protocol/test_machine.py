"""The engine against any peer at all: hypothesis invents what arrives, what we do and in which order.

The model beside it knows only ids: which requests of the peer's are owed an answer, which of ours wait for one. What
the promises say of those holds after every step, whatever was sent (guarantees 1, 2 and 6).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

import orjson
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.fuzz.effort import effort
from tests.protocol import support
from tests.protocol.support import CAPABILITIES, LEVEL, SERVED, VERSION, envelope
from trimcp.errors import ErrorReply, LocalError
from trimcp.protocol.bound_methods import methods_of
from trimcp.protocol.connection import Connection, OutboundRequest
from trimcp.protocol.events import (
    AnsweredByEngine,
    BatchReceived,
    Cancelled,
    Event,
    Forgotten,
    Ignored,
    Notified,
    Progressed,
    Rejected,
    Replied,
    RequestReceived,
)
from trimcp.protocol.profile import Role
from trimcp.protocol.states import Handshake, Inbound
from trimcp.wire import jsonrpc
from trimcp.wire.codes import INVALID_REQUEST
from trimcp.wire.content import TextContent
from trimcp.wire.jsonrpc import RequestId, parse
from trimcp.wire.revisions import REVISIONS, V2025_03_26, Revision
from trimcp.wire.tools import CallToolParams, CallToolResult

Key: TypeAlias = tuple[type, RequestId]
"""An id as the wire has it: 1 and "1" are two."""

# Few, so that they meet each other: what is equal in Python and not on the wire, and what is no id at all.
IDS = st.sampled_from([0, 1, 2, "1", "", 2**63])
NO_IDS = st.sampled_from([None, 1.0, True, False, 0.0, [], {}, 2**64])
ANY_ID = IDS | NO_IDS
SOME_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
METHODS = st.sampled_from([*methods_of(REVISIONS[0]), *methods_of(REVISIONS[-1]), "no/such", "", "tools/call"])
VERSIONS = st.sampled_from([r.name for r in REVISIONS] + ["1999-01-01", ""])
METAS = st.sampled_from(
    [
        None,
        {},
        {"progressToken": 1},
        {"progressToken": [1]},
        envelope(),
        envelope(progressToken="t"),
        envelope(**{LEVEL: "loud"}),
        {VERSION: REVISIONS[-1].name},
        {VERSION: "1999-01-01", CAPABILITIES: {}},
        {VERSION: 5, CAPABILITIES: {}},
        envelope(**{CAPABILITIES: []}),
        7,
    ]
)
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "name": st.sampled_from(["run", 5]),
    "arguments": st.sampled_from([{}, {"n": 1}, []]),
    "level": st.sampled_from(["info", "loud"]),
    "uri": st.just("a:b"),
    "protocolVersion": VERSIONS,
    "capabilities": st.sampled_from([{}, []]),
    "clientInfo": st.just({"name": "p", "version": "1"}),
    "requestId": ANY_ID,
    "message": st.just("m"),
    "requestedSchema": st.just({"type": "object", "properties": {}}),
}
PARAMS = st.builds(
    lambda fields, meta: {**dict(fields), **({} if meta is None else {"_meta": meta})},
    st.lists(st.sampled_from(list(FIELDS)).flatmap(lambda name: st.tuples(st.just(name), FIELDS[name])), max_size=4),
    METAS,
)
OUTCOMES = st.sampled_from(["result", "error", "both", "list", "bad error"])
WORDS = st.sampled_from([b"", b"{", b"}", b"null", b"1e999", b'"\\ud800"', b"\xff", b",", b'"id":1,', b"[]"])


def key(id: RequestId) -> Key:
    return type(id), id


def loaded(id: Any) -> Any:
    """An id inside params, where a number without a fraction is an integer, as JSON Schema has it."""
    return int(id) if type(id) is float and id.is_integer() else id


class EngineMachine(RuleBasedStateMachine):
    """What both sides have in common. `engine` is ours; the peer is whatever the rules write.

    Attributes:
        theirs: requests of the peer's that were let in and not yet answered, as the model knows them.
        cancelled: those of them that their peer gave up.
        ours: requests of ours that wait.
        heard: requests with a readable id that arrived; each must come to `answered` or `withdrawn`.
    """

    role: ClassVar[Role]
    calls: ClassVar[Sequence[str]]
    """What we may ask of the peer."""

    engine: Connection
    revision: Revision

    def __init__(self) -> None:
        super().__init__()
        self.theirs: dict[Key, RequestReceived] = {}
        self.cancelled: set[Key] = set()
        self.ours: dict[Key, OutboundRequest] = {}
        self.heard = self.answered = self.withdrawn = 0
        self.closed = False

    # What arrives

    @property
    def answers_nobody(self) -> bool:
        """A modern client may not write a response."""
        return self.role is Role.CLIENT and self.engine.modern.revision is not None

    def hear(self, data: bytes) -> Event:
        """Let bytes arrive, and hold what follows against the model."""
        message = parse(data)
        event = self.engine.receive(message)
        self._judge(message, event)
        return event

    def _judge(self, message: jsonrpc.Message, event: Event) -> None:
        if isinstance(message, jsonrpc.Request):
            self._judge_request(message.id, event)
        elif isinstance(message, jsonrpc.Batch) and isinstance(event, BatchReceived):
            assert len(event.events) == len(message.members)
            for member, each in zip(message.members, event.events, strict=True):
                self._judge(member, each)
        elif isinstance(message, jsonrpc.Notification):
            self._judge_notification(message, event)
        elif isinstance(message, (jsonrpc.Response, jsonrpc.ErrorResponse, jsonrpc.Lost)):
            self._judge_reply(message.id, event)
        elif isinstance(message, jsonrpc.Malformed):
            self._judge_malformed(message, event)
        else:
            assert isinstance(event, Rejected | Ignored)

    def _judge_request(self, id: RequestId, event: Event) -> None:
        if self.answers_nobody:
            assert isinstance(event, Rejected)
            assert event.reply is None
            return
        self.heard += 1
        before = self.theirs.get(key(id))
        if before is not None:
            assert isinstance(event, Rejected)
            assert event.error == INVALID_REQUEST
            assert self.engine.inbound[id] is before, "the first one is untouched"
        if isinstance(event, RequestReceived):
            assert key(event.id) == key(id)
            assert event.method.name in self.engine.served
            self.theirs[key(id)] = self.engine.inbound[id]
            return
        assert isinstance(event, AnsweredByEngine | Rejected), event
        self._answered(id, event.reply)

    def _answered(self, id: RequestId, reply: bytes | None) -> None:
        assert reply is not None, "every request with a readable id is answered"
        said = orjson.loads(reply)
        assert key(said["id"]) == key(id), "ids are never crossed"
        assert ("result" in said) is not ("error" in said)
        self.answered += 1

    def _judge_notification(self, message: jsonrpc.Notification, event: Event) -> None:
        params = message.params or {}
        if isinstance(event, Cancelled):
            named = key(loaded(params["requestId"]))
            assert message.method == "notifications/cancelled"
            assert key(event.id) == named
            assert named in self.theirs
            assert named not in self.cancelled, "nothing is cancelled twice"
            self.cancelled.add(named)
        elif isinstance(event, Progressed):
            request = self.ours[key(event.id)]
            assert request.wants_progress
            assert key(loaded(params["progressToken"])) == key(event.id)
        elif isinstance(event, Replied):
            assert (message.method, self.role) == ("notifications/cancelled", Role.CLIENT)
            assert self.ours.pop(key(event.id)).method.name == "subscriptions/listen"
        else:
            assert isinstance(event, Ignored | Notified)

    def _judge_reply(self, id: RequestId | None, event: Event) -> None:
        if id is not None and key(id) not in self.ours:
            id = jsonrpc.own_id(id)  # some peers write the number that we sent as text
        if id is not None and key(id) in self.ours:
            assert isinstance(event, Replied)
            assert key(event.id) == key(id)
            assert (event.result is None) is not (event.error is None)
            del self.ours[key(id)]
        else:
            assert isinstance(event, Ignored | Forgotten)

    def _judge_malformed(self, message: jsonrpc.Malformed, event: Event) -> None:
        if isinstance(event, Replied):
            assert message.id is not None
            del self.ours[key(message.id)]
        elif message.answerable and (self.role is Role.SERVER or (message.is_request and not self.answers_nobody)):
            assert isinstance(event, Rejected)
            assert event.reply is not None
            said = orjson.loads(event.reply)
            assert said["error"]["code"] == message.code
            assert said.get("id") == message.id
        else:
            assert isinstance(event, Ignored)

    @rule(id=st.none() | IDS, method=METHODS, params=PARAMS)
    def said(self, id: Any, method: str, params: dict[str, Any]) -> None:
        """Any request, or without an id any notification."""
        self.hear(_text(**({} if id is None else {"id": id}), method=method, params=params))

    @rule(id=NO_IDS, method=METHODS)
    def asked_without_a_readable_id(self, id: Any, method: str) -> None:
        under_way = dict(self.engine.inbound)
        event = self.hear(_text(id=id, method=method))
        assert self.engine.inbound == under_way
        if self.role is Role.SERVER and method:
            assert isinstance(event, Rejected)
            assert event.error == INVALID_REQUEST

    def _one_of(self, data: st.DataObject, table: Mapping[Key, Any]) -> Any:
        """An id from a table, more often than not; else any."""
        return data.draw(st.sampled_from([*(id for _, id in table)] * 3 or [0]) | ANY_ID)

    @rule(data=st.data(), reason=st.sampled_from([{}, {"reason": "why"}, {"reason": 5}]))
    def gave_up(self, data: st.DataObject, reason: dict[str, Any]) -> None:
        id = self._one_of(data, self.theirs)
        named = loaded(id)
        due = type(named) in (int, str) and reason.get("reason") != 5
        due = due and key(named) in self.theirs and key(named) not in self.cancelled
        event = self.hear(_text(method="notifications/cancelled", params={"requestId": id, **reason}))
        assert isinstance(event, Cancelled) is due
        if isinstance(event, Cancelled):
            assert event.reason == reason.get("reason")

    @rule(data=st.data(), value=st.sampled_from([1, 0.5, "half", None]))
    def made_progress(self, data: st.DataObject, value: Any) -> None:
        id = self._one_of(data, self.ours)
        token = loaded(id)
        request = self.ours.get(key(token)) if type(token) in (int, str) else None
        method = methods_of(self.engine.revision or REVISIONS[-1])["notifications/progress"]
        due = request is not None and request.wants_progress and type(value) in (int, float)
        due = due and (method.from_client if self.role is Role.SERVER else method.from_server)
        params = {"progressToken": id, "progress": value}
        event = self.hear(_text(method="notifications/progress", params=params))
        assert isinstance(event, Progressed) is due

    @rule(data=st.data(), outcome=OUTCOMES, value=SOME_JSON)
    def replied(self, data: st.DataObject, outcome: str, value: Any) -> None:
        id = self._one_of(data, self.ours)
        error = {"code": -32603, "message": "m", "data": value}
        said: dict[str, Any] = {
            "result": {"result": {"mark": value}},
            "error": {"error": error},
            "both": {"result": {}, "error": error},
            "list": {"result": [value]},
            "bad error": {"error": {"code": 1.5, "message": value}},
        }[outcome]
        readable = type(id) in (int, str) and id != 2**64
        due = readable and key(id) in self.ours
        event = self.hear(_text(id=id, **said))
        fits = outcome in ("result", "error") and _largest(value)[0] >= -(2**63) and _largest(value)[1] < 2**64
        if due and fits:
            assert isinstance(event, Replied)
            assert event.result == ({"mark": value} if outcome == "result" else None)
        if due:
            assert key(id) not in self.ours, "what answers a call of ours, however broken, ends it"

    @rule(id=st.none() | IDS)
    def lost(self, id: Any) -> None:
        message = jsonrpc.Lost(id, "cut")
        self._judge(message, self.engine.receive(message))

    @rule(data=st.data(), junk=st.lists(WORDS, max_size=3))
    def garbled(self, data: st.DataObject, junk: list[bytes]) -> None:
        """A message with other bytes in it, or no message at all."""
        text = _text(id=data.draw(IDS), method=data.draw(METHODS), params=data.draw(PARAMS))
        if not junk:
            text = data.draw(st.binary(max_size=30) | SOME_JSON.map(_encode))
        for word in junk:
            place = data.draw(st.integers(0, len(text)))
            text = text[:place] + word + text[place + data.draw(st.integers(0, 3)) :]
        self.hear(text)

    @rule(members=st.lists(st.tuples(ANY_ID | st.just("none"), METHODS, PARAMS) | SOME_JSON, max_size=4))
    def batched(self, members: list[Any]) -> None:
        texts = []
        for member in members:
            if isinstance(member, tuple):
                id, method, params = member
                ids = {} if id == "none" else {"id": id}
                texts.append(_text(**ids, method=method, params=params))
            else:
                texts.append(_encode(member))
        event = self.hear(b"[" + b",".join(texts) + b"]")
        if self.engine.legacy.revision is not V2025_03_26:
            assert isinstance(event, Rejected | Ignored), "no other revision has arrays"

    # What we do

    @precondition(lambda self: self.theirs)
    @rule(data=st.data(), error=st.booleans())
    def answer(self, data: st.DataObject, error: bool) -> None:
        named = data.draw(st.sampled_from(list(self.theirs)))
        request = self.theirs.pop(named)
        if error:
            reply = self.engine.encode_error(request.id, ErrorReply(-32603, "broken", {"n": 1}))
        else:
            result = CallToolResult(content=[TextContent(text="hi")])
            try:
                reply = self.engine.encode_result(request, result)
            except LocalError:
                reply = self.engine.encode_error(request.id, ErrorReply(-32603, "not said here"))
        goes_out = self.engine.answered(request.id)
        assert goes_out is (named not in self.cancelled), "a cancelled request gets no answer, any other gets one"
        if goes_out:
            self._answered(request.id, reply)
        else:
            self.cancelled.discard(named)
            self.withdrawn += 1
        assert not self.engine.answered(request.id), "nothing is answered twice"

    @rule(data=st.data(), wants_progress=st.booleans())
    def call(self, data: st.DataObject, wants_progress: bool) -> None:
        name = data.draw(st.sampled_from(self.calls))
        try:
            method = self.engine.method(name)
            self.engine.may_call(method)
        except LocalError:
            ready = self.engine.legacy.handshake is Handshake.READY or self.engine.modern.revision is not None
            assert self.closed or not ready or not self._has(name)
            return
        id = self.engine.new_id()
        params = CallToolParams("run", {}) if name == "tools/call" else None
        try:
            data_ = self.engine.encode_request(id, method, params, wants_progress=wants_progress)
        except LocalError:
            return
        assert orjson.loads(data_)["id"] == id
        self.ours[key(id)] = self.engine.sent(id, method, wants_progress=wants_progress)

    def _has(self, name: str) -> bool:
        revision = self.engine.revision
        method = None if revision is None else methods_of(revision).get(name)
        return method is not None and (method.from_client if self.role is Role.CLIENT else method.from_server)

    @precondition(lambda self: self.ours)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        named = data.draw(st.sampled_from(list(self.ours)))
        request = self.ours.pop(named)
        assert self.engine.give_up(request.id)
        assert not self.engine.give_up(request.id)
        assert isinstance(self.hear(_text(id=request.id, result={})), Ignored), "a late reply finds nothing"

    @precondition(lambda self: len(self.ours) > 2)
    @rule()
    def lose(self) -> None:
        self.engine.lose_all()
        self.ours.clear()
        self.closed = True

    # What holds after every step

    @invariant()
    def the_tables_are_the_models(self) -> None:
        if not hasattr(self, "engine"):
            return
        assert {key(id) for id in self.engine.inbound} == set(self.theirs)
        assert {key(id) for id in self.engine.outbound} == set(self.ours)
        for named, request in self.theirs.items():
            assert request.state is (Inbound.CANCELLED if named in self.cancelled else Inbound.UNDER_WAY)
        assert self.heard == self.answered + self.withdrawn + len(self.theirs)

    def teardown(self) -> None:
        """Answer what is left: then nothing is under way, and each request was answered once."""
        if not hasattr(self, "engine"):
            return
        for named, request in self.theirs.items():
            self.withdrawn += named in self.cancelled
            self.answered += self.engine.answered(request.id)
        assert not self.engine.inbound
        assert self.heard == self.answered + self.withdrawn
        for request in list(self.ours.values()):
            self.hear(_text(id=request.id, result={}))
        assert not self.engine.outbound


class ServerMachine(EngineMachine):
    """We are a server, of one era or both, and the handshake comes when it comes."""

    role = Role.SERVER
    calls = ("elicitation/create", "roots/list", "sampling/createMessage", "ping", "tools/call")

    @initialize(
        revisions=st.sampled_from([REVISIONS, support.LEGACY, REVISIONS[-1:]]),
        agreed=st.sampled_from([None, None, *support.LEGACY, V2025_03_26]),
        required=st.booleans(),
    )
    def begin(self, revisions: tuple[Revision, ...], agreed: Revision | None, required: bool) -> None:
        if agreed is not None:
            self.engine = support.agreed(agreed)
        else:
            self.engine = support.server(SERVED, revisions)
            self.engine.modern.required = required and revisions is not support.LEGACY

    @rule(id=IDS, version=VERSIONS)
    def initialize_(self, id: Any, version: str) -> None:
        params = {"protocolVersion": version, "capabilities": {}, "clientInfo": {"name": "p", "version": "1"}}
        handshake = self.engine.legacy.handshake
        event = self.hear(_text(id=id, method="initialize", params=params))
        if handshake is not Handshake.NEW:
            assert isinstance(event, Rejected), "there is one handshake"
            assert self.engine.legacy.handshake is handshake

    @rule()
    def initialized(self) -> None:
        self.hear(_text(method="notifications/initialized"))

    @rule(id=IDS, named=st.sampled_from(SERVED[:2]))
    def asked_rightly(self, id: Any, named: str) -> None:
        """What is right is let in: once something was agreed on, or with an envelope."""
        params = {"name": "run"} if named == "tools/call" else {}
        legacy = self.engine.legacy.agreed and not self.engine.modern.required
        if legacy or self.engine.profile.modern:
            meta = {} if legacy else {"_meta": envelope()}
            first = key(id) not in self.theirs
            event = self.hear(_text(id=id, method=named, params={**params, **meta}))
            assert isinstance(event, RequestReceived) is first


class ClientMachine(EngineMachine):
    """We are a client that has found its server, in one era or the other."""

    role = Role.CLIENT
    calls = ("tools/call", "tools/list", "prompts/list", "ping", "elicitation/create")

    @initialize(revision=st.sampled_from(REVISIONS), early=st.sampled_from([False, False, True]))
    def begin(self, revision: Revision, early: bool) -> None:
        self.revision = revision
        self.engine = support.client(("elicitation/create", "roots/list"))
        if not early:
            pair = support.ConnectionPair(client=self.engine)
            pair.open(revision)

    @rule(id=IDS)
    def asked_rightly(self, id: Any) -> None:
        first = key(id) not in self.theirs
        event = self.hear(_text(id=id, method="roots/list"))
        if self.engine.legacy.agreed:
            assert isinstance(event, RequestReceived) is first


def _encode(value: Any) -> bytes:
    """JSON that may hold what ours would refuse to write."""
    return _dumps(value).encode("utf-8", "surrogatepass")


def _dumps(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{_dumps(name)}:{_dumps(each)}" for name, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_dumps, value)) + "]"
    if isinstance(value, str):
        return orjson.dumps(value).decode()
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return repr(value)


def _text(**members: Any) -> bytes:
    return _encode({"jsonrpc": "2.0", **members})


def _largest(value: Any) -> tuple[int, int]:
    """The smallest and the largest integer in a value."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        found = [_largest(each) for each in value]
        return min((low for low, _ in found), default=0), max((high for _, high in found), default=0)
    return (value, value) if type(value) is int else (0, 0)


class TestServer(ServerMachine.TestCase):
    settings = effort(40, 2_000)


class TestClient(ClientMachine.TestCase):
    settings = effort(40, 2_000)
