"""Who asks: the hook, what becomes of its answer, and the bearer tokens that come with it."""

from __future__ import annotations

import hmac
import logging
from typing import Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from trimcp.principal import Principal
from trimcp.transports.http.interfaces import Head
from trimcp.transports.http.peers.identity import Identity, Refused, bearer_tokens, identify

ADA, BOB = "ada-token-1", "bob.token~2=="
TOKENS = {ADA: "ada", BOB: "bob", "ada-token-3": "ada"}


def head(authorization: str | None = None) -> Head:
    return Head("POST", "/mcp", headers={} if authorization is None else {"authorization": authorization})


def judge(authorization: str | None, **more: Any) -> Identity:
    found = bearer_tokens(TOKENS, **more)(head(authorization))
    assert isinstance(found, Principal | Refused)
    return found


# The hook


async def test_a_hook_may_answer_at_once_or_later() -> None:
    async def later(head: Head) -> Identity:
        await trio.lowlevel.checkpoint()
        return Principal("ada", {"scope": "read"})

    found = await identify(later, head())
    assert isinstance(found, Principal)
    assert (found.id, found.claims) == ("ada", {"scope": "read"})
    assert await identify(lambda head: Principal("bob"), head()) == Principal("bob")
    assert await identify(lambda head: Refused(403), head()) == Refused(403)


def test_a_hook_that_answers_at_once_costs_no_wait() -> None:
    waiting = identify(lambda head: Principal("bob"), head())
    with pytest.raises(StopIteration) as done:
        waiting.send(None)
    assert done.value.value == Principal("bob")


@pytest.mark.parametrize("answer", [None, True, "ada", ("ada",)])
@pytest.mark.parametrize("late", [False, True])
async def test_a_hook_that_answers_something_else_lets_nobody_in(
    answer: Any, late: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def later(head: Head) -> Any:
        return answer

    found = await identify(later if late else lambda head: answer, head())
    assert found == Refused(500, (), "the identity check failed")
    (record,) = caplog.records
    assert f"authenticate returned {type(answer).__name__}, neither" in str(record.exc_info)


@pytest.mark.parametrize("late", [False, True])
async def test_a_hook_that_crashes_lets_nobody_in_and_is_logged_whole(
    late: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def crash(head: Head) -> Identity:
        raise RuntimeError("the table of users is gone\n\x1b[2K2026-01-01 ERROR root: forged")

    async def crash_later(head: Head) -> Identity:
        await trio.lowlevel.checkpoint()
        return crash(head)

    found = await identify(crash_later if late else crash, head("Bearer a-secret"))
    assert isinstance(found, Refused)
    assert (found.status, "table" in found.message) == (500, False)
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert "in crash\n" in caplog.text
    assert "the table of users is gone\n    | \\x1b[2K2026-01-01 ERROR root: forged\n" in caplog.text
    assert "a-secret" not in caplog.text


async def test_a_hook_that_waits_can_be_cancelled(autojump_clock: trio.testing.MockClock) -> None:
    async def forever(head: Head) -> Identity:
        await trio.sleep_forever()
        raise AssertionError

    with trio.move_on_after(1) as scope:
        await identify(forever, head())
    assert scope.cancelled_caught


def test_a_principal_has_an_id_and_keeps_its_claims_to_itself() -> None:
    with pytest.raises(ValueError):
        Principal("")
    assert "hush" not in repr(Principal("ada", {"ssn": "hush"}))
    assert Principal("ada", {"a": 1}) == Principal("ada")
    assert len({Principal("ada", {"a": 1}), Principal("ada")}) == 1


# Bearer tokens


@pytest.mark.parametrize(
    ("authorization", "id"),
    [
        (f"Bearer {ADA}", "ada"),
        (f"bearer {BOB}", "bob"),
        (f"BEARER   {BOB}", "bob"),
        ("Bearer ada-token-3", "ada"),
    ],
)
def test_a_token_says_who_it_is(authorization: str, id: str) -> None:
    assert judge(authorization) == Principal(id)


@pytest.mark.parametrize(
    ("authorization", "status", "challenge"),
    [
        (None, 401, "Bearer"),
        ("", 401, "Bearer"),
        ("Basic YTpi", 401, "Bearer"),
        (f"Basic {ADA}", 401, "Bearer"),
        (f"Bearer{ADA}", 401, "Bearer"),
        (f"Bearer {ADA}x", 401, 'error="invalid_token"'),
        (f"Bearer {ADA[:-1]}", 401, 'error="invalid_token"'),
        (f"Bearer {ADA.upper()}", 401, 'error="invalid_token"'),
        (f"Bearer {BOB.rstrip('=')}", 401, 'error="invalid_token"'),
        ("Bearer", 400, 'error="invalid_request"'),
        ("Bearer ", 400, 'error="invalid_request"'),
        (f"Bearer {ADA} {ADA}", 400, 'error="invalid_request"'),
        (f"Bearer {ADA}, Bearer {BOB}", 400, 'error="invalid_request"'),
        (f'Bearer "{ADA}"', 400, 'error="invalid_request"'),
        (f"Bearer {ADA}\xe9", 400, 'error="invalid_request"'),
        (f"Bearer {ADA}\n", 400, 'error="invalid_request"'),
    ],
)
def test_anything_else_is_refused_as_rfc_6750_has_it(authorization: str | None, status: int, challenge: str) -> None:
    found = judge(authorization)
    assert isinstance(found, Refused)
    ((name, value),) = found.headers
    assert (found.status, name) == (status, "WWW-Authenticate")
    assert value == "Bearer" if challenge == "Bearer" else challenge in value
    assert ADA[:-1] not in value + found.message


def test_a_realm_is_named_in_each_challenge() -> None:
    for authorization in (None, "Bearer x"):
        found = judge(authorization, realm="the library")
        assert isinstance(found, Refused)
        assert found.headers[0][1].startswith('Bearer realm="the library"')
    with pytest.raises(ValueError, match="realm"):
        bearer_tokens(TOKENS, realm='a"b')


@pytest.mark.parametrize("presented", [*TOKENS, "none-of-them"])
def test_each_token_is_compared_with_whichever_came_and_in_constant_time(
    presented: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared = []
    compare_digest = hmac.compare_digest

    def compare(left: bytes, right: bytes) -> bool:
        compared.append((left, right))
        return compare_digest(left, right)

    hook = bearer_tokens(TOKENS)
    monkeypatch.setattr("trimcp.transports.http.peers.identity.hmac.compare_digest", compare)
    hook(head(f"Bearer {presented}"))
    assert len(compared) == len(TOKENS)
    assert {len(side) for pair in compared for side in pair} == {32}, "their lengths tell nothing"


def test_a_principal_by_token_keeps_its_scopes() -> None:
    found = bearer_tokens({ADA: Principal("ada", scopes=["read"])})(head(f"Bearer {ADA}"))
    assert isinstance(found, Principal)
    assert found.scopes == {"read"}


def test_nobody_can_read_the_tokens_back() -> None:
    hook: Any = bearer_tokens(TOKENS)
    assert ADA not in repr(hook)
    cells = [cell.cell_contents for cell in hook.__closure__]
    assert any(isinstance(kept, list) for kept in cells)
    assert ADA not in repr(cells)


@pytest.mark.parametrize("token", ["", "two words", "=", "a=b", "\xfcber", "a\nb", "a\n"])
def test_a_token_no_header_can_carry_is_refused_without_being_shown(token: str) -> None:
    with pytest.raises(ValueError, match="the bearer token of 'ada' must be") as caught:
        bearer_tokens({token: "ada"})
    if len(token) > 1:
        assert token not in str(caught.value)


def test_a_token_belongs_to_somebody() -> None:
    with pytest.raises(ValueError, match="belongs to nobody"):
        bearer_tokens({"token": ""})


@given(st.text(st.characters(max_codepoint=255)))
def test_no_other_credentials_let_anybody_in(text: str) -> None:
    found = judge(text)
    assert isinstance(found, Refused)
    assert all(value.isascii() and value.isprintable() for _, value in found.headers)
