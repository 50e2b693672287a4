"""Options of decorators and of servers: what the documentation of others teaches is taken, the rest refused at once."""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import date
from typing import Annotated, Any

import pytest

import trimcp
import trimcp.testing
from trimcp.agent_tools import AgentTools
from trimcp.wire import Annotations, Icon

ICON = {"src": "https://example.com/i.png", "mimeType": "image/png", "sizes": ["48x48"]}
HINTS = {"readOnlyHint": True, "title": "A title"}
SHOWN = {"audience": ["user"], "priority": 0.5, "lastModified": "2025-01-12T15:00:58Z"}

Add = Callable[..., Any]


def adders(server: trimcp.Server[None]) -> dict[str, Add]:
    """Every way to add something, each with the function that takes its options."""

    async def function() -> str:
        return ""

    async def of_one(name: str) -> str:
        return name

    return {
        "tool": lambda **o: server.tool(**o)(function),
        "add_tool": lambda **o: server.add_tool(function, **o),
        "command": lambda **o: server.add_command("true", [sys.executable], **o),
        "resource": lambda **o: server.resource("a://b", **o)(function),
        "template": lambda **o: server.resource("a://{name}", **o)(of_one),
        "add_resource": lambda **o: server.add_resource("a://c", "text", **o),
        "prompt": lambda **o: server.prompt(**o)(function),
        "add_prompt": lambda **o: server.add_prompt(function, **o),
        "ui": lambda **o: server.ui("ui://a/b", "<p>", **o),
        "Server": lambda **o: trimcp.Server("s", **o),
        "Client": lambda **o: trimcp.Client("c", **o),
    }


ADDERS = tuple(adders(trimcp.Server("s")))
TOOLS = ("tool", "add_tool", "command")
RESOURCES = ("resource", "template", "add_resource")
LISTED = (*TOOLS, *RESOURCES, "prompt", "add_prompt")
NO_TEXTS = (7, 1.5, True, b"text", ["text"], {"en": "text"}, date(2026, 1, 1), "\ud800")
NO_ICONS = (
    *("https://example.com/i.png", ICON, ["https://example.com/i.png"], [{"mimeType": "image/png"}], [7], 7, True),
    [{"src": "\ud800"}],
)
NO_META = ("text", 7, ["a"], {"when": date(2026, 1, 1)}, {7: "seven"}, {"n": float("nan")}, {"s": {1, 2}})
NO_HINTS = (
    "readOnly",
    7,
    True,
    [HINTS],
    {"readOnlyHint": "yes"},
    {"read_only_hint": True},
    {"readonlyHint": True},
    trimcp.ToolAnnotations(read_only_hint="yes"),
    Annotations(priority=1.0),
)
NO_ANNOTATIONS = (
    *("user", {"audience": "user"}, {"priority": "high"}, {"readOnlyHint": True}, trimcp.ToolAnnotations()),
    {"priority": float("nan")},
)
WRONG: list[tuple[tuple[str, ...], str, tuple[Any, ...]]] = [
    (ADDERS, "title", NO_TEXTS),
    (ADDERS, "description", NO_TEXTS),
    (ADDERS, "icons", NO_ICONS),
    (LISTED, "meta", NO_META),
    (tuple(each for each in LISTED if each != "command"), "name", NO_TEXTS),
    (("Server", "Client"), "version", (*NO_TEXTS, None)),
    (("Server", "Client"), "website_url", NO_TEXTS),
    (("Server",), "instructions", NO_TEXTS),
    (TOOLS, "annotations", NO_HINTS),
    (RESOURCES, "annotations", NO_ANNOTATIONS),
    (RESOURCES, "mime_type", NO_TEXTS),
    (RESOURCES, "size", ("big", 1.5, True)),
    (RESOURCES, "ttl_ms", ("1s", 1.5, None)),
    (RESOURCES, "cache_scope", ("all", None, 7)),
    (LISTED, "scopes", ("files:read", 7, [7], iter(["files:read"]))),
    (LISTED, "allow", ("admin", True)),
    (LISTED, "quota", (7, "7", {"running": 7})),
    (TOOLS, "confirm", ("yes", 1)),
    (("tool", "add_tool"), "structured", ("no", 0, None)),
    (TOOLS, "input_schema", ("object", [], {"type": "object", "default": {1, 2}}, {}, {"type": "array"})),
    (("tool", "add_tool"), "output_schema", ("object", [], 7)),
    (("resource", "template"), "guard", ("no", 0, None)),
    (("tool", "add_tool"), "visibility", (7, [7], {"model": 1}, b"model")),
    (("tool", "add_tool"), "ui", (7, "\ud800")),
    (("command",), "success", (7, "0", ["0"], [True], {0: 1})),
    (("command",), "env", (7, "A=b", ["A"], {"A": 7}, {7: "A"}, {"A": "\0"}, {"A": "\ud800"})),
    (("command",), "inherit_env", (7, "PATH", [7], {"PATH": "/"})),
    (("command",), "cwd", (7, ["/"], b"/", "\ud800")),
    (("command",), "stdin", (7, ["json"], {"a": 1})),
    (("ui",), "permissions", (7, [7], {"camera": {}})),
    (("ui",), "meta", NO_META),
    (("Server",), "offers", (7, [["tools"]], [7], None)),
    (("Server",), "state_keys", (7, "secret" * 4, ["secret" * 4], [7])),
    (("Server", "Client"), "revisions", (7, None, [7], [["2025-06-18"]], b"2025-06-18")),
    (("Server", "Client"), "limits", (7, "x", {"max_message": 7})),
    (("Client",), "roots", (7, b"file:///", "file:///", [7], {"file:///": 1})),
]
CASES = [(add, option, value) for adds, option, values in WRONG for add in adds for value in values]


@pytest.mark.parametrize(("add", "option", "value"), CASES)
async def test_what_no_list_could_have_is_refused_where_it_is_written(add: str, option: str, value: Any) -> None:
    server: trimcp.Server[None] = trimcp.Server("s")
    with pytest.raises(TypeError) as caught:
        adders(server)[add](**{option: value})
    assert option in str(caught.value)
    async with trimcp.testing.connected(server) as session:
        assert [await session.list_tools(), await session.list_resources(), await session.list_prompts()] == [
            [],
            [],
            [],
        ]


@trimcp.testing.every_revision
@pytest.mark.parametrize("add", LISTED)
async def test_a_dict_with_the_names_of_the_wire_is_the_value(add: str, revision: trimcp.Revision) -> None:
    server: trimcp.Server[None] = trimcp.Server("s", icons=[ICON])
    options: dict[str, Any] = {"icons": [ICON, Icon("data:,")], "meta": {"n": 1}, "title": "T"}
    if add in TOOLS:
        options["annotations"] = HINTS
    elif add in RESOURCES:
        options["annotations"] = SHOWN
    adders(server)[add](**options)
    client = trimcp.Client("c", icons=[ICON])
    async with trimcp.testing.connected(server, client, revision=revision) as session:
        found: list[Any] = [*await session.list_tools(), *await session.list_resources()]
        found += [*await session.list_resource_templates(), *await session.list_prompts()]
        (listed,) = found
    newest = revision is trimcp.LATEST
    if newest:
        assert listed.icons == [Icon("https://example.com/i.png", "image/png", ["48x48"]), Icon("data:,")]
        assert (listed.meta, listed.title) == ({"n": 1}, "T")
    if newest and add in TOOLS:
        assert listed.annotations == trimcp.ToolAnnotations(read_only_hint=True, title="A title")
    elif newest and add in RESOURCES:
        assert listed.annotations == Annotations(["user"], 0.5, "2025-01-12T15:00:58Z")


def test_the_text_says_what_to_write() -> None:
    def of(add: str, **option: Any) -> str:
        with pytest.raises(TypeError) as caught:
            adders(trimcp.Server("s"))[add](**option)
        return str(caught.value)

    assert of("tool", annotations={"read_only_hint": True}) == (
        "annotations has no 'read_only_hint'; in a dict it is 'readOnlyHint'"
    )
    assert of("tool", annotations="safe") == (
        "annotations is ToolAnnotations(...) or a dict such as {\"readOnlyHint\": True}, not 'safe'"
    )
    assert of("tool", icons="https://x/i.png").startswith("icons is a list of icons, such as [{")
    assert of("tool", icons=[{"mimeType": "image/png"}]).startswith("icons[0]: is missing @ $.src")
    assert of("Server", version=1.0) == "version is a text, not 1.0"


def test_icons_that_can_be_read_only_once_reach_a_command_too() -> None:
    server: trimcp.Server[None] = trimcp.Server("s")
    server.add_command("true", [sys.executable], icons=iter([ICON]))
    entry = server.tools.get("true")
    assert entry is not None
    assert [icon.src for icon in entry.listed.icons or ()] == [ICON["src"]]


def test_destructive_hints_of_a_dict_are_confirmed() -> None:
    server: trimcp.Server[None] = trimcp.Server("s", confirm="destructive")
    server.add_tool(lambda_free, annotations={"destructiveHint": True})
    entry = server.tools.get("lambda_free")
    assert entry is not None
    assert entry.confirmation is not None


async def lambda_free() -> str:
    return ""


SETTINGS: list[tuple[str, Callable[[], Any]]] = [
    ("dynamic is True or False", lambda: trimcp.Server("s", dynamic="yes")),
    ("lifespan is a function", lambda: trimcp.Server("s", lifespan=7)),
    ("extensions is a dict", lambda: trimcp.Server("s", extensions="x")),
    ("extensions has a dict of settings", lambda: trimcp.Server("s", extensions={"a/b": 7})),
    ("extensions is a dict of JSON", lambda: trimcp.Server("s", extensions={"a/b": {"x": {1}}})),
    ("revisions are some of", lambda: trimcp.Server("s", revisions=[])),
    ("list_cache_scope is", lambda: trimcp.Server("s", list_cache_scope="all")),
    ("limits is a trimcp.Limits", lambda: trimcp.Server("s", limits=7)),
    ("audit is a trimcp.guard.Audit", lambda: trimcp.Server("s", audit=print)),
    ("middleware is a function", lambda: trimcp.Server("s").middleware(7)),
    ("a method is a function", lambda: trimcp.Server("s").method("a/b")(7)),
    ("a notification is passed to", lambda: trimcp.Server("s").notification("a/b")(7)),
    ("@client.notification(", lambda: trimcp.Client("c").notification(lambda_free)),
    ("a notification is passed to", lambda: trimcp.Client("c").notification("a/b")(7)),
    ("extensions is a dict", lambda: trimcp.Client("c", extensions="x")),
    ("strict is True or False", lambda: trimcp.Client("c", strict="no")),
    ("validate_output is True", lambda: trimcp.Client("c", validate_output="no")),
    ("log_level is one of", lambda: trimcp.Client("c", log_level="loud")),
    ("log_level is one of", lambda: trimcp.Client("c", log_level=["info"])),
    ("revisions are some of", lambda: trimcp.Server("s", revisions=iter([]))),
    ("revisions are some of", lambda: trimcp.Client("c", revisions=[])),
    ("size is a number of at most 63 bits", lambda: trimcp.Server("s").add_resource("a://b", "text", size=2**63)),
    ("list_ttl_ms is a number of at most 63 bits", lambda: trimcp.Server("s", list_ttl_ms=2**63)),
    ("timeout is a number of at most 63 bits", lambda: trimcp.Server("s").add_tool(lambda_free, timeout=10**400)),
    ("connect_timeout is a number of at most", lambda: trimcp.Client("c", connect_timeout=10**400)),
    ("Limits.tool is a trimcp.Quota", lambda: trimcp.Limits(tool={"running": 5})),
    ("what answers roots/list is a function", lambda: trimcp.Client("c").roots(["file:///srv"])),
    ("what answers sampling/createMessage is", lambda: trimcp.Client("c").sampling("model")),
    ("what takes log messages is a function", lambda: trimcp.Client("c").logging("info")),
    ("description of an Arg is a text", lambda: trimcp.Arg(7)),
    ("header of an Arg is a text", lambda: trimcp.Arg(header=7)),
    ("examples of an Arg are a list", lambda: trimcp.Arg(examples="x")),
    ("message is a text", lambda: trimcp.Elicit(7)),
    ("schema is a JSON Schema", lambda: trimcp.Elicit("?", str)),
    ("key is a text", lambda: trimcp.Elicit("?", key=7)),
    ("tokens are a dict of texts", lambda: trimcp.bearer_tokens(["token"])),
    ("tokens are a dict of texts", lambda: trimcp.bearer_tokens({"token": 7})),
    ("contexts is a ContextLimits", lambda: AgentTools(trimcp.Server("s"), contexts={"idle": 7})),
    ("registration is a RegistrationRules", lambda: AgentTools(trimcp.Server("s"), registration={"strict": True})),
    ("authenticate is a function", lambda: AgentTools(trimcp.Server("s"), authenticate={"token": "ada"})),
    ("strict is True or False", lambda: AgentTools(trimcp.Server("s"), strict="no")),
    ("bind_permissions is True or False", lambda: AgentTools(trimcp.Server("s"), bind_permissions=None)),
    ("implementations are functions by", lambda: AgentTools(trimcp.Server("s"), implementations=[lambda_free])),
    ("headers are a dict of texts", lambda: trimcp.http("http://a.example/mcp", headers=["X-Key: 7"])),
    ("headers are a dict of texts", lambda: trimcp.websocket("ws://a.example/ws", headers={"X-Key": 7})),
    ("headers are a dict of texts", lambda: trimcp.grpc("grpc://a.example", headers="X-Key: 7")),
]


@pytest.mark.parametrize(("text", "write"), SETTINGS)
def test_settings_that_would_fail_later_are_refused_at_once(text: str, write: Any) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        write()
    assert text in str(caught.value)


async def asks_for_a_list(names: Annotated[trimcp.ElicitResult, trimcp.Elicit("?", {"type": "array"})]) -> str:
    return ""


class Forgotten:
    """One whose objects can be called, and of which none was made."""

    def __call__(self, text: str = "") -> str:
        return text


BARE: list[tuple[str, Callable[[trimcp.Server[None]], Any]]] = [
    ("@server.resource(", lambda server: server.resource(lambda_free)),
    ("@server.method(", lambda server: server.method(lambda_free)),
    ("@server.notification(", lambda server: server.notification(lambda_free)),
    ('("review", "path")', lambda server: server.complete("review", lambda_free)),
    ("a prompt's name or function", lambda server: server.complete(7, "path")),
    ("such as 'notes://today'", lambda server: server.add_resource(7, "text")),
    ("text, bytes or a Path", lambda server: server.add_resource("a://b", {"a": 1})),
    ("scopes is a list", lambda server: server.complete("review", "path", scopes="read")),
    ("quota is a", lambda server: server.complete("review", "path", quota=7)),
    ("takes the text typed so far", lambda server: server.complete("review", "path")(lambda_free)),
    ("takes the text typed so far", lambda server: server.complete("review", "path")(lambda text, other: [])),
    ("has no JSON form", lambda server: server.add_tool(Forgotten)),
    ("may only ask for flat values", lambda server: server.add_tool(asks_for_a_list)),
    ("names is a list of names", lambda server: server.filter(names=7)(lambda_free)),
    ("names is a list of names", lambda server: server.filter(names=[7])(lambda_free)),
    ("methods is a list of methods", lambda server: server.filter(methods="tools/call")(lambda_free)),
    ("a command is a list", lambda server: server.add_command("c", {"echo": 1})),
    ("was name='forecast' meant?", lambda server: server.tool("forecast")),
]


@pytest.mark.parametrize(("text", "write"), BARE, ids=[text for text, _ in BARE])
def test_a_decorator_without_its_name_says_how_it_is_written(text: str, write: Any) -> None:
    with pytest.raises(TypeError) as caught:
        write(trimcp.Server("s"))
    assert text in str(caught.value)
