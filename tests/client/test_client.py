"""How a client and a server meet: probe, fallback, respawn, refusal, in virtual time."""

from __future__ import annotations

from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
import trio
import trio.testing

from tests.client.peers import HandMade, Scripted, connected, discover_result, error, initialize_result, text
from trimcp.client.client import Client, named
from trimcp.errors import ConnectionLost, InvalidReply, LocalError, RemoteError
from trimcp.fleet.upstream import supervise
from trimcp.transports.http.client.target import HttpServer
from trimcp.transports.memory import memory_channels
from trimcp.transports.websocket.client import WebSocketServer
from trimcp.wire.codes import MISSING_CAPABILITY, UNSUPPORTED_VERSION
from trimcp.wire.revisions import LATEST, LATEST_LEGACY, REVISIONS, V2025_06_18

every_revision = pytest.mark.parametrize("revision", REVISIONS, ids=str)


@every_revision
async def test_a_pinned_revision_is_the_one_spoken(revision: Any) -> None:
    server = HandMade()
    async with connected(server, revision=revision) as session:
        assert session.revision is revision
        assert session.server_info is not None
        assert session.server_info.name == "hand-made"
        assert session.instructions == "be kind"
        assert session.server_capabilities.tools
        await trio.testing.wait_all_tasks_blocked()
        assert server.heard == ([] if revision.modern else ["notifications/initialized"])


async def test_a_revision_may_be_given_by_name() -> None:
    async with Client("c").connect(HandMade(), revision=V2025_06_18.name) as session:
        assert session.revision is V2025_06_18


async def test_an_unknown_revision_is_refused_before_anything_is_opened() -> None:
    server = HandMade()
    with pytest.raises(LocalError, match="no revision 'tomorrow'"):
        async with Client("c").connect(server, revision="tomorrow"):
            pass
    assert server.sessions == []


@every_revision
async def test_the_newest_common_revision_is_found(revision: Any) -> None:
    async with connected(HandMade(revisions=(revision,))) as session:
        assert session.revision is revision


async def test_an_old_client_gets_on_with_a_new_server() -> None:
    async with connected(HandMade(), Client("old", revisions=REVISIONS[:2])) as session:
        assert session.revision is REVISIONS[1]


def legacy(message: dict[str, Any]) -> Any:
    """A legacy server that has never heard of the probe."""
    if message.get("method") == "initialize":
        return initialize_result(message["id"])
    return error(message["id"], -32601) if "id" in message else None


async def test_an_error_to_the_probe_leads_to_initialize() -> None:
    server = Scripted(legacy)
    async with Client("c").connect(server) as session:
        assert session.revision is LATEST_LEGACY
        await trio.testing.wait_all_tasks_blocked()
    assert server.methods == ["server/discover", "initialize", "notifications/initialized"]
    assert server.heard[1]["params"]["protocolVersion"] == LATEST_LEGACY.name
    assert "_meta" not in server.heard[1]["params"]


async def test_silence_leads_to_initialize_and_a_late_discover_result_still_counts(autojump_clock: Any) -> None:
    probe: list[int] = []

    def silent(message: dict[str, Any]) -> Any:
        if message.get("method") == "server/discover" and not probe:
            return probe.append(message["id"])
        if message.get("method") == "initialize":
            return [discover_result(probe[0]), initialize_result(message["id"])]
        return {"id": message["id"], "result": discover_result(0)["result"]} if "id" in message else None

    server = Scripted(silent)
    start = trio.current_time()
    async with Client("c", probe_timeout=7).connect(server) as session:
        assert trio.current_time() - start == pytest.approx(7)
        assert session.revision is LATEST
        await session.ping()
        assert list(session.session.pending) == []
    assert "notifications/cancelled" not in server.methods


async def test_a_legacy_server_that_stays_silent_is_not_waited_for_long(autojump_clock: Any) -> None:
    server = Scripted(lambda message: None if message.get("method") == "server/discover" else legacy(message))
    began = trio.current_time()
    async with Client("c").connect(server) as session:
        assert session.revision is LATEST_LEGACY
        assert trio.current_time() - began <= 3
        assert list(session.session.pending) == []


@pytest.mark.parametrize("seconds", [2.4, 3, 16, 29])
async def test_a_late_discover_result_is_used(seconds: float, autojump_clock: Any) -> None:
    def modern(message: dict[str, Any]) -> Any:
        if message["method"] == "server/discover":
            return discover_result(message["id"])
        if message["method"] == "initialize":
            return error(message["id"], UNSUPPORTED_VERSION, data={"supported": [LATEST.name]})
        return {"id": message["id"], "result": {"resultType": "complete", "tools": [], "ttlMs": 0}}

    server = Scripted(modern, starts_in=seconds)
    began = trio.current_time()
    async with Client("c").connect(server) as session:
        assert session.revision is LATEST
        assert trio.current_time() - began == pytest.approx(seconds)
        assert session.server_info is not None
        await session.list_tools()
    assert ("initialize" in server.methods) is (seconds > 2.5)


async def test_a_late_refusal_of_the_probe_leaves_initialize_under_way(autojump_clock: Any) -> None:
    async with Client("c").connect(Scripted(legacy, starts_in=16)) as session:
        assert session.revision is LATEST_LEGACY


@pytest.mark.parametrize("supported", [None, [LATEST.name], ["2031-01-01"]], ids=str)
async def test_initialize_refused_as_a_modern_server_does_leads_to_one_more_probe(
    supported: Any, autojump_clock: Any
) -> None:
    def locked(message: dict[str, Any]) -> Any:
        if message["method"] == "initialize":
            return error(message["id"], UNSUPPORTED_VERSION, data=supported and {"supported": supported})
        return discover_result(message["id"]) if server.methods.count("server/discover") == 2 else None

    server = Scripted(locked)
    async with Client("c").connect(server) as session:
        assert session.revision is LATEST
    assert server.methods == ["server/discover", "initialize", "server/discover"]


async def test_a_server_that_refuses_everything_as_a_modern_one_is_left_soon(autojump_clock: Any) -> None:
    server = Scripted(lambda message: error(message["id"], UNSUPPORTED_VERSION, "no way", data={"supported": []}))
    client = Client("c")
    client.legacy_targets.add("known")
    server.key = "known"
    with pytest.raises(InvalidReply, match="no common revision"):
        async with client.connect(server):
            pytest.fail("there is no common ground")
    assert server.methods == ["initialize", "server/discover"]


@pytest.mark.parametrize("listed", [["2024-11-05", "2025-06-18"], ["2025-06-18"], ["2025-06-18", "1999-01-01"]])
async def test_a_server_that_lists_legacy_revisions_alone_is_initialized_in_the_newest_of_them(listed: Any) -> None:
    def legacy_list(message: dict[str, Any]) -> Any:
        if message.get("method") == "initialize":
            return initialize_result(message["id"], message["params"]["protocolVersion"])
        return error(message["id"], UNSUPPORTED_VERSION, data={"supported": listed}) if "id" in message else None

    server = Scripted(legacy_list)
    async with Client("c").connect(server) as session:
        assert session.revision is V2025_06_18
    assert server.methods == ["server/discover", "initialize", "notifications/initialized"]


async def test_initialize_refused_with_a_list_is_tried_in_the_newest_of_it() -> None:
    def picky(message: dict[str, Any]) -> Any:
        if message.get("method") == "initialize" and message["params"]["protocolVersion"] == V2025_06_18.name:
            return initialize_result(message["id"], V2025_06_18.name)
        return (
            error(message["id"], UNSUPPORTED_VERSION, data={"supported": ["2025-06-18"]}) if "id" in message else None
        )

    server = Scripted(picky)
    async with Client("c", revisions=REVISIONS[:4]).connect(server) as session:
        assert session.revision is V2025_06_18
    assert server.methods == ["initialize", "initialize", "notifications/initialized"]


async def test_a_server_that_dies_after_a_probe_that_it_left_unanswered_is_started_again_and_remembered(
    autojump_clock: Any,
) -> None:
    """As those on the Python SDK 1.0 to 1.8: the probe ends their loop, and the line after it the process."""
    probed: list[int] = []

    def fragile(message: dict[str, Any]) -> Any:
        if message["method"] == "server/discover":
            probed.append(len(server.channels))
            return None
        return "die" if len(server.channels) in probed else legacy(message)

    server = Scripted(fragile, key="fragile")
    client = Client("c")
    for opened in (2, 3):
        began = trio.current_time()
        async with client.connect(server) as session:
            assert session.revision is LATEST_LEGACY
            assert trio.current_time() - began <= 3
            await trio.testing.wait_all_tasks_blocked()
        assert len(server.channels) == opened
    assert probed == [1]


@pytest.mark.parametrize("answered", [error(1, -32601), {"id": 1, "result": {}}, None], ids=["refused", "odd", "late"])
async def test_a_server_that_dies_after_a_probe_is_started_again(answered: Any, autojump_clock: Any) -> None:
    """It may answer the probe, and end all the same."""
    probed: list[int] = []

    def fragile(message: dict[str, Any]) -> Any:
        if message["method"] == "server/discover":
            probed.append(len(server.channels))
            return answered and {**answered, "id": message["id"]}
        return "die" if len(server.channels) in probed else legacy(message)

    server = Scripted(fragile)
    async with Client("c").connect(server) as session:
        assert session.revision is LATEST_LEGACY
    assert len(server.channels) == 2
    assert probed == [1]


@pytest.mark.parametrize("again", [False, True])
async def test_a_server_that_wants_initialize_first_gets_it_in_a_new_connection(again: bool) -> None:
    def strict(message: dict[str, Any]) -> Any:
        if message["method"] == "server/discover":
            probed.append(len(server.channels))
        refuses = again or len(server.channels) in probed
        return error(message["id"], -32600, "initialize first") if refuses else legacy(message)

    probed: list[int] = []
    server = Scripted(strict)
    if again:
        with pytest.raises(RemoteError, match="initialize first"):
            async with Client("c").connect(server):
                pass
    else:
        async with Client("c").connect(server) as session:
            assert session.revision is LATEST_LEGACY
    assert len(server.channels) == 2
    assert probed == [1]


async def test_a_channel_that_cannot_be_opened_again_is_left_with_the_error_that_was_met() -> None:
    server = Scripted(lambda message: error(message["id"], -32600, "initialize first"))
    async with server.connect() as channel:
        with pytest.raises(RemoteError, match="initialize first"):
            async with Client("c").connect(channel):
                pass


async def test_a_target_may_say_with_which_revision_to_begin() -> None:
    server = Scripted(lambda message: legacy(message) if message.get("method") != "server/discover" else "die")
    server.revision = V2025_06_18.name
    async with Client("c").connect(server) as session:
        assert session.revision is LATEST_LEGACY  # the server's choice
    assert server.methods == ["initialize", "notifications/initialized"]
    assert server.heard[0]["params"]["protocolVersion"] == V2025_06_18.name
    server.revision = "tomorrow"
    with pytest.raises(LocalError, match="no revision 'tomorrow'"):
        async with Client("c").connect(server):
            pytest.fail("there is none")


async def test_a_server_that_dies_on_the_probe_is_started_again_and_remembered() -> None:
    def fragile(message: dict[str, Any]) -> Any:
        return "die" if message.get("method") == "server/discover" else legacy(message)

    server = Scripted(fragile, key="fragile")
    client = Client("c")
    async with client.connect(server) as session:
        assert session.revision is LATEST_LEGACY
    assert len(server.channels) == 2
    async with client.connect(server) as session:
        assert session.revision is LATEST_LEGACY
        await trio.testing.wait_all_tasks_blocked()
    assert len(server.channels) == 3
    assert server.methods.count("server/discover") == 1


async def test_a_remembered_legacy_server_that_is_replaced_is_probed_the_time_after() -> None:
    server = Scripted(legacy, key="same")
    client = Client("c")
    async with client.connect(server):
        pass

    def modern(message: dict[str, Any]) -> Any:
        if message["method"] == "server/discover":
            return discover_result(message["id"])
        return error(message["id"], -32601)

    server.script = modern
    with pytest.raises(RemoteError):
        async with client.connect(server):
            pass
    async with client.connect(server) as session:
        assert session.revision is LATEST


async def test_a_plain_channel_whose_peer_dies_on_the_probe_cannot_be_opened_again() -> None:
    ours, theirs = memory_channels()
    async with trio.open_nursery() as nursery:

        async def die() -> None:
            await ours.receive()
            await ours.aclose()

        nursery.start_soon(die)
        with pytest.raises(ConnectionLost, match="before the server answered server/discover"):
            async with Client("c").connect(theirs):
                pass


async def test_a_death_during_initialize_tells_the_servers_last_words() -> None:
    server = Scripted(lambda message: "die", last_words="it said: no disk")
    with pytest.raises(ConnectionLost, match="initialize was not answered: it said: no disk"):
        async with Client("c").connect(server, revision=LATEST_LEGACY):
            pass


class Command:
    """A server that is started by a command, and dies."""

    command = ("python", "server.py")

    def connect(self) -> Any:
        return Scripted(lambda message: "die").connect()


async def test_only_what_is_started_by_a_command_can_be_tried_by_hand() -> None:
    with pytest.raises(ConnectionLost, match="Run the command by hand"):
        async with Client("c").connect(Command(), revision=LATEST_LEGACY):
            pass
    with pytest.raises(ConnectionLost) as caught:
        async with Client("c").connect(Scripted(lambda message: "die"), revision=LATEST_LEGACY):
            pass
    assert "command" not in str(caught.value)


async def test_a_server_that_names_another_modern_revision_is_asked_again_with_it() -> None:
    def picky(message: dict[str, Any]) -> Any:
        if server.methods.count("server/discover") == 1:
            return error(message["id"], UNSUPPORTED_VERSION, data={"supported": [LATEST.name], "requested": "x"})
        return discover_result(message["id"])

    server = Scripted(picky)
    async with Client("c").connect(server) as session:
        assert session.revision is LATEST
    assert server.methods == ["server/discover", "server/discover"]


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (error(1, UNSUPPORTED_VERSION, data={"supported": ["2099-01-01"]}), "no common revision.*2099-01-01"),
        (error(1, MISSING_CAPABILITY), "a modern server refused the probe"),
    ],
)
async def test_no_common_ground_says_why(answer: dict[str, Any], why: str) -> None:
    server = Scripted(lambda message: answer)
    with pytest.raises(InvalidReply, match=why):
        async with Client("c").connect(server):
            pass
    assert server.methods == ["server/discover"]


async def test_a_server_that_answers_initialize_with_another_revision_than_the_pinned_one_is_left() -> None:
    with pytest.raises(InvalidReply, match="answered initialize with revision"):
        async with Client("c").connect(Scripted(legacy), revision=V2025_06_18):
            pass


async def test_a_refused_initialize_is_the_servers_error() -> None:
    with pytest.raises(RemoteError, match="no") as caught:
        async with Client("c").connect(Scripted(lambda m: error(m["id"], -32603)), revision=LATEST_LEGACY):
            pass
    assert "refused initialize" in caught.value.__notes__[0]


async def test_a_nonsense_answer_to_the_probe_is_taken_for_a_legacy_server() -> None:
    def nonsense(message: dict[str, Any]) -> Any:
        return {"id": message["id"], "result": {}} if message["method"] == "server/discover" else legacy(message)

    async with Client("c").connect(Scripted(nonsense)) as session:
        assert session.revision is LATEST_LEGACY


def test_what_is_no_target_is_refused_at_once() -> None:
    for wrong, what in ((3, "int"), ("server.py", "a str that is no URL"), ("ftp://me:secret@host", "a str that is")):
        target: Any = wrong
        for connect in (Client("c").connect, partial(supervise, Client("c"))):
            with pytest.raises(TypeError, match=f"cannot connect to {what}.*pass a URL") as caught:
                connect(target)
            assert "secret" not in str(caught.value)
    with pytest.raises(LocalError, match="names a host"):
        Client("c").connect("http://")


@pytest.mark.parametrize("scheme", ["http", "https", "HTTP", "ws", "wss", "http+unix", "WS+unix"])
def test_a_url_is_a_target(scheme: str) -> None:
    found = named(f"{scheme}://server.test/mcp")
    assert isinstance(found, HttpServer if scheme[0] in "hH" else WebSocketServer)
    assert found.url == f"{scheme}://server.test/mcp"


async def test_the_bodys_exception_leaves_as_itself_and_everything_is_closed() -> None:
    server = HandMade()
    with pytest.raises(KeyError) as caught:
        async with connected(server):
            raise KeyError("mine")
    assert caught.value.__cause__ is None
    assert server.session.lost is not None


async def test_cancelling_connect_while_it_waits_leaves_nothing(autojump_clock: Any) -> None:
    server = Scripted(lambda message: None)
    with trio.move_on_after(2) as scope:
        async with Client("c").connect(server):
            raise AssertionError("must not be reached")
    assert scope.cancelled_caught
    assert server.methods == ["server/discover"]


async def test_the_loss_of_the_server_fails_calls_and_no_body() -> None:
    server = HandMade()

    @server.tool
    async def leave(params: Any, ctx: Any) -> Any:
        server.session.close()
        await trio.sleep_forever()

    client = Client("c")
    ours, theirs = memory_channels()

    async def serve_until_closed() -> None:
        async with server.serving(ours) as session:
            await session.closed.wait()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve_until_closed)
        async with client.connect(theirs) as session:
            with pytest.raises(RemoteError, match="drain"):
                await session.call_tool("leave")
            await session.wait_lost()
            with pytest.raises(ConnectionLost):
                await session.call_tool("leave")
    assert client.sessions == set()


async def test_the_handshake_declares_what_the_handlers_can_do() -> None:
    client = Client("c", "2", title="See", extensions={"com.example/x": {"on": True}}, experimental={"y": {}})
    client.set_roots(["file:///srv"])

    @client.sampling(tools=True)
    def sample(params: Any) -> str:
        return "42"

    @client.elicitation(url=False)
    def ask(params: Any) -> Any: ...

    seen: list[Any] = []
    for revision in (LATEST_LEGACY, LATEST):
        server = HandMade()

        @server.tool
        async def who(params: Any, ctx: Any) -> Any:
            seen.append((ctx.peer, ctx.capabilities))
            return text("")

        async with connected(server, client, revision) as session:
            await session.call_tool("who")
    for peer, capabilities in seen:
        assert (peer.name, peer.version, peer.title) == ("c", "2", "See")
        assert capabilities.sampling.tools == {}
        assert capabilities.elicitation.form == {}
        assert not isinstance(capabilities.elicitation.url, dict)
        assert capabilities.roots
        assert capabilities.experimental == {"y": {}}
    assert seen[1][1].extensions == {"com.example/x": {"on": True}}


async def test_a_lost_server_is_mourned_in_the_errors_of_its_calls() -> None:
    def script(message: dict[str, Any]) -> Any:
        return discover_result(message["id"], tools={}) if message["method"] == "server/discover" else "die"

    async with Client("c").connect(Scripted(script, last_words="it ran out of cheese")) as session:
        for _ in range(2):
            with pytest.raises(ConnectionLost, match="out of cheese"):
                await session.call_tool("x")


@pytest.mark.parametrize("revision", [None, LATEST_LEGACY, LATEST], ids=["probed", "legacy", "modern"])
@pytest.mark.parametrize("limits", [{}, {"connect_timeout": 8}, {"connect_timeout": 50, "probe_timeout": 45}], ids=str)
async def test_a_server_that_never_answers_is_not_waited_for_for_ever(
    revision: Any, limits: Any, autojump_clock: Any
) -> None:
    ours, mute = memory_channels()
    seconds = limits.get("connect_timeout", 30)
    method = "server/discover" if revision is LATEST else "initialize"
    async with mute:
        began = trio.current_time()
        with pytest.raises(trio.TooSlowError, match=f"did not answer {method} within {seconds} seconds .*connect_tim"):
            async with Client("c", request_timeout=5, **limits).connect(ours, revision=revision):
                pytest.fail("there is nobody")
        assert trio.current_time() - began == pytest.approx(seconds, abs=0.01)


async def test_a_connection_that_does_not_open_is_not_waited_for_for_ever(autojump_clock: Any) -> None:
    @asynccontextmanager
    async def nowhere() -> Any:
        await trio.sleep_forever()
        yield

    with pytest.raises(trio.TooSlowError, match="was not opened within 30 seconds"):
        async with Client("c").connect(nowhere()):
            pytest.fail("there is nobody")
    with trio.move_on_after(3) as scope:
        async with Client("c").connect(nowhere()):
            pytest.fail("there is nobody")
    assert scope.cancelled_caught


async def test_the_time_to_connect_does_not_bound_what_comes_after(autojump_clock: Any) -> None:
    async with connected(HandMade(), Client("c", connect_timeout=3)) as session:
        await trio.sleep(10)
        await session.ping()


async def test_a_server_that_is_late_is_told_of_with_its_last_words(autojump_clock: Any) -> None:
    server = Scripted(lambda message: None, last_words="it is still downloading")
    with pytest.raises(trio.TooSlowError, match=r"connect_timeout.; it is still downloading"):
        async with Client("c").connect(server):
            pytest.fail("there is nobody")


@pytest.mark.parametrize(
    ("script", "error", "why"),
    [
        (lambda m: "die", ConnectionLost, "^server/discover was not answered: it said: no disk$"),
        (lambda m: error(m["id"], -32601, "what?"), InvalidReply, "of the legacy era.*answered.*what\\?"),
        (lambda m: {"id": m["id"], "result": {}}, InvalidReply, "not answered as it has to be: .*supportedVersions"),
        (lambda m: {"id": m["id"], "result": [1]}, InvalidReply, "not answered as it has to be: .*an object"),
        (lambda m: error(m["id"], MISSING_CAPABILITY, "no roots"), InvalidReply, "refused the probe.*no roots"),
    ],
)
async def test_a_pinned_modern_revision_fails_for_what_was_met(script: Any, error: Any, why: str) -> None:
    with pytest.raises(error, match=why):
        async with Client("c").connect(Scripted(script, last_words="it said: no disk"), revision=LATEST):
            pytest.fail("there is nobody")
