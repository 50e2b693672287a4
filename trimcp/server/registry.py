"""A server's entries by name, their listing in pages that are encoded once, and the listeners of changes."""

from __future__ import annotations

import base64
import binascii
import logging
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from enum import Enum
from typing import Final, Generic, TypeAlias, TypeVar

import attrs
import trio

from trimcp.errors import ErrorReply, LocalError
from trimcp.principal import Principal
from trimcp.protocol.connection import Encoded
from trimcp.protocol.events import Admission
from trimcp.support.slotted import slotted
from trimcp.wire.codes import INVALID_PARAMS
from trimcp.wire.revisions import Revision

EntryT = TypeVar("EntryT")

# The most pages kept encoded; there is one for each revision, page and set of scopes.
_MOST_PAGES = 64


EVERYTHING: Final = ""
"""Published in place of a URI: changes may have been missed, so anything that is watched may have changed."""


class Change(Enum):
    """A list that may change."""

    TOOLS = "tools"
    PROMPTS = "prompts"
    RESOURCES = "resources"

    @property
    def member(self) -> str:
        """The member of a subscription's filter that selects this list."""
        return f"{self.value}_list_changed"


Hides: TypeAlias = Callable[[Admission], bool]
"""Returns whether something does not exist for the sender of a request."""
_NOTHING: Final[frozenset[str]] = frozenset()

_TOLD_AT_ONCE: Final = 32  # listeners that are told of changes in one turn of the event loop
_MOST_UNTOLD: Final = 10_000  # changes that wait to be told; more are told at once
_log: Final = logging.getLogger("trimcp.server")

Listener: TypeAlias = Callable[[Change | str], object]
"""Called with a changed list, or with the URI of a resource whose contents changed. It must not block."""


@slotted
class Bus:
    """Calls every listener for every change, or those of one client for a change that concerns it alone.

    Some are called at once and, if there are many, the others in the following turns of the event loop, so that other
    tasks run in between. Outside of Trio all are called at once.
    """

    relays: list[Listener] = attrs.field(init=False, factory=list)  # called at once with what concerns all clients
    _listeners: dict[Listener, Hashable] = attrs.field(init=False, factory=dict)  # with their clients
    # Changes, each with the client that it concerns, of which no listener was told yet. One that is published again
    # before its turn is told once.
    _untold: dict[tuple[Change | str, Hashable], None] = attrs.field(init=False, factory=dict)
    _left: list[tuple[Listener, Hashable]] = attrs.field(init=False, factory=list)  # who is still told, in reverse
    _change: tuple[Change | str, Hashable] = attrs.field(init=False, default=("", None))  # of which they are told
    _loop: trio.lowlevel.TrioToken | None = attrs.field(init=False, default=None)  # in which the rest is told

    def attach(self, listener: Listener, client: Hashable = None) -> None:
        self._listeners[listener] = client

    def detach(self, listener: Listener) -> None:
        self._listeners.pop(listener, None)

    def publish(self, change: Change | str, client: Hashable = None) -> None:
        if client is None:
            for relay in self.relays:
                relay(change)
        if len(self._listeners) > _TOLD_AT_ONCE or self._loop is not None:
            try:
                now = trio.lowlevel.current_trio_token()
            except RuntimeError:
                now = None
            if now is not None and len(self._untold) < _MOST_UNTOLD:
                if self._loop is now:
                    self._untold[change, client] = None
                else:  # nobody is being told; or the loop in which somebody was has ended
                    self._loop, self._untold = now, {(change, client): None}
                    self._left.clear()
                    self._tell_some()
                return
        for listener, whose in list(self._listeners.items()):
            if client is None or whose == client:
                listener(change)

    def _tell_some(self) -> None:
        """Call some listeners, and the others in the next turn."""
        called, left = 0, self._left
        while called < _TOLD_AT_ONCE:
            if not left:
                if not self._untold:
                    self._loop = None
                    return
                self._change = next(iter(self._untold))
                self._untold.pop(self._change)
                left.extend(reversed(self._listeners.items()))
                if not left:
                    continue
            listener, whose = left.pop()
            change, client = self._change
            if (client is None or whose == client) and listener in self._listeners:
                called += 1
                try:
                    listener(change)
                except Exception as error:  # it would end the loop; the other listeners are told all the same
                    from trimcp.support.cleaning import log_crash

                    log_crash(_log, error, "telling of a change crashed")
        assert self._loop is not None
        with suppress(trio.RunFinishedError):  # nobody is left who would listen
            self._loop.run_sync_soon(self._tell_some)


@slotted
class Registry(Generic[EntryT]):
    """Entries by name, in the order they were added. Some may be found by name without being listed."""

    kind: str  # the name of one entry in error messages
    bus: Bus  # gets `change` when an entry is added or removed
    change: Change
    touched: bool = attrs.field(init=False, default=False)
    get: Callable[[str], EntryT | None] = attrs.field(init=False)
    """Returns an entry by its name, or None. It is the dict's own method, as each request asks."""
    _entries: dict[str, EntryT] = attrs.field(init=False, factory=dict)
    _unlisted: set[str] = attrs.field(init=False, factory=set)
    _held: int = attrs.field(init=False, default=0)  # blocks of `together` under way
    _late: bool = attrs.field(init=False, default=False)  # there was a change inside of them
    _needed: dict[str, frozenset[str]] = attrs.field(init=False, factory=dict)  # scopes, of entries that need any
    _hiding: dict[str, Hides] = attrs.field(init=False, factory=dict)  # of entries that some do not see
    _pages: dict[Hashable, Encoded] = attrs.field(init=False, factory=dict)

    def __attrs_post_init__(self) -> None:
        self.get = self._entries.get

    def __len__(self) -> int:
        return len(self._entries) - len(self._unlisted)

    def __iter__(self) -> Iterator[EntryT]:
        unlisted = self._unlisted
        if not unlisted:
            return iter(self._entries.values())
        return (entry for name, entry in self._entries.items() if name not in unlisted)

    def items(self) -> Iterator[tuple[str, EntryT, bool]]:
        """Return every entry with its name, and whether it is listed."""
        return ((name, entry, name not in self._unlisted) for name, entry in self._entries.items())

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def add(
        self,
        name: str,
        entry: EntryT,
        *,
        live: bool,
        scopes: frozenset[str] = frozenset(),
        hides: Hides | None = None,
        listed: bool = True,
        replace: bool = False,
    ) -> None:
        """Add an entry. With `live` clients may have seen the list already.

        It is not listed to clients that lack one of `scopes`, to those from which `hides` hides it, nor to anybody if
        it is not `listed`. With `replace` it takes the place of another, listed or not as that was.

        Raises LocalError if the name is taken: replacing an entry by accident is a bug, so remove it first.
        """
        taken = name in self._entries
        if taken and not replace:
            raise LocalError(f"there is a {self.kind} named {name!r} already; remove it first")
        self._entries[name] = entry
        self._note(name, scopes, hides)
        if not (taken or listed):
            self._unlisted.add(name)
        if name not in self._unlisted:
            self.altered(live=live)

    def remove(self, name: str, *, live: bool) -> None:
        """Remove an entry. Raises KeyError for an unknown name."""
        if name not in self._entries:
            raise KeyError(f"there is no {self.kind} named {name!r}")
        del self._entries[name]
        self._note(name)
        if name in self._unlisted:
            self._unlisted.remove(name)
        else:
            self.altered(live=live)

    def _note(self, name: str, scopes: frozenset[str] = frozenset(), hides: Hides | None = None) -> None:
        """Store who sees an entry, in the place of what was stored before."""
        self._needed.pop(name, None)
        self._hiding.pop(name, None)
        if scopes:
            self._needed[name] = scopes
        if hides is not None:
            self._hiding[name] = hides

    @contextmanager
    def together(self, client: Hashable = None) -> Iterator[None]:
        """Notify of the changes inside the block once, at its end; one client, if they concern that alone.

        The block must not wait.
        """
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1
            if self._late and not self._held:
                self._late = False
                self.bus.publish(self.change, client)

    def altered(self, *, live: bool) -> None:
        """Have clients list again: an entry, or who sees one, has changed."""
        self._pages.clear()
        if live:
            self.touched = True
            if self._held:
                self._late = True
            else:
                self.bus.publish(self.change)

    @property
    def scopes(self) -> frozenset[str]:
        """The scopes that any entry needs."""
        return frozenset().union(*self._needed.values())

    def rights_of(self, principal: Principal | None) -> frozenset[str] | None:
        """Return the principal's scopes that any entry needs (a key shared by many); None if it sees every entry."""
        if not self._needed or principal is None or principal.scopes is None:
            return None
        needed = self.scopes
        return None if needed <= principal.scopes else needed & principal.scopes

    @property
    def differs(self) -> bool:
        """Whether the list depends on who asks."""
        return bool(self._needed or self._hiding)

    def hidden_from(self, admission: Admission) -> frozenset[str]:
        """Return the names of the entries that do not exist for this sender."""
        if not self._hiding:
            return _NOTHING
        return frozenset(name for name, hides in self._hiding.items() if hides(admission))

    def page(
        self,
        cursor: str | None,
        page_size: int | None,
        key: tuple[Revision, frozenset[str] | None, bool],
        encode: Callable[[list[EntryT], str | None], Encoded],
        hidden: frozenset[str] = _NOTHING,
    ) -> Encoded:
        """Return one page of the list, encoded, if possible from the cache; with `page_size` None all is one page.

        Raises ErrorReply: the cursor is not valid (-32602; server/utilities/pagination).

        `key` is the revision, the client's scopes as `rights_of` returns them, whether the page is sent;
        `hidden` is what `hidden_from` returns. `encode` makes the page from its entries and the cursor of the next one.
        """
        place = (*key, cursor, hidden)
        cached = self._pages.get(place)
        if cached is not None:
            return cached
        rights = key[1]
        left_out = self._unlisted | hidden
        names = [
            name
            for name in self._entries
            if name not in left_out and (rights is None or self._needed.get(name, rights) <= rights)
        ]
        try:
            after = None if cursor is None else base64.b64decode(cursor, altchars=b"-_", validate=True).decode()
            first = 0 if after is None else names.index(after) + 1
        except (binascii.Error, UnicodeDecodeError, ValueError):
            raise ErrorReply(INVALID_PARAMS, "invalid cursor: list again from the beginning") from None
        last = len(names) if page_size is None else min(len(names), first + page_size)
        following: str | None = None
        if last < len(names):  # a name, not a number: it stays valid when other entries are added or removed
            following = base64.urlsafe_b64encode(names[last - 1].encode()).decode("ascii")
        page = encode([self._entries[name] for name in names[first:last]], following)
        if len(self._pages) >= _MOST_PAGES:
            self._pages.clear()
        self._pages[place] = page
        return page
