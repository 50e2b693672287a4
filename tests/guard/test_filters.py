"""Filters: every result passes them in order, none leaves where one crashes, and what is shipped does what it says."""

from __future__ import annotations

import base64
import json
import logging
import re
from typing import Any

import pytest
import trio.testing

import trimcp
from tests.peers.serving import NETWORK
from tests.peers.serving import connected as connected_over
from tests.yardsticks import assert_costs
from trimcp.guard.filters import SECRETS
from trimcp.testing.connect import connected, every_revision
from trimcp.wire.revisions import LATEST, LATEST_LEGACY, V2024_11_05, V2025_06_18, Revision

FILTERED = ("tools/call", "resources/read", "prompts/get")


def saying(text: Any, **options: Any) -> trimcp.Server[Any]:
    """A server whose tools, resource and prompt all say this."""
    server = trimcp.Server("s", **options)

    @server.tool(structured=False)
    async def say() -> str:
        return str(text)

    @server.tool(name="structured")
    async def structured() -> dict[str, Any]:
        return {"text": text}

    @server.tool
    async def fail() -> str:
        raise trimcp.ToolError(text)

    @server.resource("notes://one")
    async def note() -> str:
        return str(text)

    @server.prompt
    async def ask() -> str:
        return str(text)

    return server


async def everything(server: trimcp.Server[Any], revision: Revision = LATEST) -> dict[str, Any]:
    """What a client gets by each of its methods."""
    async with connected(server, revision=revision) as session:
        return {
            "tools/call": (await session.call_tool("say")).content[0].text,
            "resources/read": (await session.read_resource("notes://one")).contents[0].text,
            "prompts/get": (await session.get_prompt("ask")).messages[0].content.text,
        }


@every_revision
async def test_all_results_pass_all_filters_in_order(
    revision: Revision, autojump_clock: trio.testing.MockClock
) -> None:
    server = saying("x")
    server.filter(trimcp.guard.PatternFilter(re.compile("x"), "y"))
    server.filter(trimcp.guard.PatternFilter(re.compile("y"), "yz"))
    assert await everything(server, revision) == dict.fromkeys(FILTERED, "yz")


async def test_a_filter_is_a_function_sync_or_async_that_sees_who_asks(autojump_clock: trio.testing.MockClock) -> None:
    server = saying("x")
    seen = []

    @server.filter
    def look(ctx: Any, params: Any, result: Any) -> Any:
        seen.append((ctx.method, getattr(params, "name", None) or params.uri))
        return result

    @server.filter(methods=("tools/call",))
    async def answer(ctx: Any, params: Any, result: Any) -> Any:
        await trio.lowlevel.checkpoint()
        return trimcp.CallToolResult(content=[trimcp.Text("another")])

    assert await everything(server) == {"tools/call": "another", "resources/read": "x", "prompts/get": "x"}
    assert seen == [("tools/call", "say"), ("resources/read", "notes://one"), ("prompts/get", "ask")]


async def test_a_filter_may_be_for_some_names(autojump_clock: trio.testing.MockClock) -> None:
    server = saying("x")
    server.filter(trimcp.guard.PatternFilter(re.compile("x"), "tool"), names="sa*")
    server.filter(trimcp.guard.PatternFilter(re.compile("x"), "note"), names=["notes://*"])
    assert await everything(server) == {"tools/call": "tool", "resources/read": "note", "prompts/get": "x"}


async def test_a_filter_for_a_tool_is_for_its_older_versions_too(autojump_clock: trio.testing.MockClock) -> None:
    server = saying("x")
    entry = server.tools.get("say")
    assert entry is not None
    server.put_tool("say@0.1", entry, listed=False)
    server.filter(trimcp.guard.PatternFilter(re.compile("x"), "tool"), names="say")
    async with connected(server) as session:
        assert (await session.call_tool("say@0.1")).text == "tool"


async def test_errors_a_tool_reports_are_filtered_too(autojump_clock: trio.testing.MockClock) -> None:
    server = saying("x")
    server.filter(trimcp.guard.PatternFilter(re.compile("x"), "y"))
    async with connected(server) as session:
        result = await session.call_tool("fail")
    assert result.is_error is True
    assert result.content[0].text == "y"


async def test_filters_stand_outside_middleware(autojump_clock: trio.testing.MockClock) -> None:
    server = saying("x")

    @server.middleware
    async def change(ctx: Any, params: Any, call_next: Any) -> Any:
        result = await call_next(ctx, params)
        if ctx.method == "tools/call":
            return trimcp.CallToolResult(content=[trimcp.Text("token ghp_" + "a" * 36)])
        return result

    server.filter(trimcp.guard.SecretsFilter())
    assert (await everything(server))["tools/call"] == "token [masked: GitHub token]"


@pytest.mark.parametrize("method", FILTERED)
@pytest.mark.parametrize("what", ["crash", "nothing", "another kind"])
async def test_a_filter_that_fails_lets_nothing_out(
    what: str, method: str, autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    server = saying("the secret")

    @server.filter(methods=(method,))
    def broken(ctx: Any, params: Any, result: Any) -> Any:
        if what == "crash":
            raise RuntimeError("broken filter")
        return None if what == "nothing" else "text"

    async with connected(server) as session:
        call = {
            "tools/call": lambda: session.call_tool("say"),
            "resources/read": lambda: session.read_resource("notes://one"),
            "prompts/get": lambda: session.get_prompt("ask"),
        }[method]
        with pytest.raises(trimcp.RemoteError) as caught:
            await call()
    assert (caught.value.code, caught.value.message, caught.value.data) == (-32603, "internal error", None)
    errors = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert len(errors) == 1
    assert errors[0].exc_info is not None
    assert "broken; the result was kept back" in str(errors[0].exc_info[1].__notes__)


async def test_a_filter_may_refuse_with_a_reason(autojump_clock: trio.testing.MockClock) -> None:
    server = saying("x")

    @server.filter
    def refuse(ctx: Any, params: Any, result: Any) -> Any:
        raise trimcp.ToolError("not for you")

    async with connected(server) as session:
        result = await session.call_tool("say")
        assert (result.is_error, result.content[0].text) == (True, "not for you")
        with pytest.raises(trimcp.RemoteError, match="not for you") as caught:
            await session.read_resource("notes://one")
    assert caught.value.data == {"reason": "filter"}


async def test_questions_pass_unfiltered(autojump_clock: trio.testing.MockClock) -> None:
    server = trimcp.Server("s")
    server.filter(trimcp.guard.PatternFilter(re.compile("a"), "b"))

    @server.tool(structured=False)
    async def ask(ctx: trimcp.Context) -> str:
        answer = await ctx.elicit("a?", {"type": "object", "properties": {"a": {"type": "string"}}})
        assert answer.content is not None
        return str(answer.content["a"])

    client = trimcp.Client("c")

    @client.elicitation
    async def user(params: Any) -> trimcp.ElicitResult:
        assert params.message == "a?"
        return trimcp.ElicitResult(action="accept", content={"a": "xax"})

    async with connected(server, client) as session:
        assert (await session.call_tool("ask")).content[0].text == "xbx"


async def test_a_server_without_filters_pays_nothing() -> None:
    server = saying("x")
    handler = object()
    assert server.filtered("tools/call", handler) is handler
    server.filter(trimcp.guard.SecretsFilter())
    assert server.filtered("tools/list", handler) is handler


async def test_what_cannot_be_filtered_is_refused() -> None:
    server = saying("x")
    with pytest.raises(ValueError, match="tools/list"):
        server.filter(trimcp.guard.SecretsFilter(), methods=("tools/list",))
    with pytest.raises(TypeError, match="is a function"):
        server.filter("secrets")
    with pytest.raises(TypeError, match=r"re\.compile\('a'\)"):
        trimcp.guard.PatternFilter("a")
    with pytest.raises(ValueError):
        trimcp.guard.SizeFilter(0)
    with pytest.raises(ValueError):
        trimcp.guard.SecretsFilter("hide")
    async with server.running():
        with pytest.raises(trimcp.LocalError):
            server.filter(trimcp.guard.SecretsFilter())


# Hidden text


async def test_hidden_text_is_taken_out_of_all_there_is(autojump_clock: trio.testing.MockClock) -> None:
    hidden = "a\x1b[31m\u202e\u200b\U000e0041b"
    server = trimcp.Server("s")
    server.filter(trimcp.guard.HiddenTextFilter())

    @server.tool(structured=False)
    async def say() -> list[Any]:
        embedded = trimcp.wire.TextResourceContents(uri="notes://one", text=hidden)
        return [hidden, trimcp.wire.EmbeddedResource(embedded), trimcp.ResourceLink(name=hidden, uri="notes://one")]

    @server.tool
    async def structured() -> dict[str, Any]:
        return {hidden: [{"deep": hidden}, 1, None]}

    async with connected(server) as session:
        text, embedded, link = (await session.call_tool("say")).content
        found = await session.call_tool("structured")
    assert (text.text, embedded.resource.text, link.name) == ("ab", "ab", "ab")
    assert found.structured_content == {"ab": [{"deep": "ab"}, 1, None]}
    assert "\u202e" not in found.content[0].text


async def test_members_that_would_be_one_are_kept_back(
    autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    server = trimcp.Server("s")
    server.filter(trimcp.guard.HiddenTextFilter())

    @server.tool
    async def structured() -> dict[str, Any]:
        return {"a": 1, "a\u200b": 2}

    async with connected(server) as session:
        with pytest.raises(trimcp.RemoteError, match="internal error"):
            await session.call_tool("structured")


# Secrets

KEY = (
    "-----BEGIN RSA PRIVATE KEY-----\nProc-Type: 4,ENCRYPTED\nDEK-Info: AES-128-CBC,0A\n\n"
    f"{'MIIE' * 400}\n-----END RSA PRIVATE KEY-----"
)
JWT = ".".join(
    base64.urlsafe_b64encode(part).decode().rstrip("=")
    for part in (b'{"alg":"HS256"}', b'{"sub":"1234567"}', b"s" * 32)
)
EXAMPLES = {
    "private key": [KEY, KEY.replace("\n", "\\n"), KEY.replace("RSA", "OPENSSH"), KEY.replace("RSA ", "")],
    "authorization": [
        "Authorization: Basic dXNlcjpwYXNz",
        '"authorization": "token abcdefabcdef"',
        "authorization=Digest x",
    ],
    "bearer token": ["sent Bearer abcdef0123456789", "bearer  a.b-c_d0123456789"],
    "password in a URL": ["postgres://user:hunter2@db/x", "redis://:hunter2@h"],
    "JSON web token": [JWT, f"token={JWT}&a=b"],
    "AWS key": ["AKIAIOSFODNN7EXAMPLE"],
    "GitHub token": ["ghp_" + "a1B2" * 9, "github_pat_" + "a1B2_" * 8, "line\\nghs_" + "a1B2" * 9],
    "GitLab token": ["glpat-" + "a1B2-" * 4],
    "Slack token": ["xoxb-123456789012-abcdefghijkl"],
    "Stripe key": ["sk_live_" + "a1B2" * 6],
    "API key": ["sk-proj-" + "a1B2" * 6, "\\nsk-ant-api03-" + "a1B2" * 9],
    "Google key": ["AIza" + "a1B2c" * 7, "ya29." + "a1B2" * 10],
    "package registry token": ["npm_" + "a1B2c3" * 6, "pypi-" + "a1B2c" * 12],
    "Hugging Face token": ["hf_" + "a1B2" * 9],
}


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in EXAMPLES.items() for text in texts])
def test_secrets_are_masked_and_the_rest_stays(name: str, text: str) -> None:
    masked = trimcp.guard.SecretsFilter()._change(f"before {text} after")
    assert f"[masked: {name}]" in masked
    assert masked.startswith("before ")
    assert masked.endswith(" after")
    secret = "hunter2" if "hunter2" in text else text.rpartition(" ")[2].strip('"')
    assert secret not in masked


def test_a_key_without_its_end_is_masked_to_the_end() -> None:
    assert trimcp.guard.SecretsFilter()._change(f"before {KEY[:900]}") == "before [masked: private key]"


def test_every_pattern_has_an_example() -> None:
    assert {secret.name for secret in SECRETS} == set(EXAMPLES)


@pytest.mark.parametrize(
    "text",
    [
        "the bearer of this letter understands everything",
        "basic authentication is described there",
        "task-abcdefghijklmnopqrstuvwxyz and risk-management-of-the-whole-thing",
        "http://example.org:8080/path?query=1",
        "-----BEGIN CERTIFICATE-----\nMIIE\n-----END CERTIFICATE-----",
        "ghp_short and eyJhbGciOi alone",
        "sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
        "550e8400-e29b-41d4-a716-446655440000",
    ],
)
def test_ordinary_text_is_no_secret(text: str) -> None:
    assert trimcp.guard.SecretsFilter()._change(text) == text


async def test_secrets_are_masked_in_structured_content(autojump_clock: trio.testing.MockClock) -> None:
    server = saying("ghp_" + "a1B2" * 9)
    server.filter(trimcp.guard.SecretsFilter())
    async with connected(server) as session:
        result = await session.call_tool("structured")
    assert result.structured_content == {"text": "[masked: GitHub token]"}
    assert json.loads(result.content[0].text) == {"text": "[masked: GitHub token]"}


async def test_a_secret_may_keep_a_result_back(autojump_clock: trio.testing.MockClock) -> None:
    server = saying("ghp_" + "a1B2" * 9)
    server.filter(trimcp.guard.SecretsFilter("refuse"))
    async with connected(server) as session:
        result = await session.call_tool("say")
    assert result.is_error is True
    assert "GitHub token" in result.content[0].text
    assert "a1B2" not in result.content[0].text


BAIT = [
    "-----BEGIN PRIVATE KEY-----",
    "-----BEGIN RSA PRIVATE KEY-----" + "-" * 50,
    "-----BEGIN " + "A " * 40,
    "-----begin ",
    "eyJ" * 10,
    "eyJaaaaaaaa.",
    "eyJaaaaaaaa.eyJaaaaaaaa",
    "eyJaaaaaaaa.eyJ",
    "ghp_",
    "ghp_aaa",
    "sk-",
    "\\nsk-a",
    "sk_live_",
    "://",
    "://a:",
    "://" + "a:" * 100,
    "bearer ",
    "bearer a",
    "Bearer " + "a" * 300,
    "authorization:",
    'authorization":"a ',
    "AKIA" + "A" * 15,
    "xoxb-a",
    "AIza" + "a" * 30,
    "ya29.a",
    "pypi-a",
    "a",
    "=",
]


@pytest.mark.parametrize("bait", BAIT)
def test_no_text_makes_masking_slow(bait: str) -> None:
    """Twice the text takes at most some four times as long, and a megabyte no more than seconds."""
    change = trimcp.guard.SecretsFilter()._change
    short, long = (bait * (length // len(bait)) for length in (150_000, 300_000))
    assert_costs(lambda: change(long), at_most=4, times=lambda: change(short))
    assert_costs(lambda: change(long), at_most=2_000)


# Size


async def test_a_long_text_is_cut_and_says_so(autojump_clock: trio.testing.MockClock) -> None:
    server = saying("ü" * 1_000)
    server.filter(trimcp.guard.SizeFilter(301))
    for text in (await everything(server)).values():
        cut, _, note = text.partition("\n")
        assert cut == "ü" * 150  # never half a character
        assert note == "[cut here: the whole result has 2000 bytes, at most 301 are sent]"


async def test_what_fits_is_left_alone(autojump_clock: trio.testing.MockClock) -> None:
    server = saying("x" * 100)
    server.filter(trimcp.guard.SizeFilter(100))
    assert await everything(server) == dict.fromkeys(FILTERED, "x" * 100)


async def test_what_comes_after_the_cut_is_gone(autojump_clock: trio.testing.MockClock) -> None:
    server = trimcp.Server("s")
    server.filter(trimcp.guard.SizeFilter(15))

    @server.tool(structured=False)
    async def say() -> list[trimcp.Text]:
        return [trimcp.Text(letter * 10) for letter in "abc"]

    async with connected(server) as session:
        texts = [block.text for block in (await session.call_tool("say")).content]
    assert len(texts) == 2
    assert texts[0] == "a" * 10
    assert texts[1].startswith("bbbbb\n[cut here")


async def test_a_result_may_be_refused_for_its_size(autojump_clock: trio.testing.MockClock) -> None:
    server = saying("x" * 1_000)
    server.filter(trimcp.guard.SizeFilter(100, on_excess="refuse"))
    async with connected(server) as session:
        result = await session.call_tool("say")
        assert (result.is_error, result.content[0].text) == (True, "the result has 1000 bytes; at most 100 are sent")
        with pytest.raises(trimcp.RemoteError, match="1000 bytes"):
            await session.read_resource("notes://one")


@pytest.mark.parametrize("kind", ["structured", "image", "blob"])
async def test_what_cannot_be_cut_is_refused(kind: str, autojump_clock: trio.testing.MockClock) -> None:
    server = saying("x" * 1_000)
    server.filter(trimcp.guard.SizeFilter(100))

    @server.tool(structured=False)
    async def image() -> Any:
        return trimcp.wire.ImageContent(data="A" * 1_000, mime_type="image/png")

    @server.resource("notes://blob")
    async def blob() -> bytes:
        return b"x" * 1_000

    async with connected(server) as session:
        if kind == "blob":
            with pytest.raises(trimcp.RemoteError, match="cannot be cut"):
                await session.read_resource("notes://blob")
        else:
            result = await session.call_tool(kind)
            assert result.is_error is True
            assert "at most 100" in result.content[0].text


@pytest.mark.parametrize("road", NETWORK)
async def test_over_a_network(road: str) -> None:
    server = saying("\x1b[31mred ghp_" + "a1B2" * 9)
    server.filter(trimcp.guard.HiddenTextFilter())
    server.filter(trimcp.guard.SecretsFilter())
    revision = V2024_11_05 if road == "http+sse" else LATEST_LEGACY if "websocket" in road else LATEST
    async with connected_over(server, road, revision=revision) as session:
        assert (await session.call_tool("say")).content[0].text == "red [masked: GitHub token]"


@pytest.mark.parametrize("revision", [V2025_06_18, LATEST], ids=str)
async def test_what_is_cut_still_fits_its_schema(revision: Revision, autojump_clock: trio.testing.MockClock) -> None:
    """A result with structured content that is refused needs none: the client takes it as an error."""
    server = saying("x" * 1_000)
    server.filter(trimcp.guard.SizeFilter(500))
    async with connected(server, revision=revision) as session:
        assert (await session.call_tool("structured")).is_error is True
