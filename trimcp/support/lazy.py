"""Imports the public names of a package at their first use, from one list."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping


def lazy_names(
    package: str, listed: Mapping[str, str]
) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """Return a package's `__getattr__`, `__dir__` and `__all__`, so that a program imports only what it uses.

    Type checkers read the package's stub instead, which `python docs/stubs.py` writes from the same list.

    `listed`: for each module, its names separated by spaces. `name=there` is exported as `name` and called `there` in
    the module. `name=.` is the module itself: it is an attribute, but not part of `from package import *`.
    """
    homes = {
        name: (module, there or name)
        for module, names in listed.items()
        for name, _, there in (entry.partition("=") for entry in names.split())
    }

    def get(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, there = homes[name]
        found = importlib.import_module(module)
        value = sys.modules[package].__dict__[name] = found if there == "." else getattr(found, there)
        return value

    def names() -> list[str]:
        return sorted({*sys.modules[package].__dict__, *homes})

    return get, names, sorted(name for name, (_, there) in homes.items() if there != ".")
