"""The engine of one side: admission, ids, replies, cancellation, progress, arrays, and what is no message."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from tests.protocol.support import (
    CAPABILITIES,
    INFO,
    LEGACY,
    LEVEL,
    VERSION,
    ConnectionPair,
    agreed,
    ask,
    client,
    code_of,
    envelope,
    is_request,
    reply_of,
    server,
    tell,
)
from trimcp.errors import ConnectionLost, ErrorReply, InvalidReply, LocalError, Overloaded, RemoteError
from trimcp.principal import Principal
from trimcp.protocol.connection import Connection
from trimcp.protocol.events import (
    AnsweredByEngine,
    BatchReceived,
    Cancelled,
    Ignored,
    Notified,
    Progressed,
    Rejected,
    Replied,
    RequestReceived,
)
from trimcp.protocol.states import Handshake, Inbound
from trimcp.wire.codes import INTERNAL_ERROR, INVALID_PARAMS, INVALID_REQUEST, METHOD_NOT_FOUND, PARSE_ERROR
from trimcp.wire.content import TextContent
from trimcp.wire.jsonrpc import ErrorResponse, encode_error, encode_notification, encode_result, parse
from trimcp.wire.revisions import (
    LATEST_LEGACY,
    REVISIONS,
    V2025_03_26,
    V2025_06_18,
    V2025_11_25,
    V2026_07_28,
    Revision,
)
from trimcp.wire.tools import CallToolParams, CallToolResult

CALL = {"name": "run", "arguments": {"n": 1}}


def _call(revision: Revision, **more: Any) -> dict[str, Any]:
    return {**CALL, "_meta": envelope(), **more} if revision.modern else {**CALL, **more}


def _server(revision: Revision, **options: Any) -> Connection:
    return server(**options) if revision.modern else agreed(revision, **options)


# A request there and back


@pytest.mark.parametrize("revision", REVISIONS)
def test_a_request_goes_there_and_its_answer_back(revision: Revision) -> None:
    pair = ConnectionPair().open(revision)
    event = pair.call(CallToolParams("run", {"n": 1}), wants_progress=True)
    assert isinstance(event, RequestReceived)
    assert (event.params.name, event.params.arguments, event.method.name) == ("run", {"n": 1}, "tools/call")
    admission = event.admission
    assert admission.revision is revision
    assert admission.peer is not None
    assert admission.peer.name == "client"
    assert admission.progress_token == event.id
    replied = pair.answer(event.id, CallToolResult(content=[TextContent(text="hi")]))
    assert pair.payload(replied).content[0].text == "hi"
    assert (pair.server.inbound, pair.client.outbound) == ({}, {})


@pytest.mark.parametrize("revision", REVISIONS)
@pytest.mark.parametrize("id", [0, 1, -7, 2**53, "", "1", "é" * 100])
def test_an_id_may_be_any_string_or_integer(revision: Revision, id: Any) -> None:
    engine = _server(revision)
    event = ask(engine, id, "tools/call", _call(revision))
    assert is_request(event)
    reply = orjson.loads(engine.encode_result(engine.inbound[id], CallToolResult(content=[])))
    assert (reply["id"], type(reply["id"])) == (id, type(id))


@pytest.mark.parametrize("id", [b"null", b"true", b"1.0", b"1.5", b"{}", b"[1]", b"1e3", b"18446744073709551616"])
def test_what_is_no_id_is_refused(id: bytes) -> None:
    event = agreed(LATEST_LEGACY).receive(parse(b'{"jsonrpc":"2.0","method":"tools/list","id":%b}' % id))
    assert code_of(event) == INVALID_REQUEST


# Duplicate ids


@pytest.mark.parametrize("revision", REVISIONS)
def test_a_duplicate_id_is_refused_and_the_first_untouched(revision: Revision) -> None:
    engine = _server(revision)
    assert is_request(ask(engine, 1, "tools/call", _call(revision)))
    first = engine.inbound[1]
    again = ask(engine, 1, "tools/call", _call(revision))
    assert (code_of(again), reply_of(again)["id"]) == (INVALID_REQUEST, 1)
    assert engine.inbound[1] is first
    assert is_request(ask(engine, "1", "tools/call", _call(revision)))
    assert engine.answered(1)
    assert is_request(ask(engine, 1, "tools/call", _call(revision)))


def test_an_id_is_taken_until_a_cancelled_request_has_ended() -> None:
    engine = agreed(LATEST_LEGACY)
    ask(engine, 1, "tools/call", CALL)
    tell(engine, "notifications/cancelled", {"requestId": 1})
    assert code_of(ask(engine, 1, "tools/call", CALL)) == INVALID_REQUEST
    assert not engine.answered(1)
    assert is_request(ask(engine, 1, "tools/call", CALL))


# The ladder


@pytest.mark.parametrize("revision", REVISIONS)
def test_an_unknown_method_is_refused_before_its_params_are_read(revision: Revision) -> None:
    engine = _server(revision)
    params = {"_meta": envelope()} if revision.modern else {}
    for method in ("no/such", "notifications/cancelled", "sampling/createMessage", "tasks/get"):
        assert code_of(ask(engine, 1, method, {**params, "name": 5})) == METHOD_NOT_FOUND


@pytest.mark.parametrize(
    ("method", "in_legacy", "in_modern"),
    [
        ("ping", True, False),
        ("logging/setLevel", True, False),
        ("subscriptions/listen", False, True),
        ("server/discover", False, True),
        ("tools/list", True, True),
    ],
)
def test_methods_are_those_of_the_revision(method: str, in_legacy: bool, in_modern: bool) -> None:
    params = {"level": "error", "notifications": {}}
    legacy = ask(agreed(LATEST_LEGACY, revisions=LEGACY), 1, method, params)
    modern = ask(server(), 1, method, {**params, "_meta": envelope()})
    assert (not isinstance(legacy, Rejected), not isinstance(modern, Rejected)) == (in_legacy, in_modern)
    for event in (legacy, modern):
        if isinstance(event, Rejected):
            assert code_of(event) == METHOD_NOT_FOUND


@pytest.mark.parametrize("revision", REVISIONS)
def test_a_method_without_a_handler_is_unknown_to_the_peer(revision: Revision) -> None:
    engine = _server(revision, served=())
    assert code_of(ask(engine, 1, "tools/call", _call(revision))) == METHOD_NOT_FOUND


@pytest.mark.parametrize("revision", REVISIONS)
@pytest.mark.parametrize(
    ("params", "place"),
    [({"name": 5}, "$.name"), ({"name": "x", "arguments": []}, "$.arguments"), ({}, "name")],
)
def test_wrong_params_are_refused_with_their_place(revision: Revision, params: Any, place: str) -> None:
    engine = _server(revision)
    if revision.modern:
        params = {**params, "_meta": envelope()}
    event = ask(engine, 1, "tools/call", params)
    assert code_of(event) == INVALID_PARAMS
    error = reply_of(event)["error"]
    assert place in error["message"]
    assert any(place in problem for problem in error["data"]["problems"])
    assert engine.inbound == {}


@pytest.mark.parametrize("meta", [5, "x", [], True])
@pytest.mark.parametrize("revision", [LATEST_LEGACY, V2026_07_28])
def test_a_meta_that_is_no_object_is_refused(revision: Revision, meta: Any) -> None:
    assert code_of(ask(_server(revision), 1, "tools/call", {**CALL, "_meta": meta})) == INVALID_PARAMS


@pytest.mark.parametrize("token", [True, 1.5, {}, []])
@pytest.mark.parametrize("revision", [LATEST_LEGACY, V2026_07_28])
def test_a_progress_token_is_a_string_or_an_integer(revision: Revision, token: Any) -> None:
    params = _call(revision)
    params["_meta"] = {**params.get("_meta", {}), "progressToken": token}
    assert code_of(ask(_server(revision), 1, "tools/call", params)) == INVALID_PARAMS


# Cancelling


@pytest.mark.parametrize("revision", REVISIONS)
@pytest.mark.parametrize("id", [0, "", 5, "5"])
def test_a_cancelled_request_is_dropped(revision: Revision, id: Any) -> None:
    engine = _server(revision)
    ask(engine, id, "tools/call", _call(revision))
    event = tell(engine, "notifications/cancelled", {"requestId": id, "reason": "why"})
    assert isinstance(event, Cancelled)
    assert (event.id, event.reason) == (id, "why")
    request = engine.inbound[id]
    assert isinstance(tell(engine, "notifications/cancelled", {"requestId": id}), Ignored)
    assert not engine.answered(id)
    assert request.state is Inbound.ANSWERED
    assert isinstance(tell(engine, "notifications/cancelled", {"requestId": id}), Ignored)


@pytest.mark.parametrize("params", [{"requestId": 9}, {"requestId": "1"}, {}, {"requestId": True}, {"requestId": None}])
def test_cancelling_what_is_not_under_way_is_nothing(params: Any) -> None:
    engine = agreed(LATEST_LEGACY)
    ask(engine, 1, "tools/call", CALL)
    assert isinstance(tell(engine, "notifications/cancelled", params), Ignored)
    assert engine.inbound[1].state is Inbound.UNDER_WAY


def test_initialize_cannot_be_cancelled() -> None:
    engine = server()
    params = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "c", "version": "1"}}
    assert isinstance(ask(engine, 0, "initialize", params), AnsweredByEngine)
    assert isinstance(tell(engine, "notifications/cancelled", {"requestId": 0}), Ignored)
    assert engine.legacy.agreed


def test_a_modern_server_ends_a_subscription_by_cancelling_it() -> None:
    engine = client()
    engine.modern.revision = V2026_07_28
    for id, name in ((1, "subscriptions/listen"), (2, "tools/call")):
        engine.sent(id, engine.method(name))
    event = tell(engine, "notifications/cancelled", {"requestId": 1, "reason": "moved"})
    assert isinstance(event, Replied)
    assert isinstance(event.error, ConnectionLost)
    assert isinstance(tell(engine, "notifications/cancelled", {"requestId": 2}), Ignored)
    assert list(engine.outbound) == [2]


# Replies


def _asking(*ids: Any) -> Connection:
    engine = ConnectionPair().open(LATEST_LEGACY).client
    for id in ids:
        engine.sent(id, engine.method("tools/call"))
    return engine


def test_a_reply_finds_its_request_once() -> None:
    engine = _asking(7)
    first = engine.receive(parse(encode_result(7, {"content": []})))
    assert isinstance(first, Replied)
    assert engine.outbound == {}
    assert isinstance(engine.receive(parse(encode_result(7, {"content": []}))), Ignored)


def test_a_reply_whose_id_is_text_is_taken() -> None:
    event = _asking(7).receive(parse(encode_result("7", {})))
    assert isinstance(event, Replied)
    assert event.id == 7


@pytest.mark.parametrize("id", ["8", "x", " 7", "0" * 5000, 8, -7])
def test_a_reply_to_nothing_is_ignored(id: Any) -> None:
    engine = _asking(7)
    assert isinstance(engine.receive(parse(encode_result(id, {}))), Ignored)
    assert isinstance(engine.receive(parse(encode_error(id, 1, "m", None))), Ignored)
    assert isinstance(engine.receive(parse(b'{"jsonrpc":"2.0","id":null,"error":{"code":1,"message":"m"}}')), Ignored)
    assert list(engine.outbound) == [7]


def test_a_late_reply_is_ignored() -> None:
    engine = _asking(7)
    assert engine.give_up(7)
    assert not engine.give_up(7)
    assert isinstance(engine.receive(parse(encode_result(7, {}))), Ignored)


@pytest.mark.parametrize(("code", "kind"), [(-32603, RemoteError), (1001, Overloaded), (12345, RemoteError)])
def test_an_error_is_raised_as_what_it_is(code: int, kind: type[RemoteError]) -> None:
    event = _asking(7).receive(parse(encode_error(7, code, "m", [1])))
    assert isinstance(event, Replied)
    assert isinstance(event.error, kind)
    assert (event.error.code, event.error.message, event.error.data) == (code, "m", [1])


@pytest.mark.parametrize("revision", REVISIONS)
@pytest.mark.parametrize("raw", [{}, {"content": "x"}, {"content": [{"type": "text"}]}, {"content": [], "isError": 1}])
def test_an_answer_that_is_none_is_an_invalid_reply(revision: Revision, raw: Any) -> None:
    engine = ConnectionPair().open(revision).client
    with pytest.raises(InvalidReply, match="tools/call"):
        engine.load_result(engine.method("tools/call"), raw)


def test_lost_requests_are_forgotten() -> None:
    engine = _asking(7, 8)
    engine.lose_all()
    assert engine.outbound == {}
    assert engine.legacy.handshake is Handshake.CLOSED
    engine.lose_all()
    assert isinstance(engine.receive(parse(encode_result(7, {}))), Ignored)
    with pytest.raises(LocalError, match="closed"):
        engine.may_call(engine.method("tools/call"))


def test_ids_of_ours_are_never_used_twice() -> None:
    engine = client()
    assert len({engine.new_id() for _ in range(1000)}) == 1000


# Progress


def test_progress_reaches_the_request_that_wants_it() -> None:
    engine = _asking(7)
    engine.sent(8, engine.method("tools/call"), wants_progress=True)
    event = tell(engine, "notifications/progress", {"progressToken": 8, "progress": 1, "total": 2})
    assert isinstance(event, Progressed)
    assert (event.id, event.params.progress, event.params.total) == (8, 1, 2)


@pytest.mark.parametrize("token", [7, 9, "8", True, None, 8.5])
def test_progress_nobody_wants_is_ignored(token: Any) -> None:
    engine = _asking(7)
    engine.sent(8, engine.method("tools/call"), wants_progress=True)
    assert isinstance(tell(engine, "notifications/progress", {"progressToken": token, "progress": 1}), Ignored)


def test_progress_after_the_answer_is_ignored() -> None:
    engine = _asking()
    engine.sent(8, engine.method("tools/call"), wants_progress=True)
    engine.receive(parse(encode_result(8, {"content": []})))
    assert isinstance(tell(engine, "notifications/progress", {"progressToken": 8, "progress": 1}), Ignored)


# Notifications


@pytest.mark.parametrize("revision", REVISIONS)
def test_a_notification_is_told(revision: Revision) -> None:
    engine = ConnectionPair().open(revision).client
    event = tell(engine, "notifications/resources/updated", {"uri": "file:///a"})
    assert isinstance(event, Notified)
    assert event.params.uri == "file:///a"
    assert event.admission.revision is revision


@pytest.mark.parametrize(
    ("method", "params"),
    [
        ("no/such", {}),
        ("tools/list", {}),
        ("notifications/resources/updated", {}),
        ("notifications/resources/updated", {"uri": 5}),
        ("notifications/roots/list_changed", {}),
        ("notifications/initialized", {}),
        ("notifications/progress", {"progressToken": 1}),
        ("notifications/cancelled", {"requestId": []}),
    ],
)
def test_a_notification_nobody_understands_is_ignored(method: str, params: Any) -> None:
    for engine in (_asking(1), client()):
        assert isinstance(tell(engine, method, params), Ignored)


# What is no message


@pytest.mark.parametrize(
    ("text", "code", "id"),
    [
        (b"{", PARSE_ERROR, None),
        (b'{"jsonrpc":"2.0","method":"tools/list","params":{"a":"\\ud800"},"id":7}', PARSE_ERROR, 7),
        (b'{"id":"x","params":{"id":1},"method":', PARSE_ERROR, "x"),
        (b'{"jsonrpc":"2.0","id":3}', INVALID_REQUEST, 3),
        (b'{"jsonrpc":"1.0","method":"ping","id":3}', INVALID_REQUEST, 3),
        (b'{"jsonrpc":"2.0","method":"tools/list","params":{"n":' + b"9" * 5000 + b'},"id":4}', None, 4),
        (b"[" * 900 + b"]" * 900, None, None),
        (b"[]", INVALID_REQUEST, None),
    ],
)
@pytest.mark.parametrize("revision", REVISIONS)
def test_a_server_answers_garbage_by_the_id_in_it(revision: Revision, text: bytes, code: Any, id: Any) -> None:
    event = _server(revision).receive(parse(text))
    reply = reply_of(event)
    assert code is None or reply["error"]["code"] == code
    if id is not None:
        assert reply["id"] == id
    elif revision is V2025_11_25:
        assert "id" not in reply
    else:  # null before; a server of the modern era does not know yet whom it talks to
        assert reply["id"] is None


_BROKEN_REQUESTS = [
    (b'{"jsonrpc":"2.0","id":1,"method":"ping","params":{"a":"\\ud800"}}', PARSE_ERROR),
    (b'{"jsonrpc":"2.0","method":"ping","params":{"a":"\xff"},"id":1}', PARSE_ERROR),
    (b'{"jsonrpc":"2.0","method":"ping","params":{"n":' + b"9" * 5000 + b'},"id":1}', INVALID_REQUEST),
    (b'{"jsonrpc":"2.0","id":1,"method":"ping","params":[]}', INVALID_PARAMS),
    (b'{"jsonrpc":"1.0","id":1,"method":"ping"}', INVALID_REQUEST),
]


@pytest.mark.parametrize("revision", REVISIONS)
@pytest.mark.parametrize(("text", "code"), _BROKEN_REQUESTS)
def test_a_client_answers_a_broken_request_by_its_id(revision: Revision, text: bytes, code: int) -> None:
    """And the call of its own that has the same id goes on. In the modern era servers send no requests."""
    engine = ConnectionPair().open(revision).client
    engine.sent(1, engine.method("tools/list"))
    event = engine.receive(parse(text))
    if revision.server_may_call:
        reply = reply_of(event)
        assert (reply["id"], reply["error"]["code"]) == (1, code)
    else:
        assert isinstance(event, Ignored)
    assert 1 in engine.outbound


@pytest.mark.parametrize("revision", REVISIONS)
@pytest.mark.parametrize(
    "text", [b"Listening on port 80", b"\xff\xfe", b"[]", b'{"jsonrpc":"2.0","id":5}', b'{"jsonrpc":"2.0","id":{}}']
)
def test_a_client_never_answers_garbage(revision: Revision, text: bytes) -> None:
    engine = ConnectionPair().open(revision).client
    assert isinstance(engine.receive(parse(text)), Ignored)


@pytest.mark.parametrize(
    "text",
    [
        b'{"jsonrpc":"2.0","id":7}',
        b'{"jsonrpc":"2.0","result":{"a":"\\ud800"},"id":7}',
        b'{"jsonrpc":"2.0","id":7,"result":5}',
        b'{"jsonrpc":"2.0","id":7,"result":{},"error":{"code":1,"message":"m"}}',
        b'{"jsonrpc":"2.0","id":7,"error":"no"}',
    ],
)
@pytest.mark.parametrize("side", ["client", "server"])
def test_a_broken_reply_fails_the_call_it_names(side: str, text: bytes) -> None:
    engine = _asking(7)
    if side == "server":
        engine = agreed(LATEST_LEGACY)
        engine.sent(7, engine.method("roots/list"))
    event = engine.receive(parse(text))
    if side == "server" and isinstance(event, Rejected):
        assert reply_of(event)["id"] == 7  # without result and error it may as well have been a request
        return
    assert isinstance(event, Replied)
    assert isinstance(event.error, InvalidReply)
    assert engine.outbound == {}


# Who may call whom


@pytest.mark.parametrize("revision", REVISIONS)
def test_a_server_calls_its_client_only_in_the_legacy_era(revision: Revision) -> None:
    pair = ConnectionPair().open(revision)
    params = {"message": "?", "requestedSchema": {"type": "object", "properties": {}}}
    event = ask(pair.client, 1, "elicitation/create", params)
    if revision.modern:
        assert isinstance(event, Rejected)
        assert event.reply is None  # a modern client writes no replies, not even refusals
    elif revision >= V2025_06_18:
        assert is_request(event)
    else:
        assert code_of(event) == METHOD_NOT_FOUND


@pytest.mark.parametrize("method", ["initialize", "tools/call", "server/discover"])
def test_a_client_is_asked_nothing_that_is_for_servers(method: str) -> None:
    engine = ConnectionPair().open(LATEST_LEGACY).client
    for meta in ({}, envelope()):
        assert code_of(ask(engine, 1, method, {**CALL, "_meta": meta})) == METHOD_NOT_FOUND


@pytest.mark.parametrize("revision", REVISIONS)
def test_a_method_of_the_other_direction_is_unknown_even_with_a_handler(revision: Revision) -> None:
    engine = _server(revision, served=("sampling/createMessage", "roots/list"))
    params = {"_meta": envelope()} if revision.modern else {}
    assert code_of(ask(engine, 1, "roots/list", params)) == METHOD_NOT_FOUND
    asked = ConnectionPair(client=client(served=("tools/list",))).open(LATEST_LEGACY).client
    assert code_of(ask(asked, 1, "tools/list", {})) == METHOD_NOT_FOUND


def test_a_server_asks_nothing_but_ping_before_its_client_is_initialized() -> None:
    engine = server()
    params = {"protocolVersion": LATEST_LEGACY.name, "capabilities": {}, "clientInfo": {"name": "c", "version": "1"}}
    assert isinstance(ask(engine, 0, "initialize", params), AnsweredByEngine)
    engine.may_call(engine.method("ping"))
    with pytest.raises(LocalError, match="before the connection is initialized"):
        engine.may_call(engine.method("roots/list"))
    tell(engine, "notifications/initialized")
    engine.may_call(engine.method("roots/list"))


def test_that_a_session_has_begun_is_said_with_its_principal() -> None:
    engine = server()
    params = {"protocolVersion": LATEST_LEGACY.name, "capabilities": {}, "clientInfo": {"name": "c", "version": "1"}}
    assert isinstance(ask(engine, 0, "initialize", params), AnsweredByEngine)
    event = engine.receive(parse(encode_notification("notifications/initialized", None)), Principal("ada"))
    assert isinstance(event, Notified)
    assert event.admission.principal == "ada"


@pytest.mark.parametrize("name", ["no/such", "notifications/tools/list_changed", "subscriptions/listen"])
def test_what_the_revision_lacks_is_not_sent(name: str) -> None:
    with pytest.raises(LocalError, match=LATEST_LEGACY.name):
        ConnectionPair().open(LATEST_LEGACY).client.method(name)


def test_nothing_is_sent_before_anything_is_agreed() -> None:
    with pytest.raises(LocalError, match="before"):
        client().method("tools/call")


# Encoding


@pytest.mark.parametrize("revision", REVISIONS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 2**64, "\ud800", object(), {1: 2}])
def test_what_json_cannot_carry_is_an_error_and_changes_nothing(revision: Revision, value: Any) -> None:
    pair = ConnectionPair().open(revision)
    event = pair.call()
    assert isinstance(event, RequestReceived)
    request = pair.server.inbound[event.id]
    result = CallToolResult(content=[], structured_content=value, meta={"x": value})
    with pytest.raises(LocalError):
        pair.server.encode_result(request, result)
    assert request.state is Inbound.UNDER_WAY
    with pytest.raises(LocalError):
        pair.client.encode_request(99, pair.client.method("tools/call"), CallToolParams("run", {"x": value}))
    reply = orjson.loads(pair.server.encode_error(request.id, ErrorReply(5, "m", value)))
    escaped = isinstance(value, str)  # of a text what can be sent
    assert (reply["id"], reply["error"]["code"]) == (request.id, 5 if escaped else INTERNAL_ERROR)
    assert isinstance(pair.answer(event.id), Replied)


def test_an_error_without_trouble_goes_out_as_it_is() -> None:
    assert orjson.loads(Connection.encode_error(3, ErrorReply(5, "m", [1])))["error"] == {
        "code": 5,
        "message": "m",
        "data": [1],
    }


def test_an_answer_is_given_once() -> None:
    engine = agreed(LATEST_LEGACY)
    ask(engine, 1, "tools/call", CALL)
    assert engine.answered(1)
    assert not engine.answered(1)
    assert not engine.answered("never asked")


# Arrays of 2025-03-26


def _array(*members: bytes) -> Any:
    return parse(b"[" + b",".join(members) + b"]")


_LIST = b'{"jsonrpc":"2.0","id":%d,"method":"tools/list"}'
_NOTE = b'{"jsonrpc":"2.0","method":"notifications/roots/list_changed"}'


def test_an_error_names_the_method_of_its_request() -> None:
    engine = agreed(V2025_03_26)
    engine.sent(40, engine.method("roots/list"))
    event = engine.receive(ErrorResponse(40, -32601, "what?"))
    assert isinstance(event, Replied)
    assert isinstance(event.error, RemoteError)
    assert event.error.method == "roots/list"
    assert str(event.error) == "what? (code -32601)"


def test_an_array_is_taken_member_by_member() -> None:
    engine = agreed(V2025_03_26)
    engine.legacy.reopens = True
    engine.sent(40, engine.method("roots/list"))
    event = engine.receive(
        _array(
            _LIST % 1,
            _NOTE,
            _LIST % 1,
            b'{"jsonrpc":"2.0","id":2}',
            b'{"jsonrpc":"2.0","id":"p","method":"ping"}',
            b'{"jsonrpc":"2.0","id":40,"result":{"roots":[]}}',
            b'{"jsonrpc":"2.0","id":5,"method":"initialize","params":{}}',
            b"7",
        )
    )
    assert isinstance(event, BatchReceived)
    kinds = [type(member) for member in event.events]
    assert kinds == [RequestReceived, Notified, Rejected, Rejected, AnsweredByEngine, Replied, Rejected, Rejected]
    assert code_of(event.events[6]) == INVALID_REQUEST
    assert list(engine.inbound) == [1]


@pytest.mark.parametrize("revision", [r for r in REVISIONS if not r.batching])
def test_other_revisions_have_no_arrays(revision: Revision) -> None:
    engine = _server(revision)
    event = engine.receive(_array(_LIST % 1, _NOTE))
    assert code_of(event) == INVALID_REQUEST
    assert ("id" in reply_of(event)) == (revision is not V2025_11_25)
    assert engine.inbound == {}
    assert isinstance(ConnectionPair().open(revision).client.receive(_array(_NOTE)), Ignored)


def test_no_array_opens_a_connection() -> None:
    engine = server()
    initialize = b'{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":"2025-03-26"}}'
    assert code_of(engine.receive(_array(initialize))) == INVALID_REQUEST
    assert engine.legacy.handshake is Handshake.NEW


def test_a_client_takes_arrays_of_answers() -> None:
    engine = ConnectionPair().open(V2025_03_26).client
    for id in (11, 12):
        engine.sent(id, engine.method("tools/call"))
    event = engine.receive(_array(encode_result(12, {"content": []}), encode_result(11, {"content": []})))
    assert isinstance(event, BatchReceived)
    assert [type(member) for member in event.events] == [Replied, Replied]
    assert engine.outbound == {}


@pytest.mark.parametrize("revision", [r for r in REVISIONS if not r.batching])
def test_an_answer_in_an_array_fails_its_call_where_there_are_no_arrays(revision: Revision) -> None:
    engine = ConnectionPair().open(revision).client
    for id in (11, 12, 13):
        engine.sent(id, engine.method("tools/call"))
    event = engine.receive(
        _array(encode_result(11, {"content": []}), _NOTE, encode_error(12, -1, "no"), encode_result(99, {}))
    )
    assert isinstance(event, BatchReceived)
    assert [member.id for member in event.events if isinstance(member, Replied)] == [11, 12]
    for member in event.events:
        assert isinstance(member, Replied)
        assert member.result is None
        with pytest.raises(InvalidReply, match=f"in an array, which {revision.name} does not have"):
            raise member.error or AssertionError
    assert list(engine.outbound) == [13]


# Nothing a peer sends makes it raise


_ODD: list[Any] = [None, True, 0, -1, 1.5, "", "x", [], [1], {}, {"a": {}}, {VERSION: 1, CAPABILITIES: 2}]


@pytest.mark.parametrize("side", ["client", "server", "legacy server", "modern server"])
@pytest.mark.parametrize("revision", [None, *REVISIONS])
def test_no_message_makes_an_engine_raise(side: str, revision: Revision | None) -> None:
    offered = {"legacy server": LEGACY, "modern server": (V2026_07_28,)}.get(side, REVISIONS)
    if revision is not None and revision not in offered:
        revision = offered[-1]
    engine = client() if side == "client" else server(revisions=offered)
    if revision is not None:
        if side == "client":
            engine = ConnectionPair().open(revision).client
        elif not revision.modern:
            engine = agreed(revision, revisions=offered)
    engine.sent(1, ConnectionPair().open(LATEST_LEGACY).client.method("tools/call"), wants_progress=True)
    names = ["tools/call", "initialize", "server/discover", "ping", "logging/setLevel", "elicitation/create", ""]
    names += ["notifications/cancelled", "notifications/progress", "notifications/initialized", "notifications/message"]
    keys = ["_meta", "name", "arguments", "requestId", "progressToken", "progress", "protocolVersion", "capabilities"]
    keys += ["clientInfo", "level", "requestState", "inputResponses"]
    for name in names:
        for key in keys:
            for value in _ODD:
                for members in ({key: value}, {**CALL, "_meta": envelope(), key: value}):
                    body = {"jsonrpc": "2.0", "method": name, "params": members}
                    engine.receive(parse(orjson.dumps(body)))
                    engine.receive(parse(orjson.dumps({**body, "id": 1})))
                    engine.answered(1)
    for meta_key in (VERSION, CAPABILITIES, INFO, LEVEL, "progressToken"):
        for value in _ODD:
            params = {**CALL, "_meta": envelope(**{meta_key: value})}
            engine.receive(parse(orjson.dumps({"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": params})))
            engine.answered(2)
    assert engine.inbound == {}
