"""What some servers offer: methods, pages and tasks of extensions, skills; tools in versions, switched or found."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

from trimcp.errors import LocalError
from trimcp.server.handlers.calling import at_users_line
from trimcp.server.offering import Offering
from trimcp.server.options import check_method
from trimcp.support.bounds import check_callable, check_members, check_number
from trimcp.wire.capabilities import APP_TYPE, APPS, SKILLS, TASKS
from trimcp.wire.given import given_meta
from trimcp.wire.methods import METHODS
from trimcp.wire.tool_versions import version_in

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    from trimcp.extensions.apps import AppSources
    from trimcp.server.extensions.apps import AppPermission
    from trimcp.server.extensions.skills import ServedSkills
    from trimcp.server.extensions.tasks import ServedTasks
    from trimcp.server.registry import Registry
    from trimcp.server.resources import ResourceOptions
    from trimcp.server.running import Running
    from trimcp.server.tool_choice import OwnVersions, ToolSwitches
    from trimcp.server.tools import ToolEntry, ToolOptions
    from trimcp.session.context import Context
    from trimcp.session.facts import Beside
    from trimcp.store.tasks import TaskStore

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


class Extending(Offering):
    """What some servers offer, by extensions of the protocol for example. What is not used is not even loaded.

    It has more than 300 lines because each way to offer something is a documented method of a user's one server.
    """

    parts: list[Callable[[Running], AbstractAsyncContextManager[object]]]
    outer_parts: list[Callable[[Running], AbstractAsyncContextManager[object]]]  # entered last: around all handlers
    beside: list[Callable[[], Iterable[Beside]]]
    reads_unlisted: bool = False
    """Whether it may have resources that it knows only when they are read."""
    _skills: ServedSkills | None = None
    _tasks: ServedTasks | None = None
    _switches: ToolSwitches | None = None
    _versions: OwnVersions | None = None

    def method(self, name: str) -> Callable[[FunctionT], FunctionT]:
        """Serve a request method of an extension: `async def function(ctx, params)`; both params and result are JSON.

        Declare the extension with `Server(extensions=...)`. Raises LocalError for a method that the protocol defines
        itself, and once the server runs.
        """
        check_method(name, "method", "example/do")
        if name in METHODS:
            raise LocalError(f"{name} is a method of the protocol")

        def decorate(function: FunctionT) -> FunctionT:
            if self._live:
                raise LocalError("methods cannot be added while the server runs")
            check_callable("what serves a method", function)
            self.foreign[name] = function
            return function

        return decorate

    @at_users_line
    def ui(
        self,
        uri: str,
        html: str | Path,
        *,
        csp: AppSources | Mapping[str, Any] | None = None,
        permissions: Iterable[AppPermission] = (),
        prefers_border: bool | None = None,
        domain: str | None = None,
        **options: Unpack[ResourceOptions],
    ) -> None:
        """Offer a page that hosts show beside a tool's result (the extension "MCP Apps"): `@server.tool(ui=uri)`.

        Args:
            uri: its address, such as `ui://jobs/progress`.
            html: the page as text, or a file that is read for each request. It is one file, with its program inside.
            csp: what it may reach, by default nothing: an `AppSources`, or a dict such as
                `{"connectDomains": ["https://api.example.com"]}`.
            permissions: what it asks of the browser: "camera", "microphone", "geolocation", "clipboardWrite".
            prefers_border: whether the host should draw a frame around it; None leaves that to the host.
            domain: an origin of its own, in the form that the host wants.
            options: those of a resource, such as `title`.

        Raises:
            TypeError, ValueError: an argument is none of these, or an option is unknown.
            LocalError: a resource of that address exists.
        """
        from trimcp.server.extensions.apps import app_page  # few servers need it

        page, meta = app_page(uri, html, csp, permissions, prefers_border, domain)
        page.__name__ = uri.rsplit("/", 1)[-1]
        given: Any = {
            "mime_type": APP_TYPE,
            **options,
            "meta": {**(given_meta("meta", options.get("meta")) or {}), **meta},
        }
        self.resource(uri, run="inline" if isinstance(html, str) else "thread", **given)(page)
        self.extend(APPS)

    @at_users_line
    def skills(self, source: str | os.PathLike[str] | Mapping[str, str | bytes], *, prefix: str = "") -> None:
        """Offer skills to hosts (the extension "Skills"; needs the extra `skills`): folders with a SKILL.md each.

        A skill that is not valid, such as one without name, is left out with a warning. What is hidden (its name begins
        with a dot) or a link is no part of a skill. A change of the folder is seen by the next request.

        Args:
            source: a folder that has the folders of skills, at any depth; or the files themselves by their path, as in
                `{"git-workflow/SKILL.md": "---\\nname: git-workflow\\n..."}`.
            prefix: comes before their names in their addresses: "acme" makes `skill://acme/git-workflow/SKILL.md`.

        Raises:
            ValueError: it is no such folder, or a given file is in no skill that can be served.
            LocalError: the extra is not installed, there are skills with this prefix, or the server runs.
        """
        from trimcp.server.extensions.skills import ServedSkills  # few servers need it

        if self._live:
            raise LocalError("skills cannot be added while the server runs")
        served = self._skills
        if served is None:
            served = ServedSkills(self.page_size, self.list_ttl_ms, self.list_cache_scope)
            served.add(source, prefix)
            self.method("skills/list")(served.listing)
            self.method("skills/get")(served.get)
            self.method("resources/directory/read")(served.folder)

            async def skill_file(path: str) -> Any:
                """A file of a skill."""
                return await served.read(path)

            self.resource("skill://{+path}")(skill_file)
            self._skills = served
            self.extend(SKILLS, directoryRead=True)
        else:
            served.add(source, prefix)

    @at_users_line
    def tasks(
        self,
        store: TaskStore | str | None = None,
        *,
        longest: float = 86_400.0,
        ttl: float = 3_600.0,
        poll_interval: float = 1.0,
        running: int = 100,
        most: int = 1_000,
        lease: float = 15.0,
        grace: float = 5.0,
        workers: bool = False,
    ) -> None:
        """Say where tasks are kept, and how many (the extension "Tasks"). `@server.tool(task=...)` makes calls tasks.

        Args:
            store: keeps them, such as `trimcp.SqliteTasks("tasks.db")` or a URL (`sqlite:///path`, `redis://host`):
                they outlive the process then; by default the memory of the process.
            longest: seconds that a task may take; then it fails.
            ttl: seconds for which its result is kept after its end.
            poll_interval: seconds that a client should wait between two looks at a task.
            running: tasks that may run at once in a run of the server; others wait, and their owners take turns.
            most: tasks that one principal, or one address without, may have, those that have ended included.
            lease: seconds after which another process may take over the tasks of one that has ended without a word.
            grace: seconds in which tasks may end when the server does. What is left begins again or fails at the next
                start, as its tool wants (`restart`).
            workers: leave all tasks to processes that run `trimcp worker` on the same store.

        Raises:
            TypeError, ValueError: an argument is none of these.
            LocalError: the server runs.
        """
        if self._live:
            raise LocalError("how tasks are kept cannot be changed while the server runs")
        self._served_tasks().set(
            store=store,
            longest=longest,
            ttl=ttl,
            poll_interval=poll_interval,
            running=running,
            most=most,
            lease=lease,
            grace=grace,
            workers=workers,
        )

    def move_tasks(self, store: TaskStore | str | None, **settings: Any) -> ServedTasks | None:
        """Change where tasks are kept, and other settings, whatever the program says; None if no tool makes any.

        Raises as `tasks` does.
        """
        if self._tasks is not None:
            self._tasks.set(store=store, **settings)
        return self._tasks

    def _served_tasks(self) -> ServedTasks:
        """Return the server's tasks; the first time, declare and serve them."""
        served = self._tasks
        if served is None:
            if self._live:
                raise LocalError("a server that has begun without tasks cannot get any: call server.tasks() before")
            from trimcp.server.extensions.tasks import ServedTasks  # few servers need it

            served = self._tasks = ServedTasks()
            for verb in ("get", "update", "cancel"):
                self.foreign[f"tasks/{verb}"] = getattr(served, verb)
            self.parts.append(served.while_running)
            self.beside.append(served.beside)
            self.extend(TASKS)
        return served

    def prepare_for(self, entry: Any) -> None:
        """As `Offering` does, and serve tasks once calls of a tool may become some."""
        if getattr(entry, "task", None) is not None:
            self._served_tasks()
        super().prepare_for(entry)

    # Which tools a client finds

    def disable_tools(self, *names: str, tags: Iterable[str] = (), client: Context[Any] | None = None) -> None:
        """Hide tools: they are not listed, and do not exist for who calls them. Running calls continue.

        Call it in Trio's thread, also while the server runs: clients are notified. The last call that fits a tool
        decides, and what was said for a client comes before what was said for everyone. Tools that are added later and
        have one of the tags are hidden, too.

        Args:
            names: of tools; `NAME@VERSION` is one version.
            tags: hides the tools that have one of them.
            client: the context of a request: only for its session. Where each request stands alone (HTTP since
                2026-07-28), for its principal. It is kept in this process alone.

        Raises:
            KeyError: there is no such tool.
            TypeError: neither names nor tags are given, or `client` is none, such as the context of a sync handler.
            LocalError: the request of `client` belongs to no session and has no principal.
        """
        self._turn(False, names, tags, client)

    def enable_tools(self, *names: str, tags: Iterable[str] = (), client: Context[Any] | None = None) -> None:
        """Show tools again, or for one client what is hidden from the others. Arguments, errors: `disable_tools`."""
        self._turn(True, names, tags, client)

    def _turn(self, on: bool, names: Iterable[str], tags: Iterable[str], client: Context[Any] | None) -> None:
        tags = check_members("tags", tags, str, "texts, such as ['admin']")
        if self._switches is None:
            from trimcp.server.tool_choice import ToolSwitches  # few servers need it

            self._switches = ToolSwitches(self.tools)
        whose = self._switches.turn(on, names, tags, client)
        with self.tools.together(whose):
            found = list(self.tools.items())
            controlled = {id(entry) for name, entry, _ in found if self._switches.control(name, entry)}
            for name, entry, _ in found:
                if id(entry) in controlled:
                    self.put_tool(name, entry)
            self.tools.altered(live=self._live)
        self._declare()

    @at_users_line
    def search_tools(
        self, *, listed: Iterable[str] = (), most: int = 8, search: str = "search_tools", call: str = "call_tool"
    ) -> None:
        """List two tools in place of all: one finds tools by words, the other calls what was found.

        For a server with so many tools that their list would fill a model's context. Tools are ranked by their names,
        titles and descriptions (BM25); a client finds those that it would see in the list. All of them can be called
        by their own names, too; a call through `call_tool` passes middleware, filters, quotas and the audit as a call
        of that tool.

        Args:
            listed: names of tools that stay in the list.
            most: the most tools that one search returns.
            search: the name of the tool that finds.
            call: the name of the tool that calls.

        Raises:
            LocalError: the server runs, or there is a tool of one of these names.
        """
        from trimcp.server.tool_search import ToolSearch  # few servers need it

        if self._live:
            raise LocalError("a search for tools cannot be added while the server runs")
        check_number("most", most, whole=True)
        stay = check_members("listed", listed, str, "names of tools")
        finding = ToolSearch(frozenset(stay), most, search, call)
        self.add_tool(finding.search, **finding.search_options)
        self.add_tool(finding.call, **finding.call_options)
        self.outer_parts.append(finding.while_running)

    def guard_tool(self, entry: ToolEntry, options: ToolOptions) -> None:
        """As `Offering` does, and keep its results if its options say so."""
        super().guard_tool(entry, options)
        cache = options.get("cache")
        if cache is not None:
            from trimcp.server.caching import cached  # few servers need it

            entry.prepared = cached(entry.listed, entry.prepared, entry.make_result, cache)

    def put_tool(self, name: str, entry: ToolEntry, *, listed: bool = True) -> None:
        """As `Offering` does, for tools that may be switched."""
        if self._switches is not None:
            self._switches.control(name, entry)
        super().put_tool(name, entry, listed=listed)

    def add_entry(self, registry: Registry[Any], name: str, entry: Any, listed: bool = True) -> None:
        """As `Offering` does, for tools that may be switched and have versions."""
        if registry is not self.tools:
            super().add_entry(registry, name, entry, listed)
            return
        if self._switches is not None:
            self._switches.control(name, entry)
        plain = entry.listed.name
        if version_in(entry.listed.meta) is None or (plain in registry and plain not in (self._versions or ())):
            super().add_entry(registry, name, entry, listed)
            return
        if self._versions is None:
            from trimcp.server.tool_choice import OwnVersions  # few servers need it

            self._versions = OwnVersions(self.tools)
        with registry.together():
            for key in self._versions.keys(entry):
                if key == plain and plain in registry:
                    super().put_tool(key, entry)
                else:
                    super().add_entry(registry, key, entry, key == plain)
        entry.turns = f"{plain}@{version_in(entry.listed.meta)}"
        self._versions.note(entry)

    def remove_tool(self, name: str) -> None:
        """Stop offering a tool, in all its versions, or one version as `NAME@VERSION`; running calls continue.

        Raises KeyError for an unknown name.
        """
        found = None if self._versions is None else self._versions.forget(name)
        if found is None:
            super().remove_tool(name)
            return
        keys, newest = found
        with self.tools.together():
            for key in keys:
                super().remove_tool(key)
            if newest is not None and self.tools.get(newest.listed.name) is not newest:
                super().put_tool(newest.listed.name, newest)
