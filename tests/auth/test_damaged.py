"""Login files, locks and keyrings of any shape: one sentence with the path and what to do, and no traceback."""

from __future__ import annotations

import base64
import json
import logging
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import trio
from click.testing import CliRunner, Result
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.auth.authority import ISSUER, REDIRECT, SERVER
from tests.auth.test_oauth import KEY, World, ask
from trimcp.auth.browser import Browser
from trimcp.auth.credentials import Credentials, Registration, StoreKey, Tokens
from trimcp.auth.jose import ProofKey
from trimcp.auth.stores import FileStore, KeyringStore
from trimcp.cli.app import app
from trimcp.errors import AuthorizationError

NOBODY = "http://127.0.0.1:1/mcp"  # where nobody listens
GOOD = Credentials(
    NOBODY,
    ISSUER,
    Registration("me", "s3cret", redirect_uri=REDIRECT, expires_at=2e9, scopes=("a",)),
    Tokens("t0ken", "dpop", ("a",), 2e9, 600.0, "r3fresh"),
    ("a",),
    ProofKey.generate().jwk,
)
ENTRY = json.dumps([NOBODY, ""])


def logins(text: object = None, entry: str = ENTRY) -> bytes:
    said = GOOD.to_json() if text is None else text if isinstance(text, str) else json.dumps(text)
    return json.dumps({"logins": {entry: said}}).encode()


def changed(**members: Any) -> bytes:
    return logins({**json.loads(GOOD.to_json()), **members})


def tokens(**members: Any) -> bytes:
    whole = json.loads(GOOD.to_json())
    return logins({**whole, "tokens": {**whole["tokens"], **members}})


FILES: dict[str, bytes | Callable[[Path], object]] = {
    "empty": b"",
    "half": logins()[:80],
    "not JSON": b"logins: none",
    "a list": b"[]",
    "no logins": b'{"logins": 3}',
    "not UTF-8": b"\xff\xfe" + logins(),
    "binary": os.urandom(300),
    "nested": b"[" * 100_000,
    "a folder": Path.mkdir,
    "a loop": lambda path: path.symlink_to(path),
    "a pipe": os.mkfifo,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "names that are none": logins(entry="nonsense"),
    "names of another kind": logins(entry="[1, 2]"),
    "names of no URL": logins(entry='["http://[", ""]'),
    "texts that are none": json.dumps({"logins": {ENTRY: 3}}).encode(),
}
ENTRIES: dict[str, bytes] = {
    "empty text": logins(""),
    "not JSON text": logins("{"),
    "a list text": logins([]),
    "no members": logins({}),
    "nested text": logins("[" * 100_000),
    "no end": tokens(expires_at=float("inf")),
    "no number": tokens(expires_at=float("nan")),
    "a far end": tokens(expires_at=1e300),
    "an end as text": tokens(expires_at="soon"),
    "an end as truth": tokens(expires_at=True),
    "a token as number": tokens(access_token=5),
    "no token": tokens(access_token=""),
    "a token with lines": tokens(access_token="a\r\nX: y"),
    "a token not ASCII": tokens(access_token="\ud800"),
    "another kind": tokens(token_type="mac"),
    "scopes as text": tokens(scopes="abc"),
    "a client as list": changed(registration=["me"]),
    "a client as number": changed(registration={"client_id": 5}),
    "an issuer as number": changed(issuer=5),
    "a key as text": changed(proof_key="k"),
    "half a character in what renews": tokens(refresh_token="\ud800"),
    "half a character in the client": changed(registration={"client_id": "\ud800"}),
    "half a character in the scopes": changed(asked=["\ud800"]),
}
STRANGE = [
    "",
    "\x00",
    "http://[",
    "http://x:99999/",
    "https://\u2100.example/",
    "https://a:b@c/",
    "\x1b[2J",
    "x" * 5_000,
]


def run(home: Path, *words: str) -> Result:
    return CliRunner().invoke(app, [*words], env={"XDG_DATA_HOME": str(home), "HOME": str(home)})


def stand(home: Path, what: bytes | Callable[[Path], object]) -> Path:
    path = home / "trimcp" / "credentials.json"
    path.parent.mkdir()
    if isinstance(what, bytes):
        path.write_bytes(what)
        path.chmod(0o600)
    else:
        what(path)
    return path


COMMANDS = [("whoami",), ("whoami", "--json"), ("logout", NOBODY), ("call", NOBODY, "x"), ("inspect", NOBODY)]


@pytest.mark.parametrize("kind", FILES)
def test_a_damaged_file_is_one_sentence_of_every_command(kind: str, tmp_path: Path) -> None:
    path = stand(tmp_path, FILES[kind])
    for words in COMMANDS:
        done = run(tmp_path, *words)
        assert isinstance(done.exception, SystemExit), (words, done.exception)
        assert done.exit_code == 2
        assert done.output.count("\n") == 1
        assert str(path) in done.output
        assert "move it away" in done.output or "check the path" in done.output or "name a file" in done.output
        assert "s3cret" not in done.output
    logged_in = run(tmp_path, "login", NOBODY)
    assert isinstance(logged_in.exception, SystemExit)
    assert str(path) in logged_in.output


@pytest.mark.parametrize("kind", ENTRIES)
def test_a_damaged_login_is_one_sentence_and_can_be_logged_in_over(kind: str, tmp_path: Path) -> None:
    path = stand(tmp_path, ENTRIES[kind])
    shown = run(tmp_path, "whoami")
    assert (shown.exit_code, str(path) in shown.output) == (0, True)
    for words in (("call", NOBODY, "x"), ("inspect", NOBODY)):
        done = run(tmp_path, *words)
        assert isinstance(done.exception, SystemExit), (words, done.exception)
        assert done.exit_code == 2
        assert f"log in again: trimcp login {NOBODY}" in done.output
    done = run(tmp_path, "login", NOBODY)  # nobody listens, which is all that is wrong by now
    assert "could not be fetched" in done.output
    assert run(tmp_path, "logout", NOBODY).exit_code == 2
    assert "there is no login" in run(tmp_path, "logout", NOBODY).output


def test_one_that_is_damaged_hides_no_other(tmp_path: Path) -> None:
    other = json.dumps(["https://other.example/mcp", ""])
    said = {"logins": {ENTRY: "{", other: GOOD.to_json()}}
    stand(tmp_path, json.dumps(said).encode())
    shown = run(tmp_path, "whoami")
    assert "https://other.example/mcp" in shown.output
    assert f"trimcp login {NOBODY}" in shown.output


def test_a_token_nested_beyond_all_reading_is_listed(tmp_path: Path) -> None:
    payload = base64.urlsafe_b64encode(b'{"sub":' + b"[" * 100_000).decode()
    stand(tmp_path, tokens(access_token=f"e30.{payload}.x"))
    for words in (("whoami",), ("whoami", "--json")):
        shown = run(tmp_path, *words)
        assert shown.exit_code == 0
        assert NOBODY in shown.output


@pytest.mark.parametrize("name", ["resource", "issuer", "found_at", "redirect_uri"])
@pytest.mark.parametrize("text", STRANGE)
async def test_an_address_that_is_none_crashes_nothing(name: str, text: str, caplog: pytest.LogCaptureFixture) -> None:
    whole = json.loads(GOOD.to_json())
    whole["tokens"] = {"access_token": "old", "refresh_token": "r", "expires_at": 5.0}
    (whole["registration"] if name == "redirect_uri" else whole)[name] = text
    found = Credentials.from_json(json.dumps(whole))

    def refuse(url: str) -> None:
        raise AuthorizationError("nobody logs in")

    for refresh_token in ("r", None):
        world = World()
        kept = attrs.evolve(found, tokens=attrs.evolve(found.tokens, refresh_token=refresh_token))
        await world.oauth.store.save(KEY, kept)
        world.oauth.user_agent = Browser(open=refuse, notify=lambda text: None)
        async with world.oauth.connected(SERVER) as authorizer:
            with suppress(AuthorizationError):
                await authorizer.refused(401, {}, await authorizer.headers("POST", SERVER), 0)
    assert "Traceback" not in caplog.text


def test_a_machine_without_a_home_keeps_no_logins(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr("trimcp.auth.stores.Path.home", homeless)
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    for words in (("whoami",), ("logout", NOBODY), ("login", NOBODY)):
        done = CliRunner().invoke(app, [*words])
        assert isinstance(done.exception, SystemExit), (words, done.exception)
        assert "set XDG_DATA_HOME or HOME" in done.output
    done = CliRunner().invoke(app, ["call", NOBODY, "x"])
    assert "could not connect" in done.output


def damage(folder: Path, kind: str, *, whole: bool) -> None:
    """Put something in the place of a lock."""
    for lock in folder.glob(".*.lock"):
        if (lock.name == ".logins.json.lock") == whole:
            lock.unlink()
            lock.mkdir() if kind == "a folder" else lock.symlink_to(lock)


@pytest.mark.parametrize("which", ["of the login", "of the file"])
@pytest.mark.parametrize("kind", ["a folder", "a loop"])
async def test_a_lock_that_cannot_be_taken_is_one_sentence(which: str, kind: str, tmp_path: Path) -> None:
    path = tmp_path / "logins.json"
    store = FileStore(path)
    await store.save(KEY, GOOD)
    async with store.exclusively(KEY):
        pass
    damage(tmp_path, kind, whole=which == "of the file")
    with pytest.raises(AuthorizationError, match=r"\.lock cannot be locked: .*;") as caught:
        if which == "of the file":
            await store.save(KEY, GOOD)
        else:
            async with store.exclusively(KEY):
                pass
    assert "\n" not in str(caught.value)


async def test_a_damaged_file_ends_no_connection_that_has_a_login(tmp_path: Path) -> None:
    world = World()
    world.person.says_yes.set()
    path = tmp_path / "logins.json"
    oauth = world.make(store=FileStore(path))
    world.authority.tokens = {"refresh_token": "again"}
    async with oauth.connected(SERVER) as authorizer:
        await ask(authorizer)
        path.write_bytes(b"{")
        for number in range(2, 5):
            world.clock.now += 601
            assert await authorizer.headers("POST", SERVER) == {"authorization": f"Bearer token-{number}"}
        path.unlink()
    assert len(await FileStore(path).keys()) == 1  # kept as the connection ended


async def test_a_login_file_that_others_can_read_is_told_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "logins.json"
    store = FileStore(path)
    await store.save(KEY, GOOD)
    assert await store.load(KEY) == GOOD
    assert not caplog.records
    path.chmod(0o644)
    store = FileStore(path)
    for _ in range(3):
        await store.load(KEY)
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert f"chmod 600 {path}" in record.getMessage()
    assert "t0ken" not in caplog.text
    await store.save(KEY, GOOD)
    assert path.stat().st_mode & 0o077 == 0


def test_the_command_tells_of_files_that_others_can_read(tmp_path: Path) -> None:
    path = stand(tmp_path, logins())
    path.chmod(0o640)
    token = tmp_path / "token"
    token.write_text("hush\n")
    token.chmod(0o604)
    logging.getLogger().handlers, handlers = [], logging.getLogger().handlers  # as in a process of its own
    try:
        shown = run(tmp_path, "whoami").output + run(tmp_path, "call", NOBODY, "x", "--bearer", f"@{token}").output
    finally:
        logging.getLogger().handlers = handlers
    assert f"chmod 600 {path}" in shown
    assert f"chmod 600 {token}" in shown


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
MEMBERS = st.sampled_from(
    ["resource", "issuer", "registration", "tokens", "asked", "proof_key", "names_resource", "found_at"]
)
PARTS = st.sampled_from(
    ["access_token", "token_type", "scopes", "expires_at", "lifetime", "refresh_token", "client_id"]
)
KEYS = st.sampled_from(["kty", "crv", "x", "y", "d", "use", "alg", "key_ops", "kid"])


@given(
    members=st.dictionaries(MEMBERS, JSON, max_size=2),
    parts=st.dictionaries(PARTS, JSON, max_size=2),
    key=st.dictionaries(KEYS, JSON | st.sampled_from(["enc", "P-384", "RSA"]), max_size=2),
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_a_login_of_any_shape_is_used_or_refused_and_crashes_nothing(
    members: dict[str, Any], parts: dict[str, Any], key: dict[str, Any]
) -> None:
    whole = json.loads(GOOD.to_json())
    whole["tokens"].update(parts)
    whole["registration"].update({name: value for name, value in parts.items() if name == "client_id"})
    whole["proof_key"].update(key)
    whole.update(members)
    try:
        found = Credentials.from_json(json.dumps(whole))
    except ValueError:
        return
    assert Credentials.from_json(found.to_json()) == found

    async def main() -> None:
        world = World()
        world.person.says_yes.set()
        await world.oauth.store.save(KEY, found)
        async with world.oauth.connected(SERVER) as authorizer:
            try:
                sent = await authorizer.headers("POST", SERVER)
                await authorizer.refused(401, {}, sent, 0)
            except AuthorizationError:
                return
            assert all(value.isascii() and value.isprintable() for value in sent.values())

    trio.run(main)


# The keyring


@pytest.mark.parametrize("what", ["get_password", "set_password", "delete_password"])
@pytest.mark.parametrize("error", [RuntimeError("The keyring is locked\n\x1b[2J"), KeyError(), OSError(5, "I/O")])
async def test_a_keyring_that_cannot_be_used_is_one_sentence(
    what: str, error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: dict[tuple[str, str], str] = {}
    ring = {
        "get_password": lambda service, name: kept.get((service, name)),
        "set_password": lambda service, name, text: kept.update({(service, name): text}),
        "delete_password": lambda service, name: kept.pop((service, name)),
    }
    monkeypatch.setitem(sys.modules, "keyring", SimpleNamespace(**ring))
    await KeyringStore(tmp_path / "names.json").save(KEY, GOOD)

    def fail(*args: str) -> Any:
        raise error

    monkeypatch.setitem(sys.modules, "keyring", SimpleNamespace(**{**ring, what: fail}))
    store = KeyringStore(tmp_path / "names.json")
    with pytest.raises(AuthorizationError, match=r"^the keyring cannot be used: .*; unlock it") as caught:
        if what == "get_password":
            await store.load(KEY)
        elif what == "set_password":
            await store.save(StoreKey("https://other.example"), GOOD)
        else:
            await store.remove(KEY)
    assert "\x1b" not in str(caught.value)
    assert "\n" not in str(caught.value)
    assert KEY in await store.keys()  # a secret that is there can still be found
