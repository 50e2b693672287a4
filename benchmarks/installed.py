"""What an installation consists of: a distribution and everything it needs, as the installed metadata says."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import attrs
from packaging.requirements import Requirement

__all__ = ["Installed", "installed"]

MODULES = "node_modules"


@attrs.frozen
class Installed:
    """How many distributions, and their files' bytes without compiled bytecode."""

    distributions: int
    size: int


def installed(name: str, home: Path) -> Installed:
    """Count `name` and what it requires, without extras, in this `site-packages` or `node_modules`."""
    sizes = _npm(name, home) if home.name == MODULES else _python(name, home)
    return Installed(len(sizes), sum(sizes))


def _python(name: str, home: Path) -> list[int]:
    there = {_key(found.metadata["Name"]): found for found in metadata.distributions(path=[str(home)])}
    found: dict[str, metadata.Distribution] = {}
    wanted = [Requirement(name)]
    while wanted:
        requirement = wanted.pop()
        key = _key(requirement.name)
        if key in found:
            continue
        found[key] = there[key]
        environments = [{"extra": extra} for extra in ("", *requirement.extras)]
        for text in found[key].requires or ():
            needed = Requirement(text)
            if needed.marker is None or any(needed.marker.evaluate(environment) for environment in environments):
                wanted.append(needed)
    return [
        _bytes(Path(str(one.locate_file(file))) for file in one.files or () if file.suffix != ".pyc")
        for one in found.values()
    ]


def _key(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _npm(name: str, home: Path) -> list[int]:
    found: set[Path] = set()
    wanted = [home / name]
    while wanted:
        package = wanted.pop()
        if package in found:
            continue
        found.add(package)
        told: dict[str, Any] = json.loads((package / "package.json").read_text("utf-8"))
        wanted += [_resolved(needed, package) for needed in told.get("dependencies", {})]
    return [_bytes(_files(package)) for package in found]


def _resolved(name: str, package: Path) -> Path:
    """Return where Node finds a package that another one needs: in its own modules, or further up."""
    folders = [package, *package.parents]
    return next(found for folder in folders if (found := folder / MODULES / name).is_dir())


def _files(package: Path) -> Iterable[Path]:
    return (file for file in package.rglob("*") if MODULES not in file.relative_to(package).parts and file.is_file())


def _bytes(files: Iterable[Path]) -> int:
    return sum(file.stat().st_size for file in files if file.exists())
