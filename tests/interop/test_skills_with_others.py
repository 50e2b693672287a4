"""FastMCP and the official TypeScript SDK read our skills, and we theirs; the Inspector verifies ours."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path

import pytest
import trio

import trimcp
from tests.interop.peers import HERE, NODE, inspect, serving

PEERS = {
    "fastmcp": [Path(os.environ["TRIMCP_FASTMCP_SKILLS"]), HERE / "fastmcp_skills.py"],
    "typescript": [NODE, HERE / "node_skills.mjs"],
}
each = pytest.mark.parametrize("peer", PEERS)
GIT = "skill://git-workflow/SKILL.md"
BOTH = ["skill://acme/refunds/SKILL.md", GIT]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    def write(path: str, content: bytes) -> None:
        file = tmp_path / "skills" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)

    write("git-workflow/SKILL.md", b"---\nname: git-workflow\ndescription: Our rules\nlicense: MIT\n---\n# Git\n")
    write("git-workflow/references/a b.md", b"# A b\n")
    write("git-workflow/logo.bin", b"\xff\x00")
    write("acme/refunds/SKILL.md", b"---\nname: refunds\ndescription: Refund a customer\n---\n")
    return tmp_path / "skills"


@each
async def test_we_read_and_verify_what_others_serve(peer: str, folder: Path, tmp_path: Path) -> None:
    with serving([*PEERS[peer], "serve", folder], tmp_path / "log") as served:
        async with trimcp.Client("skills").connect(served.http) as session:
            skills = trimcp.ServerSkills(session, lambda skill: True)
            found = await skills.list_all()
            assert (sorted(skill.uri for skill in found), found.rejected) == (BOTH, ())
            active = await skills.activate(GIT)
            assert sorted(active.files) == ["SKILL.md", "logo.bin", "references/a b.md"]
            assert [await active.read(path) for path in ("references/a b.md", "logo.bin")] == [b"# A b\n", b"\xff\x00"]


@each
async def test_others_read_and_verify_what_we_serve(peer: str, folder: Path) -> None:
    server: trimcp.Server[None] = trimcp.Server("skills")
    server.skills(folder)
    async with trio.open_nursery() as nursery:
        urls = await nursery.start(partial(trimcp.serve_http, server, port=0))
        words = [*map(str, PEERS[peer]), "read", str(urls[0]), GIT]
        done = await trio.run_process(words, capture_stdout=True, capture_stderr=True, check=False)
        nursery.cancel_scope.cancel()
    assert done.returncode == 0, done.stderr.decode()
    revision, listed, files = json.loads(done.stdout)
    assert (revision, listed) == (trimcp.LATEST.name, BOTH)
    assert files.keys() == {"SKILL.md", "logo.bin", "references/a b.md"}


@pytest.mark.parametrize("era", ["legacy", "modern"])
async def test_the_inspector_verifies_what_we_serve(era: str, folder: Path, tmp_path: Path) -> None:
    server: trimcp.Server[None] = trimcp.Server("skills")
    server.skills(folder)
    async with trio.open_nursery() as nursery:
        urls = await nursery.start(partial(trimcp.serve_http, server, port=0))
        ask = partial(inspect, str(urls[0]), "http", era, tmp_path, "--method", "skills/list", "--verify")
        said = await trio.to_thread.run_sync(partial(ask, "--require-digests"))
        nursery.cancel_scope.cancel()
    assert [(skill["uri"], skill["outcome"], skill["conformance"]) for skill in said] == [
        (uri, "verified", []) for uri in BOTH
    ]
    assert [len(skill["files"]) for skill in said] == [1, 3]
