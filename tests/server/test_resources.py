"""Resources: what a function may return, what a URI selects, what a hostile one does not."""

from __future__ import annotations

import base64
import datetime
from pathlib import Path
from typing import Any

import pytest

from trimcp.client.session import ClientSession
from trimcp.errors import ErrorReply, LocalError, RemoteError, ResourceNotFound
from trimcp.server.resources import read_result
from trimcp.server.server import Server
from trimcp.session.context import Context
from trimcp.testing.connect import connected, every_revision
from trimcp.wire.codes import INTERNAL_ERROR
from trimcp.wire.content import BlobResourceContents, TextResourceContents
from trimcp.wire.resources import ReadResourceResult
from trimcp.wire.revisions import LATEST, Revision


def contents_of(value: Any, mime_type: str | None = None) -> Any:
    return read_result(value, "x://y", mime_type, 5, "public").contents


async def text(session: ClientSession, uri: str) -> str:
    [contents] = (await session.read_resource(uri)).contents
    return contents.text


async def missing(session: ClientSession, uri: str) -> None:
    with pytest.raises(RemoteError) as refused:
        await session.read_resource(uri)
    assert refused.value.code == session.revision.resource_missing_code
    assert refused.value.data == {"uri": uri}


BLOB = BlobResourceContents(uri="x://y", blob=base64.b64encode(b"\0").decode(), mime_type="application/octet-stream")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("text", [TextResourceContents(uri="x://y", text="text")]),
        ("", [TextResourceContents(uri="x://y", text="")]),
        (b"\0", [BLOB]),
        (bytearray(b"\0"), [BLOB]),
        (memoryview(b"\0"), [BLOB]),
        (["a", b"\0"], [TextResourceContents(uri="x://y", text="a"), BLOB]),
        ([TextResourceContents(uri="x://z", text="z")], [TextResourceContents(uri="x://z", text="z")]),
        ([], [TextResourceContents(uri="x://y", text="[]", mime_type="application/json")]),
        (0, [TextResourceContents(uri="x://y", text="0", mime_type="application/json")]),
        ([1, "a"], [TextResourceContents(uri="x://y", text='[\n  1,\n  "a"\n]', mime_type="application/json")]),
    ],
    # No `repr`: that of a memoryview holds its address, and every process of a run has to find the same names.
    ids=[
        "text",
        "empty text",
        "bytes",
        "bytearray",
        "memoryview",
        "several",
        "contents",
        "empty list",
        "zero",
        "values",
    ],
)
def test_whatever_a_function_returns_becomes_contents(value: Any, expected: Any) -> None:
    assert contents_of(value) == expected


def test_the_declared_type_is_told_and_a_whole_result_is_left_alone() -> None:
    assert contents_of("a", "text/html")[0].mime_type == "text/html"
    assert contents_of(b"a", "image/png")[0].mime_type == "image/png"
    assert contents_of("a")[0].mime_type is None
    whole = ReadResourceResult(contents=[])
    assert read_result(whole, "x://y", None, 5, "public") is whole
    kept = read_result("a", "x://y", None, 5, "public")
    assert (kept.ttl_ms, kept.cache_scope) == (5, "public")
    with pytest.raises(ResourceNotFound):
        contents_of(None)


@every_revision
async def test_fixed_text_bytes_and_files_are_read_each_time(revision: Revision, tmp_path: Path) -> None:
    page = tmp_path / "page.txt"
    page.write_text("first")
    server = Server("s")
    server.add_resource("file:///page.txt", page, mime_type="text/plain")
    server.add_resource("file:///raw", page)
    server.add_resource("notes://empty", "", name="nothing", size=99)
    async with connected(server, revision=revision) as session:
        listed = await session.list_resources()
        assert [(resource.name, resource.size) for resource in listed] == [
            ("page.txt", None),
            ("raw", None),
            ("nothing", 0),
        ]
        assert await text(session, "file:///page.txt") == "first"
        page.write_text("second")
        assert await text(session, "file:///page.txt") == "second"
        [raw] = (await session.read_resource("file:///raw")).contents
        assert base64.b64decode(raw.blob) == b"second"
        assert await text(session, "notes://empty") == ""


async def test_variables_become_what_the_function_wants() -> None:
    server = Server("s")

    @server.resource("days://{day}/{count}{?loud}")
    def days(day: datetime.date, count: int, loud: bool = False) -> str:
        return f"{day:%d.%m.%Y} {count + 1} {loud}"

    @server.resource("paths://{+path}")
    def paths(path: str) -> str:
        return path

    async with connected(server) as session:
        assert await text(session, "days://2026-01-02/3") == "02.01.2026 4 False"
        assert await text(session, "days://2026-01-02/3?loud=true") == "02.01.2026 4 True"
        for uri in ("days://2026-01-02/three", "days://2026-01-02/3.5", "days://2026-01-02/true", "days://today/3"):
            await missing(session, uri)
        await missing(session, "days://2026-02-30/3")  # fits the schema, and is no date
        await missing(session, "days://2026-01-02/3?loud=yes")
        assert await text(session, "paths://a/b") == "a/b"


async def test_a_template_whose_types_do_not_fit_leaves_the_uri_to_the_next() -> None:
    server = Server("s")

    @server.resource("page://{number}")
    def by_number(number: int) -> str:
        return f"number {number}"

    @server.resource("page://{name}")
    def by_name(name: str) -> str:
        return f"name {name}"

    server.add_resource("page://0", "the fixed one")
    async with connected(server) as session:
        assert await text(session, "page://7") == "number 7"
        assert await text(session, "page://seven") == "name seven"
        assert await text(session, "page://0") == "the fixed one"


HOSTILE = [
    "files://..",
    "files://../etc/passwd",
    "files://%2e%2e/etc/passwd",
    "files://%2e%2e%2fetc%2fpasswd",
    "files://a/../../etc/passwd",
    "files://..%5cwindows",
    "files:///etc/passwd",
    "files://%00",
    "files://a\x00b",
    "files://C:/windows",
    "files://" + "a/" * 5_000,
    "",
]


@pytest.mark.parametrize("uri", HOSTILE, ids=range(len(HOSTILE)))
async def test_no_uri_leaves_the_directory(uri: str) -> None:
    server = Server("s")
    reached: list[str] = []

    @server.resource("files://{+path}")
    def files(path: str) -> str:
        reached.append(path)
        return path

    async with connected(server) as session:
        await missing(session, uri)
    assert reached == []


async def test_the_guard_can_be_taken_off() -> None:
    server = Server("s")

    @server.resource("files://{+path}", guard=False)
    def files(path: str) -> str:
        return path

    async with connected(server) as session:
        assert await text(session, "files://../up") == "../up"


@every_revision
async def test_none_missing_and_a_crash_are_told_apart(revision: Revision) -> None:
    server = Server("s")

    @server.resource("a://none")
    async def none() -> str | None:
        return None

    @server.resource("a://raises")
    async def raises() -> str:
        raise ResourceNotFound("not here")

    @server.resource("a://own")
    async def own() -> str:
        raise ErrorReply(7, "own")

    @server.resource("a://crash")
    async def crash() -> str:
        raise KeyError("secret")

    async with connected(server, revision=revision) as session:
        await missing(session, "a://none")
        await missing(session, "a://raises")
        with pytest.raises(RemoteError) as refused:
            await session.read_resource("a://own")
        assert refused.value.code == 7
        with pytest.raises(RemoteError) as crashed:
            await session.read_resource("a://crash")
        assert crashed.value.code == INTERNAL_ERROR
        assert "secret" not in str(crashed.value)


def test_what_cannot_be_right_is_refused_when_it_is_added() -> None:
    server = Server("s")
    server.add_resource("a://b", "x")
    with pytest.raises(LocalError, match="already"):
        server.add_resource("a://b", "y")
    with pytest.raises(TypeError, match="takes c"):

        @server.resource("a://{b}")
        def other(c: str) -> str:
            return c

    with pytest.raises(TypeError, match="no variables"):

        @server.resource("a://plain")
        def extra(c: str) -> str:
            return c

    with pytest.raises(KeyError):
        server.remove_resource("a://c")


async def test_a_context_is_no_variable_and_reading_may_be_kept() -> None:
    server = Server("s")

    @server.resource("a://{b}", ttl_ms=60_000, cache_scope="private")
    async def read(b: str, ctx: Context[Any]) -> str:
        return f"{b} by {ctx.method}"

    async with connected(server, revision=LATEST) as session:
        result = await session.read_resource("a://x")
        assert result.contents[0].text == "x by resources/read"
        assert (result.ttl_ms, result.cache_scope) == (60_000, "private")


async def test_watching_is_bounded_and_for_what_exists() -> None:
    server = Server("s")
    server.add_resource("a://b", "x")
    async with connected(server) as session:
        async with session.listen(resources=["a://b", "a://nothing"]) as changes:
            assert changes.acknowledged.resource_subscriptions == ["a://b"]
        with pytest.raises(RemoteError):
            async with session.listen(resources=[f"a://{number}" for number in range(1_001)]):
                pass
