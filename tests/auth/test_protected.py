"""A protected server over HTTP, whole: an authorization server, a browser, our client, both hosts, every revision."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from functools import partial
from typing import Any

import attrs
import httpx2
import pytest
import trio

import trimcp
import trimcp.testing
from tests.auth.authority import reply
from tests.peers.tls import client_certificate_context, client_context, mutual_context
from trimcp.auth import AuthorizationError, Browser, ClientCredentials, OAuth, ResourceServer, bearer_tokens
from trimcp.guard import Denied
from trimcp.testing import ToyIssuer, toy_issuer
from trimcp.wire.codes import FORBIDDEN

SECONDS = 60.0


def offering() -> trimcp.Server[None]:
    server: trimcp.Server[None] = trimcp.Server("files", version="1")

    @server.tool
    async def whoami(*, ctx: trimcp.Context) -> str:
        who = ctx.principal
        return "nobody" if who is None else f"{who.subject} by {who.client_id}"

    @server.tool(scopes=["files:write"])
    async def write() -> str:
        return "written"

    @server.tool(allow=lambda request: Denied("not on a Sunday"))
    async def rest() -> str:
        return "rested"

    return server


async def log_in(url: str) -> None:
    """Be a browser and the person before it."""
    async with httpx2.AsyncClient() as browser:
        page = await browser.get(url)
        assert "files" in page.text or "to use" in page.text
        answer = await browser.post(url, data={"user": "ann"}, follow_redirects=False)
        end = await browser.get(answer.headers["location"])
        assert "You can close this window" in end.text


@attrs.define(eq=False)
class Protected:
    url: str
    issuer: ToyIssuer
    said: list[str] = attrs.field(factory=list)

    def oauth(self, **more: Any) -> OAuth:
        return OAuth(user_agent=Browser(open=log_in, notify=self.said.append), **more)

    @asynccontextmanager
    async def connected(self, oauth: OAuth | None = None, **more: Any) -> AsyncIterator[trimcp.ClientSession]:
        auth = self.oauth() if oauth is None else oauth
        async with trimcp.Client("host").connect(trimcp.http(self.url, auth=auth), **more) as session:
            with trio.fail_after(SECONDS):
                yield session


@asynccontextmanager
async def protected(
    software: Any = "own", *, settings: trimcp.HttpSettings | None = None, **more: Any
) -> AsyncIterator[Protected]:
    sock = trio.socket.socket()
    await sock.bind(("127.0.0.1", 0))
    port = sock.getsockname()[1]
    sock.close()
    async with toy_issuer() as issuer, trio.open_nursery() as nursery:
        url = f"http://127.0.0.1:{port}/mcp"
        auth = ResourceServer(url, [issuer.url], **more)

        async def serve(task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED) -> None:
            options: Any = {"port": port, "software": software, "settings": settings, "task_status": task_status}
            await trimcp.serve_http(offering(), auth=auth, **options)

        await nursery.start(serve)
        yield Protected(url, issuer)
        nursery.cancel_scope.cancel()


@pytest.fixture(params=["own", "hypercorn"])
def hosts(request: pytest.FixtureRequest) -> AbstractAsyncContextManager[Protected]:
    return protected(request.param)


async def test_somebody_logs_in_and_steps_up(hosts: AbstractAsyncContextManager[Protected]) -> None:
    async with hosts as there, there.connected() as session:
        assert (await session.call_tool("whoami")).text.startswith("ann by client-")
        assert [tool.name for tool in await session.list_tools()] == ["whoami", "rest"]
        assert len(there.said) == 1
        assert (await session.call_tool("write")).text == "written"
        assert len(there.said) == 2  # asked for the scope that was missing
        assert len(await session.list_tools()) == 3


@trimcp.testing.every_revision
async def test_who_may_not_gets_the_error_that_says_why(revision: trimcp.Revision) -> None:
    async with protected() as there:
        fixed = trimcp.http(there.url, headers={"Authorization": f"Bearer {there.issuer.token('ann', there.url)}"})
        async with trimcp.Client("host").connect(fixed, revision=revision) as session:
            with pytest.raises(trimcp.RemoteError, match="needs the scopes files:write") as caught:
                await session.call_tool("write")
            assert (caught.value.code, caught.value.data) == (FORBIDDEN, {"requiredScopes": ["files:write"]})
        async with there.connected(revision=revision) as session:
            with pytest.raises(trimcp.RemoteError, match="not on a Sunday"):
                await session.call_tool("rest")
        assert len(there.said) == 1  # a denial is no reason to log in again


@trimcp.testing.every_revision
async def test_in_every_revision(revision: trimcp.Revision) -> None:
    async with protected() as there, there.connected(revision=revision) as session:
        assert (await session.call_tool("whoami")).text.startswith("ann by")
        assert (await session.call_tool("write")).text == "written"


async def test_a_program_and_a_fixed_token_come_in_too() -> None:
    async with protected(also=bearer_tokens({"fixed": "robot"})) as there:
        there.issuer.clients = {"robot": "s3cret"}
        async with there.connected(OAuth(ClientCredentials("robot", "s3cret", issuer=there.issuer.url))) as session:
            assert (await session.call_tool("whoami")).text == "robot by robot"
        target = trimcp.http(there.url, headers={"Authorization": "Bearer fixed"})
        async with trimcp.Client("host").connect(target) as session:
            assert (await session.call_tool("write")).text == "written"


async def test_tokens_bound_to_a_key() -> None:
    async with protected(binding="required", nonces=True) as there:
        async with there.connected(there.oauth(dpop=True)) as session:
            for _ in range(3):
                assert (await session.call_tool("whoami")).text.startswith("ann by")
        with pytest.raises(AuthorizationError, match="refuses the token"):
            async with there.connected():
                pass


async def test_who_cannot_log_in_is_told_why() -> None:
    async def refuse(url: str) -> None:
        async with httpx2.AsyncClient() as browser:
            answer = await browser.post(url, data={}, follow_redirects=False)
            await browser.get(answer.headers["location"])

    async with protected() as there:
        oauth = OAuth(user_agent=Browser(open=refuse, notify=there.said.append))
        with pytest.raises(AuthorizationError, match="the login was refused") as caught:
            async with there.connected(oauth):
                pass
        assert caught.value.code == "access_denied"


async def test_a_request_without_a_token_learns_where_to_go_and_a_page_may_read_it() -> None:
    async with protected() as there, httpx2.AsyncClient() as web:
        reply = await web.post(there.url, json={}, headers={"Accept": "application/json, text/event-stream"})
        assert reply.status_code == 401
        base = there.url.removesuffix("/mcp")
        assert (
            f'resource_metadata="{base}/.well-known/oauth-protected-resource/mcp"' in reply.headers["www-authenticate"]
        )
        for path in ("/mcp", ""):
            found = await web.get(f"{base}/.well-known/oauth-protected-resource{path}")
            assert json.loads(found.content)["authorization_servers"] == [there.issuer.url]
            assert found.headers["access-control-allow-origin"] == "*"


@pytest.mark.parametrize("where", ["/mcp", "/sse", "/ws"])
async def test_every_way_in_is_guarded(where: str) -> None:
    async with protected() as there, httpx2.AsyncClient() as web:
        base = there.url.removesuffix("/mcp")
        for token in ({}, {"Authorization": f"Bearer {there.issuer.token('eve', 'https://other.example')}"}):
            reply = await web.get(base + where, headers={"Accept": "text/event-stream", **token})
            assert reply.status_code == 401
        reply = await web.get(f"{base}{where}?access_token={there.issuer.token('ann', there.url)}")
        assert reply.status_code == 400


async def test_a_websocket_is_opened_with_a_token() -> None:
    async with protected() as there:
        url = there.url.replace("http://", "ws://").replace("/mcp", "/ws")
        headers = {"Authorization": f"Bearer {there.issuer.token('ann', there.url, 'files:write')}"}
        async with trimcp.Client("host").connect(trimcp.websocket(url, headers=headers)) as session:
            assert (await session.call_tool("whoami")).text == "ann by test"
            assert (await session.call_tool("write")).text == "written"
        headers = {"Authorization": f"Bearer {there.issuer.token('ann', there.url)}"}
        async with trimcp.Client("host").connect(trimcp.websocket(url, headers=headers)) as session:
            with pytest.raises(trimcp.RemoteError, match="needs the scopes files:write"):
                await session.call_tool("write")


# A token that ends while something is open


def soon(there: Protected) -> dict[str, str]:
    """Headers with a token that is good for a second, and what clocks may differ."""
    return {"Authorization": f"Bearer {there.issuer.token('ann', there.url, exp=there.issuer.now() + 1)}"}


async def test_a_websocket_ends_with_its_token() -> None:
    async with protected(skew=0.0) as there:
        url = there.url.replace("http://", "ws://").replace("/mcp", "/ws")
        async with trimcp.Client("host").connect(trimcp.websocket(url, headers=soon(there))) as session:
            await session.call_tool("whoami")
            with trio.fail_after(SECONDS):
                await session.wait_lost()


@pytest.mark.parametrize("path", ["/sse", "/mcp"])
async def test_a_stream_that_is_listened_to_ends_with_its_token(path: str) -> None:
    settings = trimcp.HttpSettings(keep_alive=0.2)
    async with protected(skew=0.0, settings=settings) as there, httpx2.AsyncClient() as web:
        base, headers = there.url.removesuffix("/mcp"), {**soon(there), "Accept": "text/event-stream"}
        if path == "/mcp":
            params = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "x", "version": "1"}}
            hello = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": params}
            both = {**headers, "Accept": "application/json, text/event-stream"}
            reply = await web.post(there.url, json=hello, headers=both)
            headers["Mcp-Session-Id"] = reply.headers["mcp-session-id"]
        with trio.fail_after(SECONDS):
            async with web.stream("GET", base + path, headers=headers) as stream:
                assert stream.status_code == 200
                text = "".join([piece async for piece in stream.aiter_text()])
        assert "the access token has expired" in text
        again = await web.get(base + path, headers=headers)
        assert again.status_code == 401


async def test_a_subscription_ends_with_its_token() -> None:
    settings = trimcp.HttpSettings(keep_alive=0.2)
    async with protected(skew=0.0, settings=settings) as there:
        target = trimcp.http(there.url, headers=soon(there))
        async with trimcp.Client("host").connect(target, revision=trimcp.LATEST) as session:
            with trio.fail_after(SECONDS), pytest.raises(trimcp.ConnectionLost):
                async with session.listen(tools=True) as changes:
                    async for _ in changes:
                        pass


async def test_a_token_that_is_bound_to_a_certificate_is_good_only_over_its_connection() -> None:
    context, digest = client_certificate_context()
    issuer = ToyIssuer("https://auth.example")
    keys = json.dumps({"keys": [issuer.key.as_dict(private=False)]}).encode()

    async def answer(request: httpx2.Request) -> httpx2.Response:
        await trio.lowlevel.checkpoint()
        described = {"issuer": issuer.url, "jwks_uri": f"{issuer.url}/keys"}
        return reply(200, keys if request.url.path == "/keys" else described)

    url = "https://localhost/mcp"
    web = httpx2.AsyncClient(transport=httpx2.MockTransport(answer))
    auth = ResourceServer(url, [issuer.url], http_client=web)
    token = issuer.token("ann", url, cnf={"x5t#S256": digest})
    async with trio.open_nursery() as nursery:
        serve = partial(trimcp.serve_http, offering(), auth=auth, port=0, ssl_context=mutual_context("localhost"))
        urls = await nursery.start(serve)
        there = urls[0].replace("127.0.0.1", "localhost")
        for shown, good in ((context, True), (client_context(), False)):
            client = httpx2.AsyncClient(verify=shown)
            target = trimcp.http(there, headers={"Authorization": f"Bearer {token}"}, client=client)
            async with client:
                refused = nullcontext() if good else pytest.raises(trimcp.ConnectionLost, match="another certificate")
                with refused:
                    async with trimcp.Client("host").connect(target) as session:
                        assert (await session.call_tool("whoami")).text == "ann by test"
        nursery.cancel_scope.cancel()
