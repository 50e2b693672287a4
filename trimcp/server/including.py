"""One server made of several: what another offers is offered here, too."""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING, Any

from trimcp.errors import LocalError
from trimcp.server.extensions.extending import Extending
from trimcp.server.registry import Registry

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Mapping


def include(server: Extending, other: Extending, *, live: bool, own: Mapping[str, object]) -> None:
    """Offer what `other` offers, as it is now. Raises LocalError before anything is added, `live` while it runs.

    What the other has for itself (`own`, by what it is called) cannot be included.
    """
    name = other.profile.info.name
    for what, there in own.items():
        if there:
            raise LocalError(f"{name} has {what} of its own: give it to the server that includes {name}")
    if other.confirm != server.confirm:
        raise LocalError(f"{name} has another confirm= than the server that includes it")
    if other.foreign and live:
        raise LocalError("methods cannot be added while the server runs")
    registries: list[tuple[Registry[Any], Registry[Any]]] = [
        (server.tools, other.tools),
        (server.resources, other.resources),
        (server.templates, other.templates),
        (server.prompts, other.prompts),
    ]
    tables: list[tuple[str, Container[Any], Iterable[Any]]] = [
        (mine.kind, mine, [key for key, _, _ in theirs.items()]) for mine, theirs in registries
    ]
    tables += [("method", server.foreign, other.foreign), ("completion", server.completers, other.completers)]
    for kind, mine, keys in tables:
        for key in keys:
            if key in mine:
                raise LocalError(f"{server.profile.info.name} and {name} both have a {kind} named {key!r}")
    copies: dict[int, Any] = {}  # each server decides for itself who sees an entry
    for entries, theirs in registries:
        for key, entry, listed in theirs.items():
            server.add_entry(entries, key, copies.setdefault(id(entry), copy(entry)), listed)
    for completer in other.completers.values():
        server.needs.add(completer.prepared.needs, live=live)
    server.completers.update(other.completers)
    server.foreign.update(other.foreign)
    for method, handlers in other.notification_handlers.items():
        server.notification_handlers.setdefault(method, []).extend(handlers)
    for identifier, settings in other.extensions.items():
        server.extend(identifier, **settings)
