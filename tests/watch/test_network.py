"""Looking at a server over the network: who may, and what they see."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from tempfile import TemporaryDirectory
from typing import Any

import attrs
import pytest
import trio

import trimcp
from tests.fuzz.effort import PATIENCE
from tests.peers.http1 import Answer, HttpWire, http_request
from tests.peers.serving import Place, served
from trimcp.cli.top.network import NetworkServer
from trimcp.errors import LocalError
from trimcp.transports.http.client.target import HttpServer
from trimcp.watch import Metrics, NetworkAdmin
from trimcp.watch.admin import serve_admin
from trimcp.watch.network import PATH, SCOPE

PATHS = (PATH, "/metrics")
OPERATOR = "Authorization: Bearer operator"
JSON = "Content-Type: application/json"


@pytest.fixture(autouse=True)
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with TemporaryDirectory() as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield


def tokens(**more: trimcp.Principal) -> Any:
    return trimcp.bearer_tokens(
        {
            "operator": trimcp.Principal("ops", scopes=[SCOPE]),
            "user": "ada",
            "other": trimcp.Principal("bob", scopes=["files:read", "trimcp"]),
            **more,
        }
    )


@attrs.frozen
class Looked:
    """A server that is looked at over the network."""

    server: trimcp.Server[None]
    place: Place
    told: list[str]

    async def ask(
        self, *lines: str, path: str = PATH, method: str = "POST", host: str = "", body: bytes = b""
    ) -> Answer:
        stream = await trio.open_tcp_stream("127.0.0.1", self.place.port)
        host = host or f"127.0.0.1:{self.place.port}"
        async with stream:
            return await HttpWire(stream).ask(http_request(method, path, *lines, body=body or None, host=host))

    def operator(self, *, brief: bool = False) -> NetworkServer:
        token = "brief" if brief else "operator"
        return NetworkServer(HttpServer(self.place.url, headers={"authorization": f"Bearer {token}"}))

    async def request(self, by: NetworkServer, tool: str = "hold") -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the picture with a call of this tool, and the call, once it runs."""
        with trio.fail_after(PATIENCE):
            async with by.watching() as pictures:
                while True:
                    for picture in await pictures.pictures():
                        for session in picture["sessions"]:
                            for request in session["requests"]:
                                if request["target"] == tool:
                                    return picture, request


@asynccontextmanager
async def looked(authenticate: Any = None, **options: Any) -> AsyncIterator[Looked]:
    server: trimcp.Server[None] = trimcp.Server("index")
    told: list[str] = []

    @server.tool
    async def hold(*, ctx: trimcp.Context) -> str:
        try:
            await trio.sleep_forever()
        finally:
            told.append(str(ctx.cancel_detail))
        return ""

    routes = {PATH: NetworkAdmin(server, **options), "/metrics": Metrics(server, scope=SCOPE)}
    async with served(server, settings=trimcp.HttpSettings(routes=routes, authenticate=authenticate)) as place:
        yield Looked(server, place, told)


DRAIN = json.dumps({"do": "drain", "source": "here"}).encode()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "line", ["", "Authorization: Bearer nonsense", "Authorization: Basic b3BlcmF0b3I6", "Cookie: token=operator"]
)
async def test_without_a_token_nothing_is_told_or_done(path: str, line: str) -> None:
    async with looked(tokens()) as at:
        for method in ("GET", "POST"):
            answer = await at.ask(JSON, *([line] if line else []), path=path, method=method, body=DRAIN)
            assert answer.status == 401
            assert b"index" not in answer.body


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("token", ["user", "other"])
async def test_a_token_without_the_scope_is_refused(path: str, token: str, caplog: pytest.LogCaptureFixture) -> None:
    async with looked(tokens()) as at:
        for method in ("GET", "POST"):
            answer = await at.ask(JSON, f"Authorization: Bearer {token}", path=path, method=method, body=DRAIN)
            if answer.status != 405:  # metrics take no POST
                assert answer.status == 403
                assert f'scope="{SCOPE}"' in answer.headers["www-authenticate"]
            assert b"index" not in answer.body
    if path == PATH:
        assert "admin_refused" in caplog.text


@pytest.mark.parametrize("path", PATHS)
async def test_on_a_server_that_authenticates_nobody_nobody_may(path: str) -> None:
    async with looked() as at:
        for line in ("", OPERATOR):
            answer = await at.ask(
                JSON, *([line] if line else []), path=path, method="GET" if path != PATH else "POST", body=DRAIN
            )
            assert answer.status == 403


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("origin", ["https://evil.example", "http://127.0.0.1:1", "null", "http://localhost"])
async def test_a_page_of_another_origin_is_refused_even_with_the_token(path: str, origin: str) -> None:
    async with looked(tokens()) as at:
        method = "POST" if path == PATH else "GET"
        answer = await at.ask(JSON, OPERATOR, f"Origin: {origin}", path=path, method=method, body=DRAIN)
        assert answer.status == 403
        assert not answer.headers.get("access-control-allow-origin")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "localhost.evil.example"])
async def test_a_name_that_was_rebound_to_this_machine_is_refused(path: str, host: str) -> None:
    async with looked(tokens()) as at:
        method = "POST" if path == PATH else "GET"
        assert (await at.ask(JSON, OPERATOR, path=path, method=method, body=DRAIN, host=host)).status == 403


@pytest.mark.parametrize(
    ("method", "line", "status"),
    [
        ("GET", "", 405),
        ("HEAD", "", 405),
        ("POST", "Content-Type: application/x-www-form-urlencoded", 415),
        ("POST", "Content-Type: multipart/form-data; boundary=x", 415),
        ("POST", "Content-Type: text/plain", 415),
        ("POST", "", 415),
    ],
)
async def test_what_a_form_of_another_page_can_send_does_nothing(method: str, line: str, status: int) -> None:
    async with looked(tokens()) as at:
        answer = await at.ask(OPERATOR, *([line] if line else []), method=method, body=DRAIN)
        assert answer.status == status
        assert (await at.ask(JSON, OPERATOR, body=b'{"do":"nothing"}')).status == 400


@pytest.mark.parametrize("body", [b"nonsense", b"[]", b"{}", b'{"do":["drain"]}', b'{"do":"picture"}', b'{"do":"act"}'])
async def test_what_is_no_command_is_refused(body: bytes) -> None:
    async with looked(tokens()) as at:
        assert (await at.ask(JSON, OPERATOR, body=body)).status == 400


async def test_an_operator_sees_what_runs_and_cancels_it(caplog: pytest.LogCaptureFixture) -> None:
    refused: list[str] = []

    async def call(place: Place) -> None:
        with pytest.raises(trimcp.RemoteError) as caught:
            async with trimcp.Client("user").connect(
                HttpServer(place.url, headers={"authorization": "Bearer user"})
            ) as session:
                await session.call_tool("hold")
        refused.append(str(caught.value))

    async with looked(tokens()) as at:
        operator = at.operator()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(call, at.place)
            picture, request = await at.request(operator)
            assert (picture["server"], picture["source"]) == ("index", "here")
            assert "sleep_forever" in request["waits"][-1]
            await operator.act("here", "cancel", request=request["key"], reason="no room")
        with pytest.raises(LocalError, match="has ended"):
            await operator.act("here", "cancel", request=request["key"], reason="again")
        with pytest.raises(LocalError, match="not there"):
            await operator.act("/run/somebody/else.sock", "drain")
    assert at.told == ["no room"]
    assert "no room" in refused[0]
    (line,) = [one.getMessage() for one in caplog.records if one.name == "trimcp.admin"]
    assert line == "'ops' over the network cancels tools/call 'hold': 'no room'"


async def test_the_end_of_a_token_ends_the_view() -> None:
    brief = trimcp.Principal("ops", scopes=[SCOPE], expires_at=time.time() + 0.3)
    async with looked(tokens(brief=brief)) as at:
        operator = at.operator(brief=True)
        with trio.fail_after(PATIENCE):
            async with operator.watching() as pictures:
                while await pictures.pictures():
                    pass


async def test_processes_that_share_a_port_are_one_view(caplog: pytest.LogCaptureFixture) -> None:
    other: trimcp.Server[None] = trimcp.Server("other")
    async with looked(tokens(), group="ab12") as at:
        operator = at.operator()
        async with (
            serve_admin(at.server, group="ab12"),
            serve_admin(other, group="ab12"),
            serve_admin(trimcp.Server("stranger"), group="cd34"),
            serve_admin(trimcp.Server("alone")),
            operator.watching() as pictures,
        ):
            found = {one["server"]: one["source"] for one in await pictures.pictures()}
            assert set(found) == {"index", "other"}
            assert "/" not in found["other"]
            await operator.act(found["other"], "drain")
            with pytest.raises(LocalError, match="not there"):
                await operator.act("here", "drain")
    assert "'ops' over the network asks for drain" in caplog.text


@pytest.mark.parametrize(
    ("token", "path", "told"),
    [
        ("nonsense", "/mcp", "it wants a token"),
        ("user", "/mcp", f"the scope {SCOPE}"),
        ("operator", "/elsewhere/mcp", "--admin-http"),
    ],
)
async def test_a_viewer_that_is_refused_is_told_why(token: str, path: str, told: str) -> None:
    async with looked(tokens()) as at:
        url = at.place.url.replace("/mcp", path)
        by = NetworkServer(HttpServer(url, headers={"authorization": f"Bearer {token}"}))
        with pytest.raises(LocalError, match=told):
            async with by.watching():
                pass


async def test_there_are_so_many_viewers_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trimcp.watch.network._MOST", 1)
    async with looked(tokens()) as at, at.operator().watching() as pictures:
        operator = at.operator()
        assert await pictures.pictures()
        with pytest.raises(LocalError, match="503"):
            await operator.act("here", "drain")
        assert await pictures.pictures()


@pytest.mark.parametrize("text", [False, True])
async def test_what_is_said_in_a_session_is_told_over_the_network_and_logged_if_it_is_read(
    text: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with looked(tokens()) as at, trio.open_nursery() as nursery:
        operator = at.operator()
        target = HttpServer(at.place.url, headers={"authorization": "Bearer user"})
        async with trimcp.Client("user").connect(target, revision="2025-11-25") as session:
            nursery.start_soon(session.call_tool, "hold")
            picture, _ = await at.request(operator)
            key = next(one["key"] for one in picture["sessions"] if one["requests"])
            asked = {"do": "wire", "source": "here", "session": key, "text": text}
            with trio.fail_after(PATIENCE):
                async with operator.lines(asked) as values:
                    assert (await anext(values))["events"] == []
                    await session.ping()
                    while not (events := (await anext(values))["events"]):
                        pass
            nursery.cancel_scope.cancel()
    assert events[0]["method"] == "ping"
    assert bool(events[0]["text"]) is text
    assert any("'ops' over the network reads what is said" in line for line in caplog.messages) is text
