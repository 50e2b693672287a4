from __future__ import annotations

from typing import Any

import pytest
import trio.testing

from tests.transports.http.face import BOTH, LEGACY, visiting
from tests.transports.http.test_exchange import make_server
from trimcp.server.offering import Notice
from trimcp.server.server import Server
from trimcp.transports.http.endpoint.routing import PostPlan, Routing
from trimcp.transports.http.interfaces import Head
from trimcp.transports.http.settings import HttpSettings
from trimcp.wire.codes import HEADER_MISMATCH, INVALID_PARAMS, INVALID_REQUEST, UNSUPPORTED_VERSION
from trimcp.wire.common import META_CLIENT_CAPABILITIES, META_PROTOCOL_VERSION
from trimcp.wire.jsonrpc import Batch, Message, Notification, Request
from trimcp.wire.revisions import LATEST, REVISIONS, V2025_03_26, V2025_06_18


@pytest.mark.parametrize(
    "headers",
    [
        {"mcp-protocol-version": None},
        {"mcp-protocol-version": V2025_06_18.name},
        {"mcp-method": None},
        {"mcp-method": "TOOLS/CALL"},
        {"mcp-method": "tools/list"},
        {"mcp-name": None},
        {"mcp-name": "Echo"},
        {"mcp-name": "=?base64?!!?="},
    ],
    ids=str,
)
async def test_headers_have_to_say_what_the_body_says(headers: dict[str, Any], autojump_clock: Any) -> None:
    async with visiting(make_server()) as visitor:
        answer = await visitor.call("echo", headers, text="hi")
        assert (answer.status, answer.json["id"], answer.json["error"]["code"]) == (400, 1, HEADER_MISMATCH)


async def test_a_subscription_needs_a_stream(autojump_clock: Any) -> None:
    wanted = {"notifications": {"toolsListChanged": True}}
    async with visiting(make_server(), settings=HttpSettings(reply="json")) as visitor:
        refused = await visitor.post(visitor.request("subscriptions/listen", wanted), {"accept": "application/json"})
        assert (refused.status, refused.json["id"], refused.json["error"]["code"]) == (406, 1, INVALID_REQUEST)
        taken = await visitor.post(visitor.request("subscriptions/listen", wanted))
        await taken.begun()
        assert taken.headers["content-type"] == "text/event-stream"
        assert taken.messages[0]["method"] == "notifications/subscriptions/acknowledged"
        taken.leave()


@pytest.mark.parametrize("stateless", [False, True])
async def test_an_array_where_there_are_none_has_a_status(stateless: bool, autojump_clock: Any) -> None:
    async with visiting(make_server(), LEGACY, HttpSettings(stateless=stateless)) as visitor:
        if not stateless:
            await visitor.initialize()
        answer = await visitor.post([visitor.request("ping")], {"mcp-protocol-version": LEGACY.name})
        assert (answer.status, answer.json["error"]["code"]) == (400, INVALID_REQUEST)


async def test_a_name_may_be_encoded(autojump_clock: Any) -> None:
    async with visiting(make_server()) as visitor:
        answer = await (await visitor.call("echo", {"mcp-name": "=?base64?ZWNobw==?="}, text="hi")).done()
        assert answer.status == 200


@pytest.mark.parametrize("lacks", [META_PROTOCOL_VERSION, META_CLIENT_CAPABILITIES, None])
async def test_an_envelope_that_lacks_something_is_wrong_params(lacks: str | None, autojump_clock: Any) -> None:
    async with visiting(make_server()) as visitor:
        request = visitor.request("tools/list", id="a")
        if lacks is None:
            del request["params"]
        else:
            del request["params"]["_meta"][lacks]
        answer = await visitor.post(request)
        assert (answer.status, answer.json["id"], answer.json["error"]["code"]) == (400, "a", INVALID_PARAMS)


async def test_a_revision_nobody_knows_is_answered_with_those_we_know(autojump_clock: Any) -> None:
    async with visiting(make_server()) as visitor:
        request = visitor.request("tools/list", id="a", **{META_PROTOCOL_VERSION: "v999.0.0"})
        answer = await visitor.post(request, {"mcp-protocol-version": "v999.0.0"})
        assert (answer.status, answer.json["id"]) == (400, "a")
        error = answer.json["error"]
        assert error["code"] == UNSUPPORTED_VERSION
        assert error["data"] == {"supported": [LATEST.name], "requested": "v999.0.0"}


async def test_a_session_does_not_go_on_in_a_revision_nobody_knows(autojump_clock: Any) -> None:
    async with visiting(make_server(), LEGACY) as visitor:
        await visitor.initialize()
        answer = await visitor.call("echo", {"mcp-protocol-version": "v999.0.0"}, text="hi")
        assert (answer.status, answer.json["error"]["code"]) == (400, UNSUPPORTED_VERSION)
        without = await (await visitor.call("echo", {"mcp-protocol-version": None}, text="hi")).done()
        assert without.status == 200


async def test_a_server_without_modern_revisions_refuses_the_probe_as_legacy_servers_do(autojump_clock: Any) -> None:
    async with visiting(Server("old", revisions=REVISIONS[:-1])) as visitor:
        answer = await visitor.post(visitor.request("server/discover", id="a"))
        assert (answer.status, answer.json["id"]) == (400, "a")
        assert answer.json["error"]["code"] == INVALID_REQUEST
        assert "data" not in answer.json["error"]
        assert REVISIONS[0].name in answer.json["error"]["message"]


async def test_a_session_is_initialized_once(autojump_clock: Any) -> None:
    async with visiting(make_server(), LEGACY) as visitor:
        await visitor.initialize()
        again = await visitor.post(visitor.request("initialize", {"protocolVersion": LEGACY.name}))
        assert again.json["error"]["code"] == INVALID_REQUEST
        assert "initialized already" in again.json["error"]["message"]
        assert (await (await visitor.call("echo", text="hi")).done()).status == 200


async def test_a_request_before_initialize_is_told_what_to_do(autojump_clock: Any) -> None:
    async with visiting(make_server(), LEGACY) as visitor:
        answer = await visitor.call("echo", text="hi")
        assert (answer.status, answer.json["id"], answer.json["error"]["code"]) == (400, 1, INVALID_REQUEST)
        assert "initialize" in answer.json["error"]["message"]


async def test_a_session_id_means_nothing_since_2026(autojump_clock: Any) -> None:
    async with visiting(make_server()) as visitor:
        answer = await (await visitor.call("echo", {"mcp-session-id": "anything"}, text="hi")).done()
        assert answer.status == 200
        assert "mcp-session-id" not in answer.headers


@pytest.mark.parametrize("message", [{"jsonrpc": "2.0", "id": 1, "result": {}}, [], [{"jsonrpc": "2.0", "id": 1}]])
async def test_since_2026_a_post_is_a_request_or_a_notification(message: Any, autojump_clock: Any) -> None:
    async with visiting(make_server()) as visitor:
        answer = await visitor.post(message, {"mcp-protocol-version": LATEST.name})
        assert (answer.status, answer.json["error"]["code"]) == (400, INVALID_REQUEST)
        assert "id" not in answer.json


async def test_notifications_are_accepted_and_heard(autojump_clock: Any) -> None:
    heard: list[str] = []
    server = make_server()

    @server.middleware
    async def around(ctx: Any, params: Any, call_next: Any) -> Any:
        if isinstance(ctx, Notice):
            heard.append(ctx.method)
        return await call_next(ctx, params)

    async with visiting(server) as visitor:
        answer = await visitor.post({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 1}})
        assert (answer.status, bytes(answer.body)) == (202, b"")
        legacy = visitor.face
        visitor.revision = LEGACY
        await visitor.initialize()
        await trio.testing.wait_all_tasks_blocked()
        assert heard == ["notifications/initialized"]
        assert len(legacy.shared.sessions) == 1


async def test_an_array_is_answered_by_an_array_in_2025_03_26(autojump_clock: Any) -> None:
    async with visiting(make_server(), V2025_03_26) as visitor:
        await visitor.initialize()
        batch = [
            visitor.request("tools/call", {"name": "echo", "arguments": {"text": "one"}}, id=1),
            {"jsonrpc": "2.0", "method": "notifications/initialized"},
            visitor.request("ping", id=2),
            {"jsonrpc": "2.0", "id": 3, "method": 4},
        ]
        answer = await (await visitor.post(batch)).done()
        assert answer.status == 200
        assert sorted(member["id"] for member in answer.json) == [1, 2, 3]
        only = await visitor.post([{"jsonrpc": "2.0", "method": "notifications/initialized"}])
        assert only.status == 202
        streamed = await visitor.post(
            [visitor.request("tools/call", {"name": "steps", "arguments": {"count": 1}}, id=5, progressToken=9)]
        )
        await streamed.done()
        assert [type(message) for message in streamed.messages] == [dict, list]


async def test_an_array_whose_requests_are_all_given_up_ends(autojump_clock: Any) -> None:
    async with visiting(make_server(), V2025_03_26) as visitor:
        await visitor.initialize()
        calls = [
            visitor.request("tools/call", {"name": "wait", "arguments": {"seconds": 60}}, id=id) for id in ("a", "b")
        ]
        answer = await visitor.post(calls)
        for id in ("a", "b"):
            await visitor.post({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": id}})
        await answer.done()
        assert (answer.status, bytes(answer.body)) == (200, b"")


async def test_without_sessions_any_worker_answers_a_legacy_client(autojump_clock: Any) -> None:
    async with visiting(make_server(), LEGACY, HttpSettings(stateless=True)) as visitor:
        opened = await visitor.initialize()
        assert "mcp-session-id" not in opened.headers
        for revision in (r for r in REVISIONS if r.sessions):
            headers = {"mcp-protocol-version": revision.name if revision.version_header else None}
            answer = await (await visitor.call("echo", headers, text="hi")).done()
            assert (answer.status, answer.json["result"]["content"][0]["text"]) == (200, "hi")
        asked = await (await visitor.call("ask")).done()
        assert asked.json["result"]["isError"] is True
        for method in ("GET", "DELETE"):
            refused = await visitor.send(method, "/mcp", headers={"mcp-session-id": "x"})
            assert (refused.status, refused.headers["allow"]) == (405, "POST")


async def test_without_sessions_a_call_ends_with_its_reader(autojump_clock: Any) -> None:
    journal: list[str] = []
    async with visiting(make_server(journal), LEGACY, HttpSettings(stateless=True)) as visitor:
        call = await visitor.call("wait", seconds=60)
        await trio.testing.wait_all_tasks_blocked()
        call.leave()
        await trio.testing.wait_all_tasks_blocked()
        assert journal == ["disconnected"]


async def test_a_modern_server_has_only_posts(autojump_clock: Any) -> None:
    server = make_server()
    server.profile.revisions = (LATEST,)
    async with visiting(server) as visitor:
        for method in ("GET", "DELETE"):
            assert (await visitor.send(method, "/mcp", headers={"mcp-session-id": "x"})).status == 405
        visitor.revision = LEGACY
        answer = await visitor.post(visitor.request("initialize", {"protocolVersion": LEGACY.name}), {"accept": BOTH})
        assert answer.status == 400


_ENVELOPE = {"_meta": {META_PROTOCOL_VERSION: LATEST.name, META_CLIENT_CAPABILITIES: {}}}

_VERSIONED = {"mcp-protocol-version": LATEST.name}
_LEGACY = {"mcp-protocol-version": V2025_06_18.name}
_CALLED = {**_VERSIONED, "mcp-method": "ping"}
_LISTENED = {**_VERSIONED, "mcp-method": "subscriptions/listen"}


@pytest.mark.parametrize(
    ("headers", "message", "stateless", "expected"),
    [
        (_CALLED, Request(1, "ping", _ENVELOPE), False, PostPlan("single", 1, statuses=True)),
        (_LISTENED, Request(1, "subscriptions/listen", _ENVELOPE), False, PostPlan("single", 1, True, True)),
        (_VERSIONED, Notification("notifications/cancelled"), False, PostPlan("single", 0, statuses=True)),
        ({}, Request(1, "initialize"), False, PostPlan("new", 1)),
        ({"mcp-session-id": "s"}, Request(1, "ping"), False, PostPlan("known", 1)),
        ({"mcp-session-id": "s"}, Notification("notifications/initialized"), False, PostPlan("known")),
        ({"mcp-session-id": "s"}, Batch((Request(1, "ping"), Request(2, "ping"))), False, PostPlan("known", 2, True)),
        ({}, Request(1, "initialize"), True, PostPlan("assumed", 1)),
        ({}, Request(1, "ping"), True, PostPlan("assumed", 1, revision=V2025_03_26)),
        (
            {"mcp-protocol-version": V2025_06_18.name},
            Request(1, "ping"),
            True,
            PostPlan("assumed", 1, revision=V2025_06_18),
        ),
        ({}, Request(1, "ping"), False, 400),
        ({"mcp-protocol-version": "v9", "mcp-session-id": "s"}, Request(1, "ping"), False, 400),
        (_VERSIONED, Batch(()), False, 400),
        ({**_CALLED, "mcp-method": "other"}, Request(1, "ping", _ENVELOPE), False, 400),
    ],
    ids=str,
)
def test_a_plan_follows_from_head_and_message_alone(
    headers: dict[str, str], message: Message, stateless: bool, expected: PostPlan | int
) -> None:
    routing = Routing.of(REVISIONS, stateless=stateless)
    found = routing.route(Head("POST", "/mcp", headers=headers), message, events=True)
    assert (found if isinstance(found, PostPlan) else found.status) == expected
