"""Callback tools against a host with TLS of its own, in a network whose names and addresses the test decides on.

The host listens on loopback; `Net` leads connections to its public address there, and refuses all others.
"""

from __future__ import annotations

import gzip
import json
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import attrs
import pytest
import trio
import trio.testing

import trimcp
from tests.peers import tls
from trimcp import security
from trimcp.agent_tools import (
    AgentCaller,
    BadSignature,
    Callbacks,
    Catalog,
    DeadlinePassed,
    InvalidArguments,
    Manifest,
    NotAllowed,
    ProviderGone,
    RegistrationRules,
    ToolFailed,
    TooMuch,
    UnfitManifest,
    verify_callback,
)
from trimcp.agent_tools.messages import signatures
from trimcp.testing.connect import connected

SECRET = b"a secret of thirty-two bytes ..."
HOST = "tools.example"
PUBLIC = "93.184.216.34"
OTHER = "93.184.216.35"
URL = f"https://{HOST}/call?key=of-the-agent"
ADA = AgentCaller(trimcp.Principal("ada", scopes={"tools:register"}), "agent-a")
RAW = {"name": "pay", "description": "d", "parameters": {"type": "object"}, "callback": URL}
MANIFEST = Manifest.parse(RAW)


@attrs.define
class Request:
    """One request as it came."""

    line: str
    headers: dict[str, str]
    body: bytes

    @property
    def message(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.body)
        return found


Answer = Callable[[Request, trio.SSLStream[trio.SocketStream]], Awaitable[None]]


@attrs.define
class Net(trio.abc.HostnameResolver):
    """The names, the addresses that lead somewhere, and what was asked and connected to."""

    port: int = 0
    names: dict[str, list[str]] = attrs.field(factory=lambda: {HOST: [PUBLIC]})
    reachable: set[str] = attrs.field(factory=lambda: {PUBLIC, OTHER})
    asked: list[str] = attrs.field(factory=list)
    connected: list[tuple[str, int]] = attrs.field(factory=list)
    requests: list[Request] = attrs.field(factory=list)
    server_names: list[str | None] = attrs.field(factory=list)
    answer: Answer | None = None
    resolved: trio.Event | None = None  # names are resolved after this

    async def getaddrinfo(self, host: Any, port: Any, *args: Any) -> Any:
        name = host.decode() if isinstance(host, bytes) else host
        self.asked.append(name)
        if self.resolved is not None:
            await self.resolved.wait()
        if name not in self.names:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [
            (socket.AF_INET6 if ":" in each else socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, port))
            for each in self.names[name]
        ]

    async def getnameinfo(self, *args: Any) -> Any:
        raise AssertionError("nobody asks")


@pytest.fixture
async def net(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Net]:
    net = Net()
    context = tls.server_context(HOST)
    context.sni_callback = lambda stream, name, context: net.server_names.append(name)
    opened = trio.open_tcp_stream

    async def open_tcp_stream(host: str, port: int, **options: Any) -> trio.SocketStream:
        net.connected.append((host, port))
        if host not in net.reachable:
            raise OSError("no route to host")
        return await opened("127.0.0.1", net.port)

    monkeypatch.setattr(trio, "open_tcp_stream", open_tcp_stream)
    before = trio.socket.set_custom_hostname_resolver(net)
    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(trio.serve_tcp, serving(net, context), 0)
        net.port = listeners[0].socket.getsockname()[1]
        yield net
        nursery.cancel_scope.cancel()
    trio.socket.set_custom_hostname_resolver(before)


def serving(net: Net, context: ssl.SSLContext) -> Callable[[trio.SocketStream], Awaitable[None]]:
    async def serve(raw: trio.SocketStream) -> None:
        stream = trio.SSLStream(raw, context, server_side=True, https_compatible=True)
        try:
            data = b""
            while b"\r\n\r\n" not in data:
                more = await stream.receive_some()
                if not more:
                    return
                data += more
            head, _, body = data.partition(b"\r\n\r\n")
            line, *fields = head.decode().split("\r\n")
            headers = {name.lower(): value.strip() for name, _, value in (field.partition(":") for field in fields)}
            while len(body) < int(headers["content-length"]):
                body += await stream.receive_some()
            request = Request(line, headers, body)
            net.requests.append(request)
            assert net.answer is not None
            await net.answer(request, stream)
            await stream.aclose()
        except (trio.BrokenResourceError, ssl.SSLError):
            pass
        finally:
            await trio.aclose_forcefully(raw)

    return serve


def saying(body: bytes, *, status: str = "200 OK", headers: tuple[str, ...] = ()) -> Answer:
    """An answer with this body."""

    async def answer(request: Request, stream: trio.SSLStream[trio.SocketStream]) -> None:
        lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers, "", ""]
        await stream.send_all("\r\n".join(lines).encode() + body)

    return answer


def responding(**members: Any) -> Answer:
    """A `tool_response` with these members."""

    async def answer(request: Request, stream: trio.SSLStream[trio.SocketStream]) -> None:
        said = {"type": "tool_response", "request_id": request.message["request_id"], **members}
        await saying(json.dumps(said).encode())(request, stream)

    return answer


def success(result: Any) -> Answer:
    return responding(status="success", result=result)


def allowing(*hosts: str, **options: Any) -> Callbacks:
    return Callbacks(hosts or (HOST,), SECRET, **{"tls": tls.client_context(), **options})


async def call(net: Net, answer: Answer, callbacks: Callbacks | None = None) -> Any:
    """Call the tool once its host was resolved."""
    net.answer = answer
    target = await (callbacks or allowing()).resolve(URL)
    with trio.fail_after(10):
        return await target.call(MANIFEST, {"amount": 2**60}, request_id="r-1")


# A call


async def test_a_tool_at_a_url_is_called_by_mcp_clients(net: Net) -> None:
    server = trimcp.Server("s")
    catalog = Catalog(server, rules=RegistrationRules(callbacks=allowing()))
    registered = await catalog.register(RAW, ADA)
    assert (registered.manifest.name, registered.status) == ("agent-a.pay", "registered")
    assert "key" not in json.dumps([each.to_json() for each in catalog.manifests()])
    net.answer = success({"paid": True})
    async with connected(server) as session:
        assert [tool.name for tool in await session.list_tools()] == ["agent-a.pay"]
        assert (await session.call_tool("agent-a.pay", {"amount": 5})).data == {"result": {"paid": True}}
    (request,) = net.requests
    assert request.line == "POST /call?key=of-the-agent HTTP/1.1"
    assert request.message == {
        "type": "tool_request",
        "tool_name": "pay",
        "version": "1",
        "arguments": {"amount": 5},
        "request_id": request.headers["webhook-id"],
    }
    assert verify_callback(request.headers, request.body, SECRET) == request.headers["webhook-id"]
    assert request.headers["host"] == HOST
    assert net.server_names == [HOST]
    assert net.connected == [(PUBLIC, 443)]


async def test_nothing_of_the_caller_goes_along(net: Net) -> None:
    await call(net, success(1))
    (request,) = net.requests
    assert set(request.headers) == {
        "host",
        "accept",
        "accept-encoding",
        "connection",
        "content-length",
        "content-type",
        "user-agent",
        "webhook-id",
        "webhook-signature",
        "webhook-timestamp",
    }
    assert b"ada" not in request.body


@pytest.mark.parametrize("result", [{"a": [1, None]}, [], "text", 7, 2**60, None])
async def test_any_json_value_is_a_result(result: Any, net: Net) -> None:
    assert await call(net, success(result)) == result


async def test_every_call_has_an_id_and_a_connection_of_its_own(net: Net) -> None:
    server = trimcp.Server("s")
    catalog = Catalog(server, rules=RegistrationRules(callbacks=allowing()))
    await catalog.register(RAW, ADA)
    net.answer = success(None)
    async with connected(server) as session:
        for _ in range(3):
            await session.call_tool("agent-a.pay")
    assert len({request.headers["webhook-id"] for request in net.requests}) == 3
    assert net.connected == [(PUBLIC, 443)] * 3
    assert net.asked == [HOST], "the name is resolved once"


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        ({"code": "tool_error", "message": "no money"}, ToolFailed, "no money"),
        ({"code": "invalid_arguments", "message": "no", "data": {"problems": ["a"]}}, InvalidArguments, "no"),
        ({"code": "too_much", "message": "later", "retry_after": 3}, TooMuch, "later"),
        ({"code": "unauthenticated", "message": "x"}, ToolFailed, "x"),
        ({"code": "forbidden", "message": "x"}, ToolFailed, "x"),
        ({"code": "provider_gone", "message": "x"}, ToolFailed, "x"),
        ({"code": "anything", "message": "y" * 9_999}, ToolFailed, "y" * 4_096),
        ({}, ToolFailed, "None"),
        ("text", ToolFailed, "the service reported an error without saying which"),
        (None, ToolFailed, "the service reported an error without saying which"),
    ],
)
async def test_an_error_is_the_tool_s_own(error: Any, kind: Any, text: str, net: Net) -> None:
    with pytest.raises(kind) as caught:
        await call(net, responding(status="error", error=error))
    assert type(caught.value) is kind
    assert caught.value.message == text


# Names and addresses

PRIVATE = [
    *("127.0.0.1", "127.8.8.8", "0.0.0.0", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1"),
    *("224.0.0.1", "255.255.255.255", "::1", "::", "fe80::1", "fc00::1", "ff02::1", "::ffff:127.0.0.1"),
    *("64:ff9b::7f00:1", "2002:7f00:1::"),
]


@pytest.mark.parametrize("address", PRIVATE)
async def test_private_addresses_are_refused(address: str, net: Net) -> None:
    for addresses in ([address], [PUBLIC, address], [address, PUBLIC]):
        net.names[HOST] = addresses
        with pytest.raises(NotAllowed, match="its address is not a public one"):
            await allowing().resolve(URL)
    assert net.connected == []


async def test_a_private_host_may_be_allowed_by_name(net: Net) -> None:
    net.names[HOST], net.reachable = ["10.0.0.1"], {"10.0.0.1"}
    with pytest.raises(NotAllowed):
        await allowing(private=["other.example"]).resolve(URL)
    assert await call(net, success(1), allowing(private=[HOST])) == 1
    assert net.connected == [("10.0.0.1", 443)]


async def test_a_name_that_is_bound_anew_changes_nothing(net: Net) -> None:
    server = trimcp.Server("s")
    catalog = Catalog(server, rules=RegistrationRules(callbacks=allowing()))
    await catalog.register(RAW, ADA)
    net.names[HOST] = ["127.0.0.1"]
    net.reachable.add("127.0.0.1")
    net.answer = success("from the public one")
    async with connected(server) as session:
        assert (await session.call_tool("agent-a.pay")).data == {"result": "from the public one"}
        await catalog.register(RAW, ADA)
        assert (await session.call_tool("agent-a.pay")).data == {"result": "from the public one"}
    assert (net.asked, net.connected) == ([HOST], [(PUBLIC, 443)] * 2)


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "169.254.169.254", "[::ffff:10.0.0.1]"])
async def test_a_literal_address_is_a_host_like_any(host: str, net: Net) -> None:
    with pytest.raises(NotAllowed, match=r"callbacks to this host are not allowed$"):
        await allowing().resolve(f"https://{host}/")
    with pytest.raises(NotAllowed, match="not a public one"):
        await allowing(host).resolve(f"https://{host}/")
    assert net.connected == []


@pytest.mark.parametrize(
    "url",
    [
        f"http://{HOST}/",
        f"ftp://{HOST}/",
        f"//{HOST}/",
        HOST,
        "",
        "https://",
        "https:///x",
        f"https://user:password@{HOST}/",
        f"https://user@{HOST}/",
        f"https://{HOST}/#fragment",
        f"https://{HOST}/\r\nX: y",
        f"https://{HOST}/ä",
        f"https://{HOST}:port/",
        f"https://{HOST}\\@evil.example/",
        "javascript:alert(1)",
        "file:///etc/passwd",
    ],
)
def test_what_is_no_url_for_callbacks(url: str) -> None:
    with pytest.raises(UnfitManifest, match="an https URL without credentials"):
        allowing(HOST, "evil.example").check(url)


@pytest.mark.parametrize(
    "url",
    [
        "https://evil.example/",
        f"https://evil.example/{HOST}",
        f"https://{HOST}.evil.example/",
        f"https://evil{HOST}/",
        f"https://{HOST}./",
        f"https://{HOST}:8443/",
        f"https://{HOST}:80/",
        f"https://a.{HOST}/",
        f"https://{HOST}%2eevil.example/",
        f"https://{HOST}%00.evil.example/",
        "https://localhost/",
        "https://0x7f000001/",
        "https://127.1/",
    ],
)
def test_hosts_that_are_not_on_the_list(url: str) -> None:
    with pytest.raises(NotAllowed, match="callbacks to this host are not allowed"):
        allowing().check(url)


def test_hosts_that_are() -> None:
    callbacks = allowing(HOST, "Other.example:8443")
    for url in (f"https://{HOST}", f"https://{HOST.upper()}/x", f"https://{HOST}:443/", "https://other.example:8443/"):
        assert callbacks.check(url).scheme == "https"
    with pytest.raises(NotAllowed):
        callbacks.check("https://other.example/")


async def test_the_port_of_a_host_is_called(net: Net) -> None:
    net.names["other.example"] = [PUBLIC]
    target = await allowing("other.example:8443").resolve("https://other.example:8443/")
    with pytest.raises(ProviderGone):  # its certificate is for another name
        await target.call(MANIFEST, {}, request_id="r")
    assert net.connected == [(PUBLIC, 8443)]
    assert net.requests == []


async def test_a_name_that_is_not_resolved(net: Net, caplog: Any) -> None:
    del net.names[HOST]
    with pytest.raises(UnfitManifest, match="cannot be resolved"):
        await allowing().resolve(URL)
    net.names[HOST] = []
    with pytest.raises(UnfitManifest, match="cannot be resolved"):
        await allowing().resolve(URL)
    net.resolved = trio.Event()
    with trio.fail_after(5), pytest.raises(UnfitManifest, match="cannot be resolved"):
        await allowing(timeout=0.05).resolve(URL)


async def test_the_next_address_is_tried_if_nothing_was_sent(net: Net) -> None:
    net.names[HOST], net.reachable = [PUBLIC, OTHER], {OTHER}
    assert await call(net, success(1)) == 1
    assert [address for address, _ in net.connected] == [PUBLIC, OTHER]
    net.connected.clear()

    async def cut(request: Request, stream: trio.SSLStream[trio.SocketStream]) -> None:
        await trio.aclose_forcefully(stream)

    net.reachable.add(PUBLIC)
    with pytest.raises(ProviderGone):
        await call(net, cut)
    assert [address for address, _ in net.connected] == [PUBLIC], "it may have been carried out"


async def test_few_addresses_are_kept(net: Net) -> None:
    net.names[HOST] = [f"93.184.216.{n}" for n in range(1, 60)] * 2
    target = await allowing().resolve(URL)
    assert target.addresses == tuple(f"93.184.216.{n}" for n in range(1, 5))


# Answers


async def gone(net: Net, answer: Answer, caplog: Any, callbacks: Callbacks | None = None) -> str:
    """What the log says of an answer that is none."""
    caplog.clear()
    with pytest.raises(ProviderGone) as caught:
        await call(net, answer, callbacks)
    assert caught.value.message == "the callback of this tool did not answer as it should"
    (record,) = [record for record in caplog.records if record.name == "trimcp.server"]
    assert record.levelno == logging.WARNING
    text = record.getMessage()
    assert "of-the-agent" not in caplog.text, "a URL may hold a secret"
    return str(text.partition(" failed: ")[2])


@pytest.mark.parametrize("status", ["301 Moved", "302 Found", "303 See", "307 Temporary", "308 Permanent"])
@pytest.mark.parametrize(
    "target", [f"https://{HOST}/other", "https://evil.example/", "http://127.0.0.1:1/", "/x", "//evil"]
)
async def test_no_redirect_is_followed(status: str, target: str, net: Net, caplog: Any) -> None:
    answer = saying(b"", status=status, headers=(f"Location: {target}",))
    assert await gone(net, answer, caplog) == f"it answered with status {status[:3]}"
    assert len(net.requests) == len(net.connected) == 1
    assert net.asked == [HOST]


@pytest.mark.parametrize(
    "status", ["201 Created", "202 Accepted", "204 None", "400 Bad", "401 No", "404 None", "500 Oh"]
)
async def test_only_status_200_is_an_answer(status: str, net: Net, caplog: Any) -> None:
    body = b"" if status.startswith("204") else b'{"status": "success"}'
    assert await gone(net, saying(body, status=status), caplog) == f"it answered with status {status[:3]}"


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"", ""),
        (b"not JSON", ""),
        (b'"text"', "its answer is no tool_response"),
        (b"[]", "its answer is no tool_response"),
        (b'{"type": "tool_request"}', "its answer is no tool_response"),
        (b'{"type": "tool_response", "request_id": "r-2", "status": "success"}', "its answer is for another request"),
        (b'{"request_id": null, "status": "success"}', "its answer is for another request"),
        (b"{}", "its answer has no status that is known"),
        (b'{"status": "cancelled"}', "its answer has no status that is known"),
        (b'{"status": ["success"]}', "its answer has no status that is known"),
        (b'{"status": "success", "result": ' + b"[" * 200 + b"]" * 200 + b"}", "nested deeper than 128 levels"),
    ],
)
async def test_answers_that_are_none(body: bytes, why: str, net: Net, caplog: Any) -> None:
    assert why in await gone(net, saying(body), caplog)


async def test_a_short_answer_is_enough(net: Net) -> None:
    assert await call(net, saying(b'{"status": "success", "result": 7}')) == 7
    assert await call(net, saying(b'{"status": "success"}')) is None


async def test_an_answer_is_bounded(net: Net, caplog: Any) -> None:
    callbacks = allowing(max_body=1_000)
    assert await call(net, saying(b'{"status":"success","result":"' + b"x" * 900 + b'"}'), callbacks) == "x" * 900
    large = saying(b'{"status":"success","result":"' + b"x" * 1_000 + b'"}')
    assert await gone(net, large, caplog, callbacks) == "its answer is larger than 1,000 bytes"

    async def endless(request: Request, stream: trio.SSLStream[trio.SocketStream]) -> None:
        await stream.send_all(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        while True:
            await stream.send_all(b"400\r\n" + b"x" * 1_024 + b"\r\n")

    assert await gone(net, endless, caplog, callbacks) == "its answer is larger than 1,000 bytes"

    async def endless_head(request: Request, stream: trio.SSLStream[trio.SocketStream]) -> None:
        await stream.send_all(b"HTTP/1.1 200 OK\r\nX: ")
        while True:
            await stream.send_all(b"x" * 1_024)

    assert "broke" in await gone(net, endless_head, caplog, callbacks)


async def test_a_compressed_bomb_is_bounded_too(net: Net, caplog: Any) -> None:
    bomb = gzip.compress(b"x" * 10_000_000)
    answer = saying(bomb, headers=("Content-Encoding: gzip",))
    assert await gone(net, answer, caplog, allowing(max_body=100_000)) == "its answer is larger than 100,000 bytes"


@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{"])
async def test_an_answer_has_to_come_in_time(said: bytes, net: Net) -> None:
    async def slow(request: Request, stream: trio.SSLStream[trio.SocketStream]) -> None:
        if said:
            await stream.send_all(said)
        await trio.sleep_forever()

    with pytest.raises(DeadlinePassed, match=r"did not answer within 0\.2 seconds"):
        await call(net, slow, allowing(timeout=0.2))


async def test_cancelling_a_call_cuts_its_connection(net: Net) -> None:
    cut = trio.Event()

    async def wait(request: Request, stream: trio.SSLStream[trio.SocketStream]) -> None:
        nursery.cancel_scope.cancel()
        try:
            await stream.receive_some()
        except trio.BrokenResourceError:
            pass
        cut.set()

    net.answer = wait
    target = await allowing().resolve(URL)
    async with trio.open_nursery() as nursery:
        await target.call(MANIFEST, {}, request_id="r-1")
    assert nursery.cancel_scope.cancelled_caught
    with trio.fail_after(5):
        await cut.wait()


async def test_the_certificate_has_to_be_for_the_name(net: Net, caplog: Any) -> None:
    net.names["evil.example"] = [PUBLIC]
    target = await allowing("evil.example").resolve("https://evil.example/")
    with pytest.raises(ProviderGone):
        await target.call(MANIFEST, {}, request_id="r")
    assert net.server_names == ["evil.example"]
    assert "CERTIFICATE_VERIFY_FAILED" in caplog.text or "certificate" in caplog.text.lower()
    target = await Callbacks([HOST], SECRET).resolve(URL)  # the usual authorities do not know this one
    with pytest.raises(ProviderGone):
        await target.call(MANIFEST, {}, request_id="r")
    assert net.requests == []


async def test_errors_reach_mcp_clients(net: Net) -> None:
    server = trimcp.Server("s")
    catalog = Catalog(server, rules=RegistrationRules(callbacks=allowing(timeout=0.2)))
    await catalog.register(RAW, ADA)
    async with connected(server) as session:
        net.answer = responding(status="error", error={"code": "tool_error", "message": "no money"})
        result = await session.call_tool("agent-a.pay")
        assert (result.is_error, result.text) == (True, "no money")
        net.answer = saying(b"nonsense")
        with pytest.raises(trimcp.RemoteError, match="did not answer as it should") as caught:
            await session.call_tool("agent-a.pay")
        assert caught.value.data == {"reason": "provider_gone"}


# Registering


async def test_callbacks_are_off_unless_they_are_enabled(net: Net) -> None:
    server = trimcp.Server("s")
    catalog = Catalog(server)
    with pytest.raises(NotAllowed, match="this server calls no tools at URLs"):
        await catalog.register(RAW, ADA)
    assert (net.asked, len(server.tools), catalog._table.families) == ([], 0, {})


async def test_a_refused_callback_leaves_nothing_and_is_told(net: Net, caplog: Any) -> None:
    security.tell_left_out()
    server = trimcp.Server("s")
    catalog = Catalog(server, rules=RegistrationRules(callbacks=allowing()))
    with pytest.raises(NotAllowed):
        await catalog.register({**RAW, "callback": "https://169.254.169.254/latest"}, ADA)
    net.names[HOST] = ["10.0.0.1"]
    with pytest.raises(NotAllowed):
        await catalog.register(RAW, ADA)
    assert (len(server.tools), catalog._table.families, dict(catalog._table.owned)) == (0, {}, {})
    events = [vars(record) for record in caplog.records if record.name == "trimcp.security"]
    assert [(event["event"], event.get("host")) for event in events] == [
        ("not_allowed", "169.254.169.254:443"),
        ("registration_refused", None),
        ("not_allowed", HOST),
        ("registration_refused", None),
    ]


async def test_a_callback_that_is_withdrawn_while_its_name_is_resolved_stays_away(net: Net) -> None:
    server = trimcp.Server("s")
    catalog = Catalog(server, rules=RegistrationRules(callbacks=allowing(timeout=0.2)))
    net.resolved = trio.Event()

    async def register() -> None:
        with pytest.raises(ProviderGone, match="withdrawn before it was approved"):
            await catalog.register(RAW, ADA)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(register)
        await trio.testing.wait_all_tasks_blocked()
        assert [manifest.name for manifest, _ in catalog.pending()] == ["agent-a.pay"]
        with pytest.raises(trimcp.McpError, match=r"nothing named agent-a\.pay"):
            catalog.approve("agent-a.pay", "1", catalog.pending()[0][0].hash)
        await catalog.remove("agent-a.pay", ADA)
        net.resolved.set()
    assert (len(server.tools), catalog._table.families) == (0, {})


def test_every_host_has_a_secret() -> None:
    own = b"another secret of 32 bytes ....."
    callbacks = Callbacks({HOST: None, "own.example": own}, SECRET)
    assert callbacks.secret_of(callbacks.check(URL)) == SECRET
    assert callbacks.secret_of(callbacks.check("https://own.example/")) == own
    assert "secret" not in repr(callbacks).replace("_secrets", "")
    with pytest.raises(ValueError, match=r"the host own\.example has no secret"):
        Callbacks({"own.example": None})
    with pytest.raises(ValueError, match="at least 24 bytes"):
        Callbacks([HOST], b"short")
    with pytest.raises(ValueError, match="is no host"):
        Callbacks(["a:b"], SECRET)
    with pytest.raises(TypeError, match="several names"):
        Callbacks(HOST, SECRET)
    with pytest.raises(ValueError, match="timeout"):
        Callbacks([HOST], SECRET, timeout=0)


# Signatures

# The example of the specification of Standard Webhooks.
EXAMPLE_SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
EXAMPLE_BODY = b'{"test": 2432232314}'
EXAMPLE = {
    "Webhook-Id": "msg_p5jXN8AQM9LWM0D4loKWxJek",
    "Webhook-Timestamp": "1614265330",
    "Webhook-Signature": "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=",
}


@pytest.fixture
def then(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time of the example, which a test may change."""
    now = [1614265330.0]
    monkeypatch.setattr(signatures.time, "time", lambda: now[0])
    return now


def test_signatures_are_those_of_standard_webhooks(then: list[float]) -> None:
    assert verify_callback(EXAMPLE, EXAMPLE_BODY, EXAMPLE_SECRET) == EXAMPLE["Webhook-Id"]
    secret = signatures.secret_bytes(EXAMPLE_SECRET)
    made = signatures.signed_headers(secret, EXAMPLE["Webhook-Id"], EXAMPLE_BODY)
    assert made == {name.lower(): value for name, value in EXAMPLE.items()}
    assert verify_callback(made, EXAMPLE_BODY, secret)


def test_several_secrets_and_signatures(then: list[float]) -> None:
    assert verify_callback(EXAMPLE, EXAMPLE_BODY, [SECRET, EXAMPLE_SECRET])
    more = {**EXAMPLE, "Webhook-Signature": f"v1a,x v1,AAAA {EXAMPLE['Webhook-Signature']}"}
    assert verify_callback(more, EXAMPLE_BODY, EXAMPLE_SECRET)


@pytest.mark.parametrize(
    "change",
    [
        {"Webhook-Id": "msg_other"},
        {"Webhook-Id": ""},
        {"Webhook-Timestamp": "1614265331"},
        {"Webhook-Timestamp": "1614265330.0"},
        {"Webhook-Timestamp": "-1"},
        {"Webhook-Timestamp": "٣"},
        {"Webhook-Timestamp": "9" * 5_000},
        {"Webhook-Signature": ""},
        {"Webhook-Signature": "v1,"},
        {"Webhook-Signature": EXAMPLE["Webhook-Signature"][3:]},
        {"Webhook-Signature": "v1a" + EXAMPLE["Webhook-Signature"][2:]},
        {"Webhook-Signature": "v1,\ud800"},
        {"Webhook-Signature": "v1,x " * 20 + EXAMPLE["Webhook-Signature"]},
    ],
)
def test_what_is_not_signed(change: dict[str, str], then: list[float]) -> None:
    with pytest.raises(BadSignature):
        verify_callback({**EXAMPLE, **change}, EXAMPLE_BODY, EXAMPLE_SECRET)


def test_the_body_the_secret_and_the_time_are_checked(then: list[float]) -> None:
    with pytest.raises(BadSignature, match="wrong"):
        verify_callback(EXAMPLE, EXAMPLE_BODY + b" ", EXAMPLE_SECRET)
    with pytest.raises(BadSignature, match="wrong"):
        verify_callback(EXAMPLE, EXAMPLE_BODY, SECRET)
    with pytest.raises(BadSignature, match="wrong"):
        verify_callback(EXAMPLE, EXAMPLE_BODY, [])
    with pytest.raises(BadSignature, match="not signed"):
        verify_callback({}, EXAMPLE_BODY, EXAMPLE_SECRET)
    for off in (301, -301):
        then[0] = 1614265330.0 + off
        with pytest.raises(BadSignature, match="not recent"):
            verify_callback(EXAMPLE, EXAMPLE_BODY, EXAMPLE_SECRET)
        assert verify_callback(EXAMPLE, EXAMPLE_BODY, EXAMPLE_SECRET, tolerance=302)


@pytest.mark.parametrize("secret", ["text", "whsec_???", "whsec_AAAA", b"x" * 23, ""])
def test_secrets_that_are_none(secret: Any) -> None:
    with pytest.raises(ValueError, match="secret"):
        signatures.secret_bytes(secret)
