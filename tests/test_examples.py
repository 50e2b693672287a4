"""The examples, driven as their users would: the weather server by a recorded client, the code search by ours."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import trio
from jsonschema import Draft7Validator

import trimcp
from trimcp.session.listening import ResourceUpdated
from trimcp.testing import Transcript, connected, every_revision, replay
from trimcp.wire.revisions import V2024_11_05

ROOT = Path(__file__).parents[1]
SPEC = Path(os.environ.get("TRIMCP_SPEC") or ROOT.parent / "shared" / "spec")
CLINE = ROOT / "tests" / "transcripts" / "cline-2024-11-05.txt"
RESULTS = {
    "initialize": "InitializeResult",
    "tools/list": "ListToolsResult",
    "resources/list": "ListResourcesResult",
    "resources/templates/list": "ListResourceTemplatesResult",
    "tools/call": "CallToolResult",
}


def load(name: str) -> ModuleType:
    """Import an example afresh, so that no test sees the state of another."""
    specification = importlib.util.spec_from_file_location(f"example_{name}", ROOT / "examples" / f"{name}.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module
    # As Python does for a script, whose neighbours it can import.
    if str(ROOT / "examples") not in sys.path:
        sys.path.insert(0, str(ROOT / "examples"))
    specification.loader.exec_module(module)
    return module


# Weather


async def test_a_recorded_client_meets_the_weather_server() -> None:
    await replay(Transcript.read(CLINE), load("weather").server)


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ('"isError":false', '"isError":true', "message 11: $.result.isError is false, expected true"),
        ('"subscribe":false,', "", "message 2: $.result.capabilities.resources.subscribe should not be there: false"),
        ('{"resources":[]}', '{"resources":[],"nextCursor":"2"}', "message 7: $.result.nextCursor is missing"),
        (
            '"required":["latitude","longitude"]',
            '"required":["latitude"]',
            "message 5: $.result.tools[1].inputSchema.required has 2 members, expected 1",
        ),
        ("Sunny.", "Rain.", "message 11: $.result.content[0].text is"),
    ],
)
async def test_the_replay_names_each_field_that_differs(old: str, new: str, told: str) -> None:
    text = CLINE.read_text("utf-8")
    assert old in text
    with pytest.raises(AssertionError) as caught:
        await replay(Transcript.parse(text.replace(old, new)), load("weather").server)
    assert told in str(caught.value)


@pytest.mark.skipif(not SPEC.is_dir(), reason="the official schemas are not here: point TRIMCP_SPEC at them")
def test_the_recorded_replies_have_the_shapes_of_their_revision() -> None:
    schema = json.loads((SPEC / V2024_11_05.name / "schema.json").read_text("utf-8"))
    methods: dict[Any, str] = {}
    seen = []
    for from_client, message in Transcript.read(CLINE).messages:
        if from_client:
            methods[message.get("id")] = message["method"]
            continue
        method = methods[message["id"]]
        Draft7Validator({**schema, "$ref": "#/definitions/JSONRPCResponse"}).validate(message)
        definition = schema["definitions"][RESULTS[method]]
        Draft7Validator({**schema, **definition}).validate(message["result"])
        # The schema is open, so it lets fields of later revisions pass; we do not.
        assert set(message["result"]) <= set(definition["properties"]), method
        for tool in message["result"].get("tools", []):
            assert set(tool) <= set(schema["definitions"]["Tool"]["properties"])
        seen.append(method)
    assert seen == list(RESULTS)


@every_revision
async def test_the_weather_says_what_it_has_where_it_has_nothing(revision: trimcp.Revision) -> None:
    async with connected(load("weather").server, revision=revision) as session:
        result = await session.call_tool("get_forecast", {"latitude": 0, "longitude": 0})
        assert result.is_error
        assert "New York, NY (40.7128, -74.006)" in result.content[0].text
        result = await session.call_tool("get_alerts", {"state": "ny"})
        assert not result.is_error
        assert "Wind Advisory (Moderate)" in result.content[0].text


# Code search


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A directory to serve, beside what must not be seen from there."""
    served = tmp_path / "served"
    (served / "pkg" / "deep").mkdir(parents=True)
    (served / "node_modules").mkdir()
    (served / "main.py").write_text("import pkg\n\n# TODO: more\x0c\nprint('Done')\n")
    (served / "pkg" / "a.py").write_text("todo = 1\r\n\r\nTODO = 2")
    (served / "pkg" / "deep" / "note.txt").write_text("nothing\n" * 3)
    (served / "pkg" / "picture.png").write_bytes(b"\x89PNG\0\0")
    (served / "pkg" / "latin.txt").write_bytes(b"caf\xe9 TODO")
    (served / "node_modules" / "left.js").write_text("// TODO")
    (served / ".hidden").write_text("TODO")
    (tmp_path / "secret.py").write_text("TODO = 'secret'")
    (served / "link.py").symlink_to(tmp_path / "secret.py")
    (served / "loop").symlink_to(served / "loop")
    return served


@pytest.fixture
def codesearch(tree: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "argv", ["codesearch.py", str(tree)])
    monkeypatch.setattr(sys, "path", list(sys.path))
    module = load("codesearch")
    monkeypatch.setattr(module, "POLL_INTERVAL", 0.02)
    return module


def lines(result: trimcp.CallToolResult) -> list[tuple[str, int, str]]:
    structured: Any = json.loads(result.content[0].text)  # as revisions without structured results have it too
    return [(match["path"], match["line"], match["text"]) for match in structured["matches"]]


@every_revision
async def test_lines_are_found_in_text_files_below_the_directory(
    codesearch: ModuleType, revision: trimcp.Revision
) -> None:
    async with connected(codesearch.server, revision=revision) as session:
        assert lines(await session.call_tool("search", {"pattern": "TODO"})) == [
            ("main.py", 3, "# TODO: more\x0c"),
            ("pkg/a.py", 3, "TODO = 2"),
        ]


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ({"pattern": "todo", "ignore_case": True}, ["main.py:3", "pkg/a.py:1", "pkg/a.py:3"]),
        ({"pattern": "^TODO", "regex": True}, ["pkg/a.py:3"]),
        ({"pattern": "^todo", "regex": True, "ignore_case": True}, ["pkg/a.py:1", "pkg/a.py:3"]),
        ({"pattern": "=|nothing$", "regex": True, "glob": "*.txt"}, [f"pkg/deep/note.txt:{n}" for n in (1, 2, 3)]),
        ({"pattern": "TODO", "path": "pkg"}, ["pkg/a.py:3"]),
        ({"pattern": "TODO", "path": "main.py"}, ["main.py:3"]),
        ({"pattern": "nothing", "glob": "pkg/deep/*"}, [f"pkg/deep/note.txt:{n}" for n in (1, 2, 3)]),
        ({"pattern": "nothing", "max_results": 2}, [f"pkg/deep/note.txt:{n}" for n in (1, 2)]),
        ({"pattern": "."}, []),  # a dot is a dot
    ],
)
async def test_a_search_can_be_narrowed(codesearch: ModuleType, arguments: dict[str, Any], found: list[str]) -> None:
    async with connected(codesearch.server) as session:
        result = await session.call_tool("search", arguments)
        assert [f"{path}:{line}" for path, line, _ in lines(result)] == found
        structured: Any = result.structured_content
        assert structured["complete"] is ("max_results" not in arguments)


async def test_what_is_no_text_is_counted_as_skipped(codesearch: ModuleType) -> None:
    async with connected(codesearch.server) as session:
        found: Any = (await session.call_tool("search", {"pattern": "x"})).structured_content
        assert (found["files_searched"], found["files_skipped"]) == (3, 2)
        counted: Any = (await session.call_tool("line_statistics")).structured_content
        assert counted == {
            "files": 3,
            "lines": 10,
            "blank": 2,
            "kinds": [
                {"kind": ".py", "files": 2, "lines": 7, "blank": 2},
                {"kind": ".txt", "files": 1, "lines": 3, "blank": 0},
            ],
            "longest_file": "main.py",
        }


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"pattern": "(a", "regex": True}, "is not a regular expression we can run"),
        ({"pattern": "(?=a)", "regex": True}, "look-around and back-references are not supported"),
        ({"pattern": "x", "path": ".."}, "there is no .. here"),
        ({"pattern": "x", "path": "/etc"}, "there is no /etc here"),
        ({"pattern": "x", "path": "link.py"}, "there is no link.py here"),
        ({"pattern": "x", "path": "gone"}, "there is no gone here"),
        ({"pattern": "x", "path": "loop"}, "there is no loop here"),
        ({"pattern": "x", "path": "a\0b"}, "there is no a\0b here"),
    ],
)
async def test_what_cannot_be_searched_is_explained(
    codesearch: ModuleType, arguments: dict[str, Any], told: str
) -> None:
    async with connected(codesearch.server) as session:
        result = await session.call_tool("search", arguments)
        assert result.is_error
        assert told in result.content[0].text


async def test_no_pattern_takes_long(codesearch: ModuleType, tree: Path) -> None:
    (tree / "long.txt").write_text("a" * 500_000 + "!")
    async with connected(codesearch.server) as session:
        with trio.fail_after(10):
            result = await session.call_tool("search", {"pattern": "^(a+)+$", "regex": True, "glob": "long.txt"})
        assert lines(result) == []


async def test_a_cancelled_search_stops_at_the_next_file_or_block(codesearch: ModuleType, tree: Path) -> None:
    for number in range(2_000):
        (tree / f"{number:04}.py").write_text("x\n")
    async with connected(codesearch.server) as session:
        async with session.calling("search", {"pattern": "y"}) as call:
            async for step in call.progress:
                if step.progress >= 20:
                    break
        work = await read_work(session)
        while work["running"]:
            work = await read_work(session)
        assert work["cancelled"] == 1
        assert work["last_cancelled"].endswith("of 2005: cancelled by peer")
        assert work["files_read"] < 2_000
        assert (await read_work(session)) == work


async def read_work(session: trimcp.ClientSession) -> dict[str, Any]:
    result = await session.read_resource("codesearch://work")
    work: dict[str, Any] = json.loads(result.contents[0].text)
    return work


@every_revision
async def test_a_clients_roots_are_where_it_may_look(
    codesearch: ModuleType, tree: Path, revision: trimcp.Revision
) -> None:
    client = trimcp.Client("rooted", roots=[(tree / "pkg").as_uri(), "file:///nowhere"])
    async with connected(codesearch.server, client, revision=revision) as session:
        assert [path for path, _, _ in lines(await session.call_tool("search", {"pattern": "TODO"}))] == ["pkg/a.py"]
        result = await session.call_tool("search", {"pattern": "TODO", "path": "main.py"})
        assert result.is_error
        assert "outside the roots" in result.content[0].text
        assert (await session.read_resource("code:///pkg/a.py")).contents[0].text.startswith("todo")
        with pytest.raises(trimcp.RemoteError):
            await session.read_resource("code:///main.py")


@every_revision
async def test_files_are_resources_that_tell_when_they_change(
    codesearch: ModuleType, tree: Path, revision: trimcp.Revision
) -> None:
    uri = "code:///pkg/a.py"
    async with connected(codesearch.server, revision=revision) as session:
        (contents,) = (await session.read_resource("code:///pkg/picture.png")).contents
        assert contents.blob == "iVBORwAA"
        async with session.listen(resources=[uri]) as changes:
            (tree / "pkg" / "a.py").write_text("changed = True")
            os.utime(tree / "pkg" / "a.py", (1, 1))
            with trio.fail_after(10):
                assert await changes.receive() == ResourceUpdated(uri)
        assert (await session.read_resource(uri)).contents[0].text == "changed = True"


@pytest.mark.parametrize("path", ["../secret.py", "%2e%2e/secret.py", "/etc/passwd", "link.py", "pkg", "gone", "a%00"])
async def test_nothing_outside_can_be_read(codesearch: ModuleType, path: str) -> None:
    async with connected(codesearch.server) as session:
        with pytest.raises(trimcp.RemoteError, match="resource not found"):
            await session.read_resource(f"code:///{path}")
        with pytest.raises(trimcp.RemoteError, match="there is no file"):
            await session.get_prompt("review", {"path": path})


@every_revision
async def test_what_no_file_can_be_called_can_be_subscribed_to_or_is_refused(
    codesearch: ModuleType, revision: trimcp.Revision
) -> None:
    async with connected(codesearch.server, revision=revision) as session:
        # Whether a subscription leaves them out or is refused is the revision's business; a crash it is not.
        refused = "" if revision.modern else "resource not found"
        with pytest.raises(trimcp.RemoteError, match=refused) if refused else nullcontext():
            async with session.listen(resources=["code:///loop", "code:///a%00b", "http://x.example/"]):
                pass
        assert lines(await session.call_tool("search", {"pattern": "Done"})) == [("main.py", 4, "print('Done')")]


async def test_a_review_carries_its_file(codesearch: ModuleType) -> None:
    async with connected(codesearch.server) as session:
        result = await session.get_prompt("review", {"path": "main.py", "focus": "style"})
        request, file = (message.content for message in result.messages)
        assert request.text.startswith("Review main.py for style.")
        assert file.resource.uri == "code:///main.py"
        assert file.resource.text.startswith("import pkg")
        with pytest.raises(trimcp.RemoteError, match="focus must be one of bugs"):
            await session.get_prompt("review", {"path": "main.py", "focus": "beauty"})


async def test_paths_are_completed(codesearch: ModuleType) -> None:
    async with connected(codesearch.server) as session:
        for typed, values in {
            "": ["main.py", "pkg/"],
            "pkg/": ["pkg/a.py", "pkg/deep/", "pkg/latin.txt", "pkg/picture.png"],
            "pkg/d": ["pkg/deep/"],
            "../": [],
            "gone/": [],
        }.items():
            prompted = await session.complete_prompt("review", "path", typed)
            assert prompted.values == values, typed
        assert (await session.complete_resource("code:///{+path}", "path", "ma")).values == ["main.py"]
        assert (await session.complete_prompt("review", "focus", "s")).values == ["security", "style"]
