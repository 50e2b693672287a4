"""How peers are named, started, and kept installed."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import environments
import pytest
from environments import Peer, Way
from names import BEFORE, COMPILED, OURS

PEER = Peer(
    "somebody",
    ("/bin/interpreter", "server.x"),
    (Way("stdio", "2025-11-25"), Way("http", "2025-11-25", "json"), Way("http", "2026-07-28", "auto")),
    words=("--server", "other"),
    collecting=("--expose-gc",),
)


def test_a_peer_over_stdio_needs_no_words_about_a_network() -> None:
    assert PEER.command("stdio") == ["/bin/interpreter", "server.x", "stdio"]


def test_a_peer_over_a_network_is_told_how_to_answer() -> None:
    wanted = ["/bin/interpreter", "server.x", "http", "--reply", "json", "--server", "other"]
    assert PEER.command("http", reply="json") == wanted


def test_a_peer_that_counts_is_started_by_an_interpreter_that_lets_it() -> None:
    assert PEER.counting("sse") == ["/bin/interpreter", "--expose-gc", "server.x", "sse", "--server", "other"]


@pytest.mark.parametrize(
    ("asked", "can"),
    [
        (("stdio",), True),
        (("http", "2025-11-25"), True),
        (("http", "2025-11-25", "json"), True),
        (("http", None, "auto"), True),
        # Each part is true of one way, but there is no way of which all are.
        (("http", "2026-07-28", "json"), False),
        (("stdio", "2026-07-28"), False),
        (("websocket",), False),
    ],
)
def test_what_a_peer_can(asked: tuple[str, ...], can: bool) -> None:
    assert PEER.can(*asked) is can


def test_what_a_client_can() -> None:
    caller = Peer("somebody", ("/bin/interpreter",), (), (Way("http", "2025-11-25"),))
    assert caller.can_call("http", "2025-11-25")
    assert not caller.can_call("http", "2026-07-28")
    assert not caller.can_call("stdio", "2025-11-25")


def test_every_pin_is_a_version(tmp_path: Path) -> None:
    assert all("==" in requirement for requirement in environments.PINS["python"].values())
    assert all(version[0].isdigit() for version in environments.PINS["npm"].values())


@pytest.mark.needs("tar")
def test_an_earlier_trimcp_is_installed_from_its_commit_and_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "tree"
    git = ["git", "-C", str(root), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    subprocess.run(["git", "init", "--quiet", str(root)], check=True)
    for text in ("then", "now"):
        (root / "module.py").write_text(text)
        subprocess.run([*git, "add", "module.py"], check=True)
        subprocess.run([*git, "commit", "--quiet", "--message", text], check=True)
    installed: list[str] = []

    def run(*command: str) -> None:
        if "install" in command:
            installed.append((Path(command[-1].removesuffix("[cli]")) / "module.py").read_text())
        else:
            Path(command[-1]).mkdir(parents=True)

    monkeypatch.setattr(environments, "ROOT", root)
    monkeypatch.setattr(environments, "FOLDER", tmp_path / "peers")
    monkeypatch.setattr(environments, "_ours", lambda: PEER)
    monkeypatch.setattr(environments, "_run", run)
    for _ in range(2):
        peer = environments.find_before("HEAD~1")
        assert (peer.name, peer.ways, peer.program[1:]) == (BEFORE, PEER.ways, PEER.program[1:])
        assert peer.program[0] != PEER.program[0]
    assert installed == ["then"]


def made(folder: Path, pins: list[str], digest: str = "") -> tuple[bool, bool]:
    folder.mkdir(exist_ok=True)
    with environments._made(folder, pins, digest) as found:
        return found


def test_an_environment_is_made_once(tmp_path: Path) -> None:
    assert made(tmp_path / "a", ["one==1", "two==2"], "x") == (True, True)
    assert made(tmp_path / "a", ["one==1", "two==2"], "x") == (False, False)


def test_an_environment_of_other_pins_is_made_again(tmp_path: Path) -> None:
    made(tmp_path / "a", ["one==1", "two==2"], "x")
    assert made(tmp_path / "a", ["one==1", "two==3"], "x")[0]


def test_an_environment_with_an_older_package_of_ours_is_brought_up_to_date(tmp_path: Path) -> None:
    made(tmp_path / "a", ["ours"], "x")
    assert made(tmp_path / "a", ["ours"], "y") == (False, True)


def test_an_environment_that_could_not_be_made_counts_as_missing(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    folder.mkdir()
    with pytest.raises(OSError, match="no network"), environments._made(folder, ["one==1"]):
        raise OSError("no network")
    assert made(folder, ["one==1"]) == (True, False)


def test_what_has_to_be_built_is_left_out_with_a_word_where_nothing_builds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(environments, "FOLDER", tmp_path)
    monkeypatch.setattr(environments, "_ours", lambda: PEER)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert environments.find_peers([OURS, *COMPILED]) == [PEER]
    said = capsys.readouterr().err
    assert "go-sdk 1.8 is left out: there is no go to build it" in said
    assert "rmcp 3.11 is left out: there is no cargo to build it" in said


def test_what_is_built_is_built_again_when_its_sources_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, ran = tmp_path / "source", []
    source.mkdir()
    (source / "main.go").write_text("package main")
    monkeypatch.setattr(environments, "FOLDER", tmp_path / "built")
    monkeypatch.setattr(environments, "_run", lambda *words: ran.append(words[1:]))
    for text in ("package main", "package main", "package main // other"):
        (source / "main.go").write_text(text)
        assert environments._built("it", source, "sh", "build")
    assert ran == [("build",)] * 2


def test_the_compiled_peers_use_the_pinned_versions() -> None:
    peers = environments.HERE / "peers"
    go, rust = (peers / "go_sdk" / "go.mod").read_text("utf-8"), (peers / "rmcp" / "Cargo.toml").read_text("utf-8")
    assert re.findall(r"go-sdk (v[\d.]+)", go)[0] == environments.PINS["go"]["go-sdk"]
    assert re.findall(r'rmcp = \{ version = "=([\d.]+)"', rust) == [environments.PINS["cargo"]["rmcp"]]
