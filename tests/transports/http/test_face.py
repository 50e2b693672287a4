from __future__ import annotations

import logging
from typing import Any

import pytest
import trio
import trio.testing

from tests.transports.http.face import BOTH, LEGACY, Visitor, visiting
from tests.transports.http.test_exchange import make_server
from trimcp.budget import Budget
from trimcp.session.context import Context
from trimcp.transports.http.interfaces import Admitted, Head, HttpResponse, Upgrade
from trimcp.transports.http.peers.access import AccessLog
from trimcp.transports.http.peers.identity import Identity, Principal, Refused, bearer_tokens
from trimcp.transports.http.peers.origins import Origins
from trimcp.transports.http.settings import HttpSettings
from trimcp.wire.codes import OVERLOADED
from trimcp.wire.revisions import LATEST, Revision

JSON = {"content-type": "application/json"}


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("POST", "/", JSON, 404),
        ("POST", "/mcp/", JSON, 404),
        ("GET", "/%2e", {}, 404),
        ("PUT", "/mcp", JSON, 405),
        ("HEAD", "/mcp", {}, 405),
        ("OPTIONS", "/mcp", {}, 405),
        ("POST", "/sse", JSON, 405),
        ("GET", "/messages", {}, 405),
        ("POST", "/mcp", {}, 415),
        ("POST", "/mcp", {"content-type": "text/plain"}, 415),
        ("POST", "/mcp", {"content-type": "application/json; charset=latin-1"}, 415),
        ("POST", "/mcp", {**JSON, "content-encoding": "gzip"}, 415),
        ("POST", "/mcp", {**JSON, "accept": "text/html"}, 406),
        ("GET", "/mcp", {"accept": "text/html"}, 406),
        ("GET", "/sse", {"accept": "text/html"}, 406),
        ("GET", "/ws", {}, 426),
        ("GET", "/healthz", {}, 200),
        ("GET", "/readyz", {}, 200),
        ("GET", "/healthz", {"host": "10.0.0.3:8000"}, 200),
        ("GET", "/healthz", {"origin": "https://evil.example"}, 403),
        ("GET", "/readyz", {"origin": "null"}, 403),
        ("POST", "/healthz", {}, 405),
    ],
)
async def test_a_request_is_judged_by_its_head(
    method: str, path: str, headers: dict[str, str], status: int, autojump_clock: Any
) -> None:
    async with visiting(make_server()) as visitor:
        answer = await visitor.send(method, path, b"{}" if method == "POST" else b"", headers)
        assert answer.status == status
        if status == 405:
            assert method not in answer.headers["allow"].split(", ")
        if status == 415 and "content-encoding" in headers:
            assert answer.headers["accept-encoding"] == "identity"
        if status not in (200, 405):
            assert answer.json["error"]["message"]
            assert "id" not in answer.json


@pytest.mark.parametrize("path", ["/mcp", "/sse", "/ws"])
@pytest.mark.parametrize(
    "headers", [{"origin": "http://evil.example"}, {"host": "evil.example"}, {"origin": "null"}], ids=str
)
async def test_pages_of_strangers_are_refused(path: str, headers: dict[str, str], autojump_clock: Any) -> None:
    async with visiting(make_server()) as visitor:
        answer = await visitor.send("GET", path, headers=headers)
        assert answer.status == 403
        ours = await visitor.send("GET", "/mcp", headers={"origin": "http://localhost:8000"})
        assert ours.status == 400


async def test_pages_that_are_named_may_come_in(autojump_clock: Any) -> None:
    origins = Origins(allow_origins=("https://app.example",))
    page = {"origin": "https://app.example"}
    async with visiting(make_server(), LEGACY, HttpSettings(origins=origins)) as visitor:
        asked = {"access-control-request-method": "POST", "access-control-request-headers": "mcp-param-x"}
        preflight = await visitor.send("OPTIONS", "/mcp", headers={**page, **asked})
        assert preflight.status in (200, 204)
        assert preflight.headers["access-control-allow-origin"] == "https://app.example"
        visitor.headers.update(page)
        opened = await visitor.initialize()
        assert opened.headers["access-control-allow-origin"] == "https://app.example"
        assert "mcp-session-id" in opened.headers["access-control-expose-headers"].lower()
        stream = await visitor.listen()
        assert stream.headers["access-control-allow-origin"] == "https://app.example"
        call = await (await visitor.call("steps", token=1, count=1)).done()
        assert call.headers["access-control-allow-origin"] == "https://app.example"
        large = await visitor.call("echo", text="x" * 4_200_000)
        assert (large.status, large.headers["access-control-allow-origin"]) == (413, "https://app.example")
        lost = await visitor.send("GET", "/mcp")
        assert lost.headers["access-control-allow-origin"] == "https://app.example"


async def test_who_asks_is_known_to_the_handler(autojump_clock: Any) -> None:
    server = make_server()

    @server.tool
    async def whoami(*, ctx: Context) -> str:
        return f"{ctx.principal} {ctx.headers['user-agent']}"

    async def route(head: Head) -> HttpResponse:
        return HttpResponse(200, (), str(head.principal).encode())

    settings = HttpSettings(authenticate=bearer_tokens({"secret": "ada"}), routes={"/who": route})
    async with visiting(server, settings=settings) as visitor:
        refused = await visitor.call("whoami")
        assert refused.status == 401
        assert refused.headers["www-authenticate"].startswith("Bearer")
        headers = {"authorization": "Bearer secret", "user-agent": "test"}
        answer = await (await visitor.call("whoami", headers)).done()
        assert answer.json["result"]["content"][0]["text"] == "ada test"
        assert (await visitor.send("GET", "/who", headers=headers)).body == b"ada"
    async with visiting(server) as visitor:  # without a hook nobody is known
        answer = await (await visitor.call("whoami", {"user-agent": "test"})).done()
        assert answer.json["result"]["content"][0]["text"] == "None test"


async def test_identity_may_take_its_time(autojump_clock: Any) -> None:
    async def authenticate(head: Head) -> Identity:
        await trio.sleep(1)
        return Principal("ada") if "x" in head.headers else Refused(403, (), "not you")

    async with visiting(make_server(), settings=HttpSettings(authenticate=authenticate)) as visitor:
        assert (await visitor.call("echo", text="hi")).status == 403
        assert (await (await visitor.call("echo", {"x": "y"}, text="hi")).done()).status == 200


async def test_readiness_ends_with_the_drain_and_health_does_not(autojump_clock: Any) -> None:
    async with visiting(make_server()) as visitor:
        call = await visitor.call("wait", seconds=1)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(visitor.face.drain, 5)
            await trio.testing.wait_all_tasks_blocked()
            assert (await visitor.send("GET", "/readyz")).status == 503
            assert (await visitor.send("GET", "/healthz")).status == 200
        assert call.messages[-1]["result"]["content"][0]["text"] == "waited"


async def test_only_so_many_posts_are_worked_on(autojump_clock: Any) -> None:
    async with visiting(make_server(), settings=HttpSettings(max_exchanges=2)) as visitor:
        calls = [await visitor.call("wait", seconds=1) for _ in range(2)]
        refused = await visitor.call("echo", text="hi")
        assert (refused.status, refused.headers["retry-after"]) == (503, "1")
        for call in calls:
            await call.done()
        assert (await (await visitor.call("echo", text="hi")).done()).status == 200


@pytest.mark.parametrize(("revision", "status"), [(LATEST, 503), (LEGACY, 200)], ids=str)
async def test_a_request_for_which_there_is_no_memory_is_refused(
    revision: Revision, status: int, autojump_clock: Any
) -> None:
    server = make_server()

    @server.tool
    async def keep(filling: str) -> str:
        await trio.sleep(1)
        return "kept"

    server.budget = Budget(1_000_000)  # less than a server may be given: so small messages are large ones
    async with visiting(server, revision) as visitor:
        other = Visitor(visitor.face, revision)
        for each in (visitor, other):
            each.peer, each.holding = "192.0.2.1:4242", server.budget.holding("address 192.0.2.1")
            if revision is LEGACY:
                await each.initialize()
        calls = [await visitor.call("keep", filling="x" * 200_000) for _ in range(2)]
        refused = await visitor.call("echo", text="x" * 200_000)
        assert (refused.status, refused.json["error"]["code"]) == (status, OVERLOADED)
        assert refused.headers.get("retry-after") == ("1" if status == 503 else None)
        assert (await (await other.call("echo", text="small")).done()).json["result"]
        memory = server.statistics().memory
        assert (memory.refused, list(memory.owners)) == (1, ["address 192.0.2.1"])
        for call in calls:
            await call.done()


async def test_events_for_clients_that_come_back_take_a_quarter_of_the_memory(autojump_clock: Any) -> None:
    server = make_server()
    server.budget = Budget(400_000)
    async with visiting(server, LEGACY, HttpSettings(reply="sse")) as visitor:
        await visitor.initialize()
        for _ in range(5):
            await (await visitor.call("echo", text="x" * 40_000)).done()
        events = visitor.face.shared.events
        assert events is not None
        assert 40_000 < events.statistics().bytes <= 100_000


async def test_applications_may_add_routes_and_dialects(autojump_clock: Any) -> None:
    async def metrics(head: Head) -> Admitted:
        return HttpResponse(200, (("Content-Type", "text/plain"),), b"1\n")

    def other(head: Head, body: bytes) -> HttpResponse | None:
        return HttpResponse(200, (), b"other") if b'"agent/say"' in body else None

    settings = HttpSettings(routes={"/metrics": metrics}, dialects=[other])
    async with visiting(make_server(), settings=settings) as visitor:
        assert bytes((await visitor.send("GET", "/metrics")).body) == b"1\n"
        assert (await visitor.send("GET", "/metrics", headers={"host": "evil.example"})).status == 403
        said = await visitor.post({"kind": "agent/say"})
        assert bytes(said.body) == b"other"
        assert (await (await visitor.call("echo", text="hi")).done()).status == 200


@pytest.mark.parametrize(
    ("offered", "agreed"), [("mcp", "mcp"), ("chat, mcp", "mcp"), ("chat", None), ("", None), ("MCP", None)]
)
async def test_a_websocket_is_upgraded(offered: str, agreed: str | None, autojump_clock: Any) -> None:
    async with visiting(make_server()) as visitor:
        headers = {"host": "localhost", "sec-websocket-protocol": offered}
        found = await visitor.face.admit(Head("GET", "/ws", headers=headers, websocket=True))
        assert isinstance(found, Upgrade)
        assert (found.subprotocol, found.max_message) == (agreed, 4 * 1024 * 1024)
        await visitor.face.drain(1)
        late = await visitor.face.admit(Head("GET", "/ws", headers=headers, websocket=True))
        assert isinstance(late, HttpResponse)
        assert late.status == 503


@pytest.mark.parametrize(
    ("key", "status"),
    [
        (None, 101),  # over HTTP/2
        ("AAECAwQFBgcICQoLDA0ODw==", 101),
        ("x", 400),
        ("", 400),
        ("AAECAwQFBgcICQoLDA0ODw", 400),
        ("AAECAwQFBgcICQoLDA0OD===", 400),
        ("AAECAwQFBgcICQoLDA0ODxA=", 400),
        ("AAECAwQFBgcICQoLDA0ODw==, AAECAwQFBgcICQoLDA0ODw==", 400),
    ],
)
async def test_the_key_of_a_handshake_is_sixteen_bytes(key: str | None, status: int, autojump_clock: Any) -> None:
    async with visiting(make_server()) as visitor:
        headers = {"host": "localhost", **({} if key is None else {"sec-websocket-key": key})}
        found = await visitor.face.admit(Head("GET", "/ws", headers=headers, websocket=True))
        assert (found.status if isinstance(found, HttpResponse) else 101) == status


async def test_what_is_switched_off_is_not_there(autojump_clock: Any) -> None:
    settings = HttpSettings(sse_path=None, websocket_path=None, health=False, path="/other")
    async with visiting(make_server(), settings=settings) as visitor:
        for path in ("/sse", "/ws", "/healthz", "/readyz", "/mcp", "/messages"):
            assert (await visitor.send("GET", path)).status == 404
        assert (await visitor.send("GET", "/other")).status == 400


async def test_responses_are_noted_in_the_access_log(autojump_clock: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "trimcp.access")
    async with visiting(make_server(), settings=HttpSettings(access_log=AccessLog())) as visitor:
        head = Head("GET", "/healthz\n", headers={"host": "localhost", "accept": BOTH})
        await visitor.face.admit(head)
        await trio.sleep(0.25)
        visitor.face.done(head, 404, 12)
        [record] = caplog.records
        assert "\n" not in record.getMessage()
        assert (record.status, record.duration) == (404, 0.25)


@pytest.mark.parametrize("revision", [LEGACY, LATEST], ids=str)
async def test_every_message_can_be_traced(revision: Any, autojump_clock: Any) -> None:
    lines: list[str] = []
    async with visiting(make_server(), revision, HttpSettings(trace=lines.append)) as visitor:
        if not revision.modern:
            await visitor.initialize()
            lines.clear()
        await (await visitor.call("steps", token=1, count=1)).done()
        await (await visitor.call("echo", {"accept": "text/event-stream"}, text="hi")).done()
        await (await visitor.call("echo", text="hi")).done()
        await visitor.post(b"{")
    told = [(line.split()[1], "progress" in line and "notifications" in line) for line in lines]
    assert told == [
        ("<--", False),
        ("-->", True),
        *[("-->", False), ("<--", False)] * 3,
        ("-->", False),
    ]
