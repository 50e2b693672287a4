"""Lets mypy and pyright read every Python program of the documentation, and the examples: `nox -s types` runs it.

Each program is written to a module of its own, each page to a package of its own, and each checker reads all of them
in one run. A line keeps its number, so that what is said of it is said of the page.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.pages import PAGES, ROOT, Block, blocks_of

FOLDER = ROOT / "build" / "snippets"
"""One place, so that a second run finds in mypy's cache what did not change."""


def programs_of(page: Path) -> Iterator[tuple[str, list[Block]]]:
    """Yield a page's Python programs: its files by their names, and what its other blocks make together."""
    program: list[Block] = []
    for block in blocks_of(page):
        if block.language != "python" or block.speech == "output":
            continue
        if block.title is not None:
            yield block.title, [block]
        elif program and block.speech == "new program":
            yield f"line_{program[0].line}.py", program
            program = [block]
        else:
            program.append(block)
    if program:
        yield f"line_{program[0].line}.py", program


def source_of(program: list[Block]) -> str:
    """Return a program's text, each line where its page has it; from the first block that awaits, in a function."""
    # A page may say again what `main` is: what it says above has run by then.
    lines = ['# mypy: disable-error-code="no-redef"']
    indent = ""
    for block in program:
        lines += [""] * (block.line - 1 - len(lines))
        if not indent and awaits(block.text):
            lines[-1] = "async def _program() -> None:"  # where the page has the fence
            indent = "    "
        lines += [indent + line if line else "" for line in block.text.splitlines()]
    return "\n".join(lines) + "\n"


def awaits(text: str) -> bool:
    """Whether a block can only run in an async function."""
    code = compile(text, "snippet", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    return bool(code.co_flags & 0x80)  # CO_COROUTINE


def write() -> dict[str, Path]:
    """Write every program below `FOLDER`, and return which page or file each module is of."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    origins: dict[str, Path] = {}
    for page in PAGES:
        package = re.sub(r"\W", "_", str(page.relative_to(ROOT).with_suffix("")))
        for name in put(package, [(name, source_of(program)) for name, program in programs_of(page)]):
            origins[name] = page
    examples = sorted((ROOT / "examples").glob("*.py"))
    named = put("examples_", [(example.name, example.read_text("utf-8")) for example in examples])
    return origins | dict(zip(named, examples, strict=True))


def put(package: str, programs: Iterable[tuple[str, str]]) -> list[str]:
    """Write modules to a package, where they find each other: another page may have one of the same name."""
    programs = list(programs)
    names = "|".join(name.removesuffix(".py") for name, _ in programs)
    for name, source in programs:
        source = re.sub(rf"^( *)from ({names}) import ", rf"\1from {package}.\2 import ", source, flags=re.MULTILINE)
        source = re.sub(rf"^( *)import ({names})$", rf"\1from {package} import \2", source, flags=re.MULTILINE)
        path = FOLDER / package / name
        assert not path.exists(), f"{package}/{name}: twice on one page"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source, "utf-8")
    return [f"{package}/{name}" for name, _ in programs]


def check(origins: dict[str, Path]) -> int:
    """Run both checkers, print what they object to with the pages' names and lines, and return how many failed."""
    # Both checkers read this tree, installed or not.
    settings = {"pythonVersion": "3.11", "extraPaths": [".", str(ROOT)], "reportRedeclaration": False}
    (FOLDER / "pyrightconfig.json").write_text(json.dumps(settings), "utf-8")
    commands = [
        ["mypy", "--strict", "--explicit-package-bases", str(FOLDER)],
        ["pyright", "--pythonpath", sys.executable, "--project", str(FOLDER)],
    ]
    failed = 0
    for command in commands:
        # By MYPYPATH mypy finds what the programs import of each other.
        environment = {**os.environ, "MYPYPATH": str(FOLDER)}
        done = subprocess.run(
            [sys.executable, "-m", *command], cwd=ROOT, env=environment, capture_output=True, text=True
        )
        said = (done.stdout + done.stderr).replace(f"{FOLDER}/", "").replace(f"{FOLDER.relative_to(ROOT)}/", "")
        for name, page in origins.items():
            said = said.replace(name, str(page.relative_to(ROOT)))
        print(f"{command[0]}: {said.strip()}", flush=True)
        failed += done.returncode != 0
    return failed


if __name__ == "__main__":
    sys.exit(check(write()))
