"""The envelope of the modern era: what every request carries, and what a server makes of it."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from tests.protocol.support import (
    CAPABILITIES,
    INFO,
    LEGACY,
    LEVEL,
    SERVER_INFO,
    VERSION,
    ConnectionPair,
    ask,
    client,
    code_of,
    envelope,
    is_request,
    reply_of,
    server,
)
from trimcp.errors import InvalidReply
from trimcp.protocol.connection import Encoded
from trimcp.protocol.events import AnsweredByEngine, RequestReceived
from trimcp.wire.capabilities import ClientCapabilities
from trimcp.wire.codes import INVALID_PARAMS, INVALID_REQUEST, METHOD_NOT_FOUND, UNSUPPORTED_VERSION
from trimcp.wire.common import Icon
from trimcp.wire.input_requests import InputRequiredResult
from trimcp.wire.revisions import REVISIONS, V2026_07_28
from trimcp.wire.tools import CallToolParams, CallToolResult, ListToolsResult

CALL = {"name": "run", "arguments": {}}


def _ask(meta: Any, method: str = "tools/call", engine: Any = None, **params: Any) -> Any:
    return ask(engine or server(), 1, method, {**CALL, **params, "_meta": meta})


def _without(key: str) -> dict[str, Any]:
    meta = envelope()
    del meta[key]
    return meta


# The ladder


@pytest.mark.parametrize("missing", [VERSION, CAPABILITIES])
def test_a_missing_field_is_named(missing: str) -> None:
    event = _ask(_without(missing))
    assert code_of(event) == INVALID_PARAMS
    assert reply_of(event)["error"]["data"]["missing"] == [missing]


def test_discover_needs_its_envelope_too() -> None:
    attempts: list[Any] = [None, {}, {"_meta": {}}]
    for params in attempts:
        event = ask(server(), 1, "server/discover", params)
        assert code_of(event) == INVALID_PARAMS
        assert reply_of(event)["error"]["data"]["missing"] == [VERSION, CAPABILITIES]


def test_a_server_of_the_modern_era_alone_asks_for_the_envelope() -> None:
    engine = server(revisions=(V2026_07_28,))
    event = ask(engine, 1, "tools/call", CALL)
    assert code_of(event) == INVALID_PARAMS
    assert reply_of(event)["error"]["data"]["missing"] == [VERSION, CAPABILITIES]
    # One that knows both eras cannot tell what was meant.
    assert code_of(ask(server(), 1, "tools/call", CALL)) == INVALID_REQUEST


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (VERSION, 5),
        (VERSION, None),
        (CAPABILITIES, None),
        (CAPABILITIES, []),
        (CAPABILITIES, {"elicitation": 5}),
        (INFO, "me"),
        (INFO, {"name": "me"}),
        (LEVEL, "loud"),
        (LEVEL, 3),
        (LEVEL, ["info"]),
        ("progressToken", 1.5),
        ("progressToken", True),
    ],
)
def test_a_wrong_field_is_refused_by_name(key: str, value: Any) -> None:
    event = _ask(envelope(**{key: value}))
    assert code_of(event) == INVALID_PARAMS
    assert key in reply_of(event)["error"]["message"]


@pytest.mark.parametrize("version", ["2099-01-01", "2025-11-25", "", "x" * 10_000])
def test_a_version_not_served_is_answered_with_those_that_are(version: str) -> None:
    event = _ask(envelope(**{VERSION: version}))
    assert code_of(event) == UNSUPPORTED_VERSION
    assert reply_of(event)["error"]["data"] == {"supported": [V2026_07_28.name], "requested": version[:64]}


def test_the_ladder_has_its_order() -> None:
    engine = server()
    steps = [
        (_without(CAPABILITIES) | {VERSION: "2099-01-01"}, "no/such", {"name": 5}, INVALID_PARAMS),
        (envelope(**{VERSION: "2099-01-01"}), "no/such", {"name": 5}, UNSUPPORTED_VERSION),
        (envelope(), "no/such", {"name": 5}, METHOD_NOT_FOUND),
        (envelope(), "tools/call", {"name": 5}, INVALID_PARAMS),
    ]
    for meta, method, params, code in steps:
        assert code_of(_ask(meta, method, engine, **params)) == code
    assert is_request(_ask(envelope(), "tools/call", engine))
    assert code_of(_ask(_without(CAPABILITIES), "no/such", engine)) == INVALID_REQUEST  # the id comes first


# Who asks


def test_every_request_says_who_asks_anew() -> None:
    engine = server()
    declared: list[dict[str, Any]] = [{"elicitation": {}}, {}, {"elicitation": {}}]
    for n, elicitation in enumerate(declared):
        info = {"name": f"me{n}", "version": "1"}
        meta = envelope(**{CAPABILITIES: elicitation, INFO: info, LEVEL: "error", "progressToken": n})
        event = ask(engine, n, "tools/call", {**CALL, "_meta": meta}, principal=f"ada{n}")
        assert isinstance(event, RequestReceived)
        admission = event.admission
        assert isinstance(admission.capabilities, ClientCapabilities)
        assert bool(admission.capabilities.elicitation) == bool(elicitation)
        assert admission.peer is not None
        assert (admission.peer.name, admission.log_level, admission.progress_token) == (f"me{n}", "error", n)
        assert (admission.principal, admission.meta) == (f"ada{n}", meta)
        assert engine.log_level(admission) == "error"
    event = _ask(envelope(), engine=engine, name="x")
    assert code_of(event) == INVALID_REQUEST
    other = ask(engine, 9, "tools/call", {**CALL, "_meta": envelope()})
    assert isinstance(other, RequestReceived)
    assert (other.admission.peer, other.admission.log_level, other.admission.principal) == (None, None, None)


def test_both_eras_live_on_one_connection() -> None:
    pair = ConnectionPair().open(REVISIONS[0])
    legacy = ask(pair.server, 5, "tools/call", CALL)
    modern = ask(pair.server, 6, "tools/call", {**CALL, "_meta": envelope()})
    assert isinstance(legacy, RequestReceived)
    assert isinstance(modern, RequestReceived)
    assert (legacy.admission.revision, modern.admission.revision) == (REVISIONS[0], V2026_07_28)
    answers = [
        orjson.loads(pair.server.encode_result(pair.server.inbound[id], CallToolResult(content=[]))) for id in (5, 6)
    ]
    assert ["resultType" in answer["result"] for answer in answers] == [False, True]


# What is answered


def test_discover_names_only_what_a_request_may_carry() -> None:
    event = ask(server(), 1, "server/discover", {"_meta": envelope()})
    assert isinstance(event, AnsweredByEngine)
    result = reply_of(event)["result"]
    assert result["supportedVersions"] == [V2026_07_28.name]
    assert result["instructions"] == "Be brief."
    assert result["_meta"][SERVER_INFO]["name"] == "server"
    assert result["cacheScope"] == "public"


def test_a_server_with_icons_can_say_who_it_is() -> None:
    engine = server(icons=[Icon(src="https://example.org/i.png")], title="Icons")
    for id in (1, 2):
        info = reply_of(ask(engine, id, "server/discover", {"_meta": envelope()}))["result"]["_meta"][SERVER_INFO]
        assert (info["title"], info["icons"][0]["src"]) == ("Icons", "https://example.org/i.png")


def test_an_answer_names_the_server_beside_its_own_meta() -> None:
    engine = server()
    assert is_request(_ask(envelope(), engine=engine))
    result = CallToolResult(content=[], meta={"mine": 1})
    raw = orjson.loads(engine.encode_result(engine.inbound[1], result))["result"]
    assert raw["resultType"] == "complete"
    assert raw["_meta"] == {"mine": 1, SERVER_INFO: {"name": "server", "version": "1"}}


def test_an_encoded_result_is_sent_to_the_byte() -> None:
    engine = server()
    assert is_request(_ask(envelope(), "tools/list", engine))
    request = engine.inbound[1]
    data = orjson.dumps(engine.dump_result(request, ListToolsResult(tools=[], ttl_ms=0, cache_scope="private")))
    assert engine.encode_result(request, Encoded(data)) == b'{"jsonrpc":"2.0","id":1,"result":' + data + b"}"


# As a client


def test_a_client_stamps_every_request() -> None:
    engine = client()
    engine.modern.revision = V2026_07_28
    method = engine.method("tools/call")
    for n in range(2):
        data = engine.encode_request(n, method, CallToolParams("run", {}), wants_progress=n == 1, meta={"mine": n})
        meta = orjson.loads(data)["params"]["_meta"]
        assert meta[VERSION] == V2026_07_28.name
        assert meta[INFO] == {"name": "client", "version": "1"}
        assert meta[CAPABILITIES] == {"elicitation": {}}
        assert meta["mine"] == n
        assert meta.get("progressToken") == (1 if n == 1 else None)
    engine.profile.capabilities = ClientCapabilities()
    changed = orjson.loads(engine.encode_request(3, method, CallToolParams("run", {})))
    assert changed["params"]["_meta"][CAPABILITIES] == {}


@pytest.mark.parametrize("kind", ["complete", None])
def test_a_missing_result_type_means_complete(kind: str | None) -> None:
    engine = ConnectionPair().open(V2026_07_28).client
    raw: dict[str, Any] = {"content": []} if kind is None else {"content": [], "resultType": kind}
    assert engine.load_result(engine.method("tools/call"), raw).content == []


def test_questions_are_an_answer_where_they_may_be() -> None:
    engine = ConnectionPair().open(V2026_07_28).client
    raw = {"resultType": "input_required", "requestState": "s", "inputRequests": {}}
    assert isinstance(engine.load_result(engine.method("tools/call"), dict(raw)), InputRequiredResult)
    listed = {"tools": [], "ttlMs": 0, "cacheScope": "private", **raw}
    for name, bad in (
        ("tools/list", listed),
        ("tools/call", {"resultType": "later", "content": []}),
        ("tools/call", {"resultType": 5, "content": []}),
    ):
        with pytest.raises(InvalidReply, match="result type"):
            engine.load_result(engine.method(name), bad)


@pytest.mark.parametrize("offered", [LEGACY, (V2026_07_28,), REVISIONS])
def test_what_is_offered_is_sorted_by_era(offered: Any) -> None:
    engine = client(revisions=offered)
    assert engine.profile.modern + engine.profile.legacy == tuple(sorted(offered, key=lambda r: not r.modern))
