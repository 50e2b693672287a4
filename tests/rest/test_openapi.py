"""Tools of an OpenAPI document: what they take, the requests they make, what becomes of answers, and the bounds."""

from __future__ import annotations

import gzip
import json
import logging
from pathlib import Path
from typing import Any

import httpx2
import pytest
import trio

import trimcp
from tests.rest.shop import SHOP, FakeApi
from trimcp.errors import LocalError
from trimcp.session.context import Context
from trimcp.testing.connect import connected


def shop(**changes: Any) -> dict[str, Any]:
    return {**SHOP, **changes}


def one(operation: dict[str, Any], path: str = "/it", **changes: Any) -> dict[str, Any]:
    """A document with one operation."""
    return shop(paths={path: {"post": {"operationId": "it", **operation}}}, **changes)


async def test_operations_are_tools(autojump_clock: Any) -> None:
    server = trimcp.openapi(SHOP, client=FakeApi().client)
    assert (server.info.name, server.info.version) == ("Shop", "2")
    async with connected(server) as session:
        tools = {tool.name: tool for tool in await session.list_tools()}
    assert [*tools] == ["getUser", "putUser", "deleteUser", "get_users", "form"]
    got, put = tools["getUser"], tools["putUser"]
    assert (got.title, got.description, got.meta) == ("Get a user", "Get a user", {"trimcp/tags": ["people"]})
    assert got.annotations is not None
    assert (got.annotations.read_only_hint, got.annotations.open_world_hint) == (True, True)
    assert got.input_schema == {
        "type": "object",
        "properties": {"id": {"type": "string"}},
        "required": ["id"],
        "additionalProperties": False,
    }
    assert put.input_schema["properties"]["body"] == {"$ref": "#/$defs/User"}
    assert put.input_schema["required"] == ["id", "body"]
    user = {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}}}
    assert put.input_schema["$defs"] == {
        "User": {**user, "properties": {**user["properties"], "boss": {"$ref": "#/$defs/User"}}}  # type: ignore[dict-item]
    }
    assert tools["get_users"].input_schema["properties"]["old"]["description"] == "Old ones, too."
    assert "Authorization" not in tools["get_users"].input_schema["properties"]
    assert tools["deleteUser"].annotations == trimcp.ToolAnnotations(
        idempotent_hint=True, destructive_hint=True, open_world_hint=True
    )


async def test_arguments_become_requests(autojump_clock: Any) -> None:
    api = FakeApi()
    server = trimcp.openapi(SHOP, client=api.client, credentials={"key": "s3cret"})
    async with connected(server) as session:
        result = await session.call_tool("getUser", {"id": "a/b ?é"})
        assert (result.structured_content, json.loads(result.text)) == ({"ok": True}, {"ok": True})
        await session.call_tool(
            "get_users",
            {
                "tags": ["a", "b c"],
                "ids": [1, 2],
                "piped": ["x", "y"],
                "where": {"age": 3},
                "json": {"a": [1]},
                "old": True,
                "X-Trace": "t1",
                "theme": "dark blue",
            },
        )
        await session.call_tool("putUser", {"id": "1", "body": {"name": "Ada"}})
        await session.call_tool("form", {"body": {"a": "1 2", "b": ["x", "y"], "c": False}})
    got, listed, put, form = api.asked
    assert (got.method, str(got.url)) == ("GET", "https://shop.example/v1/users/a%2Fb%20%3F%C3%A9")
    assert got.headers["x-key"] == "s3cret"
    assert listed.url.query == (
        b"tags=a&tags=b%20c&ids=1%2C2&piped=x%7Cy&where%5Bage%5D=3&json=%7B%22a%22%3A%5B1%5D%7D&old=true"
    )
    assert (listed.headers["x-trace"], listed.headers["cookie"]) == ("t1", "theme=dark%20blue")
    assert (put.headers["content-type"], json.loads(put.content)) == ("application/json", {"name": "Ada"})
    assert form.content == b"a=1+2&b=x&b=y&c=false"


async def test_a_body_is_sent_as_json_if_it_can_be(autojump_clock: Any) -> None:
    api = FakeApi()
    kinds = {
        "json": ["text/xml", "text/plain", "application/x-www-form-urlencoded", "Application/JSON; charset=utf-8"],
        "patch": ["text/xml", "application/merge-patch+json"],
        "form": ["text/plain", "application/x-www-form-urlencoded"],
        "text": ["text/xml", "text/plain"],
    }
    bodies = {name: {"requestBody": {"content": {kind: {} for kind in of}}} for name, of in kinds.items()}
    paths = {f"/{name}": {"post": {"operationId": name, **body}} for name, body in bodies.items()}
    async with connected(trimcp.openapi(shop(paths=paths), client=api.client)) as session:
        for name in ("json", "patch", "form"):
            await session.call_tool(name, {"body": {"a": "b c"}})
        await session.call_tool("text", {"body": "b c"})
    assert [(each.headers["content-type"], each.content) for each in api.asked] == [
        ("Application/JSON; charset=utf-8", b'{"a":"b c"}'),
        ("application/merge-patch+json", b'{"a":"b c"}'),
        ("application/x-www-form-urlencoded", b"a=b+c"),
        ("text/plain", b"b c"),
    ]


async def test_wrong_arguments_reach_no_api(autojump_clock: Any) -> None:
    api = FakeApi()
    async with connected(trimcp.openapi(SHOP, client=api.client)) as session:
        for name, arguments in (
            ("getUser", {"id": ".."}),
            ("getUser", {"id": ""}),
            ("getUser", {"id": 5}),
            ("getUser", {}),
            ("getUser", {"id": "1", "more": 1}),
            ("putUser", {"id": "1", "body": {"name": 3}}),
            ("get_users", {"X-Trace": "a\r\nX-Evil: 1"}),
        ):
            assert (await session.call_tool(name, arguments)).is_error, arguments
    assert api.asked == []


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (httpx2.Response(404, json={"why": "gone"}), 'the API answered 404 Not Found: {"why":"gone"}'),
        (httpx2.Response(500, content=b"\x00\xff", headers={"content-type": "x/y"}), "500 Internal Server Error"),
        (httpx2.Response(302, headers={"location": "http://169.254.169.254/"}), "redirects are not followed"),
        (httpx2.Response(200, content=b"x" * 2_000), "larger than 1,000 bytes"),
        (
            httpx2.Response(200, content=gzip.compress(b"x" * 500_000), headers={"content-encoding": "gzip"}),
            "larger than 1,000 bytes",
        ),
        (
            httpx2.Response(200, content=b"\x00", headers={"content-type": "application/zip"}),
            "1 bytes of application/zip",
        ),
    ],
)
async def test_what_is_no_good_answer_is_a_tool_error(answer: Any, expected: str, autojump_clock: Any) -> None:
    api = FakeApi(lambda request: answer)
    async with connected(trimcp.openapi(SHOP, client=api.client, max_response=1_000)) as session:
        result = await session.call_tool("getUser", {"id": "1"})
    assert result.is_error
    assert expected in result.text
    assert len(api.asked) == 1


async def test_other_answers_are_shown_as_what_they_are(autojump_clock: Any) -> None:
    answers = [
        httpx2.Response(200, json=[1, 2]),
        httpx2.Response(200, text="plain"),
        httpx2.Response(204),
        httpx2.Response(200, content=b"\x89PNG", headers={"content-type": "image/png"}),
        httpx2.Response(200, content=b'{"n": 1e999}', headers={"content-type": "application/json"}),
    ]
    api = FakeApi(lambda request: answers[len(api.asked) - 1])
    async with connected(trimcp.openapi(SHOP, client=api.client)) as session:
        found = [await session.call_tool("getUser", {"id": "1"}) for _ in answers]
    assert found[0].structured_content == {"result": [1, 2]}
    assert found[1].text == "plain"
    assert found[2].text == "the API answered 204 No Content, without content"
    assert found[3].content[0].type == "image"
    assert found[4].text == '{"n": 1e999}'


async def test_an_api_that_is_not_there_or_slow(autojump_clock: Any) -> None:
    def refuse(request: httpx2.Request) -> httpx2.Response:
        raise httpx2.ConnectError("connection refused: secret-host")

    async with connected(trimcp.openapi(SHOP, client=FakeApi(refuse).client)) as session:
        result = await session.call_tool("getUser", {"id": "1"})
        assert (result.is_error, result.text) == (True, "the API could not be reached, or its answer broke off")

    class Slow(httpx2.AsyncBaseTransport):
        async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
            await trio.sleep_forever()
            raise AssertionError

    slow = httpx2.AsyncClient(transport=Slow())
    async with connected(trimcp.openapi(SHOP, client=slow, timeout=5)) as session:
        result = await session.call_tool("getUser", {"id": "1"})
        assert result.text == "the API did not answer within 5 s"


@pytest.mark.parametrize(
    ("name", "secret", "where"),
    [
        ("key", "s", lambda request: request.headers["x-key"] == "s"),
        ("query", "s&t", lambda request: request.url.query == b"k=s%26t"),
        ("cookie", "s", lambda request: request.headers["cookie"] == "sid=s"),
        ("basic", ("me", "pw"), lambda request: request.headers["authorization"] == "Basic bWU6cHc="),
        ("token", "s", lambda request: request.headers["authorization"] == "Bearer s"),
    ],
)
async def test_credentials_go_where_the_document_says(name: str, secret: Any, where: Any, autojump_clock: Any) -> None:
    api = FakeApi()
    spec = one({"security": [{"unknown": []}, {name: []}]})
    async with connected(trimcp.openapi(spec, client=api.client, credentials={name: secret})) as session:
        assert not (await session.call_tool("it")).is_error
    assert where(api.asked[0])


async def test_each_principal_has_its_own_secret_and_no_token_of_a_caller_goes_on(autojump_clock: Any) -> None:
    api = FakeApi()

    async def key_of(ctx: Context[Any]) -> str:
        if ctx.principal is None:
            raise trimcp.ToolError("log in first")
        return f"key of {ctx.principal}"

    server = trimcp.openapi(SHOP, client=api.client, credentials={"key": key_of})
    for who in ("ada", "bob"):
        async with connected(server, principal=trimcp.Principal(who)) as session:
            await session.call_tool("getUser", {"id": "1"})
    async with connected(server) as session:
        assert (await session.call_tool("getUser", {"id": "1"})).text == "log in first"
        assert not (await session.call_tool("deleteUser", {"id": "1"})).is_error  # `security: []`
    assert [each.headers.get("x-key") for each in api.asked] == ["key of ada", "key of bob", None]
    assert all("authorization" not in each.headers for each in api.asked)


async def test_a_function_decides_what_is_exposed(autojump_clock: Any) -> None:
    def expose(operation: trimcp.ApiOperation) -> Any:
        if operation.deprecated or "admin" in operation.tags:
            return False
        return {"name": "find", "scopes": ["read"]} if operation.method == "GET" and operation.id else True

    server = trimcp.openapi(SHOP, client=FakeApi().client, expose=expose)
    async with connected(server) as session:
        assert [tool.name for tool in await session.list_tools()] == ["find", "putUser", "get_users"]
    async with connected(server, principal=trimcp.Principal("ada", scopes=[])) as session:
        assert "find" not in [tool.name for tool in await session.list_tools()]


async def test_schemas_of_3_0_are_translated(autojump_clock: Any) -> None:
    schema = {
        "type": "object",
        "properties": {
            "age": {"type": "integer", "minimum": 0, "exclusiveMinimum": True, "nullable": True},
            "kind": {"type": "string", "enum": ["a"], "nullable": True},
            "size": {"type": "number", "maximum": 5, "exclusiveMaximum": False},
            "user": {"$ref": "#/components/schemas/User", "description": "ignored in 3.0"},
        },
    }
    content = {"application/json; charset=utf-8": {"schema": schema}}
    spec = one({"requestBody": {"content": content}}, openapi="3.0.3")
    async with connected(trimcp.openapi(spec, client=FakeApi().client)) as session:
        [tool] = await session.list_tools()
        assert tool.input_schema["properties"]["body"]["properties"] == {
            "age": {"type": ["integer", "null"], "exclusiveMinimum": 0},
            "kind": {"type": ["string", "null"], "enum": ["a", None]},
            "size": {"type": "number", "maximum": 5},
            "user": {"$ref": "#/$defs/User"},
        }
        assert not (await session.call_tool("it", {"body": {"age": None}})).is_error
        assert (await session.call_tool("it", {"body": {"age": 0}})).is_error


YAML = """
openapi: 3.0.3
info: {title: T, version: "1"}
servers: [{url: "http://localhost:1/"}]
paths:
  /a:
    get:
      operationId: a
      parameters:
        - {$ref: "common.yaml#/Limit"}
      responses:
        200: {description: fine}
"""


async def test_yaml_files_and_documents_that_are_named(tmp_path: Path, autojump_clock: Any) -> None:
    api = FakeApi()
    file = tmp_path / "api.yaml"
    file.write_text(YAML)
    common = "Limit: {name: limit, in: query, schema: {$ref: '#/Number'}}\nNumber: {type: integer}\n"
    server = trimcp.openapi(file, client=api.client, documents={"common.yaml": common})
    async with connected(server) as session:
        [tool] = await session.list_tools()
        assert tool.input_schema["$defs"] == {"Number": {"type": "integer"}}
        await session.call_tool("a", {"limit": 3})
    assert str(api.asked[0].url) == "http://localhost:1/a?limit=3"


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


def body_of(schema: Any) -> dict[str, Any]:
    return {"requestBody": {"content": {"application/json": {"schema": schema}}}}


def query_of(schema: Any, **more: Any) -> dict[str, Any]:
    return {"parameters": [{"name": "q", "in": "query", "schema": schema, **more}]}


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        (one(body_of({"$ref": "https://evil.example/schema.json"})), "nothing here is 'https://evil.example"),
        (one(body_of({"$ref": "file:///etc/passwd"})), "nothing here is 'file:///etc/passwd'"),
        (one(body_of({"$ref": "other.yaml#/X"})), "given by documents="),
        (one(body_of({"$ref": "#/components/schemas/None"})), "nothing here is"),
        (one(body_of({"$dynamicRef": "#x"})), "changes with its place"),
        (one(body_of(deep(200))), "100 inside each other"),
        (one(body_of({"anyOf": [{"type": "string"}] * 3_000})), "more than 2000"),
        (one(body_of({"type": "strange"})), "$.properties.body.type"),
        (one(query_of({"type": "string"}, style="matrix")), "style 'matrix'"),
        (one({}, path="/a/{id}"), "nothing says what {id}"),
        (one({"parameters": [{"in": "query"}]}), "without name"),
        (one({"requestBody": {"content": {"image/png": {}}}}), "image/png"),
        (one({"requestBody": {"required": True}}), "sent as nothing"),
        (one({"parameters": [{"$ref": "#/components/x"}]}, components={"x": {"$ref": "#/components/x"}}), "for ever"),
    ],
)
def test_what_cannot_be_a_tool_is_left_out_and_says_why(spec: Any, why: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "trimcp.server"):
        server = trimcp.openapi(spec, client=FakeApi().client)
    assert len(server.tools) == 0
    [record] = caplog.records
    assert "POST /" in record.getMessage()
    assert why in record.getMessage()


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"swagger": "2.0"}, "no OpenAPI|not of OpenAPI"),
        ("- a\n- b", "is no object"),
        ('{"a": }', "not valid JSON"),
        (b"\xff\xfe", "not UTF-8"),
        ("a: &x [1]\nb: *x", "alias or an anchor"),
        (" " * (16 * 1024 * 1024 + 1), "larger than"),
    ],
)
def test_what_is_no_document_is_refused(given: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        trimcp.openapi(given)


@pytest.mark.parametrize("url", [None, "/v1", "file:///etc", "https://{x}.example", "https://a.example?q=1"])
def test_an_address_that_is_none_is_refused(url: str | None) -> None:
    with pytest.raises(LocalError, match="give it by url="):
        trimcp.openapi(shop(servers=[] if url is None else [{"url": url}]))


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match="the document is a dict"):
        trimcp.openapi(5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no security scheme 'x'; it has key"):
        trimcp.openapi(SHOP, credentials={"x": "y"})
    with pytest.raises(TypeError, match=r"\(name, password\)"):
        trimcp.openapi(SHOP, credentials={"basic": "y"})
    with pytest.raises(ValueError, match="timeout"):
        trimcp.openapi(SHOP, timeout=0)


async def test_names_are_unique_and_strange_ones_are_made_plain(autojump_clock: Any) -> None:
    hidden = "Show\u200b it\u202e"
    paths = {
        "/a": {"get": {"operationId": "x y/z"}, "post": {"operationId": "x y z", "summary": hidden}},
        "/b": {"get": {"operationId": "日本"}, "x-note": 1},
        "no path": {"get": {}},
    }
    async with connected(trimcp.openapi(shop(paths=paths), client=FakeApi().client)) as session:
        tools = await session.list_tools()
    assert [tool.name for tool in tools] == ["x_y_z", "x_y_z_2", "get"]
    assert tools[1].title == "Show it"


async def test_it_is_included_and_its_connection_ends_with_the_run(autojump_clock: Any) -> None:
    opened: list[Any] = []
    api = FakeApi()

    class Closing(httpx2.AsyncClient):
        def __init__(self, **settings: Any) -> None:
            opened.append(self)
            super().__init__(transport=api, **settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(httpx2, "AsyncClient", Closing)
        server = trimcp.Server("all")
        server.include(trimcp.openapi(SHOP, url="http://localhost:1"))
        async with connected(server) as session:
            assert not (await session.call_tool("getUser", {"id": "1"})).is_error
            assert [each.is_closed for each in opened] == [False]
        assert [each.is_closed for each in opened] == [True]


async def test_cookies_of_an_api_are_not_kept_for_others(autojump_clock: Any) -> None:
    spec = one({})
    api = FakeApi(lambda request: httpx2.Response(200, json={}, headers={"set-cookie": "user=ada; path=/"}))
    make = httpx2.AsyncClient
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(httpx2, "AsyncClient", lambda **settings: make(transport=api, **settings))
        async with connected(trimcp.openapi(spec)) as session:
            for _ in range(2):
                await session.call_tool("it")
    assert [each.headers.get("cookie") for each in api.asked] == [None, None]
