"""The names of `trimcp.testing`: each is there, documented, and where type checkers see it imported."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import trimcp.testing


def test_names_are_looked_up_where_type_checkers_see_them_imported() -> None:
    source = ast.parse(Path(trimcp.testing.__file__).read_text("utf-8"))
    seen = next(node for node in source.body if isinstance(node, ast.If)).body
    imported = {
        alias.name: statement.module
        for statement in seen
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    }
    assert set(imported) == set(trimcp.testing.__all__)
    for name, module in imported.items():
        value = getattr(trimcp.testing, name)
        assert value is getattr(importlib.import_module(str(module)), name), name
        assert (value.__doc__ or "").strip(), name


def test_importing_the_package_loads_nothing() -> None:
    program = "import sys, trimcp.testing; print([name for name in ('trio', 'attr', 'orjson') if name in sys.modules])"
    root = Path(trimcp.__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
