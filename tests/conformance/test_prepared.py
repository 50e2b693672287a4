"""What the conformance repository prepares to check (open pull requests, 2026), tried here on the bytes of a peer.

Each test names the scenario and where it is proposed. Unlike these it also looks at what they cannot: whether a handler
was stopped, and that nothing was sent that nobody should get.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import httpx2
import pytest
import trio
from joserfc import jwt
from joserfc.jwk import ECKey

import trimcp
from tests.auth.authority import reply
from tests.client.test_tasks import SEED, TEXT, Foreign
from trimcp.auth import ResourceServer
from trimcp.wire.codes import INVALID_PARAMS, METHOD_NOT_FOUND, MISSING_CAPABILITY
from trimcp.wire.revisions import LATEST, LATEST_LEGACY, REVISIONS, V2025_03_26, V2025_06_18

META = "io.modelcontextprotocol/"
ACCEPT = {"accept": "application/json, text/event-stream", "content-type": "application/json"}
legacy = pytest.mark.parametrize("revision", REVISIONS[1:-1], ids=str)
NAMED = {"tools/call": "name", "prompts/get": "name", "resources/read": "uri"}


def make_server(**options: Any) -> trimcp.Server[None]:
    server: trimcp.Server[None] = trimcp.Server("prepared", **options)

    @server.tool
    async def fast() -> str:
        """Return at once."""
        return "fast"

    @server.tool
    async def chatty(count: int, ctx: trimcp.Context) -> str:
        """Report and log."""
        for number in range(count):
            await ctx.report_progress(number, count)
            await ctx.log("debug", f"debug {number}")
            await ctx.log("warning", f"warning {number}")
        return "said"

    return server


class Slow:
    """A tool that takes for ever, and counts how often it was begun and stopped."""

    def __init__(self, server: trimcp.Server[Any]) -> None:
        self.begun = self.stopped = 0
        self.changed = trio.Event()
        server.add_tool(self.slow, name="slow")

    async def slow(self, ctx: trimcp.Context) -> str:
        """Say that it begins, and wait."""
        self.note(begun=1)
        try:
            await ctx.report_progress(0)
            await trio.sleep_forever()
        finally:
            self.note(stopped=1)

    def note(self, begun: int = 0, stopped: int = 0) -> None:
        self.begun, self.stopped = self.begun + begun, self.stopped + stopped
        self.changed.set()
        self.changed = trio.Event()

    async def until(self, begun: int, stopped: int) -> None:
        with trio.fail_after(30):
            while (self.begun, self.stopped) != (begun, stopped):
                await self.changed.wait()


class Peer:
    """A client that says what a test wants it to say."""

    def __init__(self, web: httpx2.AsyncClient, url: str) -> None:
        self.web, self.url, self.headers, self.count = web, url, dict(ACCEPT), 0

    async def begin(self, revision: trimcp.Revision, **capabilities: Any) -> dict[str, Any]:
        """Shake hands, in a session of its own."""
        offer = {
            "protocolVersion": revision.name,
            "capabilities": capabilities,
            "clientInfo": {"name": "x", "version": "1"},
        }
        reply = await self.post({"jsonrpc": "2.0", "id": "begin", "method": "initialize", "params": offer})
        assert reply.status_code == 200
        self.headers["mcp-session-id"] = reply.headers["mcp-session-id"]
        if revision.version_header:
            self.headers["mcp-protocol-version"] = revision.name
        assert (await self.tell("notifications/initialized")).status_code == 202
        result: dict[str, Any] = reply.json()["result"]
        return result

    async def post(self, body: Any, headers: Mapping[str, str] | None = None) -> httpx2.Response:
        return await self.web.post(self.url, content=json.dumps(body), headers={**self.headers, **(headers or {})})

    async def tell(self, method: str, **params: Any) -> httpx2.Response:
        return await self.post({"jsonrpc": "2.0", "method": method, "params": params})

    def request(self, method: str, params: Mapping[str, Any] | None = None, **more: Any) -> dict[str, Any]:
        self.count += 1
        return {"jsonrpc": "2.0", "id": self.count, "method": method, "params": {**(params or {}), **more}}

    def modern(
        self, method: str, params: Mapping[str, Any], capabilities: Any = None, **meta: Any
    ) -> tuple[dict[str, Any], dict[str, str]]:
        """Return a request of the newest revision, and its headers."""
        told = {f"{META}protocolVersion": LATEST.name, f"{META}clientCapabilities": capabilities or {}}
        body = self.request(method, params, _meta={**told, **meta})
        headers = {"mcp-protocol-version": LATEST.name, "mcp-method": method}
        if method in NAMED:
            headers["mcp-name"] = params[NAMED[method]]
        return body, headers

    async def ask(self, method: str, params: Mapping[str, Any], **meta: Any) -> list[dict[str, Any]]:
        """Return all messages that answer a request of the newest revision."""
        return messages(await self.post(*self.modern(method, params, **meta)))


def messages(reply: httpx2.Response) -> list[dict[str, Any]]:
    if reply.headers["content-type"].startswith("application/json"):
        return [reply.json()]
    return [json.loads(line[5:]) for line in reply.text.splitlines() if line.startswith("data:") and line[5:].strip()]


@asynccontextmanager
async def served(server: trimcp.Server[Any], peers: int = 1, **settings: Any) -> AsyncIterator[list[Peer]]:
    async with trio.open_nursery() as nursery:
        (url, *_) = await nursery.start(partial(trimcp.serve_http, server, port=0, **settings))
        with trio.fail_after(60):
            async with httpx2.AsyncClient(timeout=30) as web:
                yield [Peer(web, url) for _ in range(peers)]
        nursery.cancel_scope.cancel()


@legacy
async def test_cancellation(revision: trimcp.Revision) -> None:
    """`cancellation`, pull requests 436 and 450: unknown, under way, already answered, and in bursts."""
    server = make_server()
    slow = Slow(server)
    async with served(server) as (peer,):
        await peer.begin(revision)
        for unknown in ("nobody", 99_999, 1):
            assert (await peer.tell("notifications/cancelled", requestId=unknown)).status_code == 202
        for params in ({}, {"requestId": None}, {"requestId": []}):
            assert (await peer.tell("notifications/cancelled", **params)).status_code in (202, 400)
        answers: list[httpx2.Response] = []
        async with trio.open_nursery() as nursery:

            async def call(request: Any) -> None:
                answers.append(await peer.post(request))

            for round in range(1, 6):
                request = peer.request("tools/call", name="slow")
                nursery.start_soon(call, request)
                await slow.until(round, round - 1)
                for _ in range(3):
                    await peer.tell("notifications/cancelled", requestId=request["id"], reason="enough")
                await slow.until(round, round)
        assert [each for reply in answers for each in (messages(reply) if reply.content else [])] == []
        again = messages(await peer.post(peer.request("tools/call", name="fast")))
        assert again[-1]["result"]["content"][0]["text"] == "fast"


@legacy
async def test_progress_notifications(revision: trimcp.Revision) -> None:
    """`progress-notifications`, pull requests 436 and 450: only for who asks, rising, and none after the end."""
    async with served(make_server()) as (peer,):
        await peer.begin(revision)
        arguments = {"name": "chatty", "arguments": {"count": 5}}
        quiet = messages(await peer.post(peer.request("tools/call", arguments)))
        assert "notifications/progress" not in {each.get("method") for each in quiet}
        for token in ("a token", 7, 0):
            said = messages(await peer.post(peer.request("tools/call", arguments, _meta={"progressToken": token})))
            told = [each["params"] for each in said if each.get("method") == "notifications/progress"]
            assert {each["progressToken"] for each in told} == {token}
            values = [each["progress"] for each in told]
            assert values == sorted(set(values))
            assert values == [0, 1, 2, 3, 4]
            assert "result" in said[-1]  # and nothing follows


async def test_cancellation_of_an_http_stream() -> None:
    """`http-stream-cancellation`, pull request 438: who closes the stream of a request cancels it."""
    server = make_server()
    slow = Slow(server)
    async with served(server) as (peer,):
        where = urlsplit(peer.url)
        for round in range(1, 8):
            body, headers = peer.modern("tools/call", {"name": "slow"}, progressToken="t")
            content = json.dumps(body)
            told = {**ACCEPT, **headers, "host": where.netloc, "content-length": str(len(content))}
            head = "".join(f"{name}: {value}\r\n" for name, value in told.items())
            stream = await trio.open_tcp_stream("127.0.0.1", where.port or 0)
            async with stream:
                await stream.send_all(f"POST {where.path} HTTP/1.1\r\n{head}\r\n{content}".encode())
                said = b""
                while b"data:" not in said:
                    said += await stream.receive_some()
                assert b"text/event-stream" in said
                await slow.until(round, round - 1)
            await slow.until(round, round)
        assert (await peer.ask("tools/call", {"name": "fast"}))[-1]["result"]["resultType"] == "complete"


async def test_log_level_per_request() -> None:
    """`per-request-loglevel`, pull request 438: asked for with the request, filtered, and on its stream alone."""
    async with served(make_server()) as (peer,):
        arguments = {"name": "chatty", "arguments": {"count": 2}}

        async def logged(**meta: Any) -> list[str]:
            said = await peer.ask("tools/call", arguments, **meta)
            assert "result" in said[-1]
            return [each["params"]["level"] for each in said if each.get("method") == "notifications/message"]

        level = f"{META}logLevel"
        assert await logged() == []
        assert await logged(**{level: "debug"}) == ["debug", "warning"] * 2
        assert await logged(**{level: "warning"}) == ["warning"] * 2
        assert await logged(**{level: "emergency"}) == []
        (refused,) = await peer.ask("tools/call", arguments, **{level: "loud"})
        assert refused["error"]["code"] == INVALID_PARAMS


SCOPED = {
    "tools/call": ({"name": "scoped"}, ["p:tools", "p:tools:scoped"]),
    "resources/read": ({"uri": "test://static"}, ["p:read", "p:read:static"]),
    "resources/read ": ({"uri": "test://template/123/data"}, ["p:read", "p:read:template"]),
    "prompts/get": ({"name": "asked"}, ["p:prompts", "p:prompts:asked"]),
}


@pytest.mark.parametrize("operation", SCOPED)
async def test_scope_challenge(operation: str) -> None:
    """`sep-2350-server-scope-challenge`, pull request 481: 403 with all that the operation needs, in one challenge."""
    server = make_server()
    params, scopes = SCOPED[operation]

    @server.tool(scopes=SCOPED["tools/call"][1])
    async def scoped() -> str:
        return "scoped"

    @server.resource("test://static", scopes=SCOPED["resources/read"][1])
    async def static() -> str:
        return "static"

    @server.resource("test://template/{id}/data", scopes=SCOPED["resources/read "][1])
    async def template(id: str) -> str:
        return id

    @server.prompt(scopes=SCOPED["prompts/get"][1])
    async def asked() -> str:
        return "asked"

    every = ["p:base", *(scope for _, needed in SCOPED.values() for scope in needed)]
    tokens = trimcp.bearer_tokens(
        {"low": trimcp.Principal("x", scopes=["p:base"]), "full": trimcp.Principal("x", scopes=every)}
    )
    auth = ResourceServer("http://127.0.0.1/mcp", ["https://issuer.example"], also=tokens)
    async with served(server, auth=auth) as (peer,):
        body, headers = peer.modern(operation.strip(), params)
        refused = await peer.post(body, {**headers, "authorization": "Bearer low"})
        assert refused.status_code == 403
        challenge = refused.headers["www-authenticate"]
        assert challenge.startswith("Bearer ")
        assert 'error="insufficient_scope"' in challenge
        assert f'scope="{" ".join(scopes)}"' in challenge
        assert 'resource_metadata="' in challenge
        assert "result" in messages(await peer.post(body, {**headers, "authorization": "Bearer full"}))[-1]


async def test_authorization_of_servers() -> None:
    """`server-auth`, pull requests 64, 105 and 155: 401 says where the metadata is, which names who gives tokens."""
    auth = ResourceServer("http://127.0.0.1/mcp", ["https://issuer.example"], scopes=("p:base",))
    async with served(make_server(), auth=auth) as (peer,):
        body, headers = peer.modern("tools/list", {})
        for more in ({}, {"authorization": "Bearer nonsense"}, {"authorization": "Basic eDp5"}):
            refused = await peer.post(body, {**headers, **more})
            assert refused.status_code in (401, 400)
            if refused.status_code == 401:
                assert 'resource_metadata="' in refused.headers["www-authenticate"]
        in_address = await peer.web.post(
            f"{peer.url}?access_token=nonsense", content=json.dumps(body), headers={**ACCEPT, **headers}
        )
        assert in_address.status_code in (400, 401)
        where = peer.url.replace("/mcp", "/.well-known/oauth-protected-resource/mcp")
        described = await peer.web.get(where)
        assert (described.status_code, described.headers["content-type"]) == (200, "application/json")
        metadata = described.json()
        assert (metadata["resource"], metadata["authorization_servers"]) == (
            "http://127.0.0.1/mcp",
            ["https://issuer.example"],
        )
        assert metadata["bearer_methods_supported"] == ["header"]


AUDIENCE = "http://127.0.0.1/mcp"
TRUSTED, UNTRUSTED = (ECKey.generate_key("P-256", {"kid": "mock"}) for _ in range(2))
TOKENS: dict[str, tuple[ECKey, str | None, int, int]] = {  # whose key, for whom, good for how long; what is answered
    "none": (TRUSTED, None, 0, 401),
    "valid": (TRUSTED, AUDIENCE, 300, 200),
    "wrong audience": (TRUSTED, "https://another-resource.example.com/mcp", 300, 401),
    "no audience": (TRUSTED, None, 300, 401),
    "expired": (TRUSTED, AUDIENCE, -600, 401),
    "of an untrusted key": (UNTRUSTED, AUDIENCE, 300, 401),
}


@pytest.mark.parametrize("revision", [V2025_06_18, LATEST_LEGACY, LATEST], ids=str)
async def test_token_audience(revision: trimcp.Revision) -> None:
    """`auth-token-audience-validation`, for issue 78: only a token that was issued for this server is taken."""
    issuer, now = "http://127.0.0.1:9797", int(time.time())

    async def authority(request: httpx2.Request) -> httpx2.Response:
        keys = {"keys": [{**TRUSTED.as_dict(private=False), "alg": "ES256", "use": "sig"}]}
        metadata = {"issuer": issuer, "jwks_uri": f"{issuer}/.well-known/jwks.json"}
        return reply(200, keys if request.url.path.endswith("jwks.json") else metadata)

    params = {"protocolVersion": revision.name, "capabilities": {}, "clientInfo": {"name": "x", "version": "1"}}
    async with httpx2.AsyncClient(transport=httpx2.MockTransport(authority)) as web:
        auth = ResourceServer(AUDIENCE, [issuer], http_client=web)
        async with served(make_server(), auth=auth) as (peer,):
            for name, (key, audience, seconds, status) in TOKENS.items():
                claims = {"iss": issuer, "sub": "user", "client_id": "app", "jti": name, "exp": now + seconds}
                claims |= {"iat": min(now, now + seconds - 3600)} | ({} if audience is None else {"aud": audience})
                token = jwt.encode({"alg": "ES256", "kid": "mock", "typ": "at+jwt"}, claims, key, default_type=None)
                more = {} if name == "none" else {"authorization": f"Bearer {token}"}
                if revision.modern:
                    body, headers = peer.modern("server/discover", {})
                    answer = await peer.post(body, {**headers, **more})
                else:
                    answer = await peer.post(peer.request("initialize", params), more)
                assert (name, answer.status_code) == (name, status)
                assert status == 200 or 'resource_metadata="' in answer.headers["www-authenticate"]


@legacy
async def test_session_isolation(revision: trimcp.Revision) -> None:
    """`session-isolation`, `notification-isolation`, pull request 137: the same ids and tokens at once, no mixture."""
    server = make_server()

    @server.tool
    async def echo(text: str, ctx: trimcp.Context) -> str:
        """Say it back, after a report."""
        for number in range(3):
            await ctx.report_progress(number, message=text)
            await trio.lowlevel.checkpoint()
        return text

    async with served(server, peers=8) as peers:
        for peer in peers:
            await peer.begin(revision)
        assert len({peer.headers["mcp-session-id"] for peer in peers}) == 8

        async def talk(peer: Peer, name: str) -> None:
            for id in range(5):
                body = {"jsonrpc": "2.0", "id": id, "method": "tools/call"}
                params = {"name": "echo", "arguments": {"text": f"{name} {id}"}, "_meta": {"progressToken": "same"}}
                said = messages(await peer.post({**body, "params": params}))
                assert said[-1]["id"] == id
                assert said[-1]["result"]["content"][0]["text"] == f"{name} {id}"
                told = [each["params"] for each in said[:-1] if each.get("method") == "notifications/progress"]
                assert {each.get("message", f"{name} {id}") for each in told} == {f"{name} {id}"}

        async with trio.open_nursery() as nursery:
            for number, peer in enumerate(peers):
                nursery.start_soon(talk, peer, f"peer {number}")
        lost = Peer(peers[0].web, peers[0].url)
        lost.headers["mcp-session-id"] = "somebody-else's"
        assert (await lost.post(lost.request("tools/list"))).status_code == 404


@pytest.mark.parametrize("revision", REVISIONS[1:], ids=str)
async def test_refusal_of_batches(revision: trimcp.Revision) -> None:
    """`json-rpc-batch-rejection`, pull request 381: arrays are messages in 2025-03-26 only."""
    server = make_server()
    slow = Slow(server)
    async with served(server) as (peer,):
        headers = {}
        if revision.name != LATEST.name:
            await peer.begin(revision)
        else:
            headers = {"mcp-protocol-version": LATEST.name, "mcp-method": "tools/list"}
        for batch in (
            [peer.request("tools/call", name="slow"), peer.request("ping")],
            [peer.request("tools/call", name="slow")],
            [],
        ):
            if revision == V2025_03_26 and batch:
                continue  # they are carried out there
            refused = await peer.post(batch, headers)
            assert refused.status_code == 400
            assert "error" in refused.json()
            assert slow.begun == 0
        if revision == V2025_03_26:
            reply = await peer.post([peer.request("ping"), peer.request("tools/call", name="fast")])
            both = reply.json() if "json" in reply.headers["content-type"] else messages(reply)
            assert len(both[0] if isinstance(both[0], list) else both) == 2


@legacy
async def test_extensions_in_legacy_revisions(revision: trimcp.Revision) -> None:
    """Specification, pull request 3364: the handshake carries extensions; what is off is neither told nor served."""
    server = make_server()

    @server.tool(task="allowed", task_after=0)
    async def long() -> str:
        return "long"

    tasks = "io.modelcontextprotocol/tasks"
    async with served(server) as (peer,):
        told = await peer.begin(revision, extensions={tasks: {}})
        known = {"extensions": {tasks: {}}} if revision >= V2025_06_18 else {}
        assert {name: each for name, each in told["capabilities"].items() if name == "extensions"} == known
        said = messages(await peer.post(peer.request("tools/call", name="long")))
        assert said[-1]["result"]["content"][0]["text"] == "long"  # no task: the extension is of 2026-07-28
        refused = messages(await peer.post(peer.request("tasks/get", taskId="x")))
        assert refused[-1]["error"]["code"] == METHOD_NOT_FOUND
    async with served(make_server()) as (peer,):
        assert "extensions" not in (await peer.begin(revision, extensions={tasks: {}}))["capabilities"]
        (discovered,) = await peer.ask("server/discover", {})
        assert "extensions" not in discovered["result"]["capabilities"]


async def test_url_elicitation() -> None:
    """Pull request 44 (SEP-1036): only for who can, with an id; in 2026-07-28 as a question of the result."""
    server = make_server()

    @server.tool
    async def pay(ctx: trimcp.Context) -> str:
        """Have the user visit a page."""
        return (await ctx.elicit_url("Please pay", "https://example.org/pay", elicitation_id="e1")).action

    async with served(server, peers=3) as (old, form, new):
        for peer, capabilities in ((old, {}), (form, {"elicitation": {"form": {}}})):
            await peer.begin(LATEST_LEGACY, **capabilities)
            said = messages(await peer.post(peer.request("tools/call", name="pay")))
            assert said[-1]["result"]["isError"] is True
            assert "elicitation/create" not in {each.get("method") for each in said}
            body, headers = new.modern("tools/call", {"name": "pay"}, capabilities)
            (refused,) = messages(await new.post(body, headers))
            assert refused["error"]["code"] == MISSING_CAPABILITY
        body, headers = new.modern("tools/call", {"name": "pay"}, {"elicitation": {"url": {}}})
        (asks,) = messages(await new.post(body, headers))
        assert asks["result"]["resultType"] == "input_required"
        (question,) = asks["result"]["inputRequests"].values()
        assert question["method"] == "elicitation/create"
        assert question["params"]["mode"] == "url"
        assert question["params"]["url"] == "https://example.org/pay"
        assert question["params"]["message"] == "Please pay"


async def test_session_renegotiation_by_clients() -> None:
    """`session-renegotiation-404`, pull request 326: a client whose session is gone begins a new one, and goes on."""
    servers, ended = list[trio.CancelScope](), trio.Event()

    async def serve(port: int, task_status: trio.TaskStatus[list[str]]) -> None:
        with trio.CancelScope() as scope:
            servers.append(scope)
            await trimcp.serve_http(make_server(), port=port, task_status=task_status)
        ended.set()

    async with trio.open_nursery() as nursery:
        (url, *_) = await nursery.start(serve, 0)
        with trio.fail_after(60):
            async with trimcp.Client("test").connect(url, revision=LATEST_LEGACY) as session:
                assert (await session.call_tool("fast")).text == "fast"
                servers[0].cancel()
                await ended.wait()
                await nursery.start(serve, urlsplit(url).port)  # which knows nobody: 404
                assert (await session.call_tool("fast")).text == "fast"
                async with session.calling("chatty", {"count": 2}) as call:
                    assert [told.progress async for told in call.progress] == [0, 1]
        nursery.cancel_scope.cancel()


async def test_a_client_of_tasks() -> None:
    """`tasks-client-lifecycle`, for issue 374: a header names the task, which is looked at when due."""
    states = [{"status": "working", "pollIntervalMs": 100}] * 3 + [{"status": "completed", "result": TEXT}]
    foreign, said = Foreign(*states), list[tuple[str, str | None, float]]()

    @foreign.server.middleware
    async def note(ctx: Any, params: Any, call_next: Any) -> Any:
        said.append((ctx.method, (ctx.internals[1].headers or {}).get("mcp-name"), time.monotonic()))
        return await call_next(ctx, params)

    async with trio.open_nursery() as nursery:
        (url, *_) = await nursery.start(partial(trimcp.serve_http, foreign.server, port=0))
        with trio.fail_after(60):
            async with trimcp.Client("test", tasks=True).connect(url) as session:
                assert (await session.call_tool("work")).text == "done"
                foreign.states[:] = [{**SEED, "status": "failed", "error": {"code": -32603, "message": "broken"}}]
                with pytest.raises(trimcp.RemoteError, match="broken"):
                    await session.call_tool("work")
                looked = len(foreign.asked)
                foreign.states[:] = [{**SEED, "status": "working"}]
                task = await session.start_task("work")
                await task.cancel()
        nursery.cancel_scope.cancel()
    about = [(method, name) for method, name, _ in said if method.startswith("tasks/")]
    assert about == [("tasks/get", "t1")] * looked + [("tasks/cancel", "t1")]
    looks = [at for method, _, at in said if method == "tasks/get"][:4]
    assert all(later - earlier >= 0.09 for earlier, later in itertools.pairwise(looks))


async def test_the_stateless_gauntlet() -> None:
    """`checker-2026-07-28`: each request stands for itself, whatever connection it comes over and session it names."""
    async with served(make_server(), peers=2) as (one, other):
        for peer, more in ((one, {}), (other, {"mcp-session-id": "nonsense", "last-event-id": "42"})):
            body, headers = peer.modern("tools/list", {})
            reply = await peer.post(body, {**headers, **more})
            assert reply.status_code == 200
            assert "mcp-session-id" not in reply.headers
            assert {each["name"] for each in reply.json()["result"]["tools"]} == {"fast", "chatty"}
        body, headers = one.modern("tools/call", {"name": "fast"})
        for changed, status in (
            ({"mcp-protocol-version": "2025-11-25"}, 400),
            ({"mcp-method": "tools/list"}, 400),
            ({"mcp-name": "chatty"}, 400),
            ({"accept": "text/html"}, 406),
            ({"content-type": "text/plain"}, 415),
        ):
            assert (await one.post(body, {**headers, **changed})).status_code == status
        del body["params"]["_meta"][f"{META}protocolVersion"]
        assert (await one.post(body, headers)).status_code == 400
