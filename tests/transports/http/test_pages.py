"""A page of another origin, in a real browser: it opens, calls, streams, resumes, ends and logs in, or is refused."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

import pytest
import trio

import trimcp
from tests.auth.test_protected import protected
from tests.peers import messages
from tests.peers.chromium import Chromium, chromium, serving_pages
from tests.peers.serving import served
from trimcp.agent_tools import AgentTools
from trimcp.wire.revisions import V2025_03_26, V2025_11_25

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.needs("chromium")]

OnBoth = pytest.mark.parametrize("transport", ["http", "http on hypercorn"])

FETCH = """
    const read = async (url, options = {}) => {
        const reply = await fetch(url, options);
        return {status: reply.status, headers: Object.fromEntries(reply.headers), text: await reply.text()};
    };
    const post = (url, body, headers = {}) => read(url, {method: "POST", body, headers: {
        "Content-Type": "application/json", "Accept": "application/json, text/event-stream", ...headers}});
"""

LEGACY = """
    const [url, version, hello, ready, call, list] = args;
    const opened = await post(url, hello);
    const session = opened.headers["mcp-session-id"];
    const more = {"Mcp-Session-Id": session, "MCP-Protocol-Version": version, "X-API-Key": "k", "traceparent": "00-1"};
    const ready_status = (await post(url, ready, more)).status;
    const called = await post(url, call, more);
    const id = (called.text.match(/^id: (.*)$/m) || [])[1];
    const listed = await post(url, list, more);
    let resumed = null;
    if (id) {
        const stream = await fetch(url, {headers: {...more, "Accept": "text/event-stream", "Last-Event-ID": id}});
        const reader = stream.body.getReader();
        let text = "";
        while (!text.includes('"result"')) {
            const piece = await reader.read();
            if (piece.done) break;
            text += new TextDecoder().decode(piece.value);
        }
        await reader.cancel();
        resumed = {status: stream.status, text};
    }
    const ended = (await read(url, {method: "DELETE", headers: more})).status;
    return {session, opened, ready_status, called, listed, resumed, ended};
"""

MODERN = """
    const [url, version, call, bad] = args;
    const called = await post(url, call, {"MCP-Protocol-Version": version, "Mcp-Method": "tools/call",
        "Mcp-Name": "steps", "X-API-Key": "k", "traceparent": "00-1"});
    const large = await post(url, bad, {"MCP-Protocol-Version": version});
    return {called, large};
"""

OLDEST = """
    const [url, hello, ready, call] = args;
    const stream = new EventSource(url);
    const heard = [];
    stream.onmessage = event => heard.push(event.data);
    const place = await new Promise((found, failed) => {
        stream.addEventListener("endpoint", event => found(new URL(event.data, url).href));
        stream.onerror = () => failed("refused");
    });
    const statuses = [];
    for (const each of [hello, ready, call]) statuses.push((await post(place, each)).status);
    while (!heard.some(text => text.includes("stepped"))) await new Promise(again => setTimeout(again, 10));
    stream.close();
    return {statuses, heard};
"""

AGENT = """
    const [base] = args;
    const call = {type: "tool_request", request_id: "r1", tool_name: "echo", arguments: {text: "hi"}};
    const called = await post(`${base}/mcp`, JSON.stringify(call));
    const made = await read(`${base}/contexts/c`, {method: "PATCH", body: '{"a": 1}',
        headers: {"Content-Type": "application/json"}});
    const again = await read(`${base}/contexts/c`, {method: "PATCH", body: '{"a": 2}',
        headers: {"Content-Type": "application/json", "If-Match": made.headers["etag"] || ""}});
    const gone = (await read(`${base}/contexts/c`, {method: "DELETE"})).status;
    return {called, made, again, gone};
"""


def offering() -> trimcp.Server[Any]:
    server: trimcp.Server[Any] = trimcp.Server("s")

    @server.tool
    async def steps(*, ctx: trimcp.Context) -> str:
        for step in range(1, 4):
            await ctx.report_progress(step, 3)
        return "stepped"

    @server.tool
    async def echo(text: str) -> str:
        return text

    return server


@asynccontextmanager
async def page_beside(transport: str) -> AsyncIterator[tuple[Chromium, str, str]]:
    """A browser on a page of an allowed origin, the server's address, and a page of one that is not allowed."""
    async with serving_pages() as allowed, serving_pages() as stranger, chromium() as browser:
        server = offering()
        origins = trimcp.Origins(allow_origins=[allowed], allow_headers=["X-API-Key", "traceparent"])
        settings = trimcp.HttpSettings(origins=origins, agent_tools=AgentTools(server))
        async with served(server, transport, settings=settings) as place:
            await browser.open(allowed)
            yield browser, place.url.removesuffix("/mcp"), stranger


def _legacy_args(base: str, revision: trimcp.Revision) -> list[str]:
    call = messages.reported_call(2, "steps")
    sent = (messages.initialize(revision.name), messages.notification("notifications/initialized"), call)
    return [f"{base}/mcp", revision.name, *(each.decode() for each in sent), messages.request(3, "tools/list").decode()]


@OnBoth
async def test_a_page_of_another_origin_does_all_that_a_client_does(transport: str) -> None:
    async with page_beside(transport) as (browser, base, stranger):
        for revision in trimcp.REVISIONS:
            if not V2025_03_26 <= revision < trimcp.LATEST:
                continue
            found = await browser.run(FETCH + LEGACY, *_legacy_args(base, revision))
            assert "failed" not in found, (revision.name, found)
            assert len(found["session"]) > 20, revision.name
            assert (found["opened"]["status"], found["ready_status"], found["ended"]) == (200, 202, 200), found
            assert found["called"]["text"].count("notifications/progress") == 3
            assert "stepped" in found["called"]["text"]
            assert "echo" in found["listed"]["text"]
            assert found["resumed"] is not None or revision < V2025_11_25, "the newest has ids from the head on"
            if found["resumed"] is not None:
                assert found["resumed"]["status"] == 200
        modern = messages.reported_call(1, "steps", modern=True).decode()
        found = await browser.run(FETCH + MODERN, f"{base}/mcp", trimcp.LATEST.name, modern, "{")
        assert "failed" not in found, found
        assert found["called"]["text"].count("notifications/progress") == 3, found
        assert "stepped" in found["called"]["text"]
        assert found["large"]["status"] == 400, "a page reads refusals, too"
        sent = (messages.initialize("2024-11-05"), messages.notification("notifications/initialized"))
        call = messages.call(2, "steps")
        found = await browser.run(FETCH + OLDEST, f"{base}/sse", *(each.decode() for each in (*sent, call)))
        assert found.get("statuses") == [202, 202, 202], found
        found = await browser.run(FETCH + AGENT, base)
        assert "failed" not in found, found
        assert json.loads(found["called"]["text"])["result"] == "hi"
        assert found["made"]["headers"]["etag"]
        assert found["again"]["status"] == 200, found

        await browser.open(stranger)
        for script, args in (
            (LEGACY, _legacy_args(base, trimcp.LATEST_LEGACY)),
            (MODERN, [f"{base}/mcp", trimcp.LATEST.name, modern, "{"]),
            (AGENT, [base]),
        ):
            found = await browser.run(FETCH + script, *args)
            assert found == {"failed": "TypeError: Failed to fetch"}


LOGIN = """
    const [url, verifier, code, back] = args;
    const first = await post(url, "{}");
    const challenge = first.headers["www-authenticate"] || "";
    const where = (challenge.match(/resource_metadata="([^"]*)"/) || [])[1];
    const about = JSON.parse((await read(where, {headers: {"MCP-Protocol-Version": "2025-11-25"}})).text);
    const issuer = about.authorization_servers[0];
    const known = JSON.parse((await read(`${issuer}/.well-known/oauth-authorization-server`)).text);
    if (!code) {
        const client = JSON.parse((await post(known.registration_endpoint,
            JSON.stringify({client_name: "a page", redirect_uris: [back]}))).text);
        return {client: client.client_id, authorize: known.authorization_endpoint, resource: about.resource};
    }
    const form = new URLSearchParams({grant_type: "authorization_code", code, code_verifier: verifier,
        redirect_uri: back, resource: about.resource});
    const got = JSON.parse((await read(known.token_endpoint, {method: "POST", body: form})).text);
    return {first: first.status, token: got.access_token};
"""
CALL = """
    const [url, token, version, call] = args;
    return await post(url, call, {"Authorization": `Bearer ${token}`, "MCP-Protocol-Version": version,
        "Mcp-Method": "tools/call", "Mcp-Name": "whoami"});
"""


async def test_a_page_of_another_origin_logs_in() -> None:
    async with serving_pages() as page, chromium() as browser:
        settings = trimcp.HttpSettings(origins=trimcp.Origins(allow_origins=[page]))
        async with protected(settings=settings) as there:
            await browser.open(page)
            verifier = "v" * 64
            found = await browser.run(FETCH + LOGIN, there.url, verifier, "", f"{page}/back")
            assert "failed" not in found, found
            digest = base64.urlsafe_b64encode(hashlib.sha256(verifier.encode()).digest()).rstrip(b"=").decode()
            query = {"client_id": found["client"], "redirect_uri": f"{page}/back", "resource": found["resource"]}
            query |= {"code_challenge": digest, "code_challenge_method": "S256", "response_type": "code"}
            await browser.open(f"{found['authorize']}?{urlencode(query)}")
            await browser.click("button")
            with trio.fail_after(60):
                while not (came := await browser.address()).startswith(page):  # noqa: ASYNC110 -- the browser goes
                    await trio.sleep(0.05)
            (code,) = parse_qs(urlsplit(came).query)["code"]
            found = await browser.run(FETCH + LOGIN, there.url, verifier, code, f"{page}/back")
            assert found["first"] == 401, found
            call = messages.modern_request(1, "tools/call", name="whoami", arguments={}).decode()
            found = await browser.run(FETCH + CALL, there.url, found["token"], trimcp.LATEST.name, call)
            assert "ann by client-" in found["text"], found
