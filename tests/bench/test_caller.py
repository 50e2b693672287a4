"""Which answers belong to which calls, and what is wrong with the others. No time passes but the time we say."""

from __future__ import annotations

import math
from typing import Any

import orjson
import pytest

from tests.bench.support import a_load, errors, progress, reply
from trimcp.bench.mux import LoadCaller, _answer_to
from trimcp.bench.supply import Load


def a_caller(places: int = 2, allowed: float = math.inf, think: float = 0.0, **options: Any) -> tuple[Load, LoadCaller]:
    load = a_load(**options)
    load.supply.allow(allowed)
    return load, LoadCaller(load.supply, places, think)


def begun(caller: LoadCaller, now: float) -> list[Any]:
    return [orjson.loads(text) for text in caller.ready(now)]


def test_free_places_are_filled_and_filled_again() -> None:
    load, caller = a_caller()
    first, second = begun(caller, 0.0)
    assert (first["id"], second["id"]) == (1, 2)
    assert first["params"]["arguments"] == {"text": "hello 1"}
    assert caller.ready(1.0) == []
    caller.take(reply(second), 2.0)
    (third,) = begun(caller, 2.0)
    assert third["params"]["arguments"] == {"text": "hello 3"}
    assert (load.tally.calls, load.tally.latency.most, load.supply.under_way) == (1, 0.0, 2)
    load.tally.end(3.0)
    assert load.tally.latency.most == 2.0


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (b"garbage", "not JSON"),
        (b'{"jsonrpc":"2.0","id":1,"result"', "not JSON"),
        (b'"text"', "no JSON-RPC"),
        (b"[5]", "no JSON-RPC"),
        (b'{"jsonrpc":"2.0","id":3,"result":{}}', "answer to no call"),
        (b'{"jsonrpc":"2.0","id":-1,"result":{}}', "answer to no call"),
        (b'{"jsonrpc":"2.0","id":"1","result":{}}', "answer to no call"),
        (b'{"jsonrpc":"2.0","id":true,"result":{}}', "answer to no call"),
        (b'{"jsonrpc":"2.0","id":1.0,"result":{}}', "answer to no call"),
        (b'{"jsonrpc":"2.0","id":[1],"result":{}}', "answer to no call"),
        (b'{"jsonrpc":"2.0","id":null,"error":{"code":-32700,"message":"?"}}', "error without an id"),
        (b'{"jsonrpc":"2.0","error":{"code":-32700,"message":"?"}}', "error without an id"),
        (b'{"jsonrpc":"2.0","method":"notifications/progress"}', "progress of no call"),
        (b'{"jsonrpc":"2.0","method":"notifications/progress","params":{"progressToken":[1]}}', "progress of no call"),
        (b'{"jsonrpc":"2.0","method":"notifications/progress","params":{"progressToken":9}}', "progress of no call"),
    ],
)
def test_what_answers_no_call_is_an_error_and_answers_none(text: bytes, kind: str) -> None:
    load, caller = a_caller()
    caller.ready(0.0)
    caller.greeting = {}  # the handshake is over
    caller.take(text, 1.0)
    assert errors(load) == {kind: 1}
    assert (load.tally.calls, load.supply.under_way) == (0, 2)


def test_a_wrong_answer_frees_its_place_and_is_not_counted_as_done() -> None:
    load, caller = a_caller(places=1)
    (call,) = begun(caller, 0.0)
    caller.take(reply(call, "hello 2"), 1.0)
    assert errors(load) == {"wrong text": 1}
    assert load.tally.calls == 0
    assert len(caller.ready(1.0)) == 1


def test_the_second__answer_to_a_call_is_an_error() -> None:
    load, caller = a_caller()
    call, _ = begun(caller, 0.0)
    caller.greeting = {}
    caller.take(reply(call), 1.0)
    caller.take(reply(call), 1.1)
    caller.take(orjson.dumps({"jsonrpc": "2.0", "id": 0, "result": {}}), 1.2)
    assert errors(load) == {"answered twice": 2}
    assert load.tally.calls == 1


def test_a_batch_is_as_many_answers() -> None:
    load, caller = a_caller()
    one, two = begun(caller, 0.0)
    caller.take(b"[" + reply(two) + b"," + reply(one, "no") + b"]", 1.0)
    assert (load.tally.calls, errors(load)) == (1, {"wrong text": 1})


def test_progress_counts_while_its_call_is_under_way() -> None:
    load, caller = a_caller(progress=True)
    call, _ = begun(caller, 0.0)
    caller.take(progress(call), 0.1)
    caller.take(progress(call, 2), 0.2)
    caller.take(reply(call), 0.3)
    assert (load.tally.progress, errors(load)) == (2, {})
    caller.take(progress(call), 0.4)
    assert (load.tally.progress, errors(load)) == (2, {"progress of no call": 1})


def test_progress_is_timed_to_the_first_and_from_one_to_the_next() -> None:
    load, caller = a_caller(progress=True)
    call, _ = begun(caller, 0.0)
    for at, value in ((0.25, 1), (0.5, 2), (1.5, 2.5)):
        caller.take(progress(call, value), at)
    caller.take(reply(call), 2.0)
    found = {label: (times.count, times.least, times.most) for label, times in load.tally.requests.items()}
    assert found["echo: first progress"] == (1, 0.25, 0.25)
    assert found["echo: progress gap"] == (2, 0.25, 1.0)
    load.tally.end(3.0)
    assert load.tally.latency.count == load.tally.requests["echo"].count == 1
    assert errors(load) == {}


@pytest.mark.parametrize("values", [(2, 1), (1, 1), (None,), (1, "2"), (True,)])
def test_progress_that_does_not_rise_is_an_error(values: tuple[Any, ...]) -> None:
    load, caller = a_caller(progress=True)
    call, _ = begun(caller, 0.0)
    for value in values:
        caller.take(progress(call, value), 0.1)
    assert errors(load) == {"progress does not rise": 1}


# Giving up


def test_a_timeout_is_told_to_the_server_and_frees_the_place() -> None:
    load, caller = a_caller(places=1, timeout=2.0)
    (call,) = begun(caller, 0.0)
    assert caller.due() == 2.0
    assert caller.ready(1.9) == []
    cancellation, following = begun(caller, 2.0)
    assert cancellation["method"] == "notifications/cancelled"
    assert cancellation["params"] == {"requestId": call["id"]}
    assert following["id"] == 2
    assert (load.tally.timed_out, load.tally.cancelled, errors(load)) == (1, 0, {})


def test_an_answer_that_crosses_its_cancellation_is_no_error_once() -> None:
    load, caller = a_caller(places=1, cancel=1.0, cancel_after=1.0, progress=True)
    (call,) = begun(caller, 0.0)
    caller.ready(1.0)
    caller.take(progress(call), 1.1)
    caller.take(reply(call), 1.1)
    assert (load.tally.cancelled, load.tally.calls, errors(load)) == (1, 0, {})
    caller.greeting = {}
    caller.take(reply(call), 1.2)
    assert errors(load) == {"answered twice": 1}


def test_an_answer_in_time_is_not_given_up() -> None:
    load, caller = a_caller(places=1, timeout=2.0, allowed=1)
    (call,) = begun(caller, 0.0)
    caller.take(reply(call), 1.0)
    assert caller.ready(5.0) == []
    assert (load.tally.calls, load.tally.timed_out) == (1, 0)
    assert caller.due() == math.inf


def test_of_millions_given_up_only_the_latest_are_remembered() -> None:
    load, caller = a_caller(places=1, timeout=1.0)
    for second in range(70_000):
        caller.ready(float(second))
    caller.greeting = {}
    caller.take(orjson.dumps({"jsonrpc": "2.0", "id": 60_000, "result": {}}), 1e6)
    assert errors(load) == {}
    caller.take(orjson.dumps({"jsonrpc": "2.0", "id": 100, "result": {}}), 1e6)
    assert errors(load) == {"answered twice": 1}


def test_thinking_leaves_a_place_empty() -> None:
    _, caller = a_caller(places=1, think=3.0)
    (call,) = begun(caller, 0.0)
    caller.take(reply(call), 1.0)
    assert caller.ready(1.0) == []
    assert caller.due() == 4.0
    assert caller.ready(3.9) == []
    assert len(caller.ready(4.0)) == 1


# What the server asks


@pytest.mark.parametrize(
    ("message", "answer"),
    [
        ({"id": 7, "method": "ping"}, {"id": 7, "result": {}}),
        ({"id": "a", "method": "ping"}, {"id": "a", "result": {}}),
        ({"id": 7, "method": "roots/list"}, {"id": 7, "error": -32601}),
        ({"method": "notifications/message"}, None),
        ({"id": None, "method": "ping"}, None),
        ({"id": True, "method": "ping"}, None),
    ],
)
def test_pings_are_answered_and_questions_refused(message: dict[str, Any], answer: dict[str, Any] | None) -> None:
    found = _answer_to({"jsonrpc": "2.0", **message})
    if found is None or answer is None:
        assert found is answer
        return
    said = orjson.loads(found)
    if "error" in said:
        said["error"] = said["error"]["code"]
    assert said == {"jsonrpc": "2.0", **answer}


def test_answers_leave_with_the_next_calls() -> None:
    _, caller = a_caller(places=1)
    caller.take(b'{"jsonrpc":"2.0","id":5,"method":"ping"}', 0.0)
    assert [message.get("method") for message in begun(caller, 0.0)] == [None, "tools/call"]


# The connection


def test_a_lost_connection_fails_every_call() -> None:
    load, caller = a_caller(places=3, timeout=5.0, think=1.0)
    call, *_ = begun(caller, 0.0)
    caller.take(reply(call), 0.5)
    caller.lose("connection lost", "it died", 1.0)
    assert errors(load) == {"connection lost": 2}
    assert (load.supply.under_way, caller.idle) == (0, True)


def test_a_message_that_was_not_sent_fails_its_call_only() -> None:
    load, caller = a_caller()
    woken: list[int] = []
    caller.wake = lambda: woken.append(1)
    caller.ready(0.0)
    caller.fail(2, "HTTP 500", "oops", 1.0)
    assert (errors(load), load.supply.under_way, woken) == ({"HTTP 500": 1}, 1, [1])
    caller.fail(None, "HTTP 500", "a notification", 1.0)
    assert (errors(load), load.supply.under_way) == ({"HTTP 500": 2}, 1)


@pytest.mark.parametrize(
    ("members", "greeting"),
    [({"result": {"a": 1}}, {"a": 1}), ({"error": {"code": -1}}, "{'code': -1}"), ({}, "None")],
)
def test_the__answer_to_the_handshake_is_kept(members: dict[str, Any], greeting: object) -> None:
    load, caller = a_caller()
    caller.take(orjson.dumps({"jsonrpc": "2.0", "id": 0, **members}), 0.0)
    assert caller.greeting == greeting
    assert errors(load) == {}
