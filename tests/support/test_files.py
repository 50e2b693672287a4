"""Files that somebody names, of every kind that may stand there: one sentence, with the path and what to do."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from trimcp.errors import LocalError
from trimcp.support.files import UnusableFile, WrongFile, claim_file, read_file, read_text

ROOT = os.geteuid() == 0 if hasattr(os, "geteuid") else False


def make(kind: str, path: Path) -> None:
    match kind:
        case "folder":
            path.mkdir()
        case "below a file":
            path.parent.write_bytes(b"")
        case "loop":
            path.symlink_to(path)
        case "dangling":
            path.symlink_to(path.with_name("nowhere"))
        case "unreadable":
            path.write_bytes(b"x")
            path.chmod(0)
        case "pipe":
            os.mkfifo(path)
        case "device":
            path.symlink_to("/dev/zero")


KINDS = ["missing", "folder", "below a file", "loop", "dangling", "unreadable", "pipe", "device"]


def place(kind: str, tmp_path: Path) -> Path:
    path = tmp_path / "x" / "f" if kind == "below a file" else tmp_path / "f"
    make(kind, path)
    return path


@pytest.mark.parametrize("kind", KINDS)
def test_what_cannot_be_read_is_one_sentence(kind: str, tmp_path: Path) -> None:
    if kind == "unreadable" and ROOT:
        pytest.skip("root reads everything")
    path = place(kind, tmp_path)
    with pytest.raises(UnusableFile) as caught:
        read_file(path, "the tokens", regular=True)
    text = str(caught.value)
    assert text.startswith(f"cannot read the tokens from {path}: ")
    assert "\n" not in text
    assert ";" in text  # and what to do
    assert isinstance(caught.value, LocalError)
    assert isinstance(caught.value, FileNotFoundError) == (kind in ("missing", "dangling"))


def test_a_name_that_is_none(tmp_path: Path) -> None:
    for name in ("a\0b", "x" * 300, "\ud800" * 300):
        with pytest.raises(UnusableFile):
            read_file(tmp_path / name, "the tokens")
        with pytest.raises(UnusableFile):
            claim_file(tmp_path / name, fits=bool, wrong="", busy="")


def test_a_text_has_a_mark_or_none_and_is_no_other_than_utf_8(tmp_path: Path) -> None:
    path = tmp_path / "f"
    for data in (b"\xef\xbb\xbf{}", b"{}"):
        path.write_bytes(data)
        assert read_text(path, "it") == "{}"
    for data in (b"\xff\xfes3cret", b"s3cret\x80", "s3cret".encode("utf-16")):
        path.write_bytes(data)
        with pytest.raises(WrongFile, match="not UTF-8; save it") as caught:
            read_text(path, "it")
        assert "s3cret" not in str(caught.value)


def test_a_file_without_end_is_not_read_to_it(tmp_path: Path) -> None:
    with pytest.raises(WrongFile, match="larger than 16 MiB"):
        read_file("/dev/zero", "the tokens")


def test_a_pipe_is_read_to_its_end() -> None:
    reading, writing = os.pipe()
    os.write(writing, b"from a command")
    os.close(writing)
    try:
        assert read_text(f"/dev/fd/{reading}", "the token", secret=True) == "from a command"
    finally:
        os.close(reading)


@pytest.mark.parametrize("mode", range(0o600, 0o1000, 0o11))
def test_secrets_that_others_can_read_or_change_are_told_of(
    mode: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"s3cret")
    path.chmod(mode)
    assert read_file(path, "it", secret=True) == b"s3cret"
    assert bool(caplog.records) == bool(mode & 0o077)
    if caplog.records:
        assert f"(mode {mode:03o}): chmod 600 {path}" in caplog.text
    caplog.clear()
    read_file(path, "it")
    assert not caplog.records


@pytest.mark.skipif(not ROOT, reason="only root gives files away")
def test_secrets_of_another_user_are_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"s3cret")
    path.chmod(0o600)
    os.chown(path, 12345, -1)
    read_file(path, "it", secret=True)
    assert "belong to another user" in caplog.text
    assert caplog.records[0].levelno == logging.WARNING


@pytest.mark.parametrize("kind", [each for each in KINDS if each != "missing"])
def test_what_cannot_be_claimed_is_left_as_it_was(kind: str, tmp_path: Path) -> None:
    path = place(kind, tmp_path)
    if kind == "unreadable" and ROOT:
        pytest.skip("root opens everything")
    before = path.lstat() if kind != "below a file" else None
    zero = os.stat("/dev/zero").st_mode
    with pytest.raises(UnusableFile) as caught:
        claim_file(path, fits=lambda head: True, wrong=f"{path} is wrong", busy=f"{path} is busy")
    assert str(path) in str(caught.value)
    assert os.stat("/dev/zero").st_mode == zero
    if before is not None:
        assert path.lstat().st_mode == before.st_mode


def test_a_device_is_not_claimed_by_its_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """By root, who could: its rights would be taken from everybody."""
    before = os.stat("/dev/null").st_mode
    monkeypatch.setattr(os, "fchmod", None)  # a test that is red must not do it
    with pytest.raises(WrongFile, match="is wrong"):
        claim_file(Path("/dev/null"), fits=lambda head: True, wrong="it is wrong", busy="")
    assert os.stat("/dev/null").st_mode == before


def test_a_claim_is_for_one_and_its_file_for_its_owner(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"head")
    path.chmod(0o666)

    def claim(fits: Callable[[bytes], bool]) -> int:
        return claim_file(path, fits=fits, wrong="wrong", busy="busy")

    with pytest.raises(WrongFile, match=r"^wrong$"):
        claim(lambda head: head == b"other")
    assert stat.S_IMODE(path.stat().st_mode) == 0o666  # it is not ours
    descriptor = claim(lambda head: head == b"head")
    try:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with pytest.raises(UnusableFile, match=r"^busy$"):
            claim(lambda head: True)
    finally:
        os.close(descriptor)
    os.close(claim(lambda head: True))
