"""The package runs no code it is given: no eval, pickle or shell anywhere, read from its syntax trees."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import trimcp

PACKAGE = Path(trimcp.__file__).parent

CALLS = {"eval", "exec", "compile", "__import__"}
METHODS = {
    ("os", "system"),
    ("os", "popen"),
    ("yaml", "load"),
    ("yaml", "unsafe_load"),
    ("subprocess", "getoutput"),
    ("subprocess", "getstatusoutput"),
    ("trio", "run_shell"),
    ("tempfile", "mktemp"),
    ("ssl", "_create_unverified_context"),
}
MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "yaml", "xml", "telnetlib", "commands"}
SPAWNS = {"spawn", "exec"}


def dangers(source: str) -> Iterator[str]:
    """Everything in a module that could run or load what somebody sent."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if not node.level and module.split(".")[0] in MODULES:
                yield module
            yield from (f"{module}.{alias.name}" for alias in node.names if (module, alias.name) in METHODS)
        elif isinstance(node, ast.Call):
            yield from _of_call(node)


def _of_call(node: ast.Call) -> Iterator[str]:
    function = node.func
    if isinstance(function, ast.Name) and function.id in CALLS:
        yield function.id
    if isinstance(function, ast.Attribute):
        owner = function.value.id if isinstance(function.value, ast.Name) else ""
        if owner == "builtins" and function.attr in CALLS:
            yield function.attr
        if (owner, function.attr) in METHODS or (owner == "os" and function.attr.startswith(tuple(SPAWNS))):
            yield f"{owner}.{function.attr}"
    for keyword in node.keywords:
        value = keyword.value
        if keyword.arg == "shell" and not (isinstance(value, ast.Constant) and value.value is False):
            yield "shell="
        if keyword.arg == "verify" and isinstance(value, ast.Constant) and value.value is False:
            yield "verify=False"


def test_the_package_runs_no_code_it_is_given() -> None:
    sources = {path.relative_to(PACKAGE).as_posix(): path.read_text("utf-8") for path in PACKAGE.rglob("*.py")}
    assert len(sources) > 200
    found = {path: list(dangers(source)) for path, source in sources.items()}
    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize(
    "source",
    [
        "eval('1')",
        "exec(text)",
        "compile(text, '', 'exec')",
        "__import__(name)",
        "import builtins\nbuiltins.eval('1')",
        "import pickle",
        "def f():\n    from pickle import loads",
        "import marshal as m",
        "import yaml",
        "from os import system",
        "import os\nos.system('ls')",
        "import os\nos.popen('ls')",
        "import os\nos.execvp('ls', [])",
        "import subprocess\nsubprocess.run('ls', shell=True)",
        "trio.run_process('ls', shell=flag)",
        "httpx2.Client(verify=False)",
        "import ssl\nssl._create_unverified_context()",
    ],
)
def test_the_search_finds(source: str) -> None:
    assert list(dangers(source))


def test_the_search_leaves_the_rest_alone() -> None:
    assert list(dangers("import re, json\nre.compile('a')\njson.loads('1')\nsubprocess.run(['ls'], shell=False)")) == []
