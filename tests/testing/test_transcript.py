"""Golden transcripts: what counts as the same, and how a difference is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from trimcp.server.server import Server
from trimcp.session.context import Context
from trimcp.testing import Transcript, replay
from trimcp.testing.play import differences
from trimcp.wire.revisions import LATEST_LEGACY

CLIENT = '"capabilities":{},"clientInfo":{"name":"c","version":"1"}'
SERVER = '"capabilities":"...","serverInfo":{"name":"s","version":"2"}'
HELLO = """
# a client comes
--> {"jsonrpc":"2.0","id":0,"method":"initialize","params":{"protocolVersion":"REVISION",CLIENT}}
<-- {"jsonrpc":"2.0","id":0,"result":{"protocolVersion":"REVISION",SERVER}}

--> {"jsonrpc":"2.0","method":"notifications/initialized"}
"""
HELLO = HELLO.replace("REVISION", LATEST_LEGACY.name).replace("CLIENT", CLIENT).replace("SERVER", SERVER)
CALL = """
--> {"jsonrpc":"2.0","id":"a","method":"tools/call","params":{"name":"echo","arguments":{"text":"hi"}}}
<-- {"jsonrpc":"2.0","id":"a","result":{"content":[{"type":"text","text":"hi"}],"isError":false}}
"""


def make_server() -> Server[Any]:
    server = Server("s", "2")

    @server.tool
    async def echo(text: str) -> str:
        return text

    @server.tool
    async def hang() -> str:
        await trio.sleep_forever()
        return "never"

    @server.tool
    async def twice(ctx: Context) -> str:
        await ctx.info("one more")
        return "x"

    return server


async def told(text: str) -> str:
    with pytest.raises(AssertionError) as caught:
        await replay(Transcript.parse(HELLO + text), make_server())
    return str(caught.value)


async def test_a_conversation_that_is_the_same_passes() -> None:
    await replay(Transcript.parse(HELLO + CALL), make_server())


async def test_it_can_be_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "conversation.txt"
    path.write_text(HELLO + CALL, encoding="utf-8")
    transcript = Transcript.read(path)
    assert [from_client for from_client, _ in transcript.messages] == [True, False, True, True, False]
    await replay(transcript, make_server())


async def test_a_difference_is_named_with_its_place() -> None:
    text = await told(CALL.replace('"text":"hi"}]', '"text":"ho","extra":1}]').replace("false", "true"))
    assert '$.result.content[0].text is "hi", expected "ho"' in text
    assert "$.result.content[0].extra is missing" in text
    assert "$.result.isError is false, expected true" in text
    assert "message 5" in text


async def test_an_error_in_place_of_a_result_is_a_difference() -> None:
    text = await told(CALL.replace('"name":"echo"', '"name":"nothing"'))
    assert "$.result is missing" in text
    assert "$.error should not be there" in text


async def test_silence_is_a_difference(autojump_clock: trio.testing.MockClock) -> None:
    text = await told(CALL.replace('"name":"echo"', '"name":"hang"').replace('"text":"hi"},', ""))
    assert "message 5: " in text
    text = await told('--> {"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"hang"}}\n<-- {}')
    assert "message 5: the server sent nothing" in text


async def test_one_message_too_many_is_a_difference() -> None:
    call = '--> {"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"twice"}}\n'
    text = await told(call + '<-- {"jsonrpc":"2.0","method":"notifications/message","params":"..."}')
    assert "the server sent more" in text


async def test_an_unwanted_answer_at_the_end_is_found(autojump_clock: trio.testing.MockClock) -> None:
    text = await told('--> {"jsonrpc":"2.0","id":1,"method":"ping"}')
    assert "the server sent more" in text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("hello", "line 1: expected -->, <-- or a comment"),
        ("\n--> {", "line 2"),
        ("--> {}\n<-- nonsense", "line 2"),
        ("---> {}", "line 1"),
        ("-->", "line 1"),
    ],
)
def test_what_is_no_transcript_is_refused_with_its_line(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Transcript.parse(text)


@pytest.mark.parametrize(
    ("expected", "actual", "places"),
    [
        ({"a": 1}, {"a": 1}, []),
        ({"a": "..."}, {"a": {"anything": []}}, []),
        ("...", None, []),
        ({"a": "..."}, {}, ["$.a is missing"]),
        ({}, {"a": None}, ["$.a should not be there: null"]),
        ({"a": 1}, {"a": True}, ["$.a is true, expected 1"]),
        ({"a": 1}, {"a": 1.0}, ["$.a is 1.0, expected 1"]),
        ({"a": None}, {"a": 0}, ["$.a is 0, expected null"]),
        ([1, 2], [1], ["$ has 1 members, expected 2"]),
        ([1], [2, 3], ["$ has 2 members, expected 1", "$[0] is 2, expected 1"]),
        ({"a": [{"b": 1}]}, {"a": [{"b": 2}]}, ["$.a[0].b is 2, expected 1"]),
        ([], {}, ["$ is {}, expected []"]),
    ],
    ids=repr,
)
def test_differences(expected: Any, actual: Any, places: list[str]) -> None:
    assert list(differences(expected, actual)) == places


def test_a_long_value_is_told_in_part() -> None:
    [line] = differences("a", "b" * 10_000)
    assert len(line) < 200
