"""Writes docs/reference/types.md: what becomes of each form of annotation, here and in two other packages.

    python docs/types_page.py                                        # our column anew, theirs as it was
    python docs/types_page.py fastmcp=/there/bin/python mcp=/here/bin/python   # theirs too, by these interpreters

Each interpreter has its package installed. `FORMS` are the forms; every one is a program of its own.
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import importlib.metadata
import itertools
import json
import re
import subprocess
import sys
import textwrap
import types
import warnings
from pathlib import Path
from typing import Any, Final

HERE: Final = Path(__file__).parent
PAGE: Final = HERE / "reference" / "types.md"
THEIRS: Final = HERE / "reference" / "types.json"

_HEAD: Final = """
import collections, collections.abc, dataclasses, datetime, decimal, enum, fractions, functools, ipaddress, pathlib, re
import typing, uuid, zoneinfo
from typing import *
import typing_extensions
"""


@dataclasses.dataclass(frozen=True)
class Form:
    """One form. `call` is what a client sends for `value`; a result is the expression `gives`."""

    annotation: str
    call: Any = None
    setup: str = ""
    gives: str = ""


_NODE: Final = "@dataclasses.dataclass\nclass Node:\n    name: str = ''\n    kids: {} = {}\n"
_LIST: Final = "dataclasses.field(default_factory=list)"
_KID: Final = {"name": "a", "kids": [{"name": "b"}]}
_TD: Final = "class Day(TypedDict):\n    on: datetime.date\n"
_FIELDS: Final = "{0}class A{1}:\n    x: int\n{0}class B{1}:\n    x: int\n    y: int = 0\n"
_AB: Final = _FIELDS.format("@dataclasses.dataclass\n", "")
_MODELS: Final = "import pydantic\n" + _FIELDS.format("", "(pydantic.BaseModel)")
_FIELD_OF_PYDANTIC: Final = (
    "import pydantic\n@dataclasses.dataclass\nclass A:\n    x: int = pydantic.Field(default=3, ge=1)\n"
)
_ORDER: Final = (
    "@dataclasses.dataclass\nclass Order:\n    x: int\n    y: int = dataclasses.field(init=False, default=7)\n"
)
_AT: Final = "import pydantic\nclass At(pydantic.BaseModel):\n    at: datetime.datetime\n"
_BOX: Final = "T = TypeVar('T')\n@dataclasses.dataclass\nclass Box(Generic[T]):\n    content: T\n"

FORMS: Final[dict[str, list[Form]]] = {
    "Values": [
        Form("int", 3.0),
        Form("float", 1),
        Form("str", "a"),
        Form("bool", True),
        Form("Any", [1, "a"]),
        Form("Literal['a', 1]", "a"),
        Form("Color", "red", "class Color(enum.Enum):\n    RED = 'red'\n"),
        Form("bytes", "aGk="),
        Form("datetime.date", "2026-02-28"),
        Form("datetime.datetime", "2026-02-28T12:00:00+00:00"),
        Form("datetime.time", "09:30:00"),
        Form("datetime.timedelta", 90),
        Form("decimal.Decimal", "0.10"),
        Form("uuid.UUID", "12345678-1234-5678-1234-567812345678"),
        Form("pathlib.PurePosixPath", "a/b"),
        Form("ipaddress.IPv4Address", "127.0.0.1"),
        Form("complex", "1+2j"),
        Form("fractions.Fraction", "1/3"),
        Form("re.Pattern[str]", "a+"),
        Form("zoneinfo.ZoneInfo", "Europe/Berlin"),
        Form("Hashable", "a"),
        Form("Callable[[], int]", 1),
    ],
    "Lists and mappings": [
        Form("list[int]", [1, 2.0]),
        Form("Iterable[int]", [1]),
        Form("Collection[int] | None", [1]),
        Form("Sequence[datetime.date]", ["2026-02-28"]),
        Form("Optional[List]", [1, "a"]),
        Form("tuple[int, str]", [1, "a"]),
        Form("tuple[int, ...]", [1, 2]),
        Form("set[int]", [1, 2]),
        Form("set", [1, "a"]),
        Form("set[dict[str, int]]", [{"a": 1}]),
        Form("collections.deque[int]", [1]),
        Form("dict[str, int]", {"a": 1}),
        Form("dict[datetime.date, int]", {"2026-02-28": 1}),
        Form("dict[int | str, int]", {"1": 1}),
        Form("dict[bool, int]", {"true": 1}),
        Form("dict[float, int]", {"1.5": 1}),
        Form("dict[str | None, int]", {"a": 1}),
        Form("dict[tuple[int, int], int]", {"1,2": 1}),
        Form("collections.defaultdict[str, list[int]]", {"a": [1]}),
        Form("Generator[int, None, None]", [1]),
    ],
    "Records": [
        Form("A", {"x": 1}, _AB),
        Form("Point", {"x": 1}, "import attrs\n@attrs.frozen\nclass Point:\n    x: int\n"),
        Form("Day", {"on": "2026-02-28"}, _TD),
        Form(
            "Day",
            {"on": "2026-02-28"},
            "class Day(typing_extensions.TypedDict):\n    on: typing_extensions.ReadOnly[datetime.date]\n",
        ),
        Form("Pair", {"left": 1, "right": 2}, "class Pair(NamedTuple):\n    left: int\n    right: int\n"),
        Form("Pair", {"left": 1, "right": 2}, "Pair = collections.namedtuple('Pair', 'left right')\n"),
        Form("A", {"x": 1}, _MODELS),
        Form("A", {"x": 1}, _FIELD_OF_PYDANTIC),
        Form("At", {"at": "09:30"}, "import pydantic\nclass At(pydantic.BaseModel):\n    at: datetime.time\n"),
        Form("Box[datetime.date]", {"content": "2026-02-28"}, _BOX),
        Form("Box", {"content": "2026-02-28"}, _BOX),
        Form("Plain", {}, "class Plain:\n    pass\n"),
    ],
    "References": [
        Form("Node", _KID, _NODE.format('list["Node"]', _LIST)),
        Form("Node", _KID, _NODE.format('List["Node"]', _LIST)),
        Form("Node", _KID, _NODE.format('list["Node"] | None', "None")),
        Form("Node", {"name": "a", "kids": {"name": "b"}}, _NODE.format('Optional["Node"]', "None")),
        Form("Node", _KID, _NODE.format('tuple["Node", ...]', "()")),
        Form("Node", _KID, _NODE.format('Union[str, list["Node"]]', "''")),
        Form("Node", _KID, "class Node(TypedDict, total=False):\n    name: str\n    kids: List['Node']\n"),
        Form("list['Later']", [{"x": 1}], "@dataclasses.dataclass\nclass Later:\n    x: int\n"),
        Form("Tree", {"a": {"b": 1}}, 'Tree = typing_extensions.TypeAliasType("Tree", "dict[str, Tree] | int")\n'),
        Form("Missing", {}, "@dataclasses.dataclass\nclass Missing:\n    x: 'Nowhere'\n"),
    ],
    "Annotated, unions, type variables": [
        Form("Annotated[Day, 'when']", {"on": "2026-02-28"}, _TD),
        Form("list[Annotated[Day, 'when']]", [{"on": "2026-02-28"}], _TD),
        Form("int | str", "5"),
        Form("A | B", {"x": 1, "y": 2}, _AB),
        Form("list[A] | list[B]", [{"x": 1, "y": 2}], _AB),
        Form("A | B", {"x": 1, "y": 2}, _MODELS),
        Form("Bound", {"x": 1}, _AB + "Bound = TypeVar('Bound', bound=A)\n"),
        Form("Either", 1, "Either = TypeVar('Either', int, str)\n"),
        Form("Name", "a", "Name = NewType('Name', str)\n"),
    ],
    "Results": [
        Form("list[datetime.date]", gives="[datetime.date(2026, 2, 28)]"),
        Form("dict[datetime.date, int]", gives="{datetime.date(2026, 2, 28): 1}"),
        Form("dict[pathlib.PurePosixPath, int]", gives="{pathlib.PurePosixPath('a/b'): 1}"),
        Form("dict[bool, int]", gives="{True: 1}"),
        Form("dict[tuple[int, int], int]", gives="{(1, 2): 3}"),
        Form("set[int]", gives="{1}"),
        Form("decimal.Decimal", gives="decimal.Decimal('1E+2')"),
        Form("Iterable[int]", gives="map(int, '12')"),
        Form("A", gives="A(1)", setup=_AB),
        Form("Order", gives="Order(1)", setup=_ORDER),
        Form("Names", gives="Names(['a'])", setup="class Names(list[str]):\n    pass\n"),
        Form("pydantic.StrictInt", gives="3", setup="import pydantic\n"),
        Form("At", gives="At(at=datetime.datetime(2026, 2, 28))", setup=_AT),
        Form("Any", gives="{'a': [1]}"),
        Form("Shown", gives="Shown()", setup="class Shown:\n    def __str__(self): return 'as shown'\n"),
        Form("Plain", gives="Plain()", setup="class Plain:\n    pass\n"),
        Form("NoReturn", gives="None"),
    ],
}


_NUMBERS: Final = itertools.count()


def function_of(form: Form) -> Any:
    """Return the function of a form, whose module has nothing else in it."""
    name = f"form_{next(_NUMBERS)}"
    module = types.ModuleType(name)
    sys.modules[name] = module
    # The order of a set differs from run to run.
    told = "'{%s}' % ', '.join(sorted(map(repr, value))) if type(value) is set and value else repr(value)"
    takes = f"def tool(value: {form.annotation}) -> str:\n    return {told}\n"
    gives = f"def tool() -> {form.annotation}:\n    return {form.gives}\n"
    source = _HEAD + form.setup + (gives if form.gives else takes)
    exec(compile(source, name, "exec", dont_inherit=True), vars(module))
    return vars(module)["tool"]


def told(error: BaseException) -> str:
    """Return the first line of an error, without what differs from run to run."""
    return f"refused: {plain(str(error).strip().partition(chr(10))[0] or type(error).__name__)}"


def plain(text: str) -> str:
    """Return a text without what differs from run to run: names of modules and addresses."""
    return re.sub(r"(?<=0x)[0-9a-f]+", "...", re.sub(r"form_\d+\.?", "", text))


async def ours(form: Form) -> tuple[str, str]:
    """Return the schema of a form and what a call gets."""
    import trimcp
    import trimcp.testing

    server = trimcp.Server("types")
    try:
        server.add_tool(function_of(form), run="inline")
    except TypeError as error:
        return "", told(error).replace("tool(): ", "")
    async with trimcp.testing.connected(server) as session:
        (tool,) = await session.list_tools()
        schema = tool.output_schema or {} if form.gives else tool.input_schema["properties"]["value"]
        result = await session.call_tool("tool", {} if form.gives else {"value": form.call})
        structured = result.structured_content if form.gives else None
        return json.dumps(schema), shown(bool(result.is_error), result.text, structured or None)


def shown(is_error: bool, text: str, structured: Any) -> str:
    """Return what a client is told, on one line."""
    if is_error:
        return f"error: {plain(text.partition(chr(10))[0])}"
    try:
        return json.dumps(structured["result"] if structured and "result" in structured else json.loads(text))
    except ValueError:
        return plain(text)


def measure_ours() -> dict[str, tuple[str, str]]:
    """Return our column, by the key of each form."""
    import trio

    async def measure() -> dict[str, tuple[str, str]]:
        return {key: await ours(form) for key, form in keyed().items()}

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return trio.run(measure)


def keyed() -> dict[str, Form]:
    """Return each form by a text that no other has."""
    return {f"{title} {number}": form for title, forms in FORMS.items() for number, form in enumerate(forms)}


def measure_theirs(package: str) -> dict[str, str]:
    """Return the column of the package that is installed beside this interpreter."""
    return {key: asyncio.run(_theirs(package, form)) for key, form in keyed().items()}


async def _theirs(package: str, form: Form) -> str:
    arguments = {} if form.gives else {"value": form.call}
    try:
        function = function_of(form)
        if package == "fastmcp":
            server = importlib.import_module("fastmcp").FastMCP("types")
            server.tool(function)
        else:
            server = importlib.import_module("mcp.server").MCPServer("types")
            server.tool()(function)
    except Exception as error:
        return told(error)
    try:
        if package == "fastmcp":
            async with importlib.import_module("fastmcp").Client(server) as client:
                result = await client.call_tool("tool", arguments, raise_on_error=False)
        else:
            result = await server.call_tool("tool", arguments)
    except Exception as error:
        return f"error: {str(error).partition(chr(10))[0]}"
    text = "".join(getattr(block, "text", "") for block in result.content)
    return shown(bool(result.is_error), text, result.structured_content if form.gives else None)


def cell(text: str) -> str:
    """Return a text for a table, as code, shortened."""
    if not text:
        return ""
    text = plain(text)
    short = (text if len(text) <= 160 else f"{text[:159]}…").replace("`", "'")
    return f"`{short}`".replace("|", "\\|")


def page(mine: dict[str, tuple[str, str]], theirs: dict[str, Any]) -> str:
    """Return the page."""
    lines = [textwrap.dedent(INTRODUCTION).strip(), ""]
    versions = [f"{package} {each['version']}" for package, each in theirs.items()]
    for title, forms in FORMS.items():
        lines += ["", f"## {title}", "", f"| form | schema | a call gets | {' | '.join(versions)} |"]
        lines += ["| --- " * (3 + len(versions)) + "|"]
        for number, form in enumerate(forms):
            key = f"{title} {number}"
            schema, got = mine[key]
            setup = "<br>".join(cell(line) for line in form.setup.splitlines() if not line.startswith("import"))
            sent = form.gives or json.dumps(form.call)
            said = f"{'returns' if form.gives else 'sent'} {cell(sent)}"
            what = "<br>".join(filter(None, (cell(form.annotation), setup, said)))
            same = [theirs[package]["cells"].get(key, "") for package in theirs]
            others = " | ".join("the same" if each == got else cell(each) for each in same)
            lines.append(f"| {what} | {cell(schema)} | {cell(got)} | {others} |")
    return "\n".join(lines) + "\n"


INTRODUCTION: Final = """
    # Types

    <!-- Written by docs/types_page.py, which has the forms; a test compares our columns. -->

    An annotation is refused where the function is defined, in one sentence that says what to write instead; or every
    JSON that its schema admits converts, and every value of the result's type is sent. That holds on Python 3.11, 3.12,
    3.13 and 3.14, with `from __future__ import annotations` and without, and for references in quotes.

    Each row is a program of its own: a tool with one parameter `value` of this form, called once, which returns the
    `repr` of what it got; or one with a result of this form. Beside it stands what two other packages make of the same
    function.

    - A value that the schema does not admit never reaches the function: `"5"` is no number.
    - The keys of a JSON object are texts. Where the type of a key takes no text, they are its JSON: `"true"`, `"1.5"`.
    - A field that the class does not take (`init=False`) is part of results, unless its name begins with `_`.
    - Of a union, the alternative is taken that knows most of the members that were sent; of several the first.
    - Members that a record does not know are dropped, but a `TypedDict` keeps them.
    - A schema is written out where it is used. Only what is recursive, or would become large, is a `$ref`.
    - A list without a type (`list`, `list[Any]`, `tuple`) promises no output schema: with `Text` or `Image` in it, it
      is sent as these blocks.
    - A result of a class without a JSON form is sent as its `str()`, if the class has one of its own.
    - In prompts and resource templates every argument arrives as text; where the type takes no text, it is read as
      JSON.
    - A name that the module does not define is looked for in the functions that are running: classes in a function may
      name each other.
    - A sync function that returns an awaitable, such as a wrapper of an async one, is awaited. Generators are refused.
    - A parameter for the context may be optional: `ctx: trimcp.Context | None = None`.
"""


def main() -> None:
    theirs = json.loads(THEIRS.read_text("utf-8")) if THEIRS.exists() else {}
    if sys.argv[1:2] == ["--column"]:  # in the interpreter of another package
        package = sys.argv[2]
        print(json.dumps({"version": importlib.metadata.version(package), "cells": measure_theirs(package)}))
        return
    for given in sys.argv[1:]:
        package, _, python = given.partition("=")
        command = [python, "-W", "ignore", __file__, "--column", package]
        ran = subprocess.run(command, stdout=subprocess.PIPE, check=True)
        theirs[package] = json.loads(ran.stdout.splitlines()[-1])
    THEIRS.write_text(json.dumps(theirs, indent=1) + "\n", "utf-8")
    PAGE.write_text(page(measure_ours(), theirs), "utf-8")


if __name__ == "__main__":
    main()
