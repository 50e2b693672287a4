"""The server that the official conformance suite drives: one fixture for everything it looks at, and a few of our own.

    python tests/conformance/server.py --transport http --port 8000

The names, texts and schemas are what the suite expects. `run.py` starts this and the suite.
"""

from __future__ import annotations

import argparse
import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Annotated, Any, Literal

import attrs
import trio

import trimcp

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
WAV = base64.b64decode("UklGRiYAAABXQVZFZm10IBAAAAABAAEAQB8AAAB9AAACABAAZGF0YQIAAAAAAA==")
WATCHED = "test://watched-resource"


@attrs.define
class Counts:
    """What the tools count, for as long as the server runs."""

    cancelled: int = 0


@asynccontextmanager
async def counting(server: trimcp.Server[Counts]) -> AsyncIterator[Counts]:
    """The server's lifespan."""
    yield Counts()


server = trimcp.Server("conformance", "1.0", lifespan=counting, dynamic=True)


# Content


@server.tool
async def test_simple_text() -> str:
    """Return a text."""
    return "This is a simple text response for testing."


@server.tool
async def test_image_content():
    """Return a picture."""
    return trimcp.Image(PNG, "image/png")


@server.tool
async def test_audio_content():
    """Return a sound."""
    return trimcp.Audio(WAV, "audio/wav")


@server.tool
async def test_embedded_resource():
    """Return a resource with its contents."""
    return embedded("test://embedded-resource", "text/plain", "This is an embedded resource content.")


@server.tool
async def test_multiple_content_types():
    """Return a text, a picture and a resource."""
    data = json.dumps({"test": "data", "value": 123})
    picture = trimcp.Image(PNG, "image/png")
    return [
        "Multiple content types test:",
        picture,
        embedded("test://mixed-content-resource", "application/json", data),
    ]


def embedded(uri: str, mime_type: str, text: str) -> trimcp.wire.EmbeddedResource:
    return trimcp.wire.EmbeddedResource(trimcp.wire.TextResourceContents(uri=uri, mime_type=mime_type, text=text))


@attrs.frozen
class Weather:
    temperature: float
    conditions: str


@server.tool
async def test_structured_content() -> Weather:
    """Return a structured result."""
    return Weather(22.5, "Partly cloudy")


@server.tool
async def test_error_handling() -> str:
    """Fail in a way that the model is told of."""
    raise trimcp.ToolError("This tool intentionally returns an error for testing")


# Arguments

CONTACT = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "$defs": {
        "address": {
            "$anchor": "addressDef",
            "type": "object",
            "properties": {"street": {"type": "string"}, "city": {"type": "string"}},
        }
    },
    "properties": {
        "name": {"type": "string"},
        "address": {"$ref": "#/$defs/address"},
        "contactMethod": {"type": "string", "enum": ["phone", "email"]},
        "phone": {"type": "string"},
        "email": {"type": "string"},
    },
    "allOf": [{"anyOf": [{"required": ["phone"]}, {"required": ["email"]}]}],
    "if": {"properties": {"contactMethod": {"const": "phone"}}, "required": ["contactMethod"]},
    "then": {"required": ["phone"]},
    "else": {"required": ["email"]},
    "additionalProperties": False,
}


@server.tool(input_schema=CONTACT)
async def json_schema_2020_12_tool(arguments: dict[str, Any]) -> str:
    """Take arguments that need much of JSON Schema to be described."""
    return json.dumps(arguments)


@server.tool
async def test_x_mcp_header(
    region: Annotated[str, trimcp.Arg("where to look", header="Region")] = "any",  # noqa: PT028  # a tool of the suite, no test
) -> str:
    """Take an argument that travels in an HTTP header too."""
    return f"region: {region}"


# While a call is under way


@server.tool
async def test_tool_with_logging(*, ctx: trimcp.Context) -> str:
    """Log what it does."""
    for message in ("Tool execution started", "Tool processing data", "Tool execution completed"):
        await ctx.info(message)
        await trio.sleep(0.05)
    return "logged"


@server.tool
async def test_logging_tool(*, ctx: trimcp.Context) -> str:
    """Log one message, which reaches only those who asked for it."""
    await ctx.info("one message")
    return "logged"


@server.tool
async def test_tool_with_progress(*, ctx: trimcp.Context) -> str:
    """Say how far it is."""
    for percent in (0, 50, 100):
        await ctx.report_progress(percent, total=100)
        await trio.sleep(0.05)
    return "done"


@server.tool
async def test_reconnection(*, ctx: trimcp.Context) -> str:
    """Close the stream of this very call, and answer on the one the client resumes it with."""
    ctx.close_stream()
    await trio.sleep(0.2)
    return "answered after the stream was closed"


@server.tool
async def test_tool_slow(durationMs: float, *, ctx: trimcp.Context) -> str:  # noqa: N803  the suite's name
    """Say that it has begun, and take a while."""
    await ctx.report_progress(0, 1)
    await ctx.log("info", "it begins")
    await trio.sleep(durationMs / 1_000)
    return f"took {durationMs:g} ms"


@server.tool
async def test_tool_fast() -> str:
    """Return at once."""
    return "fast"


@server.tool
async def test_slow(seconds: float, *, ctx: trimcp.Context[Counts]) -> str:
    """Sleep, and count being cancelled."""
    try:
        await trio.sleep(seconds)
    except trio.Cancelled:
        ctx.state.cancelled += 1
        raise
    return "slept"


@server.tool
async def test_cancelled_count(*, ctx: trimcp.Context[Counts]) -> str:
    """Say how often `test_slow` was cancelled."""
    return str(ctx.state.cancelled)


# Questions to the client. Where a server may not call its client, they travel in an input-required result.


def form(**properties: Any) -> dict[str, Any]:
    """A form whose fields all have to be filled in."""
    return {"type": "object", "properties": properties, "required": list(properties)}


TEXT = {"type": "string"}
NAME = form(name=TEXT)
CONFIRM = form(ok={"type": "boolean"})


def prompt_for(text: str, max_tokens: int = 100) -> trimcp.CreateMessageParams:
    """What a model is asked."""
    question = trimcp.wire.SamplingMessage(role="user", content=trimcp.Text(text))
    return trimcp.CreateMessageParams(messages=[question], max_tokens=max_tokens)


def said(answer: trimcp.CreateMessageResult) -> str:
    return "".join(block.text for block in answer.blocks if isinstance(block, trimcp.Text))


def told(answer: trimcp.ElicitResult) -> str:
    """What the user did, for whoever reads the result."""
    return f"action={answer.action}, content={json.dumps(answer.content or {})}"


@server.tool
async def test_sampling(prompt: str, *, ctx: trimcp.Context) -> str:
    """Ask the client's model."""
    return f"LLM response: {said(await ctx.sample(prompt_for(prompt)))}"


@server.tool
async def test_elicitation(message: str, *, ctx: trimcp.Context) -> str:
    """Ask the user to fill in a form."""
    return f"User response: {told(await ctx.elicit(message, form(username=TEXT, email=TEXT)))}"


@attrs.frozen
class Profile:
    name: str = "John Doe"
    age: int = 30
    score: float = 95.5
    status: Literal["active", "inactive", "pending"] = "active"
    verified: bool = True


@server.tool
async def test_elicitation_sep1034_defaults(*, ctx: trimcp.Context) -> str:
    """Ask with a form that has a default for every field."""
    return f"Elicitation completed: {told(await ctx.elicit('Please check your profile', trimcp.form(Profile)))}"


CHOICES = ["option1", "option2", "option3"]
TITLED = [{"const": choice, "title": choice.capitalize()} for choice in CHOICES]
SELECTIONS = {
    "untitledSingle": {"type": "string", "enum": CHOICES},
    "titledSingle": {"type": "string", "oneOf": TITLED},
    "legacyEnum": {"type": "string", "enum": CHOICES, "enumNames": [choice.capitalize() for choice in CHOICES]},
    "untitledMulti": {"type": "array", "items": {"type": "string", "enum": CHOICES}},
    "titledMulti": {"type": "array", "items": {"anyOf": TITLED}},
}


@server.tool
async def test_elicitation_sep1330_enums(*, ctx: trimcp.Context) -> str:
    """Ask with a form that has every kind of choice."""
    answer = await ctx.elicit("Please choose", {"type": "object", "properties": SELECTIONS})
    return f"Elicitation completed: {told(answer)}"


@server.tool
async def test_streaming_elicitation(*, ctx: trimcp.Context) -> str:
    """Ask the user for leave to go on."""
    return told(await ctx.elicit("Shall I go on?", CONFIRM))


@server.tool
async def test_list_roots(*, ctx: trimcp.Context) -> str:
    """Name the places the client works on."""
    return "\n".join(root.uri for root in await ctx.list_roots())


@server.tool
async def test_missing_capability(*, ctx: trimcp.Context) -> str:
    """Need what not every client can do."""
    return said(await ctx.sample(prompt_for("Can you hear me?")))


@server.tool
async def test_input_required_result_elicitation(
    name: Annotated[str, trimcp.Elicit("What is your name?", key="user_name")],
) -> str:
    """Greet the user by name."""
    return f"Hello, {name}!"


@server.tool
async def test_input_required_result_sampling(*, ctx: trimcp.Context) -> str:
    """Let the client's model answer."""
    return said(await ctx.sample(prompt_for("What is the capital of France?"), key="capital_question"))


@server.tool
async def test_input_required_result_list_roots(*, ctx: trimcp.Context) -> str:
    """Name the places the client works on."""
    return ", ".join(root.uri for root in await ctx.list_roots(key="client_roots"))


@server.tool
async def test_input_required_result_request_state(*, ctx: trimcp.Context) -> str:
    """Ask for leave; what is known so far travels with the client."""
    await ctx.elicit("Is it all right?", CONFIRM, key="confirm")
    return "state-ok"


@server.tool
async def test_input_required_result_tampered_state(*, ctx: trimcp.Context) -> str:
    """Ask for leave; what travels with the client is sealed."""
    await ctx.elicit("Is it all right?", CONFIRM, key="confirm")
    return "nobody touched it"


@server.tool
async def test_input_required_result_multiple_inputs(*, ctx: trimcp.Context) -> str:
    """Ask three things at once."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(ctx.elicit, "What is your name?", NAME, key="user_name"))
        nursery.start_soon(partial(ctx.sample, prompt_for("Write a greeting", max_tokens=50), key="greeting"))
        nursery.start_soon(partial(ctx.list_roots, key="client_roots"))
    return "three answers"


@server.tool
async def test_input_required_result_multi_round(*, ctx: trimcp.Context) -> str:
    """Ask two things, one after the other."""
    name = await ctx.elicit("What is your name?", NAME, key="step1")
    color = await ctx.elicit("What is your favourite colour?", form(color=TEXT), key="step2")
    return f"{told(name)}; {told(color)}"


@server.tool
async def test_input_required_result_capabilities(*, ctx: trimcp.Context) -> str:
    """Ask all that this client can answer."""
    async with trio.open_nursery() as nursery:
        if ctx.capabilities.sampling:
            nursery.start_soon(partial(ctx.sample, prompt_for("Write a greeting"), key="greeting"))
        if ctx.capabilities.elicitation:
            nursery.start_soon(partial(ctx.elicit, "What is your name?", NAME, key="user_name"))
    return "asked what can be asked"


# Changes


async def test_passing_tool() -> str:
    """Come and go."""
    return "here"


async def test_passing_prompt() -> str:
    """Come and go."""
    return "here"


@server.tool
async def test_trigger_tool_change() -> str:
    """Change the list of tools."""
    if test_passing_tool.__name__ in server.tools:
        server.remove_tool(test_passing_tool.__name__)
    else:
        server.add_tool(test_passing_tool)
    return "changed"


@server.tool
async def test_trigger_prompt_change() -> str:
    """Change the list of prompts."""
    if test_passing_prompt.__name__ in server.prompts:
        server.remove_prompt(test_passing_prompt.__name__)
    else:
        server.add_prompt(test_passing_prompt)
    return "changed"


@server.tool
async def test_update_resource() -> str:
    """Say that the watched resource holds something else now."""
    server.resource_updated(WATCHED)
    return "updated"


# Tasks

AGREED = {"type": "object", "properties": {"confirm": {"type": "boolean"}}, "required": ["confirm"]}
WHO = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
server.tasks(poll_interval=0.1, grace=0)


@server.tool
async def greet(name: str) -> str:
    """Say hello, and never become a task."""
    return f"Hello, {name}!"


@server.tool(task="allowed", task_after=0)
async def slow_compute(seconds: float, label: str = "") -> str:
    """Take a while."""
    await trio.sleep(seconds)
    return f"computed {label}"


@server.tool(task="required")
async def failing_job() -> str:
    """Fail as a tool does."""
    await trio.sleep(1)
    raise trimcp.ToolError("the job failed")


@server.tool(task="allowed", task_after=0)
async def protocol_error_job() -> str:
    """Fail as a request does."""
    raise trimcp.ErrorReply(-32603, "the job broke")


@server.tool(task="allowed", task_after=0)
async def confirm_delete(filename: str, ctx: trimcp.Context) -> str:
    """Ask before something is done."""
    answer = await ctx.elicit(f"Delete {filename}?", AGREED)
    return f"{filename}: {answer.action}"


@server.tool(task="allowed", task_after=0)
async def multi_input(ctx: trimcp.Context) -> str:
    """Ask two things at once."""
    actions: list[str] = []

    async def ask(message: str, schema: dict[str, Any]) -> None:
        actions.append((await ctx.elicit(message, schema)).action)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask, "Your name?", WHO)
        nursery.start_soon(ask, "Go on?", AGREED)
    return f"{actions}"


@server.tool(task="required")
async def test_tool_with_task(
    user_name: Annotated[trimcp.ElicitResult, trimcp.Elicit("Who are you?", WHO, key="user_name")],
) -> str:
    """Ask before there is a task."""
    return f"Hello, {(user_name.content or {}).get('name')}!"


# Resources

server.add_resource("test://static-text", "This is the content of the static text resource.", mime_type="text/plain")
server.add_resource("test://static-binary", PNG, mime_type="image/png")
server.add_resource(WATCHED, "Whoever subscribes is told of updates.", mime_type="text/plain")


@server.resource("test://template/{id}/data", mime_type="application/json")
async def template(id: str) -> dict[str, Any]:
    """A family of resources."""
    return {"id": id, "templateTest": True, "data": f"Data for ID: {id}"}


server.skills(
    {
        "git-workflow/SKILL.md": "---\nname: git-workflow\ndescription: Our rules of git\n---\n# Git\n",
        "git-workflow/references/names.md": "# Names\n",
        "acme/refunds/SKILL.md": "---\nname: refunds\ndescription: Refund a customer\n---\n# Refunds\n",
        "acme/refunds/templates/letter.md": "Dear customer\n",
    }
)


# Prompts


@server.prompt
async def test_simple_prompt() -> str:
    """A prompt without arguments."""
    return "This is a simple prompt for testing."


@server.prompt
async def test_prompt_with_arguments(arg1: str, arg2: str) -> str:
    """A prompt with two arguments."""
    return f"Prompt with arguments: arg1='{arg1}', arg2='{arg2}'"


@server.complete(test_prompt_with_arguments, "arg1")
async def complete_arg1(typed: str) -> list[str]:
    return [word for word in ("testament", "testing", "tomorrow") if word.startswith(typed)]


@server.prompt
async def test_prompt_with_embedded_resource(resourceUri: str):  # noqa: N803  the suite's name
    """A prompt about a resource."""
    resource = embedded(resourceUri, "text/plain", "Embedded resource content for testing.")
    return [resource, "Please process the embedded resource above."]


@server.prompt
async def test_prompt_with_image():
    """A prompt about a picture."""
    return [trimcp.Image(PNG, "image/png"), "Please analyze the image above."]


@server.prompt
async def test_input_required_result_prompt(*, ctx: trimcp.Context) -> str:
    """A prompt that asks the user first."""
    return told(await ctx.elicit("What is it about?", form(context=TEXT), key="user_context"))


# The program


def parse_options() -> argparse.Namespace:
    """Return what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--transport", choices=["stdio", *PATHS], default="stdio")
    parser.add_argument("--port", type=int, default=0, help="of the loopback interface; 0 takes a free one")
    parser.add_argument("--page-size", type=int, help="entries to a page of a list; all on one without it")
    parser.add_argument("--host-software", choices=["own", "hypercorn"], default="own")
    parser.add_argument("--before", metavar="URL", help="serve a proxy before the server there instead")
    return parser.parse_args()


# Where each transport is found. Over HTTP all three are, since they share a port.
PATHS: dict[str, dict[str, str | None]] = {
    "http": {"path": "/mcp", "sse_path": "/sse", "websocket_path": "/ws"},
    "sse": {"path": None, "sse_path": "/sse", "websocket_path": None},
    "ws": {"path": None, "sse_path": None, "websocket_path": "/ws"},
}


def main() -> None:
    options = parse_options()
    server.page_size = options.page_size
    if options.transport == "stdio":
        trimcp.run_stdio(server)
    else:
        settings = trimcp.HttpSettings(retry=100, **PATHS[options.transport])
        software = options.host_software
        served = server if options.before is None else trimcp.proxy(options.before, name="conformance")
        trimcp.run_http(served, port=options.port, settings=settings, software=software, ready=announce)


def announce(urls: list[str]) -> None:
    """Print where the server is found, for whoever started it."""
    print(*urls, flush=True)


if __name__ == "__main__":
    main()
