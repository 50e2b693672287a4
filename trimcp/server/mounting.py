"""Other servers mounted in a server: each runs beside it, and what it offers has a prefix.

A mounted server keeps everything of its own: its lifespan and state, its middleware, filters, limits and quotas. Names
of tools and prompts get the prefix; addresses of resources are changed only where two servers have the same one.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import attrs
import trio

from trimcp.errors import ErrorReply, LocalError, McpError
from trimcp.protocol.connection import Encoded
from trimcp.protocol.events import Admission, Notified
from trimcp.server.handlers.calling import Handler
from trimcp.server.registry import Change
from trimcp.server.subscribing import LookAtTask, changed_task, task_change
from trimcp.session.context import Context
from trimcp.session.limits import Quota
from trimcp.session.session import Session
from trimcp.support.cleaning import one_line
from trimcp.wire.codes import INVALID_PARAMS, METHOD_NOT_FOUND
from trimcp.wire.common import PageParams
from trimcp.wire.content import EmbeddedResource, ResourceLink
from trimcp.wire.jsonrpc import encode
from trimcp.wire.methods import CALLS, LISTS, METHODS, TASK_ID

if TYPE_CHECKING:
    from trimcp.server.running import Running

log: logging.Logger = logging.getLogger("trimcp.server")

SEPARATOR: Final = "__"
"""Between a prefix and a name."""

_MOST_PAGES: Final = 1_000
_MOST_LISTED: Final = 10_000  # entries of one list of one mounted server
_MOST_CLAIMS: Final = 50_000  # addresses of which is known whose they are


@attrs.define(eq=False, repr=False)
class Mounted:
    """One mounted server."""

    prefix: str  # of its names
    server: Any  # a `Server`, which imports this
    # `scopes`, `visible`: who may see it, see `Server.mount`
    scopes: frozenset[str] = frozenset()
    visible: Callable[[Admission], bool] | None = None
    tools: tuple[str, ...] | None = None  # patterns of the names of its tools that are offered; None for all
    quota: Quota | None = None  # how many requests it gets at once, and per second; None for no bound
    running: Running | None = None  # its run, while the server runs that it is mounted in

    def seen_by(self, ctx: Context[Any]) -> bool:
        """Return whether it exists for the sender of a request."""
        principal = ctx.principal
        lacks = principal is not None and principal.scopes is not None and not self.scopes <= principal.scopes
        return self.running is not None and not lacks and (self.visible is None or self.visible(ctx.admission))

    def name(self, inner: str) -> str:
        """Return the name here of something that it calls so."""
        return f"{self.prefix}{SEPARATOR}{inner}"

    def ask(self, ctx: Context[Any], method: str, params: Any) -> Awaitable[Any]:
        """Have it handle a request."""
        running = self.running
        assert running is not None
        if self.quota is None or method not in CALLS:
            return running.handle_for(ctx, method, params)
        return running.pools.in_turn(
            ctx, "tool", self.prefix, self.quota, lambda pools, ctx: running.handle_for(ctx, method, params)
        )

    def offers(self, tool: str) -> bool:
        """Return whether a tool of this name, as it is called there, is offered."""
        return self.tools is None or any(fnmatchcase(tool, pattern) for pattern in self.tools)


@attrs.define(eq=False, repr=False)
class Mounts:
    """The servers that are mounted in one.

    It has more than 300 lines because each kind of request is routed by what it names.
    """

    server: Any
    by_prefix: dict[str, Mounted] = attrs.field(init=False, factory=dict)
    _claims: dict[str, Mounted] = attrs.field(init=False, factory=dict)  # whose an address is, as it is listed here

    def __iter__(self) -> Iterator[Mounted]:
        return iter(list(self.by_prefix.values()))

    def add(self, mounted: Mounted) -> None:
        """Mount a server. Raises LocalError: see `check`."""
        self.check(mounted)
        other = mounted.server
        self.by_prefix[mounted.prefix] = mounted
        for name in other.foreign:
            self.server.foreign.setdefault(name, nobody)
        self.server.dynamic = True
        self.declare(other)

    def check(self, mounted: Mounted) -> None:
        """Raise LocalError if the prefix is taken or no part of a name, or the server cannot be mounted."""
        prefix, other = mounted.prefix, mounted.server
        if not prefix or SEPARATOR in prefix or not prefix.replace("-", "").replace("_", "").isalnum():
            raise LocalError(f"a prefix is made of letters, digits, - and single _, not {prefix!r:.60}")
        if prefix in self.by_prefix:
            raise LocalError(f"a server is mounted with the prefix {prefix!r} already")
        if other is self.server:
            raise LocalError("a server cannot be mounted in itself")
        if other.has_tasks:
            raise LocalError(f"{other.info.name} has tools that run as tasks: include it, or mount a proxy before it")
        other.mounted = True

    def declare(self, other: Any) -> None:
        """Declare the extensions of a mounted server."""
        for identifier, settings in list(other.extensions.items()):
            self.server.extend(identifier, **settings)
        self.server.expect_tools()

    @asynccontextmanager
    async def while_running(self, running: Running) -> AsyncIterator[None]:
        """Run the mounted servers while the block runs."""
        async with AsyncExitStack() as stack:
            for mounted in self.by_prefix.values():
                await stack.enter_async_context(self.entered(mounted))
            for name in LISTS:
                running.replace(name, partial(self._listing, name))
            for name in CALLS:
                routed = running.within(name, partial(self._routed, name))
                running.replace(name, partial(self._choosing, name, routed))
            for name in self.methods():
                running.replace(name, partial(self._extending, name))
            running.subscribers.others = self._may_watch
            running.subscribers.tasks.append(self._watching)
            before, running.on_notified = running.on_notified, self._noticed
            try:
                yield
            finally:
                running.on_notified = before

    @asynccontextmanager
    async def entered(self, mounted: Mounted) -> AsyncIterator[None]:
        """Run one server while the block runs, and pass its changes on."""

        def tell(change: Change | str) -> None:
            if (id := changed_task(change)) is not None:
                change = task_change(mounted.name(id))
            elif isinstance(change, str):
                change = self._outward(mounted, change)
            self.server.changes.publish(change)

        async with mounted.server.running() as mounted.running:
            self.declare(mounted.server)
            mounted.server.changes.attach(tell)
            try:
                yield
            finally:
                mounted.server.changes.detach(tell)
                mounted.running = None
                self._claims = {uri: whose for uri, whose in self._claims.items() if whose is not mounted}

    def methods(self) -> set[str]:
        """Return the methods of extensions that any of them serves."""
        mounted = {name for each in self.by_prefix.values() for name in each.server.foreign}
        return mounted | {name for name, handler in self.server.foreign.items() if handler is nobody}

    def _noticed(self, session: Session, event: Notified) -> None:
        for mounted in self.by_prefix.values():
            running = mounted.running
            if running is None:
                continue
            if running.on_notified is not None:
                running.on_notified(session, event)
            running.notice(session, event)

    # Lists

    def _listing(self, name: str, own: Handler | None) -> Handler:
        row = METHODS[name]

        async def listed(ctx: Context[Any], params: PageParams) -> Any:
            # Pages of our own; what is mounted is on the last.
            page = row.result(**{row.members or "": []}) if own is None else await own(ctx, params)
            value = page.value if isinstance(page, Encoded) else page
            if value is None or value.next_cursor is not None:
                return page
            found: dict[str, list[Any]] = {}
            async with trio.open_nursery() as nursery:
                for mounted in list(self.by_prefix.values()):
                    if mounted.seen_by(ctx):
                        nursery.start_soon(self._gather, ctx, name, mounted, found)
            entries = [*getattr(value, row.members or "")]
            for prefix, mounted in self.by_prefix.items():
                entries += [self._renamed(mounted, each) for each in found.get(prefix, ())]
            scope = "private" if found else value.cache_scope
            return attrs.evolve(value, **{row.members or "": entries}, cache_scope=scope, ttl_ms=0)

        return listed

    async def _gather(self, ctx: Context[Any], name: str, mounted: Mounted, found: dict[str, list[Any]]) -> None:
        """List everything of one server; it is left out, with a warning, if it fails."""
        entries: list[Any] = []
        cursor, seen = None, set[str | None]()
        try:
            while cursor not in seen and len(seen) < _MOST_PAGES and len(entries) < _MOST_LISTED:
                seen.add(cursor)
                page = await mounted.ask(ctx, name, PageParams(cursor=cursor))
                value = page.value if isinstance(page, Encoded) else page
                entries += getattr(value, METHODS[name].members or "")
                cursor = value.next_cursor
                if cursor is None:
                    break
            else:
                log.warning("the list %s of the mounted server %r has no end: it is cut", name, mounted.prefix)
        except ErrorReply as error:
            log.warning("%s of the mounted server %r failed: %s", name, mounted.prefix, one_line(error.message))
        if name == "tools/list":
            entries = [tool for tool in entries if mounted.offers(tool.name)]
        found[mounted.prefix] = entries[:_MOST_LISTED]

    def _renamed(self, mounted: Mounted, entry: Any) -> Any:
        """Return an entry of a list as it is called here."""
        if hasattr(entry, "uri"):
            return attrs.evolve(entry, uri=self._outward(mounted, entry.uri, claim=True))
        if hasattr(entry, "uri_template"):
            return attrs.evolve(entry, uri_template=self._outward(mounted, entry.uri_template, claim=True))
        changed: dict[str, Any] = {"name": mounted.name(entry.name)}
        page = getattr(entry, "app", None)
        if page is not None:
            ui = {**entry.meta["ui"], "resourceUri": self._outward(mounted, page, claim=True)}
            changed["meta"] = {**entry.meta, "ui": ui}
        return attrs.evolve(entry, **changed)

    # Addresses

    def _outward(self, mounted: Mounted, uri: str, *, claim: bool = False) -> str:
        """Return the address here of a resource: its own, unless it is that of another server."""
        whose = self._claims.get(uri)
        if whose is None and (uri in self.server.resources or uri in self.server.templates):
            return _with_prefix(mounted.prefix, uri)
        if whose is None and claim and len(self._claims) < _MOST_CLAIMS:
            self._claims[uri] = mounted
        return uri if whose in (None, mounted) else _with_prefix(mounted.prefix, uri)

    def _owners(self, ctx: Context[Any], uri: str) -> list[tuple[Mounted, str]]:
        """Return who may have a resource, and its address there: who is known to have it first."""
        seen = [mounted for mounted in self.by_prefix.values() if mounted.seen_by(ctx)]
        for mounted in seen:
            inner = _without_prefix(mounted.prefix, uri)
            if inner is not None:
                return [(mounted, inner)]
        whose = self._claims.get(uri)
        if whose is not None:
            return [(whose, uri)] if whose in seen else []
        has = [mounted for mounted in seen if mounted.server.find_resource(uri)[0] is not None]
        return [(mounted, uri) for mounted in has or [each for each in seen if each.server.reads_unlisted]]

    async def _may_watch(self, ctx: Context[Any], uri: str) -> bool:
        for mounted, inner in self._owners(ctx, uri):
            assert mounted.running is not None
            if await mounted.running.subscribers.may_watch(ctx, inner):
                return True
        return False

    @asynccontextmanager
    async def _watching(self, ctx: Context[Any], ids: list[str]) -> AsyncIterator[dict[str, LookAtTask]]:
        """See `WatchTasks`. The tasks of a server that cannot be asked are left out, with a warning."""
        looks: dict[str, LookAtTask] = {}
        async with AsyncExitStack() as stack:
            for mounted in self:
                inner = [part[1] for part in map(self._split, ids) if part is not None and part[0] is mounted]
                watched = [] if mounted.running is None else mounted.running.subscribers.tasks
                for watching in watched if inner and mounted.seen_by(ctx) else ():
                    try:
                        found = await stack.enter_async_context(watching(ctx, inner))
                    except (McpError, trio.TooSlowError) as error:
                        log.warning("no changes of tasks of %r are heard: %s", mounted.prefix, one_line(str(error)))
                    else:
                        looks.update({mounted.name(id): look for id, look in found.items()})
            yield looks

    # Requests

    def _choosing(self, name: str, routed: Handler, own: Handler | None) -> Handler:
        def handle(ctx: Context[Any], params: Any) -> Awaitable[Any]:
            if own is not None and self._is_own(name, params):
                return own(ctx, params)
            return routed(ctx, params)

        return handle

    def _is_own(self, name: str, params: Any) -> bool:
        about = getattr(params, "ref", params)
        if name == "resources/read":
            return self.server.find_resource(about.uri)[0] is not None or not self.by_prefix
        if hasattr(about, "uri"):
            return about.uri in self.server.templates or about.uri in self.server.resources
        own = self.server.tools if name == "tools/call" else self.server.prompts
        return about.name in own or self._split(about.name) is None

    def _split(self, name: str) -> tuple[Mounted, str] | None:
        prefix, separator, inner = name.partition(SEPARATOR)
        mounted = self.by_prefix.get(prefix)
        return None if mounted is None or not separator else (mounted, inner)

    async def _routed(self, name: str, ctx: Context[Any], params: Any) -> Any:
        """Have a mounted server handle a request, in its own names."""
        about = getattr(params, "ref", params)

        async def ask(mounted: Mounted, **named: str) -> Any:
            changed = attrs.evolve(about, **named)
            given = changed if about is params else attrs.evolve(params, ref=changed)
            return self._result(mounted, await mounted.ask(ctx, name, given))

        if not hasattr(about, "uri"):
            mounted, inner = self._of_name(ctx, name, about.name)
            return await ask(mounted, name=inner)
        missing: ErrorReply | None = None
        for mounted, inner in self._owners(ctx, about.uri):
            try:
                return await ask(mounted, uri=inner)
            except ErrorReply as error:
                if error.code not in (ctx.revision.resource_missing_code, INVALID_PARAMS):
                    raise
                missing = missing or error
        if missing is not None:
            raise missing
        from trimcp.server.resources import missing as unknown

        raise unknown(ctx, about.uri)

    def _of_name(self, ctx: Context[Any], method: str, name: str) -> tuple[Mounted, str]:
        found = self._split(name)
        hidden = found is not None and method == "tools/call" and not found[0].offers(found[1])
        if found is None or hidden or not found[0].seen_by(ctx):
            what = "tool" if method == "tools/call" else "prompt"
            raise ErrorReply(INVALID_PARAMS, f"unknown {what}: {name[:100]}")
        return found

    def _result(self, mounted: Mounted, result: Any) -> Any:
        """Return a result in which addresses of resources and ids of tasks are those of here."""
        if isinstance(result, Encoded):
            task = result.value
            if isinstance(task, dict) and isinstance(task.get(TASK_ID), str):
                task = {**task, TASK_ID: mounted.name(task[TASK_ID])}
                return Encoded(encode(task), task)
            return result
        changed: dict[str, Any] = {}
        for member in ("content", "contents", "messages"):
            if members := getattr(result, member, None):
                changed[member] = [self._linked(mounted, each) for each in members]
        return attrs.evolve(result, **changed) if changed else result

    def _linked(self, mounted: Mounted, part: Any) -> Any:
        inside = getattr(part, "content", None)  # of a message of a prompt
        if isinstance(inside, ResourceLink | EmbeddedResource):
            return attrs.evolve(part, content=self._linked(mounted, inside))
        if isinstance(part, EmbeddedResource):
            whole: Any = part
            return attrs.evolve(whole, resource=self._linked(mounted, part.resource))
        uri = getattr(part, "uri", None)
        outward = None if uri is None else self._outward(mounted, uri)
        return part if outward == uri else attrs.evolve(part, uri=outward)

    # Extensions

    def _extending(self, name: str, own: Handler | None) -> Handler:
        """Return the handler of a method of an extension, by what its params name: a task, or a resource."""

        async def handle(ctx: Context[Any], params: Mapping[str, Any]) -> Any:
            serving = [each for each in self.by_prefix.values() if each.seen_by(ctx) and name in each.server.foreign]
            if isinstance(id := params.get(TASK_ID), str) and (found := self._split(id)) and found[0] in serving:
                answer = await found[0].ask(ctx, name, {**params, TASK_ID: found[1]})
                return {**answer, TASK_ID: id} if TASK_ID in answer else answer
            if name == "skills/list" and not params.get("cursor"):
                return await self._all_skills(ctx, own, serving, params)
            failure = ErrorReply(INVALID_PARAMS, "nothing of this name is here")
            for handler in _handlers(own, serving, name):
                try:
                    return await handler(ctx, params)
                except ErrorReply as error:
                    failure = error
            raise failure

        return handle

    async def _all_skills(
        self, ctx: Context[Any], own: Handler | None, serving: Iterable[Mounted], params: Mapping[str, Any]
    ) -> Any:
        skills: list[Any] = []
        for handler in _handlers(own, serving, "skills/list"):
            cursor, pages = None, 0
            while pages < _MOST_PAGES and len(skills) < _MOST_LISTED:
                try:
                    page = await handler(ctx, params if cursor is None else {**params, "cursor": cursor})
                except ErrorReply as error:
                    log.warning("skills/list of a mounted server failed: %s", one_line(error.message))
                    break
                skills += page.get("skills", ())
                cursor, pages = page.get("nextCursor"), pages + 1
                if cursor is None:
                    break
        return {"skills": skills, "ttlMs": 0, "cacheScope": "private"}


async def nobody(ctx: Context[Any], params: Any) -> Any:
    """Stand for a method that only mounted servers serve."""
    raise ErrorReply(METHOD_NOT_FOUND, f"method not offered here: {ctx.method[:100]}")


def _handlers(own: Handler | None, serving: Iterable[Mounted], name: str) -> list[Handler]:
    """Return who may serve a method: the server itself, then each of these."""

    def of(mounted: Mounted) -> Handler:
        return lambda ctx, params: mounted.ask(ctx, name, params)

    return [*([] if own is None else [own]), *map(of, serving)]


def _with_prefix(prefix: str, uri: str) -> str:
    """Return an address of the same scheme that another server cannot have."""
    scheme, colon, rest = uri.partition("://")
    return f"{scheme}://{prefix}+{rest}" if colon else f"{prefix}+{uri}"


def _without_prefix(prefix: str, uri: str) -> str | None:
    """Return the address that `_with_prefix` has changed, or None."""
    scheme, colon, rest = uri.partition("://")
    if colon:
        return f"{scheme}://{rest.removeprefix(prefix + '+')}" if rest.startswith(prefix + "+") else None
    return uri.removeprefix(prefix + "+") if uri.startswith(prefix + "+") else None
