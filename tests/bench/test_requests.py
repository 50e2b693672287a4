"""What is sent, byte by byte, and which answers are right."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from trimcp.bench.plan import MixEntry, cancellation, prepare
from trimcp.errors import LocalError
from trimcp.framing.headers import find_mirrors
from trimcp.wire.revisions import LATEST, LATEST_LEGACY, Revision

ECHO = MixEntry.tool("echo", {"text": "100 % of {n} and {n}", "more": ["{n}", {"deep": "%d{n}"}]}, expect="got {n}")


def sent(request: MixEntry, revision: Revision = LATEST_LEGACY, *, progress: bool = False, id: int = 3) -> Any:
    return orjson.loads(prepare(request, revision, progress=progress, http=False).render(id, 77))


def answer(result: object, **members: object) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": 3, "result": result, **members}


def text(value: object) -> dict[str, Any]:
    return {"content": [{"type": "text", "text": value}]}


def test_a_legacy_call_carries_its_id_and_the_number_in_every_text() -> None:
    arguments = {"text": "100 % of 77 and 77", "more": ["77", {"deep": "%d77"}]}
    params = {"name": "echo", "arguments": arguments}
    assert sent(ECHO) == {"jsonrpc": "2.0", "id": 3, "method": "tools/call", "params": params}


@pytest.mark.parametrize("request_", [MixEntry("ping"), MixEntry("tools/list"), MixEntry.tool("50%", {"a": 5})])
def test_a_request_without_numbers_is_sent_as_it_is(request_: MixEntry) -> None:
    message = {"jsonrpc": "2.0", "id": 3, "method": request_.method, "params": dict(request_.params)}
    if not request_.params:
        del message["params"]
    assert sent(request_) == message


def test_a_modern_request_says_who_asks_and_keeps_its_own_meta() -> None:
    message = sent(MixEntry("tools/list", {"_meta": {"mine": "{n}"}}), LATEST)
    assert message["params"]["_meta"] == {
        "mine": "77",
        "io.modelcontextprotocol/protocolVersion": LATEST.name,
        "io.modelcontextprotocol/clientInfo": {"name": "trimcp-bench", "version": "1"},
        "io.modelcontextprotocol/clientCapabilities": {},
    }


@pytest.mark.parametrize("revision", [LATEST, LATEST_LEGACY])
def test_the_progress_token_is_the_id(revision: Revision) -> None:
    assert sent(ECHO, revision, progress=True, id=12)["params"]["_meta"]["progressToken"] == 12
    assert sent(MixEntry("ping"), revision, progress=True, id=13)["params"]["_meta"]["progressToken"] == 13


def test_over_http_the_modern_era_repeats_what_is_called() -> None:
    request = prepare(MixEntry.tool("tool-{n}"), LATEST, progress=False, http=True)
    lines = f"mcp-protocol-version: {LATEST.name}\r\nmcp-method: tools/call\r\nmcp-name: tool-77\r\n"
    assert request.render_headers(77) == lines.encode()
    assert prepare(ECHO, LATEST_LEGACY, progress=False, http=True).render_headers(77) == b""


def test_arguments_a_tool_wants_in_headers_are_there() -> None:
    schema = {"type": "object", "properties": {"place": {"type": "string", "x-mcp-header": "Place"}}}
    mirrors = find_mirrors(schema)
    request = prepare(MixEntry.tool("t", {"place": "50% of {n}"}), LATEST, progress=False, http=True, mirrors=mirrors)
    assert request.render_headers(5).endswith(b"mcp-name: t\r\nmcp-param-place: 50% of 5\r\n")
    fixed = prepare(MixEntry.tool("t", {"place": "50%"}), LATEST, progress=False, http=True, mirrors=mirrors)
    assert fixed.render_headers(5).endswith(b"mcp-param-place: 50%\r\n")


def test_a_number_cannot_stand_in_base64() -> None:
    with pytest.raises(LocalError, match="mcp-name, which travels in base64"):
        prepare(MixEntry.tool("häuser-{n}"), LATEST, progress=False, http=True)


def wrong(request: MixEntry, message: dict[str, Any]) -> Any:
    return prepare(request, LATEST_LEGACY, progress=False, http=False).check(message, 77)


@pytest.mark.parametrize(
    ("message", "kind", "example"),
    [
        (answer(text("got 77")), None, None),
        (answer({**text("got 77"), "resultType": "complete", "isError": False}), None, None),
        (answer(text("got 78")), "wrong text", "got 78"),
        (answer(text("got {n}")), "wrong text", "got {n}"),
        (answer(text(5)), "no text", text(5)),
        (answer({"content": []}), "no text", {"content": []}),
        (answer({"content": None}), "no text", {"content": None}),
        (answer({}), "no text", {}),
        (answer({**text("boom"), "isError": True}), "tool error", "boom"),
        (answer({"isError": True}), "tool error", {"isError": True}),
        (answer({**text("got 77"), "isError": "no"}), "tool error", "got 77"),
        (answer({"resultType": "input_required"}), "no result but a question", {"resultType": "input_required"}),
        (answer(None), "no JSON-RPC", answer(None)),
        (answer([]), "no JSON-RPC", answer([])),
        (answer(text("got 77"), jsonrpc="1.0"), "no JSON-RPC", answer(text("got 77"), jsonrpc="1.0")),
        ({"jsonrpc": "2.0", "id": 3, "error": {"code": -32601, "message": "no"}}, "error -32601", "no"),
        ({"jsonrpc": "2.0", "id": 3, "error": "no"}, "no JSON-RPC", {"jsonrpc": "2.0", "id": 3, "error": "no"}),
        (answer(text("got 77"), error={"code": 1}), "no JSON-RPC", answer(text("got 77"), error={"code": 1})),
    ],
)
def test_only_a_right_answer_is_right(message: dict[str, Any], kind: str | None, example: object) -> None:
    assert wrong(ECHO, message) == (None if kind is None else (kind, example))


def test_without_an_expected_text_a_result_still_has_to_be_of_its_kind() -> None:
    assert wrong(MixEntry("tools/list"), answer({"tools": []})) is None
    assert wrong(MixEntry("tools/list"), answer({"prompts": []})) == ("no tools in the result", {"prompts": []})
    assert wrong(MixEntry.tool("t"), answer({"content": []})) is None
    assert wrong(MixEntry.tool("t"), answer({})) == ("no content in the result", {})
    assert wrong(MixEntry("ping"), answer({})) is None


@pytest.mark.parametrize(
    ("method", "result"),
    [
        ("resources/read", {"contents": [{"uri": "u", "text": "hello 77"}]}),
        ("prompts/get", {"messages": [{"role": "user", "content": {"type": "text", "text": "hello 77"}}]}),
    ],
)
def test_the_first_text_is_found_where_its_method_has_it(method: str, result: dict[str, Any]) -> None:
    assert wrong(MixEntry(method, expect="hello {n}"), answer(result)) is None
    assert wrong(MixEntry(method, expect="{n}"), answer(result)) == ("wrong text", "hello 77")


def test_a_cancellation_names_its_call() -> None:
    assert orjson.loads(cancellation(9)) == {
        "jsonrpc": "2.0",
        "method": "notifications/cancelled",
        "params": {"requestId": 9},
    }
