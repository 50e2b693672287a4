"""The package as a user meets it: what importing it loads, and whether its names explain themselves."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import inspect
import json
import runpy
import subprocess
import sys
from importlib.metadata import distribution
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import trimcp
import trimcp.auth

ROOT = Path(__file__).parents[2]
PACKAGES: Any = [trimcp, trimcp.auth, trimcp.fleet, trimcp.guard, trimcp.testing, trimcp.watch, trimcp.wire]
WEB = ["httpx2", "hypercorn", "trio_websocket", "wsproto", "h11", "h2", "httptools"]
FOREIGN = [*WEB, "click", "rich", "jsonschema", "joserfc", "cryptography", "filelock", "hiredis", "watchfiles"]


def test_importing_loads_no_http_websocket_or_command_line_code() -> None:
    program = f"import json, sys, trimcp; print(json.dumps([m for m in {FOREIGN} if m in sys.modules]))"
    root = Path(trimcp.__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, check=True)
    assert json.loads(done.stdout) == []


@pytest.mark.parametrize(
    "program",
    [
        "trimcp.Server('x'); trimcp.run_stdio; trimcp.serve_stdio",
        "trimcp.Client('x'); trimcp.stdio('x')",
        "trimcp.run_http; trimcp.HttpSettings(); trimcp.http('http://x/'); trimcp.websocket('ws://x/')",
    ],
)
def test_software_for_the_web_is_loaded_when_it_is_used(program: str) -> None:
    program = f"import json, sys, trimcp; {program}; print(json.dumps([m for m in {FOREIGN} if m in sys.modules]))"
    root = Path(trimcp.__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, check=True)
    assert json.loads(done.stdout) == []


SELDOM = ("portal", "compose", "rest", "extensions", "fleet", "watch", "auth", "guard", "agent_tools", "store.tasks")
SELDOM += ("server.caching", "server.including", "server.mounting", "server.handlers.provided", "server.tool_choice")
SELDOM += ("server.extensions.skills", "server.extensions.apps", "server.extensions.tasks", "server.tool_search")
SELDOM += ("server.commands", "workers")

STDIO_SERVER = """
import json, sys, trimcp, trio
server = trimcp.Server("x")
@server.tool
async def echo(text: str, times: int = 1) -> str:
    return text * times
trimcp.run_stdio(server)
used = [
    cls.__name__
    for name, module in list(sys.modules.items())
    if name.startswith("trimcp.wire.")
    for cls in vars(module).values()
    if hasattr(cls, "__wire__") and cls.__module__ == name and isinstance(vars(cls)["__attrs_attrs__"], tuple)
]
slotted = [cls for name, module in list(sys.modules.items()) if name.startswith("trimcp.")
    for cls in vars(module).values() if isinstance(cls, type) and cls.__module__ == name and "__slots__" in vars(cls)]
complete = [cls.__qualname__ for cls in slotted if isinstance(vars(cls).get("__attrs_attrs__"), tuple)]
print(json.dumps([sorted(sys.modules), sorted(used), sorted(complete)]), file=sys.stderr)
"""
INITIALIZE = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "initialize",
    "params": {
        "protocolVersion": trimcp.LATEST_LEGACY.name,
        "capabilities": {},
        "clientInfo": {"name": "x", "version": "1"},
    },
}


def test_a_stdio_server_loads_only_what_it_uses_until_its_first_answer() -> None:
    """The start is what a user of a local server waits for. Something new here has to be worth that wait."""
    root = Path(trimcp.__file__).parent.parent
    asked = json.dumps(INITIALIZE).encode() + b"\n"
    done = subprocess.run([sys.executable, "-c", STDIO_SERVER], input=asked, cwd=root, capture_output=True, check=True)
    assert json.loads(done.stdout)["result"]["serverInfo"]["name"] == "x"
    loaded, payloads, complete = json.loads(done.stderr)
    trios = subprocess.run(
        [sys.executable, "-c", "import json, sys, trio; print(json.dumps(list(sys.modules)))"],
        capture_output=True,
        check=True,
    )
    ours = [name for name in loaded if name.partition(".")[0] == "trimcp"]
    foreign = {name.partition(".")[0] for name in {*loaded} - {*json.loads(trios.stdout)}} - sys.stdlib_module_names
    assert foreign == {"trimcp", "orjson"}
    assert not {"asyncio", "email", "http", "concurrent", "xml", "unittest", "decimal", "mimetypes"} & {*loaded}
    parts = ("client", "cli", "bench", "testing", "net", "transports.http", "transports.memory", "transports.trace")
    unused = (*parts, *SELDOM, "server.prompts", "server.resources", "schema.engine", "schema.problems")
    unused += ("session.push", "session.outgoing.asking")
    assert [name for name in ours if name.removeprefix("trimcp.").startswith(unused)] == []
    assert len(ours) < 100, f"{len(ours)} modules of trimcp"
    declared = [
        "ClientCapabilities",
        "ServerCapabilities",
        "PromptsCapability",
        "ResourcesCapability",
        "ToolsCapability",
    ]
    said = ["InitializeParams", "InitializeResult", "Implementation", "Params", "Result", "Tool"]
    assert payloads == sorted([*declared, *said]), "payload classes that attrs had to finish"
    assert len(complete) < 50, f"classes that attrs had to complete: {complete}"


def test_trimcp_run_loads_what_a_server_needs_and_of_the_command_its_own_module(tmp_path: Path) -> None:
    """A host waits for the server that it starts by `trimcp run`: no client, no other command, no screen."""
    server = tmp_path / "server.py"
    server.write_text("import trimcp\nserver = trimcp.Server('x')\n")
    program = """
import atexit, json, sys, trimcp.cli
atexit.register(lambda: print(json.dumps(sorted(sys.modules)), file=sys.stderr))
trimcp.cli.main()
"""
    words = [sys.executable, "-c", program, "run", str(server)]
    asked = json.dumps(INITIALIZE).encode() + b"\n"
    done = subprocess.run(words, input=asked, cwd=ROOT, capture_output=True, check=True)
    assert json.loads(done.stdout)["result"]["serverInfo"]["name"] == "x"
    loaded = json.loads(done.stderr)
    assert [name for name in loaded if name.partition(".")[0] == "rich" or name.startswith(NOT_RUN)] == []
    assert [name.removeprefix("trimcp.cli.") for name in loaded if name.startswith("trimcp.cli.")] == [
        *("app", "exits", "loading", "options", "serve", "serve.run", "text")
    ]


NOT_RUN = ("trimcp.client", "trimcp.bench", "trimcp.testing", "trimcp.net", "trimcp.transports.http")


def test_a_resource_without_variables_loads_no_templates_and_no_table_of_media_types() -> None:
    program = """
import sys, trimcp
server = trimcp.Server("x")
server.resource("x://fixed")(lambda: "text")
loaded = [name for name in ("trimcp.server.uri_template", "mimetypes") if name in sys.modules]
server.resource("x://{one}")(lambda one: one)
print(loaded, "trimcp.server.uri_template" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, check=True, text=True)
    assert done.stdout == "[] True\n"


OTHER_HOSTS = ["httpx2", "hypercorn", "h2", "hpack", "google.protobuf", "trimcp.framing.grpc", "click", "rich"]
OTHER_HOSTS += [f"trimcp.{name}" for name in ("client", "cli", *SELDOM)]


def test_serving_http_loads_no_other_host_and_no_client() -> None:
    program = f"""
import json, sys, trimcp, trio
async def main():
    async with trio.open_nursery() as nursery:
        await nursery.start(lambda task_status: trimcp.serve_http(trimcp.Server("x"), port=0, task_status=task_status))
        nursery.cancel_scope.cancel()
trio.run(main)
print(json.dumps([m for m in {OTHER_HOSTS} if m in sys.modules]))
"""
    root = Path(trimcp.__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, check=True)
    assert json.loads(done.stdout) == []


def test_the_list_of_what_is_not_loaded_names_real_packages() -> None:
    """A misspelt name above would never be found loaded."""
    program = "import importlib, sys; [importlib.import_module(m) for m in sys.argv[1:]]"
    subprocess.run([sys.executable, "-c", program, *FOREIGN], capture_output=True, check=True)
    assert [name for name in SELDOM if importlib.util.find_spec(f"trimcp.{name}") is None] == []


def test_type_checkers_are_told_the_same_names() -> None:
    for stub, text in runpy.run_path(str(ROOT / "docs" / "stubs.py"))["stubs"]().items():
        assert stub.read_text("utf-8") == text, f"{stub} is stale: python docs/stubs.py"


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_every_name_is_what_its_module_calls_so(package: ModuleType) -> None:
    source = Path(str(package.__file__)).with_suffix(".pyi").read_text("utf-8")
    imported = {
        alias.asname: (statement.module, alias.name)
        for statement in ast.parse(source).body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    }
    assert set(package.__all__) <= set(imported)
    assert set(package.__all__) <= set(dir(package))
    for name, (module, own) in imported.items():
        there = importlib.import_module(str(module))
        if name not in package.__all__:
            there = importlib.import_module(f"{module}.{own}")
            assert getattr(package, str(name)) is there
            continue
        assert getattr(package, str(name)) is getattr(there, own), name
        assert _is_documented(name, package), name


def test_a_server_does_not_load_the_client_nor_the_other_way_round() -> None:
    program = "import sys, trimcp; trimcp.{}('x'); print([m for m in sys.modules if m.startswith('trimcp.{}')])"
    root = Path(trimcp.__file__).parent.parent
    for used, other in (("Server", "client"), ("Client", "server")):
        done = subprocess.run(
            [sys.executable, "-c", program.format(used, other)], cwd=root, capture_output=True, check=True, text=True
        )
        assert done.stdout == "[]\n"


def test_a_client_loads_a_transport_when_it_is_given_a_url_of_it() -> None:
    program = """
import sys, trimcp
def loaded(*packages): return sorted(m for m in sys.modules if m.startswith(packages))
client = trimcp.Client("x")
print(loaded("trimcp.transports."))
client.connect("http://127.0.0.1/mcp"), client.connect("ws://127.0.0.1/ws")
print("trimcp.transports.http.client.target" in sys.modules, "trimcp.transports.websocket.client" in sys.modules)
print(loaded("trimcp.server", "trimcp.net", "trimcp.run"))
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, check=True, text=True)
    assert done.stdout == "[]\nTrue True\n[]\n"


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    assert not hasattr(trimcp, "Sever")
    assert not hasattr(trimcp.wire, "Tol")
    assert "Server" in dir(trimcp)


def test_names_without_underscore_are_public() -> None:
    """Whatever `trimcp.<Tab>` offers besides submodules is meant to be used."""
    offered = {name for name, value in vars(trimcp).items() if not inspect.ismodule(value)}
    assert {name for name in offered if not name.startswith("_")} - {"annotations"} <= set(trimcp.__all__)


def test_importing_what_pytest_always_loads_loads_nothing() -> None:
    program = "import sys, trimcp.testing; print([name for name in ('trio', 'attr', 'orjson') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_types_are_shipped() -> None:
    assert Path(trimcp.__file__).with_name("py.typed").exists()


def test_the_command_is_installed() -> None:
    entries = {(entry.group, entry.name): entry.value for entry in distribution("trimcp").entry_points}
    plugin = {("pytest11", "trimcp"): "trimcp.testing.plugin"}
    assert entries == {("console_scripts", "trimcp"): "trimcp.cli:main", **plugin}


def test_the_search_for_documentation_can_fail() -> None:
    told, untold = "X: int = 1\n'''Why.'''\n", "X: int = 1\nY = 2\n'''Of Y.'''\n"
    assert _documented_constants(told) == {"X"}
    assert _documented_constants(untold) == {"Y"}


def _is_documented(name: str, package: ModuleType) -> bool:
    value = getattr(package, name)
    if inspect.ismodule(value) or inspect.isroutine(value) or inspect.isclass(value):
        return bool((value.__doc__ or "").strip())
    # A constant or an alias carries no docstring; documentation tools read the string below its assignment.
    return name in _constants()


@functools.cache
def _constants() -> set[str]:
    """The documented constants of the whole package."""
    paths = Path(trimcp.__file__).parent.rglob("*.py")
    return set().union(*(_documented_constants(path.read_text("utf-8")) for path in paths))


def _documented_constants(source: str) -> set[str]:
    """The module-level names whose assignment is followed by a bare string."""
    body = ast.parse(source).body
    found: set[str] = set()
    for statement, below in pairwise(body):
        if not (isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)):
            continue
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            found.add(statement.target.id)
        elif isinstance(statement, ast.Assign):
            found |= {target.id for target in statement.targets if isinstance(target, ast.Name)}
    return found
