"""Skills that a server offers: what it lists and reads of folders, also of those that were filled with bad intent."""

from __future__ import annotations

import hashlib
import os
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import trio

import trimcp
from trimcp.errors import LocalError
from trimcp.server.extensions import skills
from trimcp.server.extensions.skills import SkillSource
from trimcp.testing import connected, every_revision
from trimcp.wire.codes import INVALID_PARAMS

SKILLS = "io.modelcontextprotocol/skills"
GIT = "skill://git-workflow/SKILL.md"
TEXT = "---\nname: git-workflow\ndescription: Our rules of git\nmetadata:\n  since: 2026-02-28\n---\n# Git\n"


def manifest(name: str, more: str = "") -> str:
    return f"---\nname: {name}\ndescription: About {name}\n{more}---\n"


def write(root: Path, path: str, content: str | bytes) -> Path:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    return file


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "skills"
    write(root, "git-workflow/SKILL.md", TEXT)
    write(root, "git-workflow/references/a b.md", "# A b\n")
    write(root, "git-workflow/logo.bin", b"\xff\x00\xfe")
    (root / "git-workflow/empty").mkdir()
    write(root, "acme/billing/refunds/SKILL.md", manifest("refunds"))
    write(root, "README.md", "of no skill")
    return root


def serving(*sources: Any, **options: Any) -> trimcp.Server[None]:
    server: trimcp.Server[None] = trimcp.Server("skills", **options)
    for number, source in enumerate(sources):
        server.skills(source, prefix=f"p{number}" if number else "")
    return server


async def listed(session: trimcp.ClientSession) -> dict[str, Any]:
    found: Any = (await session.request("skills/list"))["skills"]
    return {skill["uri"]: skill for skill in found}


async def members(session: trimcp.ClientSession, uri: str) -> list[Any]:
    found: Any = (await session.request("resources/directory/read", {"uri": uri}))["resources"]
    return found  # type: ignore[no-any-return]


@every_revision
async def test_a_folder_is_listed_with_the_digest_and_size_of_every_file(
    folder: Path, revision: trimcp.Revision
) -> None:
    server = serving(folder, list_ttl_ms=5000)
    async with connected(server, revision=revision) as session:
        declared = session.server_capabilities.extensions
        result = await session.request("skills/list")
        got = await session.request("skills/get", {"uri": GIT})
    assert declared == ({SKILLS: {"directoryRead": True}} if revision.name >= "2025-06-18" else None)
    assert (result["ttlMs"], result["cacheScope"]) == (got["ttlMs"], got["cacheScope"]) == (5000, "public")
    assert result.get("resultType") == ("complete" if revision.modern else None)
    found: Any = result["skills"]
    assert [skill["uri"] for skill in found] == ["skill://acme/billing/refunds/SKILL.md", GIT]
    assert got["skill"] == found[1]
    assert found[1]["frontmatter"] == {
        "name": "git-workflow",
        "description": "Our rules of git",
        "metadata": {"since": "2026-02-28"},
    }
    for path, uri in {"SKILL.md": GIT, "references/a b.md": "skill://git-workflow/references/a%20b.md"}.items():
        content = (folder / "git-workflow" / path).read_bytes()
        digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
        assert {"uri": uri, "digest": digest, "size": len(content)} in found[1]["resources"]
    assert len(found[1]["resources"]) == 3


async def test_files_are_read_as_resources_and_folders_are_told(folder: Path) -> None:
    async with connected(serving(folder)) as session:
        assert (await session.read_resource(GIT)).contents[0].mime_type == "text/markdown"
        assert (await session.read_resource(GIT)).text == TEXT
        blob: Any = (await session.read_resource("skill://git-workflow/logo.bin")).contents[0]
        assert (blob.blob, blob.mime_type) == ("/wD+", "application/octet-stream")
        root = await members(session, "skill://git-workflow")
        assert {"uri": GIT, "name": "git-workflow", "mimeType": "text/markdown", "size": len(TEXT)}.items() <= root[
            0
        ].items()
        assert root[0]["description"] == "Our rules of git"
        assert {member["uri"] for member in root if member["mimeType"] == "inode/directory"} == {
            "skill://git-workflow/references",
            "skill://git-workflow/empty",
        }
        assert await members(session, "skill://git-workflow/empty") == []
        assert [each["name"] for each in await members(session, "skill://acme")] == ["billing"]
        for uri in ("skill://git-workflow/", GIT, "skill://nowhere", "skill://README.md"):
            with pytest.raises(trimcp.RemoteError, match="no folder") as info:
                await members(session, uri)
            assert info.value.code == INVALID_PARAMS


@every_revision
async def test_what_is_no_skill_is_an_error_of_params(folder: Path, revision: trimcp.Revision) -> None:
    async with connected(serving(folder), revision=revision) as session:
        for params in ({"uri": "skill://nowhere/SKILL.md"}, {"uri": "skill://git-workflow"}, {"uri": 7}, {}):
            with pytest.raises(trimcp.RemoteError) as info:
                await session.request("skills/get", params)
            assert info.value.code == INVALID_PARAMS
        with pytest.raises(trimcp.RemoteError) as info:
            await session.request("skills/list", {"cursor": 7})
        assert info.value.code == INVALID_PARAMS


@pytest.mark.parametrize(
    "path",
    [
        *("../outside.md", "git-workflow/../../outside.md", "git-workflow/%2e%2e/%2e%2e/outside.md", "README.md"),
        *("git-workflow/.env", "git-workflow/link.md", "git-workflow/away/outside.md", "git-workflow//SKILL.md"),
        *("git-workflow/", "git-workflow/pipe", "git-workflow/socket", "/etc/passwd", "git-workflow/SKILL.md%00"),
    ],
)
async def test_nothing_outside_of_skills_is_read(folder: Path, path: str, caplog: pytest.LogCaptureFixture) -> None:
    write(folder.parent, "outside.md", "secret")
    write(folder, "git-workflow/.env", "secret")
    (folder / "git-workflow/link.md").symlink_to(folder.parent / "outside.md")
    (folder / "git-workflow/away").symlink_to(folder.parent)
    os.mkfifo(folder / "git-workflow/pipe")
    with socket.socket(socket.AF_UNIX) as made:
        here = os.getcwd()
        os.chdir(folder / "git-workflow")  # the whole path may be too long for a socket
        try:
            made.bind("socket")
        finally:
            os.chdir(here)
    async with connected(serving(folder)) as session:
        with pytest.raises(trimcp.RemoteError) as info:
            await session.read_resource(f"skill://{path}")
        assert info.value.code == INVALID_PARAMS
        assert len((await listed(session))[GIT]["resources"]) == 3
    assert caplog.text.count("is a link, or no file") == 4  # once of each, however often it is looked at


async def test_a_file_that_becomes_a_link_after_the_look_is_not_followed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(folder.parent, "outside/SKILL.md", TEXT)
    server = serving(folder)
    original = SkillSource.read
    swapped = []

    def read(self: SkillSource, path: str) -> bytes:
        if not swapped:
            swapped.append((folder / "git-workflow").rename(folder.parent / "gone"))
            (folder / "git-workflow").symlink_to(folder.parent / "outside")
        return original(self, path)

    async with connected(server) as session:
        await listed(session)
        monkeypatch.setattr(SkillSource, "read", read)
        monkeypatch.setattr(skills, "_RECENT", 0)  # so that the look itself reads nothing again
        with pytest.raises(trimcp.RemoteError) as info:
            await session.read_resource(GIT)
    assert info.value.code == INVALID_PARAMS
    assert swapped


async def test_the_next_request_sees_a_change(folder: Path) -> None:
    async with connected(serving(folder)) as session:
        before = await listed(session)
        write(folder, "git-workflow/SKILL.md", TEXT.replace("rules", "RULES"))  # of the same size, in the same moment
        after = await listed(session)
        assert before[GIT]["resources"][0]["digest"] != after[GIT]["resources"][0]["digest"]
        assert after[GIT]["frontmatter"]["description"] == "Our RULES of git"
        assert "RULES" in (await session.read_resource(GIT)).text
        write(folder, "new/SKILL.md", manifest("new"))
        (folder / "acme/billing/refunds/SKILL.md").unlink()
        assert list(await listed(session)) == [GIT, "skill://new/SKILL.md"]


async def test_a_change_within_the_clocks_step_is_seen(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some systems keep the time of a change in steps of seconds: one that was just now may not be the last."""
    step = 1_000_000_000
    monkeypatch.setattr(skills, "stamp_of", lambda status: (status.st_mtime_ns // step * step, status.st_size))
    async with connected(serving(folder)) as session:
        write(folder, "git-workflow/SKILL.md", TEXT.replace("rules", "RULES"))
        assert (await listed(session))[GIT]["frontmatter"]["description"] == "Our RULES of git"


async def test_bytes_that_changed_after_the_look_are_told_with_their_own_digest(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = SkillSource.read
    texts = [TEXT.replace("rules", f"rule{number}") for number in range(10)]

    def read(self: SkillSource, path: str) -> bytes:
        if changing and path == "git-workflow/SKILL.md":
            write(folder, path, changing.pop())
        return original(self, path)

    async with connected(serving(folder)) as session:
        changing = texts[:1]
        await listed(session)
        monkeypatch.setattr(SkillSource, "read", read)
        assert (await session.read_resource(GIT)).text == texts[0]
        changing = texts  # whenever somebody looks
        with pytest.raises(trimcp.RemoteError, match="changes while it is read"):
            await session.read_resource(GIT)


async def test_only_what_changed_is_read_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in ("git-workflow/SKILL.md", "git-workflow/references/a b.md", "acme/billing/refunds/SKILL.md"):
        os.utime(folder / path, (1_000_000_000, 1_000_000_000))
    os.utime(folder / "git-workflow/logo.bin", (1_000_000_000, 1_000_000_000))
    server = serving(folder)
    read: list[str] = []
    original = SkillSource.read
    monkeypatch.setattr(SkillSource, "read", lambda self, path: (read.append(path), original(self, path))[1])
    async with connected(server) as session:
        await listed(session)
        assert read == []
        write(folder, "git-workflow/logo.bin", b"new")
        await listed(session)
        assert read == ["git-workflow/logo.bin"]


async def test_requests_at_once_share_a_look_that_began_after_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serving(folder)
    looks = 0
    original = SkillSource.look

    def look(self: Any) -> Any:
        nonlocal looks
        looks += 1
        return original(self)

    monkeypatch.setattr(SkillSource, "look", look)
    async with connected(server) as session, trio.open_nursery() as nursery:
        for _ in range(20):
            nursery.start_soon(listed, session)
    assert 1 <= looks <= 3


@pytest.mark.parametrize(
    ("path", "content", "why"),
    [
        ("bad/SKILL.md", "no frontmatter", "does not begin with frontmatter"),
        ("bad/SKILL.md", manifest("other"), "not called other"),
        ("BAD/SKILL.md", manifest("BAD"), "small letters"),
        ("bad/SKILL.md", "---\nname: bad\n---\n", "description"),
        ("bad/SKILL.md", f"---\nname: bad\ndescription: {'x' * 1025}\n---\n", "description"),
        ("bad/SKILL.md", "---\nname: bad\ndescription: &a x\nb: *a\n---\n", "alias or an anchor"),
        ("bad/SKILL.md", b"---\nname: \xff\n---\n", "not UTF-8"),
    ],
)
async def test_a_skill_that_is_not_valid_is_left_out_with_a_warning(
    folder: Path, path: str, content: str | bytes, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    write(folder, path, content)
    async with connected(serving(folder)) as session:
        assert len(await listed(session)) == 2
        assert len(await listed(session)) == 2
    assert caplog.text.count(why) == 1


async def test_the_limits_of_a_skill_are_its_files_and_their_bytes(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(512):
        write(folder, f"many/{number}.txt", "x")
    write(folder, "many/SKILL.md", manifest("many"))
    write(folder, "large/SKILL.md", manifest("large"))
    os.truncate(write(folder, "large/hole", ""), 16 * 1024 * 1024)  # it takes no room on the disk, and is not read
    async with connected(serving(folder)) as session:
        assert len(await listed(session)) == 2
        (folder / "many/0.txt").unlink()
        os.truncate(folder / "large/hole", 1000)
        found = await listed(session)
        assert len(found["skill://many/SKILL.md"]["resources"]) == 512
        assert len(found["skill://large/SKILL.md"]["resources"]) == 2
    assert caplog.text.count("more than 512 files") == 2


async def test_a_skill_inside_another_is_one_of_its_own_and_part_of_the_other(folder: Path) -> None:
    write(folder, "git-workflow/inner/SKILL.md", manifest("inner"))
    write(folder, "git-workflow/wrong/SKILL.md", "no frontmatter: a file like others")
    async with connected(serving(folder)) as session:
        found = await listed(session)
        inner = "skill://git-workflow/inner/SKILL.md"
        assert {inner, GIT} <= found.keys()
        files = {file["uri"] for file in found[GIT]["resources"]}
        assert {inner, "skill://git-workflow/wrong/SKILL.md"} <= files


async def test_lists_come_in_pages(folder: Path) -> None:
    for number in range(5):
        write(folder, f"s{number}/SKILL.md", manifest(f"s{number}"))
    async with connected(serving(folder, page_size=3)) as session:
        names, cursor = [], None
        while True:
            page: Any = await session.request("skills/list", {} if cursor is None else {"cursor": cursor})
            assert len(page["skills"]) <= 3
            names += [skill["frontmatter"]["name"] for skill in page["skills"]]
            if (cursor := page.get("nextCursor")) is None:
                break
        assert names == ["refunds", "git-workflow", "s0", "s1", "s2", "s3", "s4"]


async def test_files_in_code_and_several_sources(folder: Path) -> None:
    given = {"hello/SKILL.md": manifest("hello"), "hello/data": b"\x00"}
    async with connected(serving(folder, given)) as session:
        found = await listed(session)
        assert "skill://p1/hello/SKILL.md" in found
        assert GIT in found
        assert (await session.read_resource("skill://p1/hello/SKILL.md")).text == manifest("hello")
        assert [each["name"] for each in await members(session, "skill://p1")] == ["hello"]


@pytest.mark.parametrize(
    "source",
    [
        {"hello/SKILL.md": "no frontmatter"},
        {"../hello/SKILL.md": manifest("hello")},
        {"SKILL.md": manifest("hello")},
        {"hello/SKILL.md": manifest("hello"), "alone.md": "x"},
        "/nowhere/at/all",
    ],
    ids=str,
)
def test_what_an_author_gave_and_cannot_be_served_is_told_at_once(source: Any) -> None:
    with pytest.raises(ValueError):
        serving(source)


def test_a_prefix_is_a_path_and_used_once(folder: Path) -> None:
    server = serving(folder)
    for prefix in ("..", "a//b", "./x"):
        with pytest.raises(ValueError, match="prefix is a path"):
            server.skills(folder, prefix=prefix)
    with pytest.raises(trimcp.LocalError, match="already"):
        server.skills(folder)
    with pytest.raises(ValueError, match="a folder for each"):
        server.skills(folder / "git-workflow", prefix="x")


async def test_none_is_added_while_the_server_runs(folder: Path) -> None:
    server = serving(folder)
    async with server.running():
        with pytest.raises(LocalError, match="skills cannot be added while the server runs"):
            server.skills({"refunds/SKILL.md": manifest("refunds")}, prefix="late")


def test_a_look_at_many_skills_does_as_much_as_at_each_alone() -> None:
    def calls(number: int) -> int:
        source = SkillSource(None, {f"s{n}/SKILL.md": manifest(f"s{n}").encode() for n in range(number)}, "")
        source.look()  # later ones read nothing
        count = 0

        def counted(frame: object, event: str, argument: object) -> None:
            nonlocal count
            count += 1

        before = sys.getprofile()
        sys.setprofile(counted)
        try:
            found = source.look()
        finally:
            sys.setprofile(before)
        assert len(found.skills) == number
        return count

    assert calls(800) < 10 * calls(100), "eight times as many: 64 times as much where each looks at all"


def test_without_the_extra_it_says_what_to_install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ruamel", None)
    with pytest.raises(trimcp.LocalError, match=r"pip install 'trimcp\[skills\]'"):
        serving(folder)
