"""Which of a server's tools a client finds: those that are switched on for it, and the newest of several versions."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable
from typing import Any, Final, TypeAlias
from weakref import WeakKeyDictionary

import attrs

from trimcp.errors import LocalError
from trimcp.guard.permission import Permission, Visible
from trimcp.protocol.events import Admission
from trimcp.server.registry import Registry
from trimcp.server.tools import ToolEntry
from trimcp.session.context import CURRENT, Context, client_key
from trimcp.session.session import Session
from trimcp.wire.tool_versions import META_TAGS, version_in, version_key

_MOST_RULES: Final = 1_000  # for one client
_MOST_PRINCIPALS: Final = 4_096  # whose rules are kept; the ones seen last

_Rules: TypeAlias = dict[tuple[str, str], bool]
"""On or off by ("name", a name) or ("tag", a tag). The last one that fits a tool decides."""


@attrs.frozen(eq=False)
class SwitchedTool:
    """Decides who sees one tool: those for whom it is on, of those who saw it before there were switches."""

    switches: ToolSwitches
    names: frozenset[str]
    tags: frozenset[str]
    before: Visible | None

    def __call__(self, who: Admission) -> bool:
        return self.switches.on_for_sender(self) and (self.before is None or self.before(who) is True)


class ToolSwitches:
    """Which tools of a server are on: for everyone, and for single clients, whose own rules come first."""

    def __init__(self, tools: Registry[ToolEntry]) -> None:
        self._tools = tools
        self._everyone: _Rules = {}
        self._sessions: WeakKeyDictionary[Session, _Rules] = WeakKeyDictionary()
        self._principals: OrderedDict[Hashable, _Rules] = OrderedDict()

    def control(self, name: str, entry: ToolEntry) -> bool:
        """Have switches decide who sees a tool, too. Return whether they did not yet."""
        permission = entry.permission or Permission()
        if isinstance(permission.visible, SwitchedTool) and permission.visible.switches is self:
            return False
        tags = (entry.listed.meta or {}).get(META_TAGS, ())
        own = f"{entry.listed.name}@{version_in(entry.listed.meta)}"
        names = frozenset((name, entry.listed.name, own))
        switched = SwitchedTool(self, names, frozenset(tags), permission.visible)
        entry.permission = attrs.evolve(permission, visible=switched)
        return True

    def turn(self, on: bool, names: Iterable[str], tags: Iterable[str], client: Context[Any] | None) -> Hashable:
        """Switch tools, and return for whom: None for everyone. Raises as `Server.disable_tools` does."""
        if client is not None and not isinstance(client, Context):
            raise TypeError(f"client is the Context of an async handler, not {type(client).__name__}")
        for name in names:
            if name not in self._tools:
                raise KeyError(f"there is no tool named {name!r}")
        selected = [*(("name", name) for name in names), *(("tag", tag) for tag in tags)]
        if not selected:
            raise TypeError("say which tools: by their names, or by tags=[...]")
        rules, whose = (self._everyone, None) if client is None else self._rules_of(client)
        if client is not None and len(rules.keys() | set(selected)) > _MOST_RULES:
            raise LocalError(f"more than {_MOST_RULES} names and tags are switched for one client")
        for each in selected:
            rules.pop(each, None)  # the last one counts, so it has to be the last
            rules[each] = on
        return whose

    def _rules_of(self, client: Context[Any]) -> tuple[_Rules, Hashable]:
        whose = client_key(client)
        if isinstance(whose, Session):
            return self._sessions.setdefault(whose, {}), whose
        if client.principal is None:
            raise LocalError(
                "this request has neither a session nor a principal: nothing can be switched for its client"
            )
        rules = self._principals.setdefault(whose, {})
        if len(self._principals) > _MOST_PRINCIPALS:
            self._principals.popitem(last=False)
        return rules, whose

    def on_for_sender(self, tool: SwitchedTool) -> bool:
        """Return whether a tool is on for the sender of the request that is being handled here."""
        ctx = CURRENT.get()
        if ctx is not None:
            session, job = ctx.internals
            if getattr(job.origin, "task", None) is not None:  # it was on when the call became a task
                return True
            own = self._sessions.get(session)
            if own is None and self._principals:
                whose = client_key(ctx)
                own = self._principals.get(whose)
                if own is not None:
                    self._principals.move_to_end(whose)
            decided = None if own is None else _decide(own, tool)
            if decided is not None:
                return decided
        return _decide(self._everyone, tool) is not False


def _decide(rules: _Rules, tool: SwitchedTool) -> bool | None:
    for (kind, what), on in reversed(rules.items()):
        if what in (tool.names if kind == "name" else tool.tags):
            return on
    return None


class OwnVersions:
    """The tools of a server that have versions. The newest has the plain name; each is found as `NAME@VERSION`."""

    def __init__(self, tools: Registry[ToolEntry]) -> None:
        self._tools = tools
        self._known: dict[str, dict[str, ToolEntry]] = {}  # by name, then by version

    def keys(self, entry: ToolEntry) -> list[str]:
        """Return the keys under which a new entry belongs: its own, and the plain name if it is the newest.

        Raises LocalError: there is such a version.
        """
        name, version = entry.listed.name, version_in(entry.listed.meta) or ""
        known = self._known.get(name, {})
        if known.get(version) is entry:
            return []
        key = version_key(version)
        if any(version_key(other) == key for other in known):
            raise LocalError(f"there is a tool named {name!r} of version {version} already; remove it first")
        own = f"{name}@{version}"
        return [own, name] if all(version_key(other) < key for other in known) else [own]

    def note(self, entry: ToolEntry) -> None:
        """Keep an entry that has been put."""
        self._known.setdefault(entry.listed.name, {})[version_in(entry.listed.meta) or ""] = entry

    def __contains__(self, name: object) -> bool:
        return name in self._known

    def forget(self, name: str) -> tuple[list[str], ToolEntry | None] | None:
        """Forget a tool, or one version of it.

        Return the keys that go, and what the plain name is for then; None for what is no tool with versions.
        """
        plain, _, version = (name, "", "") if name in self._known else name.rpartition("@")
        known = self._known.get(plain, {})
        if not known or (version and version not in known):
            return None
        gone = [version] if version else list(known)
        for each in gone:
            del known[each]
        keys = [f"{plain}@{each}" for each in gone]
        if known:
            return keys, known[max(known, key=version_key)]
        del self._known[plain]
        return [*keys, plain], None
