from __future__ import annotations

import functools
import traceback
from pathlib import Path
from typing import Any

import pytest

from trimcp.server.options import check_options
from trimcp.server.server import Server
from trimcp.server.tools import ToolOptions


def nothing() -> None:
    """Do nothing."""


def test_what_is_known_passes() -> None:
    check_options({"timeout": 3, "title": "T"}, ToolOptions)


@pytest.mark.parametrize(
    ("name", "told"), [("timout", "did you mean 'timeout'"), ("zzz", "there are name, title, description")]
)
def test_a_slip_of_the_pen_is_named(name: str, told: str) -> None:
    with pytest.raises(TypeError, match=rf"no option {name!r}; {told}"):
        check_options({name: 1}, ToolOptions)


@pytest.mark.parametrize(
    ("register", "told"),
    [
        (lambda server: server.tool(timout=3)(nothing), "'timout'"),
        (lambda server: server.add_tool(nothing, timout=3), "'timout'"),
        (lambda server: server.prompt(titel="T")(nothing), "'titel'"),
        (lambda server: server.resource("a:///b", mime="text/plain")(nothing), "'mime'"),
        (lambda server: server.add_resource("a:///b", "text", mime="text/plain"), "'mime'"),
        (lambda server: server.tool("a name"), "was name='a name' meant"),
        (lambda server: server.resource(nothing), "a resource needs its address"),
        (lambda server: server.tool(timeout=0)(nothing), "timeout is a number greater than 0 or None, not 0"),
        (
            lambda server: server.tool(max_concurrent=0)(nothing),
            "max_concurrent is an integer of at least 1 or None",
        ),
    ],
)
def test_a_server_refuses_what_it_would_have_to_ignore(register: Any, told: str) -> None:
    server: Any = Server("s")
    with pytest.raises((TypeError, ValueError), match=told):
        register(server)
    assert (len(server.tools), len(server.resources), len(server.prompts)) == (0, 0, 0)


def wrong(value: type) -> None:
    """Take what no JSON can carry."""


@pytest.mark.parametrize(
    "register",
    [
        lambda server: server.tool(wrong),
        lambda server: server.tool(title="T")(wrong),
        lambda server: server.tool(functools.partial(wrong)),
        lambda server: server.add_tool(wrong),
        lambda server: server.prompt(wrong),
        lambda server: server.prompt(title="T")(wrong),
        lambda server: server.add_prompt(wrong),
        lambda server: server.resource("a://{value}")(wrong),
        lambda server: server.complete("a", "b")(wrong),
    ],
)
def test_an_error_at_definition_shows_the_users_line_and_names_the_functions_place(register: Any) -> None:
    with pytest.raises(TypeError) as caught:
        register(Server("s"))
    frames = [Path(frame.filename).name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert frames == [Path(__file__).name] * 2  # this function and the lambda
    assert type(caught.value) is TypeError
    assert caught.value.__notes__ == [
        f'the function is defined in File "{__file__}", line {wrong.__code__.co_firstlineno}'
    ]


def test_a_server_refuses_words_for_what_they_do_not_mean() -> None:
    with pytest.raises(ValueError, match="'log', 'tell' or 'raise', not 'rise'"):
        Server("s", handler_errors="rise")
    wrong: Any = ["yesterday"]
    with pytest.raises(TypeError, match=r"members of trimcp.REVISIONS, not 'yesterday'"):
        Server("s", revisions=wrong)
