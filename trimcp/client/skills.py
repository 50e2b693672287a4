"""The skills of a server (the extension "Skills"): listed, approved, read when they are needed, and verified."""

from __future__ import annotations

import base64
import binascii
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeAlias
from urllib.parse import quote, unquote

import attrs
import trio

from trimcp.client.handlers import call_handler
from trimcp.client.session import ClientSession
from trimcp.client.tools import Listing
from trimcp.errors import InvalidReply, LocalError
from trimcp.extensions.skills import Skill, SkillFile, digest_of, entry_of, read_frontmatter, same_json
from trimcp.extensions.yaml_values import require_yaml
from trimcp.support.cleaning import in_quotes
from trimcp.wire.capabilities import SKILLS
from trimcp.wire.common import Unreadable
from trimcp.wire.content import BlobResourceContents

log: logging.Logger = logging.getLogger("trimcp.client")

Approve: TypeAlias = Callable[[Skill], "bool | Awaitable[bool]"]
"""Asks the user whether a skill may be used: a sync or async function that returns True or False."""

_MOST_LISTED: Final = 100_000


@attrs.define(eq=False)
class ActiveSkill:
    """A skill that was approved: its files as they were approved, each read when it is asked for, and verified.

    What it says is untrusted, however well it is verified: the digests come from the same server. Tell the model from
    which server it is, and let it run no program of the skill that the user did not approve.

    Attributes:
        skill: the entry that was approved. Files that are not in it are not read.
        instructions: the text of its SKILL.md, frontmatter included.
    """

    skill: Skill
    instructions: str
    _session: ClientSession
    _read: dict[str, bytes] = attrs.field(factory=dict)  # what was verified, at most 16 MiB in all

    @property
    def files(self) -> list[str]:
        """The paths of its files, relative to its folder."""
        return [unquote(file.uri.removeprefix(f"{self.skill.root}/")) for file in self.skill.files]

    async def read(self, path: str) -> bytes:
        """Return the bytes of a file, by its path in the folder of the skill, or by its address.

        Raises:
            LocalError: it is no file of the skill as it was approved. If the skill has changed, activate it again.
            InvalidReply: what the server sent is not what was approved.
        """
        root = f"{self.skill.root}/"
        wanted = {path, root + path, root + quote(path)}
        file = next((file for file in self.skill.files if file.uri in wanted), None)
        if file is None:
            raise LocalError(f"{path!r:.200} is no file of the skill {self.skill.name} as it was approved")
        if file.uri not in self._read:
            self._read[file.uri] = await fetched(self._session, file)
        await trio.lowlevel.checkpoint()
        return self._read[file.uri]

    async def read_text(self, path: str) -> str:
        """Return a file as text. Raises as `read`, and InvalidReply if it is not UTF-8."""
        try:
            return (await self.read(path)).decode()
        except UnicodeDecodeError:
            raise InvalidReply(f"{path!r:.200} of the skill {self.skill.name} is no text") from None


@attrs.define(eq=False)
class ServerSkills:
    """The skills of one server: `ServerSkills(session, approve)`. It needs the extra `skills`.

    Nothing of a skill is read before it is activated, nor more of it than is asked for.

    Args:
        session: the connection to the server.
        approve: called with each `Skill` before it is used: True lets it, anything else refuses it.
    """

    _session: ClientSession
    _approve: Approve

    async def list_all(self) -> Listing[Skill]:
        """Return all skills that the server lists, following cursors; none if it did not declare the extension.

        An entry that is not valid is left out, and is in the list's `rejected`. The server may have more than it lists.
        """
        found = Listing[Skill]()
        seen: set[str] = set()
        if not self._offered:
            await trio.lowlevel.checkpoint()
            return found
        for place, raw in enumerate(await self._entries()):
            uri = raw.get("uri") if isinstance(raw, dict) else None
            try:
                skill = entry_of(raw)
                if skill.uri in seen:
                    raise ValueError("it is listed twice")
            except ValueError as error:
                named = uri[:200] if isinstance(uri, str) else None
                found.rejected += (Unreadable(f"skills[{place}]", named, str(error)),)
                log.warning("the skill %s is left out: %s", in_quotes(named or place), error)
                continue
            seen.add(skill.uri)
            found.append(skill)
        return found

    async def get(self, uri: str) -> Skill:
        """Return one skill by the address of its SKILL.md, also one that is not listed, as it is now."""
        if not self._offered:
            raise LocalError("this server has no skills")
        result = await self._session.request("skills/get", {"uri": uri})
        try:
            skill = entry_of(result.get("skill"))
            if skill.uri != uri:
                raise ValueError("it is another one than was asked for")
        except ValueError as error:
            raise InvalidReply(f"the entry of the skill {uri!r:.200} cannot be used: {error}") from None
        return skill

    async def activate(self, skill: Skill | str) -> ActiveSkill:
        """Ask the user to approve a skill, and read its SKILL.md; an address is looked up first.

        One that is inside another one is approved by itself.

        Raises:
            LocalError: it was not approved, it is dynamic, so that nothing could be verified, or the server has none.
            InvalidReply: what the server sent is not what it listed: the bytes, or what they say of the skill.
        """
        require_yaml("skills")
        if isinstance(skill, str):
            skill = await self.get(skill)
        manifest = next((file for file in skill.files if file.uri == skill.uri), None)
        if manifest is None:
            raise LocalError(f"the skill {skill.name} is dynamic: what it says could not be verified")
        if await call_handler(self._approve, skill) is not True:
            raise LocalError(f"the skill {skill.name} was not approved")
        content = await fetched(self._session, manifest)
        try:
            said = read_frontmatter(content)
            instructions = content.decode()
        except ValueError as error:
            raise InvalidReply(f"the SKILL.md of {skill.name} cannot be used: {error}") from None
        if not same_json(said, skill.frontmatter):
            raise InvalidReply(f"the SKILL.md of {skill.name} says other things of itself than its entry")
        return ActiveSkill(skill, instructions, self._session, {manifest.uri: content})

    @property
    def _offered(self) -> bool:
        return SKILLS in (self._session.server_capabilities.extensions or {})

    async def _entries(self) -> list[Any]:
        """Return the entries that the server lists, following cursors."""
        found: list[Any] = []
        params: dict[str, Any] = {}
        weight = 0
        for _ in range(self._session.client.max_pages):
            page = await self._session.request("skills/list", params)
            entries = page.get("skills")
            if not isinstance(entries, list):
                raise InvalidReply("skills/list was answered without skills")
            found += entries
            weight += sum(1 + _files_in(each) for each in entries)
            if weight > _MOST_LISTED:
                raise InvalidReply(f"skills/list was answered with more than {_MOST_LISTED} files")
            cursor = page.get("nextCursor")
            if not isinstance(cursor, str) or cursor == params.get("cursor"):
                return found
            params = {"cursor": cursor}
        raise InvalidReply(f"skills/list was answered with more than {self._session.client.max_pages} pages")


def _files_in(entry: Any) -> int:
    files = entry.get("resources") if isinstance(entry, dict) else None
    return len(files) if isinstance(files, list) else 0


async def fetched(session: ClientSession, file: SkillFile) -> bytes:
    """Read a file of a skill, and return its bytes if they are those of its entry. Raises InvalidReply otherwise."""
    contents = (await session.read_resource(file.uri, fresh=True)).contents
    if len(contents) != 1 or contents[0].uri != file.uri:
        raise InvalidReply(f"{file.uri!r:.200} was answered with another file")
    found = contents[0]
    try:
        if isinstance(found, BlobResourceContents):
            content = base64.b64decode(found.blob, validate=True)
        else:
            content = found.text.encode()
    except (binascii.Error, UnicodeEncodeError):
        raise InvalidReply(f"{file.uri!r:.200} cannot be decoded") from None
    if len(content) != file.size or digest_of(content) != file.digest:
        raise InvalidReply(f"{file.uri!r:.200} is not the file that was listed: it was changed, or it is stale")
    return content
