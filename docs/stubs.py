"""Writes the stubs that tell type checkers the public names of each package, from the package's one list.

python docs/stubs.py            write them
python docs/stubs.py --check    fail if one is not what would be written
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "trimcp"
HEAD = "# Written by docs/stubs.py from the list in __init__.py beside it.\n"


def listed(source: str) -> dict[str, str] | None:
    """Return the list of names in the source of a package, or None if it has none."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "_NAMES":
            names: dict[str, str] = ast.literal_eval(node.value)
            return names
    return None


def stub(names: dict[str, str]) -> str:
    """Return the text of a stub."""
    imports, exported = [], []
    for module, entries in names.items():
        for entry in entries.split():
            name, _, there = entry.partition("=")
            if there == ".":
                package, _, module_name = module.rpartition(".")
                imports.append(f"from {package} import {module_name} as {name}")
            else:
                imports.append(f"from {module} import {there or name} as {name}")
                exported.append(name)
    lines = "".join(f'    "{name}",\n' for name in sorted(exported))
    return HEAD + "\n" + "\n".join(sorted(imports)) + f"\n\n__all__ = [\n{lines}]\n"


def stubs() -> dict[Path, str]:
    """Return what each stub has to be."""
    found = {}
    for path in sorted(PACKAGE.rglob("__init__.py")):
        names = listed(path.read_text("utf-8"))
        if names is not None:
            found[path.with_suffix(".pyi")] = stub(names)
    return found


def main() -> int:
    stale = [path for path, text in stubs().items() if not path.exists() or path.read_text("utf-8") != text]
    for path in stale:
        if "--check" not in sys.argv:
            path.write_text(stubs()[path], "utf-8")
        print(path.relative_to(PACKAGE.parent))
    return int(bool(stale) and "--check" in sys.argv)


if __name__ == "__main__":
    sys.exit(main())
