"""Writes the stubs that tell type checkers the public names of each package, from the package's one list, and the
methods of the client without Trio, from those of its session.

python docs/stubs.py            write them
python docs/stubs.py --check    fail if one is not what would be written
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from pathlib import Path

from trimcp.client.session import ClientSession
from trimcp.portal.methods import FACTS, public_methods

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


STAND_INS = """\
# Written by docs/stubs.py from the methods of `trimcp.ClientSession`.

{imports}

ResultT = TypeVar("ResultT")

class {prefix}Call(Generic[ResultT]):
    @property
    def progress(self) -> {iterator}[ProgressParams]: ...
    {define} result(self) -> ResultT: ...

class {prefix}Subscription:
    @property
    def acknowledged(self) -> SubscriptionFilter: ...
    {define} receive(self) -> Change: ...
    def {iterate}(self) -> {iterator}[Change]: ...

class {prefix}Session:
{members}

def connect(
    target: Target, *, client: ClientProgram | None = None, revision: Revision | str | None = None
) -> {manager}[{prefix}Session]: ...
"""
KINDS = {
    "blocking": {
        "prefix": "Blocking",
        "define": "def",
        "iterate": "__iter__",
        "iterator": "Iterator",
        "manager": "AbstractContextManager",
    },
    "asyncio": {
        "prefix": "Asyncio",
        "define": "async def",
        "iterate": "__aiter__",
        "iterator": "AsyncIterator",
        "manager": "AbstractAsyncContextManager",
    },
}
BESIDE = {
    "trimcp.client.client": "Target",
    "trimcp.client.handlers": "ClientProgram",
    "trimcp.session.outgoing.listening": "Change",
    "trimcp.wire.lifecycle": "ProgressParams SubscriptionFilter",
    "trimcp.wire.revisions": "Revision",
    "typing": "Generic TypeVar",
}
"""What the stub of a client without Trio names beside what its methods do."""


def stand_ins(kind: str) -> str:
    """Return the text of the stub of a client without Trio."""
    how = KINDS[kind]
    source = ast.parse(inspect.getsource(sys.modules[ClientSession.__module__]))
    homes = {
        alias.name: node.module
        for node in source.body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }
    [session] = [node for node in source.body if isinstance(node, ast.ClassDef) and node.name == "ClientSession"]
    shown = {name for name, _, _ in public_methods(ClientSession)} | FACTS
    members = []
    names: set[str] = {how["manager"], how["iterator"]}
    homes |= {how["iterator"]: "collections.abc", how["manager"]: "contextlib"}
    for node in session.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id in shown:
            members += ["    @property", f"    def {node.target.id}(self) -> {ast.unparse(node.annotation)}: ..."]
            names |= {each.id for each in ast.walk(node.annotation) if isinstance(each, ast.Name)}
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name in shown:
            assert node.returns is not None
            define = how["define"] if isinstance(node, ast.AsyncFunctionDef) else "def"
            returns = ast.unparse(node.returns).replace("AbstractAsyncContextManager", how["manager"])
            for opened in ("Call", "Subscription"):
                returns = re.sub(rf"\b{opened}\b", f"{how['prefix']}{opened}", returns)
            first = (ast.get_docstring(node) or "").partition("\n")[0]
            if node.name in FACTS:
                members.append("    @property")
            members.append(f"    {define} {node.name}({ast.unparse(node.args)}) -> {returns}:")
            members.append(f'        """{first}"""')
            used = [each for part in (node.args, node.returns) for each in ast.walk(part)]
            names |= {each.id for each in used if isinstance(each, ast.Name)}
    imported: dict[str, set[str]] = {module: {*listed.split()} for module, listed in BESIDE.items()}
    for name in names - {"Call", "Subscription", "AbstractAsyncContextManager"} | {how["manager"]}:
        if name in homes:
            imported.setdefault(homes[name], set()).add(name)
    lines = [f"from {module} import {', '.join(sorted(found))}" for module, found in sorted(imported.items())]
    text = STAND_INS.format(imports="\n".join(lines), members="\n".join(members), **how)
    return text + ("\ndef timeout(seconds: float) -> AbstractContextManager[None]: ...\n" if kind == "blocking" else "")


def stubs() -> dict[Path, str]:
    """Return what each stub has to be."""
    found = {}
    for path in sorted(PACKAGE.rglob("__init__.py")):
        names = listed(path.read_text("utf-8"))
        if names is not None:
            found[path.with_suffix(".pyi")] = stub(names)
    found |= {PACKAGE / "portal" / f"{kind}.pyi": stand_ins(kind) for kind in KINDS}
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
