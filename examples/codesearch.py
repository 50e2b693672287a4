"""Search a directory of source code: a server to use, and an example of nearly everything a server can do.

Run it:      python examples/codesearch.py DIRECTORY        (by default the directory it is started in)
Try it:      trimcp call examples/codesearch.py search pattern=TODO glob='*.py'
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import quote, unquote, urlsplit

import attrs
import trio
from source_files import SKIPPED, count_lines, find_lines, list_files, matcher

import trimcp

TEMPLATE = "code:///{+path}"
MOST_WATCHED = 1_000
POLL_INTERVAL = 0.5


# What tools return: attrs classes become structured results with a schema.


@attrs.frozen
class Match:
    """A line that matches; `line` counts from 1."""

    path: str
    line: int
    text: str


@attrs.frozen
class Found:
    """What a search found. `complete` is false where it stopped at `max_results`."""

    matches: list[Match]
    files_searched: int
    files_skipped: int
    complete: bool


@attrs.frozen
class Lines:
    """Lines of all files of one kind."""

    kind: str
    files: int
    lines: int
    blank: int


@attrs.frozen
class LineStatistics:
    """How much there is, and of what, the largest part first."""

    files: int
    lines: int
    blank: int
    kinds: list[Lines]
    longest_file: str | None


# The state of a run: the directory, what is watched in it, and what has been done.


@attrs.define
class Work:
    """What the server has done so far, as the resource `codesearch://work` tells it."""

    running: int = 0
    finished: int = 0
    cancelled: int = 0
    files_read: int = 0
    last_cancelled: str | None = None


@attrs.define(eq=False)
class Tree:
    """The directory that is served. Nothing outside of it is ever opened."""

    root: Path
    work: Work = attrs.field(factory=Work)
    watched: dict[str, float | None] = attrs.field(factory=dict)

    def places(self, path: str, roots: list[Path]) -> list[Path]:
        """Return where to look for a path a client named: there, or in those of its roots that lie below."""
        found = self.real(path)
        if found is None:
            raise trimcp.ToolError(f"there is no {path} here; paths are relative to the served directory")
        if any(found.is_relative_to(root) for root in roots):
            return [found]
        below = [root for root in roots if root.is_relative_to(found) and root.exists()]
        if not below:
            raise trimcp.ToolError(f"{path} is outside the roots of this client")
        return below

    def real(self, path: str | Path) -> Path | None:
        """Return where a path leads, links followed, or None if nothing is there or it is outside."""
        try:
            found = (self.root / path).resolve(strict=True)
        except (OSError, ValueError, RuntimeError):  # missing, with a null byte, a loop of links
            return None
        return found if found.is_relative_to(self.root) else None

    def relative(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()

    def watch(self, uri: str) -> None:
        """Look at a file's resource from now on; the one that was looked at longest gives way."""
        if not uri.startswith("code:///"):
            return
        self.watched.pop(uri, None)
        if len(self.watched) >= MOST_WATCHED:
            del self.watched[next(iter(self.watched))]
        self.watched[uri] = self.stamp(uri)

    def stamp(self, uri: str) -> float | None:
        """Return when a resource was last changed, or None where there is none."""
        place = self.real(unquote(urlsplit(uri).path).lstrip("/"))
        try:
            return None if place is None else place.stat().st_mtime
        except OSError:
            return None

    def changed(self) -> list[str]:
        """Return the watched resources that changed since the last time."""
        now = {uri: self.stamp(uri) for uri in list(self.watched)}
        changed = [uri for uri, stamp in now.items() if self.watched.get(uri, stamp) != stamp]
        self.watched.update({uri: now[uri] for uri in changed if uri in self.watched})
        return changed


def uri_of(path: str) -> str:
    return f"code:///{quote(path)}"


def served_directory() -> Path:
    """Return the directory named on the command line, else the one the program was started in."""
    root = Path(sys.argv[1] if len(sys.argv) > 1 else os.curdir).resolve()
    if not root.is_dir():
        raise SystemExit(f"codesearch: {root} is no directory")
    return root


@asynccontextmanager
async def lifespan(server: trimcp.Server[Tree]) -> AsyncIterator[Tree]:
    """Serve the directory named on the command line, and look for changes as long as the server runs."""
    tree = Tree(served_directory())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(tell_changes, server, tree)
        yield tree
        nursery.cancel_scope.cancel()


async def tell_changes(server: trimcp.Server[Tree], tree: Tree) -> None:
    while True:
        await trio.sleep(POLL_INTERVAL)
        if tree.watched:
            for uri in await trio.to_thread.run_sync(tree.changed):
                server.resource_updated(uri)


server: trimcp.Server[Tree] = trimcp.Server(
    "codesearch",
    "1.0.0",
    instructions="Search first, then read what you need as code:///PATH. Paths are relative to the served directory.",
    lifespan=lifespan,
)


@server.middleware
async def watch_subscribed(ctx: trimcp.Context[Tree], params: Any, call_next: Callable[..., Awaitable[Any]]) -> Any:
    """Watch what a client subscribes to, in either era's way of subscribing."""
    if ctx.method == "resources/subscribe":
        ctx.state.watch(params.uri)
    elif ctx.method == "subscriptions/listen":
        for uri in params.notifications.resource_subscriptions or ():
            ctx.state.watch(uri)
    return await call_next(ctx, params)


# Tools


@server.tool(annotations=trimcp.ToolAnnotations(read_only_hint=True, open_world_hint=False))
async def search(
    pattern: Annotated[str, trimcp.Arg("The text to look for, or a regular expression", min_length=1, max_length=1000)],
    path: Annotated[str, "A file, or a directory to search with all below it"] = ".",
    regex: Annotated[bool, "Take the pattern for a regular expression, matched line by line"] = False,
    ignore_case: Annotated[bool, "Take capital and small letters for the same"] = False,
    glob: Annotated[str, "Only files whose name, or path below the directory, matches this"] = "*",
    max_results: Annotated[int, trimcp.Arg("Stop after so many matching lines", ge=1, le=10_000)] = 200,
    *,
    ctx: trimcp.Context[Tree],
) -> Found:
    """Find the lines of text files that contain a text or match a regular expression."""
    try:
        matches_line = matcher(pattern, regex=regex, ignore_case=ignore_case)
    except ValueError as error:
        raise trimcp.ToolError(str(error)) from None
    matches: list[Match] = []
    searched = skipped = 0
    async with job(ctx, path, glob) as files:
        async for file in files:
            hits = await trio.to_thread.run_sync(find_lines, file, matches_line, max_results + 1 - len(matches))
            searched += hits is not None
            skipped += hits is None
            matches += [Match(ctx.state.relative(file), number, text) for number, text in hits or ()]
            if len(matches) > max_results:
                break
    return Found(matches[:max_results], searched, skipped, complete=len(matches) <= max_results)


@server.tool(annotations=trimcp.ToolAnnotations(read_only_hint=True, open_world_hint=False))
async def line_statistics(
    path: Annotated[str, "A file, or a directory to count with all below it"] = ".",
    glob: Annotated[str, "Only files whose name, or path below the directory, matches this"] = "*",
    *,
    ctx: trimcp.Context[Tree],
) -> LineStatistics:
    """Count files and lines by kind of file."""
    files_of, lines_of, blank_of = Counter[str](), Counter[str](), Counter[str]()
    most, longest = 0, None
    async with job(ctx, path, glob) as files:
        async for file in files:
            counted = await trio.to_thread.run_sync(count_lines, file)
            if counted is None:
                continue
            lines, blank = counted
            kind = file.suffix or file.name
            files_of[kind] += 1
            lines_of[kind] += lines
            blank_of[kind] += blank
            if lines > most:
                most, longest = lines, ctx.state.relative(file)
    kinds = [Lines(kind, files_of[kind], count, blank_of[kind]) for kind, count in lines_of.most_common()]
    return LineStatistics(files_of.total(), lines_of.total(), blank_of.total(), kinds, longest)


@attrs.define(eq=False)
class Files:
    """The files of one tool call; going to the next one reports progress, and is where a cancel takes effect."""

    ctx: trimcp.Context[Tree]
    files: list[Path]
    done: int = 0

    def __aiter__(self) -> Files:
        return self

    async def __anext__(self) -> Path:
        tree = self.ctx.state
        if self.done == len(self.files):
            await self.ctx.report_progress(self.done, self.done, "done")
            raise StopAsyncIteration
        file = self.files[self.done]
        await self.ctx.report_progress(self.done, len(self.files), tree.relative(file))
        self.done += 1
        tree.work.files_read += 1
        return file


@asynccontextmanager
async def job(ctx: trimcp.Context[Tree], path: str, glob: str) -> AsyncIterator[Files]:
    """List the files of one tool call, and keep count of how it ends."""
    tree = ctx.state
    places = tree.places(path, await roots_of(ctx))
    try:
        listed = await trio.to_thread.run_sync(list_files, places, glob)
    except ValueError as error:
        raise trimcp.ToolError(str(error)) from None
    files = Files(ctx, listed)
    tree.work.running += 1
    try:
        yield files
        tree.work.finished += 1
    except trio.Cancelled:
        tree.work.cancelled += 1
        reason = ctx.cancel_reason.value if ctx.cancel_reason else "shutdown"
        tree.work.last_cancelled = f"at file {files.done} of {len(files.files)}: {reason}"
        raise
    finally:
        tree.work.running -= 1


async def roots_of(ctx: trimcp.Context[Tree]) -> list[Path]:
    """Return where this client may look: in its roots if it has an idea of roots, else everywhere."""
    if not getattr(ctx.capabilities, "roots", None):
        return [ctx.state.root]
    uris = [urlsplit(root.uri) for root in await ctx.list_roots()]
    return await trio.to_thread.run_sync(lambda: [Path(unquote(uri.path)).resolve() for uri in uris])


# Resources, a prompt, and suggestions for both


@server.resource(TEMPLATE, title="A file")
async def file(path: str, ctx: trimcp.Context[Tree]) -> str | bytes:
    """The contents of a file, by its path below the served directory: as text where it is text."""
    return await trio.to_thread.run_sync(read_file, ctx.state, path, await roots_of(ctx))


def read_file(tree: Tree, path: str, roots: list[Path]) -> str | bytes:
    # The template has refused `..` and absolute paths already; this refuses links that lead outside.
    try:
        (place,) = tree.places(path, roots)
        data = place.read_bytes()
    except (trimcp.ToolError, OSError, ValueError):  # ValueError: several roots lie below
        raise trimcp.ResourceNotFound(path) from None
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data


@server.resource("codesearch://work", mime_type="application/json")
async def work(ctx: trimcp.Context[Tree]) -> dict[str, Any]:
    """What this server has done so far: tool calls running, finished and cancelled, and files read."""
    return attrs.asdict(ctx.state.work)


@server.prompt(title="Review a file")
async def review(
    path: Annotated[str, "The file to review, relative to the served directory"],
    focus: Annotated[Literal["bugs", "security", "style", "tests"], "What to look for"] = "bugs",
    *,
    ctx: trimcp.Context[Tree],
) -> list[Any]:
    """Ask for a review of a file, which comes with the request."""
    try:
        text = await trio.to_thread.run_sync(read_file, ctx.state, path, await roots_of(ctx))
    except trimcp.ResourceNotFound:
        raise trimcp.ErrorReply(-32602, f"there is no file {path}") from None
    if not isinstance(text, str):
        raise trimcp.ErrorReply(-32602, f"{path} is not text")
    contents = trimcp.wire.TextResourceContents(uri=uri_of(path), text=text, mime_type="text/plain")
    return [
        f"Review {path} for {focus}. Name each problem with its line, say why it is one, and suggest a change.",
        trimcp.wire.EmbeddedResource(resource=contents),
    ]


@server.complete("review", "path")
@server.complete(TEMPLATE, "path")
async def suggest_paths(value: str, ctx: trimcp.Context[Tree]) -> list[str]:
    """Return the files and directories that begin with what was typed."""
    return await trio.to_thread.run_sync(list_suggestions, ctx.state, value)


def list_suggestions(tree: Tree, value: str) -> list[str]:
    folder, _, typed = value.rpartition("/")
    try:
        (place,) = tree.places(folder or ".", [tree.root])
        entries = sorted(place.iterdir())
    except (trimcp.ToolError, OSError):
        return []
    return [
        tree.relative(entry) + "/" * entry.is_dir()
        for entry in entries
        if entry.name.startswith(typed or entry.name.lstrip("."))  # hidden ones only for those who type the dot
        and entry.name not in SKIPPED
        and tree.real(entry) is not None
    ]


if __name__ == "__main__":
    trimcp.run_stdio(server)
