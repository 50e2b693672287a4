"""Holds the names on the pages of design against the package and the tree, so that no page names what is gone.

Checked are, in backticks, paths and names of code; in a diagram (a fenced block of `text`) names with a dot, classes of
two words, and functions written with parentheses. A module is named from `trimcp`, `transports` or `http` on:
`session.drive`, `stdio.streams`, `h1.writer`. In a diagram a function is one of the module that begins its line, or
else a line above.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

import attrs
import pytest

import trimcp
from tests.pages import PAGES as ALL_PAGES
from tests.pages import ROOT, blocks_of

PACKAGE = ROOT / "trimcp"
DESIGN = ROOT / "docs" / "design"
PAGES = sorted(page for page in DESIGN.glob("*.md") if page.name != "dependencies.md")  # which is about others' names

BEGINNINGS = ("", "portal.", "transports.", "transports.http.")
FILES = re.compile(r"[\w./-]+(\.(py|md|json|toml)|/)")
NAME = re.compile(r"@?([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)(\(.*\))?")
IN_DIAGRAM = re.compile(r"[\w./]+\.py\b|\b_?[A-Za-z]\w*(?:\.[A-Za-z_]\w*)+|\b_?[A-Za-z]\w*(?=\()|\b[A-Z][a-z]+[A-Z]\w*")

ABBREVIATED = {"ctx": "Context"}
"""What pages call an object of a class."""

OTHERS = {
    *("trio", "bytes", "object"),  # with whatever they have
    *("attrs", "cattrs", "orjson", "hypercorn", "mcp", "epoll", "epoll_ctl", "plot", "TYPE_CHECKING"),
    *("wait_all_tasks_blocked", "reproduce_failure", "ParamSpec", "CONNECT", "keep_alive_max_requests", "WebSocket"),
}
"""Names of Python, its packages and the system."""

NOT_CODE = {
    *("build/soak.json", "trimcp.peer_closed", "data.reason"),
    *("JsonRpc", "Check", "trimcp.v1", "trimcp.v1.Mcp", "trimcp.v1.AgentTools", "grpc.health.v1.Health"),
}
"""A report that a run writes, an extension of an ASGI scope, a member of an error on the wire, and names of gRPC."""


@attrs.frozen
class Names:
    """What the package defines.

    Attributes:
        modules: the names that each module defines at any depth, by each form in which a page may write the module.
        dotted: modules, `module.name`, `module.Class.member` and `Class.member`, in each such form.
        classes: all classes; no two have one name.
        anywhere: all names, parameters and one-word strings of the package.
    """

    modules: Mapping[str, frozenset[str]]
    dotted: frozenset[str]
    classes: frozenset[str]
    anywhere: frozenset[str]


@cache
def package_names() -> Names:
    return names_in({path.relative_to(PACKAGE).as_posix(): path.read_text("utf-8") for path in PACKAGE.rglob("*.py")})


def names_in(sources: Mapping[str, str]) -> Names:
    """Read the names of a package given as {path below trimcp/: source text}."""
    trees = {
        path.removesuffix(".py").removesuffix("/__init__").replace("/", "."): list(ast.walk(ast.parse(source)))
        for path, source in sources.items()
    }
    classes = {node.name: node for nodes in trees.values() for node in nodes if isinstance(node, ast.ClassDef)}
    modules: dict[str, frozenset[str]] = {}
    members = {name: _members(name, classes) for name in classes}
    dotted = {f"{name}.{member}" for name in classes for member in members[name]}
    anywhere: set[str] = set()
    for module, nodes in trees.items():
        defined = frozenset(_defined(nodes))
        anywhere |= {*module.split("."), *defined, *_words(nodes)}
        for beginning in BEGINNINGS:
            if module.startswith(beginning):
                form = module.removeprefix(beginning)
                modules[form] = defined
                dotted |= {form} | {f"{form}.{name}" for name in defined}
                dotted |= {f"{form}.{name}.{member}" for name in defined & set(classes) for member in members[name]}
    return Names(modules, frozenset(dotted), frozenset(classes), frozenset(anywhere))


def _members(name: str, classes: Mapping[str, ast.ClassDef]) -> set[str]:
    """Return the members of a class, and those of its bases in the package."""
    found = set(_defined(ast.walk(classes[name])))
    for base in _plain(classes[name].bases):
        if isinstance(base, ast.Name) and base.id in classes:
            found |= _members(base.id, classes)
    return found


def _plain(bases: list[ast.expr]) -> Iterator[ast.expr]:
    """Yield base classes without their type arguments."""
    for base in bases:
        yield base.value if isinstance(base, ast.Subscript) else base


def _defined(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Yield what nodes define: classes, functions, parameters, variables, attributes of `self`."""
    for node in nodes:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
            yield node.attr


def _words(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Yield strings that are one word: members of messages, keys of settings."""
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            yield node.value


def problems(page: Path, names: Names) -> list[str]:
    """Return the names on a page that stand for nothing."""
    text = page.read_text("utf-8")
    for block in blocks_of(page):
        text = text.replace(block.text, "\n" * block.text.count("\n"))
    found = []
    for number, line in enumerate(text.split("\n"), 1):
        found += [f"{page.name}:{number}: {name}" for name in re.findall(r"`([^`]+)`", line) if not exists(name, names)]
    for block in blocks_of(page):
        if block.language == "text":
            found += [
                f"{page.name}:{block.line + line}: {name}" for line, name in missing_in_diagram(block.text, names)
            ]
    return found


def exists(quoted: str, names: Names) -> bool:
    """Return whether what stands in backticks exists, or is nothing of ours: a command, a header, a message."""
    if FILES.fullmatch(quoted) and quoted not in NOT_CODE:
        return any((folder / quoted).exists() for folder in (ROOT, PACKAGE, ROOT / "docs", *_folders()))
    name = NAME.fullmatch(quoted)
    if name is None or name[1] in NOT_CODE or name[1].split(".")[0] in OTHERS:
        return True
    arguments = set(re.findall(r"(?<![\w\"'.])[a-z_]\w*", name[2] or "")) - set(dir(builtins))
    if not arguments <= names.anywhere:
        return False
    if "." in name[1]:
        return _full(name[1]) in names.dotted
    return name[1] in names.anywhere or name[1] in dir(builtins) or name[1] == "__init__"


def _full(dotted: str) -> str:
    """Return a name without `trimcp`, and with its class for an object."""
    first, _, rest = dotted.removeprefix("trimcp.").partition(".")
    return f"{ABBREVIATED.get(first, first)}.{rest}".removesuffix(".")


@cache
def _folders() -> tuple[Path, ...]:
    return tuple(path for path in PACKAGE.rglob("*") if path.is_dir())


def missing_in_diagram(text: str, names: Names) -> Iterator[tuple[int, str]]:
    """Yield the lines and names of a diagram that stand for nothing."""
    module: str | None = None
    for number, line in enumerate(text.split("\n")):
        beginning = re.match(r" *([a-z]\w*\.[\w.]+)", line)
        if beginning and _full(beginning[1]) in names.modules:
            module = _full(beginning[1])
        for name in IN_DIAGRAM.findall(line):
            if name.endswith(".py"):
                known = any((folder / name).exists() for folder in (PACKAGE, *_folders()))
            elif name.split(".")[0] in OTHERS:
                known = True
            elif "." in name:
                known = _full(name) in names.dotted
            elif name in names.classes:
                known = True
            else:
                known = name in (names.anywhere if module is None else names.modules[module])
            if not known:
                yield number, name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_names_nothing_that_is_gone(page: Path) -> None:
    assert problems(page, package_names()) == []


def test_every_layer_stands_in_the_diagram_of_layers() -> None:
    plan = next(blocks_of(DESIGN / "architecture.md")).text
    named = set(re.findall(r"[a-z_]\w*", plan))
    there = {path.stem for path in PACKAGE.iterdir() if path.is_dir() or path.suffix == ".py"} - {
        "__init__",
        "__pycache__",
    }
    assert there - named == set()
    folders = set(re.findall(r"\b([a-z]\w*)/", plan)) - {"trimcp"}
    assert {name for name in folders if not any(folder.name == name for folder in _folders())} == set()


@pytest.mark.parametrize("page", [*ALL_PAGES, ROOT / "SECURITY.md"], ids=lambda page: page.stem)
def test_what_a_page_has_of_trimcp_is_public(page: Path) -> None:
    """Names such as `trimcp.Limits` in running text; those of snippets are run."""
    found = set(re.findall(r"`@?trimcp\.(\w+)", page.read_text("utf-8"))) - {
        "peer_closed",
        "v1",
        "access",
        "admin",
    }  # ASGI's, gRPC's, loggers
    assert found - set(trimcp.__all__) - {name.partition(".")[0] for name in package_names().modules} == set()


SMALL = names_in(
    {
        "channel.py": "class Sink:\n    def post(self): ...",
        "session/queues.py": "class Outbox(Sink):\n    size: int = 0\n    def room(self, bytes_left): self.held = 0",
        "transports/http/h1/writer.py": "def write(): ...",
        "transports/http/seams.py": "NAMES = ('retryAfter', 'two words')",
    }
)


@pytest.mark.parametrize(
    "name",
    [
        *("session.queues", "session.queues.Outbox", "trimcp.session.queues", "Outbox.size", "Outbox.post"),
        *(
            "session.queues.Outbox.held",
            "h1.writer",
            "http.h1.writer.write",
            "transports.http.seams",
            "room()",
            "Outbox",
        ),
        *(
            "Outbox(bytes_left=1)",
            "bytes_left",
            "retryAfter",
            "trio.Event",
            "tools/call",
            "--plot",
            "Mcp-Method",
            "a b",
        ),
    ],
)
def test_what_is_there_is_found(name: str) -> None:
    assert exists(name, SMALL)


@pytest.mark.parametrize(
    "name",
    [
        *("session.crew", "session.queues.Inbox", "Outbox.drop", "session.queues.Outbox.drop", "writer.write", "Inbox"),
        *("Outbox(bytes_right=1)", "room_left", "leave()", "trimcp/session/crew.py", "session.queues.write"),
    ],
)
def test_what_is_gone_is_found_out(name: str) -> None:
    assert not exists(name, SMALL)


def test_a_function_in_a_diagram_is_one_of_the_module_before_it() -> None:
    diagram = "session.queues   Outbox.room(): waits, then room() -> write()\nh1.writer   write(data)  room()  _gone()"
    assert list(missing_in_diagram(diagram, SMALL)) == [(0, "write"), (1, "room"), (1, "_gone")]
