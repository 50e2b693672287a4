"""Attacks on a protected server and on a client that logs in, over real HTTP where that is where they happen."""

from __future__ import annotations

import json
import logging
import re
import traceback
from functools import partial
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx2
import pytest
import trio

import trimcp
from tests.auth.authority import ISSUER, SERVER, Authority, reply
from tests.auth.test_flow import login
from tests.auth.test_oauth import KEY, UNAUTHORIZED, World, ask
from tests.auth.test_protected import SECONDS, Protected, log_in, protected
from trimcp import security
from trimcp.auth import AuthorizationError, Browser, MemoryStore, OAuth, Registration, Tokens
from trimcp.auth.credentials import Credentials
from trimcp.auth.flow import authorization_code
from trimcp.auth.metadata import AuthorizationServer
from trimcp.testing import ToyIssuer

BOTH = "application/json, text/event-stream"


# Replies of an authorization server

ODD: list[Any] = [
    *(None, True, 0, -1, 2**64, 10**400, 1e308, float("nan"), float("inf")),
    *("", "\ud800", "a\ud800b", "\x00", "\x1b[31m", "\u00e9", "x" * 5_000),
    *("http://[", "http://x:99999/", "https://a:b@c/", "https://\u2100.example/", "https://auth.example/\ud800"),
    *([], {}, [[]], [None], ["S256", "\ud800"], {"a": 1}),
]
MEMBERS = {
    "resource": ("resource", "authorization_servers", "scopes_supported"),
    "metadata": (
        *("issuer", "authorization_endpoint", "token_endpoint", "registration_endpoint", "scopes_supported"),
        *("token_endpoint_auth_methods_supported", "code_challenge_methods_supported"),
        *("authorization_response_iss_parameter_supported", "dpop_signing_alg_values_supported"),
    ),
    "registers": ("client_id", "client_secret", "client_secret_expires_at", "token_endpoint_auth_method", "scope"),
    "tokens": ("access_token", "token_type", "scope", "refresh_token", "expires_in", "error", "error_description"),
}


@pytest.mark.parametrize(("where", "name"), [(where, name) for where, names in MEMBERS.items() for name in names])
@pytest.mark.parametrize("revision", ["2025-03-26", "2025-06-18"])
async def test_a_reply_of_any_members_is_used_or_an_error_and_crashes_nothing(
    where: str, name: str, revision: str, caplog: pytest.LogCaptureFixture
) -> None:
    for value in ODD:
        world = World()
        world.person.says_yes.set()
        authority = world.authority
        if revision == "2025-03-26":  # no metadata of the server
            authority.resource_at, authority.issuer = None, "https://mcp.example"
            authority.metadata_at = f"{authority.issuer}/.well-known/oauth-authorization-server"
        authority.metadata = {"token_endpoint_auth_methods_supported": ["client_secret_basic"]}
        authority.tokens = {"refresh_token": "r"}
        getattr(authority, where)[name] = value
        errors: list[str] = []
        try:
            async with world.oauth.connected(SERVER) as authorizer:
                await ask(authorizer)
                world.clock.now += 10_000
                await ask(authorizer)
        except AuthorizationError as error:
            errors.append(str(error))
        assert all(text.isprintable() for text in errors), value
        for key in await world.oauth.store.keys():
            kept = await world.oauth.store.load(key)
            assert kept is not None
            assert Credentials.from_json(kept.to_json()) == kept, value
        assert "Traceback" not in caplog.text, value


@pytest.mark.parametrize("where", ["tokens", "registers"])
async def test_truth_is_no_number_of_seconds(where: str) -> None:
    world = World()
    world.person.says_yes.set()
    world.authority.tokens = {"refresh_token": "r"}
    ends = {"tokens": "expires_in", "registers": "client_secret_expires_at"}[where]
    getattr(world.authority, where)[ends] = True
    async with world.oauth.connected(SERVER) as authorizer:
        await ask(authorizer)
        world.clock.now += 100
        assert (await authorizer.headers("POST", SERVER)) == {"authorization": "Bearer token-1"}
        kept = await world.oauth.store.load(KEY)
        assert kept is not None
        assert kept.registration.expires_at is None


# Heads


async def exchange(there: Protected, head: bytes) -> bytes:
    """Send a request with these header lines as they are, and return all that is answered."""
    parts = urlsplit(there.url)
    stream = await trio.open_tcp_stream("127.0.0.1", parts.port or 0)
    body = b'{"jsonrpc":"2.0","id":1,"method":"ping"}'
    request = (
        b"POST /mcp HTTP/1.1\r\nHost: %b\r\nContent-Type: application/json\r\nConnection: close\r\n"
        b"Accept: application/json, text/event-stream\r\nContent-Length: %d\r\n%b\r\n%b"
    ) % (parts.netloc.encode(), len(body), head, body)
    answer = b""
    async with stream:
        with trio.fail_after(SECONDS):
            try:
                await stream.send_all(request)
                async for data in stream:
                    answer += data
            except trio.BrokenResourceError:  # it was closed with some of the request unread
                pass
    return answer


HEADS = {
    "no token": b"Authorization: Bearer\r\n",
    "blanks": b"Authorization: Bearer      \r\n",
    "no scheme": b"Authorization: \r\n",
    "a token of 15 KiB": b"Authorization: Bearer " + b"a" * 15_000 + b"\r\n",
    "three parts of 5 KiB": b"Authorization: Bearer " + b".".join([b"a" * 5_000] * 3) + b"\r\n",
    "a token of 1 MiB": b"Authorization: Bearer " + b"a" * 1_048_576 + b"\r\n",
    "not ASCII": b"Authorization: Bearer \xff\xfe\xe4.\xc3\xa4.x\r\n",
    "a tab": b"Authorization: Bearer a\tb\r\n",
    "a NUL": b"Authorization: Bearer a\x00b\r\n",
    "two of them": b"Authorization: Bearer GOOD\r\nAuthorization: Bearer GOOD\r\n",
    "a list": b"Authorization: Bearer GOOD, Bearer GOOD\r\n",
    "folded": b"Authorization: Bearer\r\n GOOD\r\n",
    "a bare line end": b"Authorization: Bearer GOOD\nX: y\r\n",
    "a proof without a key": b"Authorization: DPoP GOOD\r\nDPoP: a.b.c\r\n",
    "a proof of 15 KiB": b"Authorization: DPoP GOOD\r\nDPoP: " + b"a" * 15_000 + b"\r\n",
    "basic": b"Authorization: Basic YTpi\r\n",
    "a hundred others": b"".join(b"Authorization-%d: Bearer GOOD\r\n" % number for number in range(90)),
    "another name": b"X-Authorization: Bearer GOOD\r\n",
}


@pytest.mark.parametrize("host", ["own", "hypercorn"])
async def test_no_head_however_malformed_or_huge_gets_in_or_ends_anything(
    host: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with protected(host) as there:
        good = there.issuer.token("ann", there.url).encode()
        for name, head in HEADS.items():
            answer = await exchange(there, head.replace(b"GOOD", good))
            assert not answer or 400 <= int(answer[9:12]) < 500, (name, answer[:80])
            assert good not in answer
        answer = await exchange(there, b"authorization: bearer " + good + b"\r\n")
        assert answer[9:12] not in (b"401", b"403"), answer[:200]
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


# What belongs to others


async def test_a_session_and_its_stream_are_nobody_elses() -> None:
    async with protected() as there, httpx2.AsyncClient() as web:

        def of(user: str, **more: str) -> dict[str, str]:
            return {"Authorization": f"Bearer {there.issuer.token(user, there.url)}", "Accept": BOTH, **more}

        params = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "x", "version": "1"}}
        hello = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": params}
        opened = await web.post(there.url, json=hello, headers=of("ann"))
        session = {"Mcp-Session-Id": opened.headers["mcp-session-id"], "MCP-Protocol-Version": "2025-11-25"}
        call = {"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": {"name": "whoami"}}
        stream = {"Accept": "text/event-stream", **session}
        for user, status in (("eve", 404), ("ann", 200)):  # ann with another token than before, which is no matter
            assert (await web.post(there.url, json=call, headers=of(user, **session))).status_code == status
            async with web.stream("GET", there.url, headers=of(user, **stream)) as answer:
                assert answer.status_code == status
        assert (await web.delete(there.url, headers=of("eve", **session))).status_code == 404
        assert (await web.post(there.url, json=call, headers=of("ann", **session))).status_code == 200


async def test_the_address_of_a_stream_of_http_sse_is_of_no_use_to_others() -> None:
    async with protected() as there, httpx2.AsyncClient() as web:
        base = there.url.removesuffix("/mcp")
        ann, eve = [
            {"Authorization": f"Bearer {there.issuer.token(user, there.url)}", "Accept": "text/event-stream"}
            for user in ("ann", "eve")
        ]
        stream = await trio.open_tcp_stream("127.0.0.1", urlsplit(base).port or 0)
        async with stream:
            lines = "".join(f"{name}: {value}\r\n" for name, value in ann.items())
            await stream.send_all(f"GET /sse HTTP/1.1\r\nHost: {urlsplit(base).netloc}\r\n{lines}\r\n".encode())
            text = b""
            with trio.fail_after(SECONDS):
                while (found := re.search(rb"data: (/\S+)\r?\n", text)) is None:
                    text += await stream.receive_some()
            place = base + found[1].decode()
            ping = {"jsonrpc": "2.0", "id": 1, "method": "ping"}
            assert (await web.post(place, json=ping, headers={**eve, "Accept": BOTH})).status_code == 404
            assert (await web.post(place, json=ping, headers={**ann, "Accept": BOTH})).status_code == 202


# A client that is led astray


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize(
    "target", ["https://evil.example/mcp", "https://mcp.example:444/mcp", "http://mcp.example/mcp"]
)
async def test_a_redirect_of_the_resource_takes_no_token_to_another_host(status: int, target: str) -> None:
    asked: list[httpx2.Request] = []

    async def answer(request: httpx2.Request) -> httpx2.Response:
        await trio.lowlevel.checkpoint()
        asked.append(request)
        if str(request.url) == SERVER:
            return reply(status, b"", {"location": target})
        return reply(401, b"", UNAUTHORIZED)

    store = MemoryStore()
    await store.save(KEY, Credentials(SERVER, ISSUER, Registration("me"), Tokens("s3cret")))
    web = httpx2.AsyncClient(transport=httpx2.MockTransport(answer))
    with trio.fail_after(SECONDS), pytest.raises(trimcp.McpError):
        async with trimcp.Client("host").connect(
            trimcp.http(SERVER, auth=OAuth(store=store, http_client=web), client=web, retries=0)
        ):
            pass
    assert [request for request in asked if request.headers.get("authorization") == "Bearer s3cret"]
    for request in asked:
        assert (str(request.url) == SERVER) or "authorization" not in request.headers
        assert request.url.host == "mcp.example"


async def test_a_token_for_one_server_is_sent_to_no_other(world: World) -> None:
    world.person.says_yes.set()
    async with world.oauth.connected(SERVER) as one, world.oauth.connected("https://evil.example/mcp") as other:
        await ask(one)
        assert await other.headers("POST", "https://evil.example/mcp") == {}
        assert await other.headers("POST", SERVER) == {}
        # It names the other's authorization server and resource, to get a token for it.
        world.authority.resource_at = "https://evil.example/.well-known/oauth-protected-resource/mcp"
        with pytest.raises(AuthorizationError, match="not about"):
            await ask(other)
    assert world.of("/token") == 1


@pytest.fixture
def world() -> World:
    return World()


@pytest.mark.parametrize("advertised", [True, False])
def test_a_code_of_one_authorization_server_is_not_shown_to_another(advertised: bool) -> None:
    """Mix-up (RFC 9207 section 1): the login begins at evil's, and the honest one's answer comes back."""
    evil = "https://evil.example"
    authority = Authority(issuer=evil, metadata_at=f"{evil}/.well-known/oauth-authorization-server", iss=ISSUER)
    authority.metadata = {
        "authorization_endpoint": f"{ISSUER}/authorize",
        "authorization_response_iss_parameter_supported": advertised,
    }
    with pytest.raises(AuthorizationError, match=f"not from {evil}"):
        authority.walk(login().begin(None, None))
    assert not [url for url in authority.urls if url.endswith("/token")]


@pytest.mark.parametrize(
    "query",
    [
        "code=a&code=b&state=s&iss=I",
        "code=a&code=a&state=s&iss=I",
        "code=a&state=s&state=s&iss=I",
        "code=a&state=s&iss=I&iss=I",
        "code=a&state=t&iss=I",
        "code=a&iss=I",
        "code=a&state=%73%00&iss=I",
        "code=a&state=s&iss=J",
        "state=s&iss=I",
        "code=&state=s&iss=I",
        "code=a&state=ä&iss=I",
        "a=1&" * 60 + "code=a&state=s&iss=I",
    ],
)
def test_a_code_that_comes_back_twice_or_with_something_else_is_not_used(query: str) -> None:
    with pytest.raises(AuthorizationError):
        authorization_code(f"http://127.0.0.1:1/callback?{query}", "s", AuthorizationServer("I"))


async def test_a_code_is_sent_once_whatever_becomes_of_it(world: World) -> None:
    world.person.says_yes.set()
    world.authority.refuses = [{"error": "invalid_grant"}]
    async with world.oauth.connected(SERVER) as authorizer:
        with pytest.raises(AuthorizationError, match="invalid_grant"):
            await ask(authorizer)
        await ask(authorizer)
    verifiers = [
        parse_qs((fetch.body or b"").decode())["code_verifier"][0]
        for fetch in world.authority.asked
        if fetch.url.endswith("/token")
    ]
    assert len(set(verifiers)) == 2  # another login, with secrets of its own


# Nothing secret is written down


async def test_no_token_code_or_secret_is_written_anywhere(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.DEBUG)
    security.tell_left_out()
    secrets: set[str] = set()
    lines: list[str] = []
    records: list[Any] = []
    make_token, give, approve = ToyIssuer.token, ToyIssuer._give, ToyIssuer._approve

    def token(self: ToyIssuer, *args: Any, **more: Any) -> str:
        made = make_token(self, *args, **more)
        _, claims, signature = made.split(".")
        secrets.update((made, claims[:40], signature))  # any part of it
        return made

    def note(self: ToyIssuer, head: Any, fields: Any) -> Any:
        secrets.update(fields[name] for name in ("code", "code_verifier", "refresh_token") if name in fields)
        if "dpop" in head.headers:
            secrets.add(head.headers["dpop"].rpartition(".")[2])
        answer = give(self, head, fields)
        secrets.update(self._refresh)
        return answer

    def approved(self: ToyIssuer, query: Any, user: str) -> Any:
        answer = approve(self, query, user)
        secrets.update(self._codes)
        return answer

    monkeypatch.setattr(ToyIssuer, "token", token)
    monkeypatch.setattr(ToyIssuer, "_give", note)
    monkeypatch.setattr(ToyIssuer, "_approve", approved)
    audit = trimcp.guard.Audit(write=records.append, arguments="whole")
    monkeypatch.setattr("tests.auth.test_protected.trimcp.Server", partial(trimcp.Server, audit=audit))
    settings = trimcp.HttpSettings(access_log=trimcp.AccessLog(), trace=lines.append)
    async with protected(settings=settings, nonces=True) as there:
        store = MemoryStore()
        for dpop in (False, True):
            oauth = OAuth(user_agent=Browser(open=log_in, notify=lines.append), store=store, dpop=dpop)
            await oauth.login(there.url)
            target = trimcp.http(there.url, auth=oauth, trace=lines.append)
            async with trimcp.Client("host").connect(target) as session:
                lines += [repr(session), repr(oauth), repr(target)]
                await session.call_tool("whoami")
                await session.call_tool("write")
            kept = await store.load(next(iter(await store.keys())))
            assert kept is not None
            lines += [repr(kept), repr(kept.tokens), repr(store)]
        async with httpx2.AsyncClient() as web:  # refused ones are no less secret
            for bad in (
                there.issuer.token("eve", "https://other.example"),
                there.issuer.token("eve", there.url, exp=1),
                there.issuer.token("eve", there.url) + "x",
            ):
                answer = await web.post(there.url, json={}, headers={"Authorization": f"Bearer {bad}", "Accept": BOTH})
                assert answer.status_code == 401
                lines.append(answer.text + json.dumps(dict(answer.headers)))
                answer = await web.get(f"{there.url}?access_token={bad}")
                assert answer.status_code == 400
                lines.append(answer.text)
    security.tell_left_out()
    texts = [*lines, json.dumps(records, default=repr)]
    for record in caplog.records:
        if record.name.startswith(("httpx2", "httpcore2")):  # what this test's browser says; our own requests do not
            assert "/token" not in record.getMessage()
            continue
        texts += [trimcp.JsonFormatter().format(record), repr(vars(record))]
        texts += traceback.format_exception(*record.exc_info) if record.exc_info else []
    everything = "\n".join(texts)
    assert len(secrets) > 10
    for name in ("trimcp.access", "trimcp.auth", "trimcp.security"):
        assert name in {record.name for record in caplog.records}
    assert "tools/call" in everything
    assert not [secret for secret in secrets if secret in everything]
