"""No secret reaches a log, a trace, an audit or a security event: on any transport, on either side, at DEBUG.

Each secret is a word of its own, given where it belongs; then everything that was written down is searched for all.
"""

from __future__ import annotations

import json
import logging
import sys
import traceback
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio

import trimcp
from tests.peers.serving import NETWORK, ServedHere, served
from tests.rules import secrets_server
from tests.rules.secrets_server import make_server
from trimcp import security
from trimcp.transports.trace import traced
from trimcp.wire.revisions import LATEST, LATEST_LEGACY, V2024_11_05, Revision
from trimcp.wire.tools import CallToolParams

ARGUMENT = "arg-s3cr3t-hunter2"
KEY = "key-s3cr3t-hunter3"
BEARER = "bearer-s3cr3t-hunter4"
BAD_BEARER = "wrong-s3cr3t-hunter5"
QUERY = "query-s3cr3t-hunter6"
ANSWER = "answer-s3cr3t-hunter7"
COOKIE = "cookie-s3cr3t-hunter8"
ENVIRONMENT = "env-s3cr3t-hunter9"
STATE = "state-s3cr3t-hunter10"
USERINFO = "user-s3cr3t-hunter11"
SECRETS = (ARGUMENT, KEY, BEARER, BAD_BEARER, QUERY, ANSWER, COOKIE, ENVIRONMENT, STATE, USERINFO)

WORLDS = [
    (road, revision)
    for road in ("memory", "stdio", *NETWORK)
    for revision in ((V2024_11_05,) if road == "http+sse" else (LATEST_LEGACY, LATEST))
]


@attrs.define
class Written:
    """Everything that was written down."""

    caplog: Any
    lines: list[str] = attrs.field(factory=list)
    records: list[Any] = attrs.field(factory=list)

    def everything(self) -> str:
        """All of it as one text, every attribute of every record and every traceback included."""
        texts = [*self.lines, json.dumps(self.records, default=repr)]
        for record in self.caplog.records:
            texts.append(trimcp.JsonFormatter().format(record))
            texts.append(repr(vars(record)))
            if record.exc_info:
                texts += traceback.format_exception(*record.exc_info)
        return "\n".join(texts)


@pytest.fixture
def written(caplog: pytest.LogCaptureFixture) -> Written:
    # Loggers of others that show whole requests at DEBUG are their users' to switch on.
    caplog.set_level(logging.DEBUG)
    security.tell_left_out()
    return Written(caplog)


def make_client() -> trimcp.Client:
    client = trimcp.Client("c")

    @client.elicitation
    async def user(params: Any) -> trimcp.ElicitResult:
        content = {"secret": ANSWER} if "secret" in params.requested_schema.properties else {"confirm": True}
        return trimcp.ElicitResult(action="accept", content=content)

    return client


@asynccontextmanager
async def connected(road: str, revision: Revision, written: Written) -> AsyncIterator[Any]:
    client = make_client()
    if road == "memory":
        theirs, ours = trimcp.memory_channels()
        server = make_server(written.records.append)
        async with server.running() as running, trio.open_nursery() as nursery:
            nursery.start_soon(running.serve, traced(theirs, written.lines.append))
            async with client.connect(traced(ours, written.lines.append), revision=revision) as session:
                yield session
    elif road == "stdio":
        child = trimcp.stdio(
            sys.executable,
            secrets_server.__file__,
            env={"SERVICE_TOKEN": ENVIRONMENT, "PYTHONPATH": str(Path(trimcp.__file__).parent.parent)},
            on_stderr=written.lines.append,
        )
        async with (
            child.connect() as channel,
            client.connect(traced(channel, written.lines.append), revision=revision) as session,
        ):
            yield session
    else:
        server = make_server(written.records.append)
        settings: dict[str, Any] = {
            "authenticate": trimcp.bearer_tokens({BEARER: "ada"}),
            "access_log": trimcp.AccessLog(),
            "trace": written.lines.append,
            "sse_path": "/sse",
        }
        async with served(server, road, settings=trimcp.HttpSettings(**settings)) as place:
            await be_refused(place, written)
            headers = {"authorization": f"Bearer {BEARER}", "cookie": f"session={COOKIE}", "x-api-key": KEY}
            target = place.target(with_query(place), headers=headers)
            async with client.connect(target, revision=revision) as session:
                yield session


def with_query(place: ServedHere) -> str:
    """The server's URL with a secret in its query; of gRPC without one, where URLs have none."""
    return place.url if place.transport == "grpc" else f"{place.url}?token={QUERY}"


async def be_refused(place: ServedHere, written: Written) -> None:
    """Come with a wrong token, and with credentials in the address."""
    headers = {"authorization": f"Bearer {BAD_BEARER}"}
    for url in (with_query(place), place.url.replace("://", f"://me:{USERINFO}@")):
        with pytest.raises((trimcp.McpError, ValueError, ExceptionGroup)) as caught:
            async with trimcp.Client("bad").connect(place.target(url, headers=headers)):
                pass
        if "@" not in url:  # the text of an error goes to who gave the address
            written.lines.append(str(caught.value))


@pytest.mark.parametrize(("road", "revision"), WORLDS, ids=str)
async def test_no_secret_is_written_down(road: str, revision: Revision, written: Written) -> None:
    async with connected(road, revision, written) as session:
        arguments = {"user": "ada", "password": ARGUMENT, "api_key": KEY}
        result = await session.call_tool("login", arguments)
        assert bool(result.is_error) == (revision is V2024_11_05)  # which has no questions
        with pytest.raises(trimcp.RemoteError):
            await session.call_tool("crash", {"password": ARGUMENT})
        with suppress(trimcp.RemoteError):  # wrong arguments: a tool error, or one of the protocol before 2025-11-25
            await session.call_tool("login", {"user": 5, "password": [ARGUMENT]})
        await session.read_resource(f"notes://one?token={QUERY}")
        with trio.move_on_after(0.2):
            await session.call_tool("wait", {"password": ARGUMENT})
        if revision.modern:
            params = CallToolParams(name="login", arguments=arguments, request_state=STATE)
            with pytest.raises(trimcp.RemoteError):
                await session.session.call("tools/call", params)
    everything = written.everything()
    assert "login" in everything
    assert "tools/call" in everything
    assert '"outcome": "tool_error"' in everything  # the audit is among it
    if road not in ("memory", "stdio"):
        assert "authentication_failed" in everything
        assert "trimcp.access" in everything
    if revision.modern:
        assert "request_state_refused" in everything
    assert [secret for secret in SECRETS if secret in everything] == []


def test_the_search_can_fail(written: Written) -> None:
    logging.getLogger("trimcp.http").debug("got %s", {"authorization": BEARER})
    assert BEARER in written.everything()
