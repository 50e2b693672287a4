"""What a peer says of itself is kept for long, so it has a bound, in every era and on both sides."""

from __future__ import annotations

from sys import getsizeof
from typing import Any

import orjson
import pytest

from tests.protocol.support import CAPABILITIES, INFO, ask, client, envelope, is_request, reply_of, server
from tests.yardsticks import assert_costs
from trimcp.errors import InvalidReply
from trimcp.protocol.profile import _WORST, Profile, memory_of
from trimcp.protocol.states import Handshake
from trimcp.wire.codes import INVALID_PARAMS
from trimcp.wire.revisions import LATEST_LEGACY

MOST = Profile.__attrs_attrs__.max_peer_info.default
LARGE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a name": ({"name": "x" * MOST, "version": "1"}, {}),
    "a name of wide letters": ({"name": "x" * 20_000 + "\N{ROCKET}", "version": "1"}, {}),
    "an icon": ({"name": "c", "version": "1", "icons": [{"src": "data:," + "x" * MOST}]}, {}),
    "empty arrays": ({"name": "c", "version": "1"}, {"experimental": {"a": {"b": [[] for _ in range(2_000)]}}}),
    "member names": ({"name": "c", "version": "1"}, {"experimental": {f"capability {n}": {} for n in range(1_000)}}),
    "what nobody knows": ({"name": "c", "version": "1"}, {"unheard-of": "x" * MOST}),
}


def _initialize(info: Any, capabilities: Any) -> dict[str, Any]:
    return {"protocolVersion": LATEST_LEGACY.name, "capabilities": capabilities, "clientInfo": info}


def _refused(event: Any) -> None:
    error = reply_of(event)["error"]
    assert error["code"] == INVALID_PARAMS
    assert str(MOST) in error["message"]
    assert error["data"] == {"reason": "size", "most": MOST}


@pytest.mark.parametrize("what", LARGE)
def test_a_client_that_says_too_much_of_itself_is_refused_and_may_say_less(what: str) -> None:
    engine = server()
    _refused(ask(engine, 1, "initialize", _initialize(*LARGE[what])))
    assert engine.legacy.handshake is Handshake.NEW
    assert engine.legacy.peer is None
    assert "result" in reply_of(ask(engine, 2, "initialize", _initialize({"name": "c", "version": "1"}, {})))
    assert 0 < engine.legacy.kept < 2_000


@pytest.mark.parametrize("what", LARGE)
def test_so_it_is_in_the_envelope_of_each_request(what: str) -> None:
    engine = server()
    info, capabilities = LARGE[what]
    said = envelope(**{INFO: info, CAPABILITIES: capabilities})
    _refused(ask(engine, 1, "tools/list", {"_meta": said}))
    assert is_request(ask(engine, 2, "tools/list", {"_meta": envelope()}))


def test_what_is_within_the_bound_is_kept_whole() -> None:
    engine = server()
    name = "x" * (MOST - 2_000)
    assert "result" in reply_of(ask(engine, 1, "initialize", _initialize({"name": name, "version": "1"}, {})))
    assert engine.legacy.peer is not None
    assert engine.legacy.peer.name == name
    assert MOST - 2_000 < engine.legacy.kept <= MOST


def _answer(**more: Any) -> dict[str, Any]:
    info = {"name": "s", "version": "1"}
    return {"protocolVersion": LATEST_LEGACY.name, "capabilities": {}, "serverInfo": info, **more}


@pytest.mark.parametrize(
    "more",
    [
        {"instructions": "x" * MOST},
        {"serverInfo": {"name": "s" * MOST, "version": "1"}},
        {"capabilities": {"experimental": {"a": {"b": [[] for _ in range(2_000)]}}}},
    ],
)
def test_a_client_takes_no_server_that_says_too_much_of_itself(more: Any) -> None:
    legacy = client().legacy
    legacy.offer(LATEST_LEGACY)
    with pytest.raises(InvalidReply, match=str(MOST)):
        legacy.accept(_answer(**more))
    assert legacy.peer is None


def test_memory_is_counted_and_not_text() -> None:
    assert 1_000 <= memory_of(20_000, "x" * 1_000) <= 1_100
    assert memory_of(20_000, "x" * 1_000 + "\N{ROCKET}") >= 4_000
    assert memory_of(20_000, {"a": [[]] * 200}) >= 200 * getsizeof([])
    assert memory_of(20_000, {"a" * 1_000: 1}) > 1_000
    assert client().profile.weigh_server({"a": "b" * 400}, None) == memory_of(MOST, {"a": "b" * 400}, None)


@pytest.mark.parametrize(
    "value",
    [[[] for _ in range(900)], [{} for _ in range(900)], {f"{n}": {} for n in range(900)}, [0.5] * 900, [[1]] * 900],
    ids=["arrays", "objects", "members", "numbers", "nested"],
)
def test_what_is_short_as_text_is_short_in_memory(value: Any) -> None:
    """Text alone is looked at where even the worst of its length would be within the bound."""
    parsed = orjson.loads(orjson.dumps(value))
    assert memory_of(1_000_000, parsed) * 8 >= memory_of(100_000, parsed)
    assert memory_of(10_000, parsed) <= _WORST * len(orjson.dumps(value))


def test_counting_ends_with_the_bound() -> None:
    value = ["x"] * 1_000_000
    assert memory_of(64 * 1024, value) > 64 * 1024
    assert_costs(lambda: memory_of(64 * 1024, value), at_most=5, times=lambda: orjson.dumps(value))
