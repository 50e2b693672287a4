"""Who may know whom: the package's layers, read from its syntax trees.

Every import counts, wherever it stands: at the top, inside a function, under `if TYPE_CHECKING`. A rule that
cannot fail guards nothing, so each is also shown a tree that breaks it.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "trimcp"
MAX_LINES = 600
MAX_MODULES = 20

_WIRE = {
    "errors",
    "principal",
    "support.addresses",
    "support.lazy",
    "support.slotted",
    "support.bounds",
    "support.rates",
    "support.cleaning",
    "support.files",
    "security",
    "hidden",
    "wire",
}
_CHANNEL = _WIRE | {
    "extensions",
    "framing",
    "budget",
    "support.nurseries",
    "support.descendants",
    "support.restarts",
    "support.deadlines",
    "support.shares",
    "channel",
}
_SESSION = _CHANNEL | {"protocol", "schema", "session"}
_SERVER = _SESSION | {"guard", "watch", "workers", "server"}
_ANYTHING = _SERVER | {
    "store",
    "agent_tools",
    "rest",
    "auth",
    "portal",
    "worker_program",
    "transports",
    "client",
    "fleet",
    "compose",
    "run",
    "net",
    "testing",
    "bench",
    "cli",
    "trimcp",
}

LAYERS: dict[str, set[str]] = {
    "errors": {"errors"},
    "support": {"support"},
    "support.addresses": {"support.addresses"},
    "support.lazy": {"support.lazy"},
    "support.slotted": {"support.slotted"},
    "principal": {"principal"},
    "support.bounds": {"support.bounds"},
    "support.rates": {"support.rates"},
    "support.restarts": {"support.bounds", "support.slotted", "support.restarts"},
    "support.cleaning": {"support.cleaning"},
    "support.files": {"support.cleaning", "errors", "support.files"},
    "hidden": {"hidden", "support.slotted"},
    "security": {"support.cleaning", "security"},
    "support.nurseries": {"support.nurseries"},
    "support.descendants": {"support.slotted", "support.descendants"},
    "support.deadlines": {"support.deadlines"},
    "budget": {"support.slotted", "support.cleaning", "security", "budget"},
    "support.shares": {"support.cleaning", "security", "principal", "budget", "support.shares"},
    "wire": _WIRE,
    "extensions": _WIRE | {"extensions"},
    "framing": _WIRE | {"framing"},
    "protocol": _WIRE | {"protocol"},
    "schema": _WIRE | {"schema"},
    "store": _WIRE | {"support.nurseries", "support.restarts", "store"},
    "channel": _CHANNEL,
    "transports": _CHANNEL | {"store", "transports"},
    "auth": _CHANNEL | {"transports", "auth"},
    "session": _SESSION,
    "guard": _SESSION | {"guard"},
    "workers": _SESSION | {"workers"},
    "watch": _SESSION | {"workers", "transports", "watch"},
    "server": _SERVER | {"store"},
    "agent_tools": _SERVER | {"store", "transports", "auth", "agent_tools"},
    "worker_program": _SERVER | {"worker_program"},
    "client": _SESSION | {"transports", "client"},
    "fleet": _SESSION | {"client", "fleet"},
    "rest": _SERVER | {"transports", "rest"},
    "compose": _SERVER | {"client", "fleet", "compose"},
    "portal": _SESSION | {"client", "portal"},
    # These put the parts together. "trimcp" is the package's own __init__; only these may import it, `run` or `net`.
    "run": _ANYTHING - {"testing", "bench", "cli"},
    "net": _ANYTHING - {"testing", "bench", "cli"},
    "testing": _ANYTHING - {"bench", "cli"},
    "bench": _ANYTHING - {"cli"},
    "cli": _ANYTHING,
    "trimcp": _ANYTHING - {"bench", "cli"},
}
"""Each layer (a module or folder of the package, a module of `support`) with those it may import, itself too."""

FRAMING_KNOWS = {"trimcp.wire.jsonrpc", "trimcp.wire.codes", "trimcp.wire.subschemas"}
"""All of `wire` that turning bytes into messages needs; the payloads are none of its business."""

HTTP_FLOORS = (
    {"endpoint.accept"},
    {"interfaces"},
    {"peers.access", "peers.identity", "peers.origins", "endpoint.routing"},
    {"settings", "state.streams"},
    {"state.sessions"},
    {"state.held"},
    {"endpoint.exchange", "endpoint.sse2024"},
    {"endpoint.shared_exchange"},
    {"endpoint.sharing"},
    {"endpoint.application"},
)
"""The modules of `transports/http`, from the lowest floor up: each may import those below its own."""

_BY_HOSTS = {"interfaces", "settings"}

HTTP_FOLDERS = {
    "h1": {"h1", "h2.connection", *_BY_HOSTS},
    "h2": {"h2", "h1.hosting", "h1.parser", "h1.wires", "h1.writer", *_BY_HOSTS},
    "asgi": {"asgi", "h1.sockets", "h1.wires", *_BY_HOSTS},
    "client": {"client", "h1.replies", "h1.wires"},
}
"""Its other folders with what of `transports/http` each may import: a host knows the interfaces, and no session."""

AGENT_ROOMS = {
    "messages": set[str](),
    "callers": {"messages"},
    "watching": set[str](),
    "contexts": {"messages", "callers", "watching"},
    "catalog": {"messages", "callers"},
    "answering": {"messages", "callers", "contexts", "catalog"},
    "service": {"messages", "callers", "contexts", "catalog", "answering"},
    "bindings": {"messages", "callers", "watching", "contexts", "catalog", "answering", "service"},
    "serving": {"messages", "callers", "contexts", "catalog", "service", "bindings"},
    "client": {"messages", "watching"},
    "providing": {"messages", "callers", "contexts", "catalog", "service", "bindings", "client"},
}
"""The rooms of `agent_tools` with what of it each may import beside itself."""

_OF_COMMANDS = {
    *("asking", "conversation", "exits", "hosts", "inspecting", "loading", "options", "schemas", "screen"),
    *("targets", "text", "web"),
}

ROOMS = {
    "cli/bench": _OF_COMMANDS,
    "cli/serve": _OF_COMMANDS,
    "cli/top": _OF_COMMANDS,
    "server/handlers": {"options"},
    "session/incoming": {"clock", "facts", "limits", "queues", "scopes"},
    "session/outgoing": {"clock", "incoming", "queues", "scopes", "session"},
}
"""Rooms inside folders with what of the folder each may import beside itself."""

SANS_IO = {"wire", "extensions", "framing", "protocol"}
IO_MODULES = {"trio", "trio_websocket", "hypercorn", "httpx2", "asyncio", "socket", "ssl", "subprocess"}

REVISION_LITERAL = re.compile(r"\b202[4-9]-")


def read_package() -> dict[str, str]:
    return {path.relative_to(PACKAGE).as_posix(): path.read_text("utf-8") for path in PACKAGE.rglob("*.py")}


def problems(sources: Mapping[str, str]) -> list[str]:
    """Every broken rule in a package given as {path below trimcp/: source text}."""
    modules = {_dotted(path) for path in sources}
    found: list[str] = []
    graph: dict[str, set[str]] = {}
    homes: dict[str, list[str]] = {}
    for path, source in sorted(sources.items()):
        nodes = list(ast.walk(ast.parse(source)))  # once: no rule takes as long as to read all of it
        imported = sorted(set(_imports(nodes, path, modules)))
        graph[_dotted(path)] = {name for _, name in imported if name in modules}
        classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
        for node in classes:
            homes.setdefault(node.name.lstrip("_"), []).append(path)
        found += [f"{path}: {problem}" for problem in _problems_of_module(path, source, nodes, imported)]
        found += [f"{path}: {problem}" for problem in _unexplained(classes)]
    found += [f"a circle of imports: {', '.join(circle)}" for circle in _circles(graph)]
    # Private classes count as well: a name that means two things is looked up twice.
    found += [f"{name} is a class in {', '.join(paths)}" for name, paths in homes.items() if len(paths) > 1]
    return found + list(_crowded(sources))


def _crowded(sources: Mapping[str, str]) -> Iterator[str]:
    """A folder of many modules has no door that a reader finds: its stories want rooms of their own."""
    rooms = Counter(path.rpartition("/")[0] for path in sources)
    yield from (
        f"{room}/ has {count} modules beside each other" for room, count in rooms.items() if count > MAX_MODULES
    )


def _circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Modules that import each other, directly or through others: what is left once all are gone that import none."""
    left = {name: {other for other in others if other != name} for name, others in graph.items()}
    while done := [name for name, others in left.items() if not others & left.keys()]:
        for name in done:
            del left[name]
    # What only leads into a circle is no part of it.
    while outside := left.keys() - {other for others in left.values() for other in others}:
        for name in outside:
            del left[name]
    return [sorted(left)] if left else []


def _unexplained(classes: Iterable[ast.ClassDef]) -> Iterator[str]:
    """More than 300 lines or 20 fields may be one story; a docstring says which, so that somebody has asked."""
    for node in classes:
        fields = sum(isinstance(line, ast.AnnAssign) for line in node.body)
        lines = (node.end_lineno or 0) - node.lineno + 1
        if lines > 300 or fields > 20:
            why = " ".join((ast.get_docstring(node) or "").split())
            if not re.search(r"has more than (20 fields|300 lines).* because", why):
                yield f"{node.name} does not say why it is one class: {lines} lines, {fields} fields"


def _problems_of_module(
    path: str, source: str, nodes: Sequence[ast.AST], imported: Iterable[tuple[int, str]]
) -> Iterator[str]:
    layer = _layer(_dotted(path))
    if layer not in LAYERS:
        yield f"{layer} has no layer: say in LAYERS what it may import"
        return
    if (lines := source.count("\n")) > MAX_LINES:
        yield f"{lines} lines, more than {MAX_LINES}"
    for line, name in imported:
        if name.split(".")[0] != "trimcp":
            if layer in SANS_IO and name.split(".")[0] in IO_MODULES:
                yield f"line {line}: {layer} does no I/O but imports {name}"
        elif _layer(name) not in LAYERS[layer]:
            yield f"line {line}: {layer} must not know {name}"
        elif layer == "framing" and _layer(name) == "wire" and name not in FRAMING_KNOWS:
            yield f"line {line}: framing knows messages, not {name}"
        elif not _room_may_know(path, name):
            yield f"line {line}: {path.rpartition('/')[0]} must not know {name}"
        elif not _http_may_know(path, name) or not _agents_may_know(path, name):
            module = path.removeprefix(HTTP).removeprefix(AGENTS).removesuffix(".py")
            yield f"line {line}: {module} must not know {name}"
    if layer != "wire":
        for line, text in _strings(nodes):
            if REVISION_LITERAL.search(text):
                yield f"line {line}: the revision in {text!r} belongs in trimcp.wire.revisions"


HTTP = "transports/http/"


def _http_may_know(path: str, name: str) -> bool:
    """Whether a module of `transports/http` keeps to its floors and folders; others have no such rule."""
    known = name.removeprefix("trimcp.transports.http.")
    if not path.startswith(HTTP) or known == name:
        return True
    module = path.removeprefix(HTTP).removesuffix(".py").replace("/", ".")
    folder = module.split(".")[0]
    if folder in HTTP_FOLDERS:
        return bool({known, known.split(".")[0]} & HTTP_FOLDERS[folder])
    floor = next((number for number, names in enumerate(HTTP_FLOORS) if module in names), 0)
    return any(known in names for names in HTTP_FLOORS[:floor])


AGENTS = "agent_tools/"


def _room_may_know(path: str, name: str) -> bool:
    """Whether a module of a room inside a folder keeps to what `ROOMS` says of the rest of that folder."""
    room = path.rpartition("/")[0]
    around, own = (f"trimcp.{where.replace('/', '.')}" for where in (room.rpartition("/")[0], room))
    if room not in ROOMS or not _within(name, around) or _within(name, own):
        return True
    return any(_within(name, f"{around}.{known}") for known in ROOMS[room])


def _within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def _agents_may_know(path: str, name: str) -> bool:
    """Whether a module of `agent_tools` keeps to its rooms."""
    room = path.removeprefix(AGENTS).removesuffix(".py").split("/")[0]
    known = name.removeprefix("trimcp.agent_tools.").split(".")[0]
    if not path.startswith(AGENTS) or not name.startswith("trimcp.agent_tools.") or known in (room, "proto"):
        return True
    return known in AGENT_ROOMS[room]


def _dotted(path: str) -> str:
    parts = ["trimcp", *path.removesuffix(".py").split("/")]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _layer(module: str) -> str:
    """The layer of a module. Each module of `support` is one of its own: some use Trio, which `wire` must not know."""
    names = module.split(".")
    if len(names) == 1:
        return "trimcp"
    return ".".join(names[1:3]) if names[1] == "support" else names[1]


def _imports(nodes: Iterable[ast.AST], path: str, modules: set[str]) -> Iterator[tuple[int, str]]:
    """The module behind each imported name: `from trimcp.wire import jsonrpc` is trimcp.wire.jsonrpc."""
    package = ["trimcp", *path.split("/")[:-1]]
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                whole = f"{base}.{alias.name}"
                yield node.lineno, whole if whole in modules else base


def _strings(nodes: Sequence[ast.AST]) -> Iterator[tuple[int, str]]:
    """String constants the program can see; docstrings and other bare strings are for people."""
    bare = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in bare:
            yield node.lineno, node.value


def test_the_package_keeps_its_layers() -> None:
    sources = read_package()
    assert "errors.py" in sources
    assert "wire/jsonrpc.py" in sources
    assert problems(sources) == []


SOUND = {
    "__init__.py": "from trimcp.run import serve\nfrom trimcp.server.server import Server\n",
    "errors.py": "class McpError(Exception): ...\n",
    "wire/__init__.py": "",
    "wire/jsonrpc.py": "from trimcp.errors import McpError\nimport orjson\n",
    "wire/revisions.py": "LATEST = '2026-07-28'\n",
    "wire/tools.py": "from .revisions import LATEST\nfrom . import jsonrpc\n",
    "framing/lines.py": "from trimcp.wire import jsonrpc\n",
    "protocol/connection.py": "import trimcp.wire.tools\n",
    "schema/validator.py": "import trimcp.wire.jsonrpc\n",
    "channel.py": "import trio\nfrom trimcp.wire.jsonrpc import Message\n",
    "transports/stdio/server.py": "import trio\nfrom trimcp import channel\nimport trimcp.framing.lines\n",
    "session/session.py": "'''Speaks 2025-11-25.'''\nimport trimcp.protocol.connection, trimcp.channel\n",
    "server/server.py": "from trimcp.session.session import Session\nimport trimcp.schema.validator\n",
    "client/client.py": "from trimcp.session.session import Session\n",
    "run.py": "import trimcp.server.server, trimcp.client.client, trimcp.transports.stdio.server\n",
    "testing/connect.py": "from trimcp.run import serve\n",
    "bench/engine.py": "import trimcp.client.client, trimcp.server.server, trimcp.transports.stdio.server\n",
    "cli/main.py": "import trimcp.bench.engine, trimcp\nfrom trimcp import run\n",
}


def test_a_sound_tree_has_no_problems() -> None:
    assert problems(SOUND) == []


@pytest.mark.parametrize(
    ("path", "imported"),
    [
        ("errors.py", "trimcp.wire.jsonrpc"),
        ("wire/tools.py", "trimcp.framing.lines"),
        ("wire/tools.py", "trimcp.protocol.connection"),
        ("framing/lines.py", "trimcp.protocol.connection"),
        ("framing/lines.py", "trimcp.channel"),
        ("protocol/connection.py", "trimcp.framing.lines"),
        ("protocol/connection.py", "trimcp.channel"),
        ("support/cleaning.py", "trimcp.wire.jsonrpc"),
        ("schema/validator.py", "trimcp.protocol.connection"),
        ("schema/validator.py", "trimcp.client.client"),
        ("schema/forms.py", "trimcp.session.session"),
        ("schema/forms.py", "trimcp.server.server"),
        ("channel.py", "trimcp.protocol.connection"),
        ("channel.py", "trimcp.transports.stdio.server"),
        ("transports/stdio/server.py", "trimcp.protocol.connection"),
        ("store/database.py", "trimcp.channel"),
        ("store/events.py", "trimcp.transports.http.settings"),
        ("transports/stdio/server.py", "trimcp.session.session"),
        ("transports/stdio/server.py", "trimcp.run"),
        ("session/session.py", "trimcp.transports.stdio.server"),
        ("session/session.py", "trimcp.server.server"),
        ("session/session.py", "trimcp.client.client"),
        ("session/session.py", "trimcp"),
        ("guard/audit.py", "trimcp.server.server"),
        ("workers/remote.py", "trimcp.server.running"),
        ("workers/remote.py", "trimcp.watch.watchdog"),
        ("watch/watchdog.py", "trimcp.server.server"),
        ("server/tools.py", "trimcp.worker_program.serve"),
        ("server/server.py", "trimcp.client.client"),
        ("server/server.py", "trimcp.transports.stdio.server"),
        ("server/server.py", "trimcp.run"),
        ("client/client.py", "trimcp.server.server"),
        ("client/client.py", "trimcp.run"),
        ("client/client.py", "trimcp.testing.connect"),
        ("run.py", "trimcp.testing.connect"),
        ("testing/connect.py", "trimcp.cli.main"),
        ("testing/connect.py", "trimcp.bench.engine"),
        ("bench/engine.py", "trimcp.cli.main"),
        ("run.py", "trimcp.bench.engine"),
        ("__init__.py", "trimcp.bench.engine"),
        ("__init__.py", "trimcp.cli.main"),
    ],
)
def test_an_import_upward_or_sideways_is_found(path: str, imported: str) -> None:
    layer = path.removesuffix(".py").replace("/", ".")
    layer = layer if layer.startswith("support.") else layer.split(".")[0].replace("__init__", "trimcp")
    assert complaints_about(path, f"import {imported}") == [f"line 1: {layer} must not know {imported}"]


@pytest.mark.parametrize(
    "source",
    [
        "import trimcp.server.server",
        "import trimcp.server.server as s, json",
        "from trimcp.server import server",
        "from trimcp.server.server import Server",
        "from ..server.server import Server",
        "from ..server import server",
        "def late():\n    from trimcp.server.server import Server",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from trimcp.server.server import Server",
    ],
)
def test_an_import_is_found_however_it_is_written(source: str) -> None:
    (complaint,) = complaints_about("session/session.py", source)
    assert complaint.endswith("session must not know trimcp.server.server")


def test_framing_knows_messages_and_no_payloads() -> None:
    (complaint,) = complaints_about("framing/lines.py", "from trimcp.wire.tools import Tool")
    assert complaint == "line 1: framing knows messages, not trimcp.wire.tools"


@pytest.mark.parametrize(
    ("module", "imported"),
    [
        ("endpoint/routing", "endpoint.exchange"),
        ("state/sessions", "endpoint.exchange"),
        ("endpoint/exchange", "endpoint.application"),
        ("endpoint/exchange", "endpoint.sse2024"),
        ("endpoint/exchange", "h1.connection"),
        ("endpoint/application", "client.target"),
        ("h1/connection", "endpoint.application"),
        ("h1/connection", "asgi.app"),
        ("asgi/request", "state.sessions"),
        ("asgi/guards", "h1.connection"),
        ("client/target", "interfaces"),
    ],
)
def test_http_keeps_to_its_floors_and_folders(module: str, imported: str) -> None:
    path, name = f"transports/http/{module}.py", f"trimcp.transports.http.{imported}"
    assert complaints_about(path, f"from {name} import x") == [f"line 1: {module} must not know {name}"]


@pytest.mark.parametrize(
    ("module", "imported"),
    [
        ("messages/answers", "callers"),
        ("contexts/table", "catalog.catalog"),
        ("catalog/providers", "service"),
        ("service", "bindings.http"),
        ("client/wire", "service"),
        ("bindings/http", "client.wire"),
    ],
)
def test_agent_tools_keep_to_their_rooms(module: str, imported: str) -> None:
    path, name = f"agent_tools/{module}.py", f"trimcp.agent_tools.{imported}"
    assert complaints_about(path, f"from {name} import x") == [f"line 1: {module} must not know {name}"]


@pytest.mark.parametrize("path", ["wire/tools.py", "framing/lines.py", "protocol/connection.py"])
@pytest.mark.parametrize("source", ["import trio", "from trio.abc import Stream", "def f():\n    import socket"])
def test_io_below_the_channel_is_found(path: str, source: str) -> None:
    (complaint,) = complaints_about(path, source)
    assert "does no I/O but imports" in complaint


@pytest.mark.parametrize("source", ["def f():\n    x = '2025-11-25'", "f'{1} since 2024-11-05'", "f('2026-')"])
def test_a_revision_literal_outside_wire_is_found(source: str) -> None:
    (complaint,) = complaints_about("server/server.py", source)
    assert complaint.endswith("belongs in trimcp.wire.revisions")


@pytest.mark.parametrize(
    "back",
    [
        "import trimcp.session.session",
        "def late():\n    from trimcp.session import session",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from trimcp.session.session import Session",
    ],
)
def test_a_circle_is_found_however_it_is_closed(back: str) -> None:
    more = {"session/job.py": "import trimcp.session.crew", "session/crew.py": back}
    forth = {"session/session.py": "import trimcp.session.job"}
    circle = "trimcp.session.crew, trimcp.session.job, trimcp.session.session"
    assert problems({**SOUND, **more, **forth}) == [f"a circle of imports: {circle}"]
    assert problems({**SOUND, **more}) == []


@pytest.mark.parametrize("name", ["Link", "_Link"])
def test_two_classes_of_one_name_are_found(name: str) -> None:
    more = {"session/session.py": "class Link: ...", "client/client.py": f"def f():\n    class {name}: ..."}
    assert problems({**SOUND, **more}) == ["Link is a class in client/client.py, session/session.py"]


@pytest.mark.parametrize("large", ["    field: int\n" * 21, "    x = 1\n" * 300])
def test_a_large_class_says_why_it_is_one(large: str) -> None:
    (found,) = problems({"errors.py": f"class Story:\n{large}"})
    assert found.startswith("errors.py: Story does not say why")
    said = "    '''It has more than 20 fields because\n    there is no other place.'''\n"
    assert problems({"errors.py": f"class Story:\n{said}{large}"}) == []


def test_a_long_module_is_found() -> None:
    assert complaints_about("server/server.py", "x = 1\n" * MAX_LINES) == []
    assert complaints_about("server/server.py", "x = 1\n" * (MAX_LINES + 1)) == [
        f"{MAX_LINES + 1} lines, more than {MAX_LINES}"
    ]


@pytest.mark.parametrize(
    ("path", "imported"),
    [
        ("cli/top/view.py", "cli.bench.table"),
        ("server/handlers/calling.py", "server.running"),
        ("session/incoming/job.py", "session.session"),
        ("session/outgoing/calls.py", "session.drive"),
    ],
)
def test_rooms_keep_to_what_they_may_know(path: str, imported: str) -> None:
    room = path.rpartition("/")[0]
    assert complaints_about(path, f"import trimcp.{imported}") == [f"line 1: {room} must not know trimcp.{imported}"]


def test_a_crowded_folder_is_found() -> None:
    full = {f"wire/m{number}.py": "" for number in range(MAX_MODULES)}
    assert problems(full) == []
    assert problems({**full, "wire/more.py": ""}) == [f"wire/ has {MAX_MODULES + 1} modules beside each other"]


def test_a_module_without_a_layer_is_found() -> None:
    assert complaints_about("helpers.py", "") == ["helpers has no layer: say in LAYERS what it may import"]


def complaints_about(path: str, source: str) -> list[str]:
    """What is wrong with a module of the sound tree once it reads `source`, apart from circles."""
    found = problems({**SOUND, path: source})
    return [problem.removeprefix(f"{path}: ") for problem in found if not problem.startswith("a circle")]
