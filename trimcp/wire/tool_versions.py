"""The versions of a tool: which of two is newer. Where a listing says a tool's version and tags."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypeAlias

META_VERSION: Final = "version"
"""The key of a tool's `_meta` that has its version."""
META_TAGS: Final = "trimcp/tags"
"""The key of a tool's `_meta` that has its tags."""

VersionKey: TypeAlias = tuple[Any, ...]
"""Versions in their order: those with equal keys are the same version."""


def _part(text: str) -> tuple[int, int, str]:
    return (1, int(text), "") if text.isdecimal() else (0, 0, text)


_ZERO: Final = _part("0")


def version_key(version: str) -> VersionKey:
    """Return by what versions are ordered: dotted numbers by number, texts before numbers.

    "2" and "2.0" are one version, "1.10" is newer than "1.9", and "2.0-rc.1" is older than "2.0".
    """
    numbers, _, before = version.partition("-")
    parts = [_part(text) for text in numbers.split(".")]
    while len(parts) > 1 and parts[-1] == _ZERO:
        parts.pop()
    release = (0, tuple(_part(text) for text in before.split("."))) if before else (1, ())
    return tuple(parts), release


def version_in(meta: Mapping[str, Any] | None) -> str | None:
    """Return the version that a tool's `_meta` says, or None."""
    found = None if meta is None else meta.get(META_VERSION)
    return found if isinstance(found, str) and found else None
