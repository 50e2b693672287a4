"""Skills that a server offers: folders of files and files given in code, listed with digests and read as resources."""

from __future__ import annotations

import base64
import logging
import mimetypes
import os
import stat
import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import attrs
import trio

from trimcp.errors import ErrorReply, LocalError
from trimcp.extensions.skills import (
    MANIFEST,
    MOST_BYTES,
    MOST_FILES,
    Skill,
    SkillFile,
    check_entry,
    digest_of,
    read_frontmatter,
)
from trimcp.extensions.yaml_values import require_yaml
from trimcp.session.context import Context
from trimcp.support.cleaning import in_quotes, one_line
from trimcp.wire.codes import INTERNAL_ERROR, INVALID_PARAMS
from trimcp.wire.common import CacheScope
from trimcp.wire.content import BlobResourceContents, TextResourceContents
from trimcp.wire.given import given_name

log: logging.Logger = logging.getLogger("trimcp.server")

_SCHEME: Final = "skill://"
_FOLDER_TYPE: Final = "inode/directory"
_MOST_SEEN: Final = 50_000  # files and folders below one folder
_DEEPEST: Final = 32
_FOLDER_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE_FLAGS: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_RECENT: Final = 2_000_000_000  # nanoseconds: a file may change again without a new time of change
_PAGE: Final = 1024  # files of the entries on one page of a list, or members of one folder
_MOST_WARNINGS: Final = 1_000
_THREADS: Final = 4
_TRIES: Final = 3


@attrs.define(eq=False)
class _Stored:
    """A file as it was found: what tells that it changed, and what was made of its bytes."""

    size: int
    stamp: tuple[int, ...] = ()
    digest: str = ""
    frontmatter: dict[str, Any] = attrs.field(factory=dict)  # of a SKILL.md
    problem: str = ""  # why that cannot be read


@attrs.frozen
class _SkillTree:
    """All skills at one moment, and all files and folders in them by their path."""

    skills: dict[str, Skill]
    files: dict[str, tuple[SkillSource, str, _Stored]]  # the path is that in its source
    folders: dict[str, dict[str, dict[str, Any]]]  # what is in each, by address


@attrs.define(eq=False)
class SkillSource:
    """Where skills come from: a folder, or files given in code (`given`, by their path)."""

    root: Path | None
    given: Mapping[str, bytes]
    prefix: str  # before each path, "" or with a slash at its end
    _before: dict[str, _Stored] = attrs.field(init=False, factory=dict)
    _warned: set[tuple[str, str]] = attrs.field(init=False, factory=set)

    def look(self) -> _SkillTree:
        """Return what there is now. Only what changed is read again. It blocks."""
        folders: set[str] = set()
        found = {path: _Stored(len(content)) for path, content in self.given.items()}
        if self.root is not None:
            with _opened(self.root, ()) as fd:
                self._walk(fd, "", found, folders)
        now = time.time_ns()
        for path, file in found.items():
            known = self._before.get(path)
            if known is not None and known.stamp == file.stamp and (not file.stamp or now - file.stamp[0] > _RECENT):
                found[path] = known
        self._before = found
        snapshot, homes, paths = _SkillTree({}, {}, {}), set[str](), sorted(found)
        for inside in [path.removesuffix(MANIFEST) for path in paths if path.endswith(f"/{MANIFEST}")]:
            after = f"{inside[:-1]}0"  # the character after "/"
            mine = {path: found[path] for path in paths[bisect_left(paths, inside) : bisect_left(paths, after)]}
            try:
                skill = self._entry(inside, mine)
            except (ValueError, OSError) as error:
                self._warn(inside, one_line(str(error)) if isinstance(error, ValueError) else "it cannot be read")
                continue
            snapshot.skills[skill.uri] = skill
            snapshot.files.update({self.prefix + path: (self, path, file) for path, file in mine.items()})
            homes.add(inside)
        _fill(snapshot, [self.prefix + folder for folder in folders if not homes.isdisjoint(_above(folder))])
        return snapshot

    def _walk(self, fd: int, inside: str, found: dict[str, _Stored], folders: set[str]) -> None:
        """Note every file below a folder. What is hidden, a link or no file is left out."""
        with os.scandir(fd) as entries:
            for entry in entries:
                path = inside + entry.name
                if entry.name.startswith("."):
                    continue
                if len(found) + len(folders) >= _MOST_SEEN or path.count("/") > _DEEPEST:
                    self._warn(path, f"there are more than {_MOST_SEEN} files, or {_DEEPEST} folders inside each other")
                    return
                try:
                    quote(path)
                    status = entry.stat(follow_symlinks=False)
                    if stat.S_ISDIR(status.st_mode):
                        folders.add(path)
                        with _opened(entry.name, (), fd) as inner:
                            self._walk(inner, f"{path}/", found, folders)
                    elif stat.S_ISREG(status.st_mode):
                        found[path] = _Stored(status.st_size, stamp_of(status))
                    else:
                        self._warn(path, "it is a link, or no file")
                except (OSError, UnicodeEncodeError):
                    self._warn(path, "it cannot be read, or its name is not UTF-8")

    def _entry(self, inside: str, mine: dict[str, _Stored]) -> Skill:
        """Return the entry of the skill in this folder. Raises ValueError and OSError if it cannot be served."""
        if len(mine) > MOST_FILES or sum(file.size for file in mine.values()) > MOST_BYTES:
            raise ValueError(f"it has more than {MOST_FILES} files, or more than {MOST_BYTES} bytes of them")
        for path, file in mine.items():
            if not file.digest:
                content = self.read(path)
                file.size, file.digest = len(content), digest_of(content)
                if path.endswith(f"/{MANIFEST}"):
                    try:
                        file.frontmatter = read_frontmatter(content)
                    except ValueError as error:
                        file.problem = str(error)
        manifest = mine[inside + MANIFEST]
        if manifest.problem:
            raise ValueError(manifest.problem)
        files = [SkillFile(uri_of(self.prefix + path), file.digest, file.size) for path, file in sorted(mine.items())]
        skill = Skill(uri_of(self.prefix + inside + MANIFEST), manifest.frontmatter, files)
        check_entry(skill)
        return skill

    def read(self, path: str) -> bytes:
        """Return the bytes of a file, never through a link. Raises OSError. It blocks."""
        if self.root is None:
            return self.given[path]
        with _opened(self.root, path.split("/")) as fd:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise OSError("no file")
            with open(fd, "rb", closefd=False) as file:
                content = file.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise OSError("too large")
        return content

    def _warn(self, path: str, why: str) -> None:
        if (path, why) not in self._warned and len(self._warned) < _MOST_WARNINGS:
            self._warned.add((path, why))
            log.warning("of the skills, %s is left out: %s", in_quotes(path.rstrip("/")), why)


@contextmanager
def _opened(start: str | Path, steps: tuple[str, ...] | list[str], below: int | None = None) -> Iterator[int]:
    """Open a folder, or the file that these steps lead to from it, following no link but one to the first folder."""
    flags = _FOLDER_FLAGS if below is not None else _FOLDER_FLAGS & ~os.O_NOFOLLOW
    fd = os.open(start, flags, dir_fd=below)
    try:
        for number, step in enumerate(steps, 1):
            inner = os.open(step, _FILE_FLAGS if number == len(steps) else _FOLDER_FLAGS, dir_fd=fd)
            os.close(fd)
            fd = inner
        yield fd
    finally:
        os.close(fd)


def stamp_of(status: os.stat_result) -> tuple[int, ...]:
    """Return what changes when a file does, its time of change first."""
    return status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino


def uri_of(path: str) -> str:
    """Return the address of a file or folder of skills."""
    return _SCHEME + quote(path)


def _fill(snapshot: _SkillTree, folders: list[str]) -> None:
    """Note what is in each folder, and in each above it, as listings of resources have it."""
    for path in folders:  # they may be empty
        snapshot.folders.setdefault(uri_of(path), {})
        _put(snapshot, path, _folder_at(path))
    for path, (_, _, file) in snapshot.files.items():
        uri = uri_of(path)
        child = {"uri": uri, "name": path.rsplit("/", 1)[-1], "mimeType": media_type(path), "size": file.size}
        skill = snapshot.skills.get(uri)
        _put(snapshot, path, child if skill is None else child | {"name": skill.name, "description": skill.description})


def _put(snapshot: _SkillTree, path: str, child: dict[str, Any]) -> None:
    while "/" in path:
        path = path.rpartition("/")[0]
        snapshot.folders.setdefault(uri_of(path), {})[child["uri"]] = child
        child = _folder_at(path)


def _above(path: str) -> list[str]:
    """Return the folders that a path is in, each with a slash at its end."""
    return [path[: at + 1] for at, character in enumerate(path) if character == "/"]


def _folder_at(path: str) -> dict[str, Any]:
    return {"uri": uri_of(path), "name": path.rsplit("/", 1)[-1], "mimeType": _FOLDER_TYPE}


def media_type(path: str) -> str:
    """Return the media type of a file, by its name."""
    if path.endswith(".md"):
        return "text/markdown"
    return mimetypes.guess_type(path)[0] or "application/octet-stream"


@attrs.define(eq=False)
class ServedSkills:
    """Answers the requests of the extension from what the folders hold at that moment. It has no task of its own."""

    page_size: int | None
    ttl_ms: int
    cache_scope: CacheScope
    sources: list[SkillSource] = attrs.field(init=False, factory=list)
    _now: _SkillTree = attrs.field(init=False, factory=lambda: _SkillTree({}, {}, {}))
    _looks: int = attrs.field(init=False, default=0)  # begun
    _turn: trio.Lock = attrs.field(init=False, factory=trio.Lock)
    _threads: trio.CapacityLimiter = attrs.field(init=False, factory=lambda: trio.CapacityLimiter(_THREADS))

    def add(self, source: Any, prefix: str) -> None:
        """Serve what is in a folder, or files by their path. Raises as `Server.skills` does."""
        require_yaml("skills")
        texts = source.values() if isinstance(source, Mapping) else ()
        if not isinstance(source, str | os.PathLike | Mapping) or not all(
            isinstance(each, str | bytes) for each in texts
        ):
            raise TypeError(f"skills are read from the path of a folder, or given as a dict, not {source!r:.60}")
        prefix = f"{given_name('prefix', prefix).strip('/')}/".removeprefix("/")
        if prefix and not {"", ".", ".."}.isdisjoint(prefix[:-1].split("/")):
            raise ValueError(f"prefix is a path, such as 'acme/billing', not {prefix!r:.60}")
        if any(each.prefix == prefix for each in self.sources):
            raise LocalError(f"there are skills below {prefix or 'no prefix'!r} already; give these another one")
        if isinstance(source, Mapping):
            given = {path: text.encode() if isinstance(text, str) else bytes(text) for path, text in source.items()}
            added = SkillSource(None, given, prefix)
        else:
            added = SkillSource(Path(source).resolve(), {}, prefix)
            if not Path(source).is_dir() or (Path(source) / MANIFEST).exists():
                raise ValueError(f"skills are in a folder that has a folder for each, not {os.fspath(source)!r:.100}")
        found = added.look()
        if isinstance(source, Mapping):
            for path in source:
                if prefix + path not in found.files:
                    raise ValueError(f"{path!r:.100} is in no skill that can be served; the log tells why")
        self.sources.append(added)
        self._now = self._look()

    def _look(self) -> _SkillTree:
        merged = _SkillTree({}, {}, {})
        for source in self.sources:
            found = source.look()
            merged.skills.update(found.skills)
            merged.files.update(found.files)
            for uri, members in found.folders.items():
                merged.folders.setdefault(uri, {}).update(members)
        return merged

    async def now(self) -> _SkillTree:
        """Return what there is now: as seen by a look at the folders that began after this was called."""
        looks = self._looks
        async with self._turn:
            if looks == self._looks and any(source.root is not None for source in self.sources):
                self._looks += 1
                self._now = await trio.to_thread.run_sync(self._look, limiter=self._threads)
            return self._now

    async def read(self, path: str) -> TextResourceContents | BlobResourceContents | None:
        """Return the contents of a file, or None if it is in no skill. They have the digest that its entry tells."""
        for _ in range(_TRIES):
            found = (await self.now()).files.get(path)
            if found is None:
                return None
            source, inside, file = found
            try:
                if source.root is None:
                    content = source.given[inside]
                else:
                    content = await trio.to_thread.run_sync(source.read, inside, limiter=self._threads)
            except OSError:
                continue  # it went, or became a link
            if digest_of(content) == file.digest:
                uri, kind = uri_of(path), media_type(path)
                try:
                    return TextResourceContents(uri=uri, text=content.decode(), mime_type=kind)
                except UnicodeDecodeError:
                    blob = base64.b64encode(content).decode("ascii")
                    return BlobResourceContents(uri=uri, blob=blob, mime_type=kind)
        raise ErrorReply(INTERNAL_ERROR, "this file changes while it is read; try again")

    async def listing(self, ctx: Context[Any], params: dict[str, Any]) -> dict[str, Any]:
        """Answer `skills/list`."""
        entries = [(uri, 1 + len(skill.resources), as_json(skill)) for uri, skill in (await self.now()).skills.items()]
        return self._page("skills", entries, params) | self._hints

    async def get(self, ctx: Context[Any], params: dict[str, Any]) -> dict[str, Any]:
        """Answer `skills/get`."""
        uri = _text(params, "uri")
        skill = (await self.now()).skills.get(uri)
        if skill is None:
            raise ErrorReply(INVALID_PARAMS, f"there is no skill at {uri:.200}")
        return {"skill": as_json(skill), **self._hints}

    async def folder(self, ctx: Context[Any], params: dict[str, Any]) -> dict[str, Any]:
        """Answer `resources/directory/read`."""
        uri = _text(params, "uri")
        members = (await self.now()).folders.get(uri)
        if members is None:
            raise ErrorReply(INVALID_PARAMS, f"there is no folder at {uri:.200}")
        return self._page("resources", [(each, 1, member) for each, member in members.items()], params)

    @property
    def _hints(self) -> dict[str, Any]:
        return {"ttlMs": self.ttl_ms, "cacheScope": self.cache_scope}

    def _page(self, member: str, entries: list[tuple[str, int, Any]], params: dict[str, Any]) -> dict[str, Any]:
        """Return a page of entries, each with its address and weight. The cursor is the last address before it."""
        after = _text(params, "cursor") if params.get("cursor") is not None else ""
        page: list[Any] = []
        weight = 0
        last = ""
        for uri, heavy, entry in sorted(entries, key=lambda each: each[0]):
            if uri <= after:
                continue
            if page and (weight + heavy > _PAGE or len(page) == self.page_size):
                return {member: page, "nextCursor": last}
            page.append(entry)
            weight, last = weight + heavy, uri
        return {member: page}


def as_json(skill: Skill) -> dict[str, Any]:
    """Return an entry as it is sent."""
    files = [{"uri": file.uri, "digest": file.digest, "size": file.size} for file in skill.files]
    return {"uri": skill.uri, "frontmatter": skill.frontmatter, "resources": files}


def _text(params: dict[str, Any], name: str) -> str:
    value = params.get(name)
    if not isinstance(value, str):
        raise ErrorReply(INVALID_PARAMS, f"{name} must be a text")
    return value
