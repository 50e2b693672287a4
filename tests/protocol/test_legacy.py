"""The handshake of the legacy era, from both sides."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.protocol.support import LEGACY, ConnectionPair, agreed, ask, client, code_of, reply_of, server, tell
from trimcp.errors import InvalidReply, LocalError
from trimcp.protocol.events import AnsweredByEngine, Ignored, Notified, Rejected, Replied
from trimcp.protocol.states import Handshake
from trimcp.wire.capabilities import ServerCapabilities
from trimcp.wire.codes import INVALID_PARAMS, INVALID_REQUEST, METHOD_NOT_FOUND
from trimcp.wire.revisions import (
    LATEST_LEGACY,
    V2024_11_05,
    V2025_03_26,
    V2025_06_18,
    V2025_11_25,
    V2026_07_28,
    Revision,
)

ME = {"name": "Cline", "version": "3.12.3"}


def _params(version: Any, **more: Any) -> dict[str, Any]:
    return {"protocolVersion": version, "capabilities": {}, "clientInfo": ME, **more}


@pytest.mark.parametrize("revision", LEGACY)
def test_both_sides_agree(revision: Revision) -> None:
    pair = ConnectionPair()
    pair.initialize(revision)
    for engine, name in ((pair.client, "server"), (pair.server, "client")):
        assert engine.revision is revision
        assert engine.legacy.handshake is Handshake.READY
        assert engine.legacy.peer is not None
        assert engine.legacy.peer.name == name
        assert engine.outbound == {}
    assert pair.client.legacy.instructions == "Be brief."


@pytest.mark.parametrize(
    ("asked", "offered", "answered"),
    [
        ("2024-11-05", LEGACY, V2024_11_05),
        ("2025-06-18", LEGACY, V2025_06_18),
        ("2024-11-05", (V2025_03_26, V2025_06_18), V2025_06_18),
        ("2025-11-25", (V2024_11_05, V2025_03_26), V2025_03_26),
        ("1999-01-01", LEGACY, LATEST_LEGACY),
        ("2099-01-01", LEGACY, LATEST_LEGACY),
        ("2026-07-28", (*LEGACY, V2026_07_28), LATEST_LEGACY),
        ("not a date", LEGACY, LATEST_LEGACY),
    ],
)
def test_a_server_agrees_if_it_can_and_else_offers_its_newest(asked: str, offered: Any, answered: Revision) -> None:
    engine = server(revisions=offered)
    event = ask(engine, 0, "initialize", _params(asked))
    assert isinstance(event, AnsweredByEngine)
    assert reply_of(event)["result"]["protocolVersion"] == answered.name
    assert engine.revision is answered
    assert engine.legacy.handshake is Handshake.AGREED


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"protocolVersion": 5, "capabilities": {}, "clientInfo": ME},
        {"protocolVersion": "2025-06-18", "capabilities": [], "clientInfo": ME},
        {"protocolVersion": "2025-06-18", "capabilities": {}},
        {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "x"}},
    ],
)
def test_a_refused_initialize_leaves_the_door_open(params: Any) -> None:
    engine = server()
    event = ask(engine, 0, "initialize", params)
    assert code_of(event) == INVALID_PARAMS
    assert engine.legacy.handshake is Handshake.NEW
    assert isinstance(ask(engine, 1, "initialize", _params("2025-06-18")), AnsweredByEngine)


def test_a_second_initialize_is_refused_and_changes_nothing() -> None:
    engine = server()
    ask(engine, 0, "initialize", _params("2025-06-18"))
    for _ in range(2):
        assert code_of(ask(engine, 1, "initialize", _params("2024-11-05"))) == INVALID_REQUEST
        tell(engine, "notifications/initialized")
    assert engine.revision is V2025_06_18
    assert engine.legacy.handshake is Handshake.READY


@pytest.mark.parametrize("confirmed", [False, True])
def test_on_a_pipe_a_second_initialize_begins_anew(confirmed: bool) -> None:
    """Bridges let clients share one server's pipe, one after the other or at once."""
    engine = server()
    engine.legacy.reopens = True
    ask(engine, 0, "initialize", _params("2025-06-18"))
    if confirmed:
        tell(engine, "notifications/initialized")
    ask(engine, 1, "tools/list")
    engine.legacy.log_level = "error"
    again = reply_of(ask(engine, 0, "initialize", {**_params("2024-11-05"), "clientInfo": {**ME, "name": "next"}}))
    assert again["result"]["protocolVersion"] == "2024-11-05"
    assert list(engine.inbound) == [1]  # the other client's goes on
    assert engine.revision is V2024_11_05
    assert engine.legacy.peer is not None
    assert engine.legacy.peer.name == "next"
    assert engine.legacy.log_level == "info"
    ask(engine, 2, "tools/list")
    assert engine.inbound[2].admission.revision is V2024_11_05
    assert isinstance(tell(engine, "notifications/initialized"), Notified)
    assert engine.legacy.handshake is Handshake.READY


def test_on_a_pipe_a_second_initialize_that_is_wrong_changes_nothing() -> None:
    engine = server()
    engine.legacy.reopens = True
    ask(engine, 0, "initialize", _params("2025-06-18"))
    tell(engine, "notifications/initialized")
    assert code_of(ask(engine, 1, "initialize", {"protocolVersion": "2024-11-05"})) == INVALID_PARAMS
    assert engine.revision is V2025_06_18
    assert engine.legacy.handshake is Handshake.READY
    engine.legacy.close()
    assert code_of(ask(engine, 2, "initialize", _params("2024-11-05"))) == INVALID_REQUEST


def test_requests_before_initialize_are_refused_but_for_ping() -> None:
    engine = server()
    assert code_of(ask(engine, 1, "tools/list")) == INVALID_REQUEST
    assert reply_of(ask(engine, 2, "ping"))["result"] == {}
    assert isinstance(tell(engine, "notifications/initialized"), Ignored)
    assert engine.legacy.handshake is Handshake.NEW


def test_a_client_that_is_early_is_served() -> None:
    engine = server()
    ask(engine, 0, "initialize", _params("2025-06-18"))
    assert engine.inbound == {}
    ask(engine, 1, "tools/list")
    assert list(engine.inbound) == [1]


def test_initialized_is_told_once() -> None:
    engine = server()
    ask(engine, 0, "initialize", _params("2025-06-18"))
    assert isinstance(tell(engine, "notifications/initialized"), Notified)
    assert isinstance(tell(engine, "notifications/initialized"), Ignored)


def test_a_modern_server_takes_no_initialize() -> None:
    engine = server(revisions=(V2026_07_28,))
    event = ask(engine, 0, "initialize", _params("2025-06-18"))
    assert code_of(event) in (INVALID_PARAMS, METHOD_NOT_FOUND)
    assert isinstance(event, Rejected)
    assert event.reply is not None
    error = json.loads(event.reply)["error"]
    assert "2026-07-28" in error["message"]  # the one thing that a legacy client can show
    assert error["data"]["supported"] == ["2026-07-28"]


def test_a_server_that_lives_in_the_past_looks_like_one() -> None:
    engine = server(revisions=LEGACY)
    meta = {
        "io.modelcontextprotocol/protocolVersion": V2026_07_28.name,
        "io.modelcontextprotocol/clientCapabilities": {},
    }
    assert code_of(ask(engine, 1, "server/discover", {"_meta": meta})) == INVALID_REQUEST
    assert isinstance(ask(engine, 1, "initialize", _params("2025-06-18")), AnsweredByEngine)
    tell(engine, "notifications/initialized")
    assert code_of(ask(engine, 1, "server/discover", {"_meta": meta})) == METHOD_NOT_FOUND


# As a client


def _offered() -> Any:
    engine = client()
    engine.legacy.offer(LATEST_LEGACY)
    return engine


@pytest.mark.parametrize(
    "raw",
    [
        {},
        {"protocolVersion": "2099-01-01", "capabilities": {}, "serverInfo": ME},
        {"protocolVersion": 5, "capabilities": {}, "serverInfo": ME},
        {"protocolVersion": "2026-07-28", "capabilities": {}, "serverInfo": ME},
        {"protocolVersion": "2025-06-18", "capabilities": {}},
        {"protocolVersion": "2025-06-18", "capabilities": 5, "serverInfo": ME},
    ],
)
def test_a_client_accepts_no_nonsense(raw: Any) -> None:
    engine = _offered()
    with pytest.raises(InvalidReply):
        engine.legacy.accept(raw)
    assert engine.revision is None
    with pytest.raises(LocalError):
        engine.method("tools/list")


def test_a_client_accepts_an_older_revision() -> None:
    engine = _offered()
    engine.legacy.accept({"protocolVersion": "2024-11-05", "capabilities": {}, "serverInfo": ME})
    assert engine.revision is V2024_11_05


def test_a_refused_client_may_offer_again() -> None:
    engine = _offered()
    with pytest.raises(LocalError):
        engine.legacy.offer(V2024_11_05)
    engine.legacy.refused()
    engine.legacy.offer(V2024_11_05)
    assert engine.legacy.handshake is Handshake.OFFERED


def test_only_ping_goes_out_before_the_handshake_is_done() -> None:
    engine = _offered()
    engine.legacy.may_call("ping")
    with pytest.raises(LocalError, match="initialized"):
        engine.legacy.may_call("tools/list")


def test_a_server_may_ping_its_client_at_any_time() -> None:
    for engine in (client(), _offered(), ConnectionPair().open(V2025_11_25).client):
        event = ask(engine, "p", "ping")
        assert isinstance(event, AnsweredByEngine)
        assert reply_of(event) == {"jsonrpc": "2.0", "id": "p", "result": {}}


# The level of log messages


def test_the_log_level_is_kept_for_the_connection() -> None:
    engine = agreed(LATEST_LEGACY)
    admission: Any = engine.legacy.admit(None, None)
    assert engine.log_level(admission) == "info"
    assert reply_of(ask(engine, 1, "logging/setLevel", {"level": "error"}))["result"] == {}
    assert engine.log_level(admission) == "error"
    assert code_of(ask(engine, 1, "logging/setLevel", {"level": "loud"})) == INVALID_PARAMS
    assert engine.log_level(admission) == "error"
    assert engine.inbound == {}


def test_capabilities_are_remembered_for_every_request() -> None:
    pair = ConnectionPair().open(LATEST_LEGACY)
    event: Any = pair.call()
    assert event.admission.capabilities.elicitation is not None
    assert isinstance(pair.client.legacy.capabilities, ServerCapabilities)
    assert isinstance(pair.answer(event.id), Replied)
