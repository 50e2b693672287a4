"""What an installation consists of: a distribution and everything it needs here, as the installed metadata says."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

import attrs
from packaging.requirements import Requirement

__all__ = ["Installed", "installed"]


@attrs.frozen
class Installed:
    """How many distributions, and their files' bytes without compiled bytecode."""

    distributions: int
    size: int


def installed(name: str) -> Installed:
    """Count `name` and what it requires, without extras."""
    found: dict[str, metadata.Distribution] = {}
    wanted = [Requirement(name)]
    while wanted:
        requirement = wanted.pop()
        key = re.sub(r"[-_.]+", "-", requirement.name).lower()
        if key in found:
            continue
        found[key] = metadata.distribution(requirement.name)
        environments = [{"extra": extra} for extra in ("", *requirement.extras)]
        for text in found[key].requires or ():
            needed = Requirement(text)
            if needed.marker is None or any(needed.marker.evaluate(environment) for environment in environments):
                wanted.append(needed)
    return Installed(len(found), sum(map(_size, found.values())))


def _size(distribution: metadata.Distribution) -> int:
    files = (Path(str(distribution.locate_file(file))) for file in distribution.files or () if file.suffix != ".pyc")
    return sum(file.stat().st_size for file in files if file.exists())
