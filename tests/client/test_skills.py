"""The skills of a server in a client: approved, read on demand and verified, also where the server lies."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import trimcp
from trimcp.extensions.skills import Skill, digest_of
from trimcp.testing import connected, every_revision

SKILLS = "io.modelcontextprotocol/skills"
URI = "skill://git-workflow/SKILL.md"
TEXT = "---\nname: git-workflow\ndescription: Our rules\nmetadata: {level: 1}\n---\n# Git\n"
FILES = {
    "git-workflow/SKILL.md": TEXT,
    "git-workflow/references/a b.md": "# A b\n",
    "git-workflow/logo": b"\xff",
    "git-workflow/inner/SKILL.md": "---\nname: inner\ndescription: Inside\n---\n",
}


def honest() -> trimcp.Server[None]:
    server: trimcp.Server[None] = trimcp.Server("honest")
    server.skills(FILES)
    return server


def entry(**changes: Any) -> dict[str, Any]:
    size = len(TEXT.encode())
    frontmatter = {"name": "git-workflow", "description": "Our rules", "metadata": {"level": 1}}
    resources = [{"uri": URI, "digest": digest_of(TEXT.encode()), "size": size}]
    return {"uri": URI, "frontmatter": frontmatter, "resources": resources, **changes}


def lying(*entries: Any, contents: Any = None, got: Any = None, asked: list[str] | None = None) -> trimcp.Server[None]:
    """A server that says what it is told to."""
    server: trimcp.Server[None] = trimcp.Server("lying", extensions={SKILLS: {}})
    log = [] if asked is None else asked

    @server.method("skills/list")
    async def answer_list(ctx: trimcp.Context[None], params: dict[str, Any]) -> dict[str, Any]:
        return {"skills": list(entries), "ttlMs": 0, "cacheScope": "private"}

    @server.method("skills/get")
    async def answer_get(ctx: trimcp.Context[None], params: dict[str, Any]) -> dict[str, Any]:
        return {"skill": entries[0] if got is None else got, "ttlMs": 0, "cacheScope": "private"}

    @server.resource("skill://{+path}")
    async def answer_read(path: str) -> Any:
        log.append(path)
        return TEXT if contents is None else contents

    return server


async def yes(skill: Skill) -> bool:
    return True


@every_revision
async def test_a_skill_is_asked_about_and_then_read_file_by_file(revision: trimcp.Revision) -> None:
    asked: list[Skill] = []

    def approve(skill: Skill) -> bool:
        asked.append(skill)
        return True

    server = honest()
    read: list[str] = []

    @server.middleware
    async def note(ctx: Any, params: Any, call_next: Any) -> Any:
        if ctx.method == "resources/read":
            read.append(params.uri)
        return await call_next(ctx, params)

    async with connected(server, revision=revision) as session:
        skills = trimcp.ServerSkills(session, approve)
        found = await skills.list_all()
        if revision.name < "2025-06-18":  # a server cannot say that it has some
            assert found == []
            with pytest.raises(trimcp.LocalError, match="no skills"):
                await skills.get(URI)
            return
        assert [skill.name for skill in found] == ["git-workflow", "inner"]
        assert found[0] == await skills.get(URI)
        assert (read, asked) == ([], [])
        active = await skills.activate(found[0])
        assert (read, asked) == ([URI], [found[0]])
        assert active.instructions == TEXT
        assert set(active.files) == {path.removeprefix("git-workflow/") for path in FILES}
        for _ in range(2):
            assert await active.read_text("references/a b.md") == "# A b\n"
            assert await active.read("skill://git-workflow/logo") == b"\xff"
        assert len(read) == 3
        with pytest.raises(trimcp.InvalidReply, match="no text"):
            await active.read_text("logo")


async def test_what_is_not_approved_is_not_read() -> None:
    asked: list[str] = []
    for approve in (lambda skill: False, lambda skill: None, lambda skill: "yes"):
        async with connected(lying(entry(), asked=asked)) as session:
            with pytest.raises(trimcp.LocalError, match="not approved"):
                await trimcp.ServerSkills(session, approve).activate(URI)  # type: ignore[arg-type]
    assert asked == []


async def test_a_file_that_is_not_in_the_entry_is_not_read() -> None:
    asked: list[str] = []
    async with connected(lying(entry(), asked=asked)) as session:
        active = await trimcp.ServerSkills(session, yes).activate(URI)
        asked.clear()
        for path in ("other.md", "../other/SKILL.md", "skill://other/SKILL.md", "", "/SKILL.md"):
            with pytest.raises(trimcp.LocalError, match="no file of the skill"):
                await active.read(path)
    assert asked == []


async def test_an_inner_skill_is_approved_by_itself() -> None:
    asked: list[str] = []

    async def approve(skill: Skill) -> bool:
        asked.append(skill.name)
        return skill.name != "inner"

    async with connected(honest()) as session:
        skills = trimcp.ServerSkills(session, approve)
        outer = await skills.activate(URI)
        assert "name: inner" in await outer.read_text("inner/SKILL.md")
        with pytest.raises(trimcp.LocalError, match="not approved"):
            await skills.activate("skill://git-workflow/inner/SKILL.md")
    assert asked == ["git-workflow", "inner"]


async def test_a_changed_skill_has_another_fingerprint_and_is_no_longer_read(tmp_path: Path) -> None:
    def write(path: str, text: str) -> None:
        file = tmp_path / "git-workflow" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    write("SKILL.md", TEXT)
    write("references/a b.md", "# A b\n")
    server: trimcp.Server[None] = trimcp.Server("changing")
    server.skills(tmp_path)
    async with connected(server) as session:
        skills = trimcp.ServerSkills(session, yes)
        active = await skills.activate(URI)
        write("references/a b.md", "other")
        with pytest.raises(trimcp.InvalidReply, match="changed, or it is stale"):
            await active.read("references/a b.md")
        assert (await skills.get(URI)).fingerprint != active.skill.fingerprint


SAME_SIZE = TEXT.replace("rules", "RULES")


@pytest.mark.parametrize(
    "contents",
    [
        SAME_SIZE,
        TEXT + " ",
        TEXT[:-1],
        TEXT.encode()[:-1] + b"\xff",
        [],
        [TEXT, TEXT],
        trimcp.wire.TextResourceContents("skill://other/SKILL.md", TEXT),
        trimcp.wire.BlobResourceContents(URI, "no base64!"),
    ],
    ids=repr,
)
async def test_other_bytes_than_were_listed_are_not_used(contents: Any) -> None:
    async with connected(lying(entry(), contents=contents)) as session:
        with pytest.raises(trimcp.InvalidReply):
            await trimcp.ServerSkills(session, yes).activate(URI)


@pytest.mark.parametrize(
    "frontmatter",
    [
        {"name": "git-workflow", "description": "Our rules"},
        {"name": "git-workflow", "description": "Our rules", "metadata": {"level": True}},
        {"name": "git-workflow", "description": "Our rules", "metadata": {"level": "1"}},
        {"name": "git-workflow", "description": "Our rules", "metadata": {"level": 1}, "allowed-tools": "Bash"},
        {"name": "git-workflow", "description": "harmless", "metadata": {"level": 1}},
    ],
    ids=repr,
)
async def test_what_was_approved_is_what_the_file_says(frontmatter: dict[str, Any]) -> None:
    async with connected(lying(entry(frontmatter=frontmatter))) as session:
        with pytest.raises(trimcp.InvalidReply, match="other things of itself"):
            await trimcp.ServerSkills(session, yes).activate(URI)


async def test_a_file_without_frontmatter_is_no_skill() -> None:
    text = "---\nname: git-workflow\nx: &a 1\n---\n"
    resources = [{"uri": URI, "digest": digest_of(text.encode()), "size": len(text)}]
    async with connected(lying(entry(resources=resources), contents=text)) as session:
        with pytest.raises(trimcp.InvalidReply, match="alias or an anchor"):
            await trimcp.ServerSkills(session, yes).activate(URI)


async def test_a_dynamic_skill_is_listed_and_not_used() -> None:
    async with connected(lying(entry(resources="dynamic"))) as session:
        skills = trimcp.ServerSkills(session, yes)
        [skill] = await skills.list_all()
        with pytest.raises(trimcp.LocalError, match="is dynamic"):
            await skills.activate(skill)


def file(uri: str, **changes: Any) -> dict[str, Any]:
    return {"uri": uri, "digest": digest_of(b""), "size": 0, **changes}


def bad_entries() -> Iterator[tuple[str, Any]]:
    manifest = entry()["resources"][0]
    yield "object", 7
    yield "object", {"uri": URI}
    yield "object", entry(frontmatter=[])
    yield "no list of files", entry(resources=None)
    yield "no list of files", entry(resources="static")
    yield "lacks its", entry(resources=[])
    yield "twice", entry(resources=[manifest, manifest])
    yield "without address", entry(resources=[manifest, 7])
    yield "without address", entry(resources=[manifest, file("skill://git-workflow/x", size=True)])
    yield "a digest or a size", entry(resources=[manifest, file("skill://git-workflow/x", size=-1)])
    yield "a digest or a size", entry(resources=[manifest, file("skill://git-workflow/x", digest="sha256:" + "A" * 64)])
    yield "a digest or a size", entry(resources=[manifest, file("skill://git-workflow/x", digest="md5:" + "a" * 64)])
    for uri in ("skill://other/x", "skill://git-workflow/../x", "skill://git-workflow/%2E%2e/x", "file:///etc/passwd"):
        yield "not in its folder", entry(resources=[manifest, file(uri)])
    for uri in (
        "skill://git-workflow//x",
        "skill://git-workflow/",
        "skill://git-workflow/a\\..\\x",
        "skill://git-workflow",
    ):
        yield "not in its folder", entry(resources=[manifest, file(uri)])
    many = [file(f"skill://git-workflow/{number}") for number in range(512)]
    yield "more than 512 files", entry(resources=[manifest, *many])
    yield "more than 512 files", entry(resources=[manifest, file("skill://git-workflow/x", size=16 * 1024 * 1024)])
    yield "is not called", entry(uri="skill://other/SKILL.md")
    yield "is not called", entry(uri="skill://git-workflow/README.md")
    yield "small letters", entry(frontmatter={"name": "Git", "description": "x"})
    yield "description", entry(frontmatter={"name": "git-workflow", "description": " "})


@pytest.mark.parametrize(("why", "raw"), list(bad_entries()))
async def test_an_entry_that_is_not_valid_is_left_out(why: str, raw: Any, caplog: pytest.LogCaptureFixture) -> None:
    async with connected(lying(entry(), raw, entry(), got=raw)) as session:
        skills = trimcp.ServerSkills(session, yes)
        found = await skills.list_all()
        assert [skill.uri for skill in found] == [URI]
        assert why in found.rejected[0].reason
        assert found.rejected[-1].reason == "it is listed twice"
        with pytest.raises(trimcp.InvalidReply, match=why):
            await skills.activate(URI)


async def test_another_skill_than_was_asked_for_is_not_used() -> None:
    async with connected(honest()) as session:
        found = await trimcp.ServerSkills(session, yes).get("skill://git-workflow/inner/SKILL.md")
    raw = {"uri": found.uri, "frontmatter": found.frontmatter, "resources": "dynamic"}
    async with connected(lying(entry(), got=raw)) as session:
        with pytest.raises(trimcp.InvalidReply, match="another one than was asked for"):
            await trimcp.ServerSkills(session, yes).get(URI)


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (lambda params: {"skills": {}}, "without skills"),
        (lambda params: {"skills": [], "nextCursor": params.get("cursor", "") + "x"}, "more than 5 pages"),
        (
            lambda params: {"skills": [{"resources": [0] * 60_000}], "nextCursor": params.get("cursor", "") + "x"},
            "100000",
        ),
    ],
)
async def test_a_list_without_end_is_refused(answer: Callable[[Any], Any], why: str) -> None:
    server: trimcp.Server[None] = trimcp.Server("endless", extensions={SKILLS: {}})

    @server.method("skills/list")
    async def answer_list(ctx: trimcp.Context[None], params: dict[str, Any]) -> Any:
        return answer(params)

    async with connected(server, trimcp.Client("c", max_pages=5)) as session:
        with pytest.raises(trimcp.InvalidReply, match=why):
            await trimcp.ServerSkills(session, yes).list_all()


async def test_a_server_without_skills_is_not_asked() -> None:
    async with connected(trimcp.Server[None]("none")) as session:
        assert await trimcp.ServerSkills(session, yes).list_all() == []
        with pytest.raises(trimcp.LocalError, match="no skills"):
            await trimcp.ServerSkills(session, yes).activate(URI)


def test_a_client_without_skills_loads_nothing_of_them() -> None:
    program = "import sys, trimcp; trimcp.Client('c'); print([m for m in sys.modules if 'skill' in m or 'ruamel' in m])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, text=True)
    assert done.stdout == "[]\n"
