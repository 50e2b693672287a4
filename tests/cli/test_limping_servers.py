"""What `trimcp inspect` and `call` make of a server whose lists fail."""

from __future__ import annotations

import json
from typing import Any

import attrs
import pytest
from click.testing import CliRunner, Result

from tests.client.peers import HandMade, text
from trimcp.cli import conversation
from trimcp.cli.app import app
from trimcp.errors import ErrorReply
from trimcp.wire.codes import INTERNAL_ERROR, METHOD_NOT_FOUND
from trimcp.wire.prompts import ListPromptsResult, Prompt
from trimcp.wire.resources import ListResourcesResult, ListResourceTemplatesResult, Resource, ResourceTemplate
from trimcp.wire.tools import ListToolsResult, Tool


def trimcp(*words: str) -> Result:
    return CliRunner().invoke(app, list(words), prog_name="trimcp")


LISTS = {
    "tools/list": ListToolsResult([Tool("echo", {"type": "object"})]),
    "resources/list": ListResourcesResult([Resource("a://b", "b")]),
    "resources/templates/list": ListResourceTemplatesResult([ResourceTemplate("a://{b}", "b")]),
    "prompts/list": ListPromptsResult([Prompt("review")]),
}


def limping(failing: str, failure: Any) -> HandMade:
    """A server one of whose lists fails: with an error of this code, or because each page names the same as next."""
    server = HandMade()

    def answer(method: str, result: Any) -> None:
        async def listed(params: Any, ctx: Any) -> Any:
            if method == failing and failure == "circle":
                return attrs.evolve(result, next_cursor="again")
            if method == failing:
                raise ErrorReply(failure, "out of order")
            return result

        server.method(method)(listed)

    for method, result in LISTS.items():
        answer(method, result)
    return server


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("failing", LISTS)
@pytest.mark.parametrize("failure", [METHOD_NOT_FOUND, INTERNAL_ERROR, "circle"])
def test_a_list_that_fails_hides_no_other(
    as_json: bool, failing: str, failure: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversation, "find_target", lambda *words: limping(failing, failure))
    result = trimcp("inspect", *(["--json"] if as_json else []), "x")
    assert result.exit_code == (4 if failure == INTERNAL_ERROR else 0), result.output
    told = {METHOD_NOT_FOUND: "", INTERNAL_ERROR: f"{failing}: out of order", "circle": "pages go round"}[failure]
    for method, name in zip(LISTS, ("echo", "a://b", "a://{b}", "review"), strict=True):
        assert (name in result.stdout) is (method != failing or failure == "circle"), result.stdout
    if as_json:
        offer = json.loads(result.stdout)
        assert told in offer.get("errors", {}).get(failing, "")
        assert list(offer.get("errors", ())) == ([failing] if told else [])
    else:
        assert told in result.stdout
        assert ("cannot be listed" in result.stdout) is (failure == INTERNAL_ERROR)


def test_a_tool_is_called_although_its_list_has_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    server = limping("tools/list", "circle")

    @server.tool
    async def echo(params: Any, ctx: Any) -> Any:
        return text("here")

    monkeypatch.setattr(conversation, "find_target", lambda *words: server)
    result = trimcp("call", "x", "echo")
    assert (result.exit_code, result.stdout) == (0, "here\n")


def test_the_error_of_a_request_names_its_method(monkeypatch: pytest.MonkeyPatch) -> None:
    server = HandMade()
    server.method("resources/read")(lambda params, ctx: refuse())
    monkeypatch.setattr(conversation, "find_target", lambda *words: server)
    result = trimcp("read", "x", "a://b")
    assert result.exit_code == 4
    assert "resources/read: not today (code 7)" in result.stderr


async def refuse() -> Any:
    raise ErrorReply(7, "not today")
