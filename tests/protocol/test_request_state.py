"""Sealed state: what comes back is what was sealed, for whom and for what, or nothing."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from trimcp.errors import LocalError
from trimcp.protocol.request_state import InvalidState, Memory, Sealer, question_key, request_digest

KEY, OLDER = b"k" * 32, b"o" * 16
DIGEST = request_digest("tools/call", {"name": "run"})


def _seal(sealer: Sealer, principal: str | None = None, now: float = 1000.0) -> str:
    memory = Memory({"q-0": {"action": "accept"}}, {"q-0": "d"}, {"n": [1, "é", None]})
    return sealer.seal(memory, digest=DIGEST, principal=principal, now=now)


def _open(
    sealer: Sealer, state: str, digest: str = DIGEST, principal: str | None = None, now: float = 1000.0
) -> Memory:
    return sealer.open(state, digest=digest, principal=principal, now=now)


def test_what_was_sealed_opens() -> None:
    sealer = Sealer([KEY])
    memory = _open(sealer, _seal(sealer, "ada"), principal="ada")
    assert (memory.answers, memory.asked, memory.kept) == (
        {"q-0": {"action": "accept"}},
        {"q-0": "d"},
        {"n": [1, "é", None]},
    )


def test_every_altered_byte_is_noticed() -> None:
    sealer = Sealer([KEY])
    blob = base64.urlsafe_b64decode(_seal(sealer))
    for place in range(len(blob)):
        altered = bytearray(blob)
        altered[place] ^= 1
        with pytest.raises(InvalidState):
            _open(sealer, base64.urlsafe_b64encode(altered).decode())


@pytest.mark.parametrize("state", ["", "A", "not base64!", "é", "=" * 8, "QUJD" * 20, "A" * 300_000, "\ud800"])
def test_garbage_is_refused(state: str) -> None:
    with pytest.raises(InvalidState):
        _open(Sealer([KEY]), state)


def test_it_expires() -> None:
    sealer = Sealer([KEY], lifetime=60)
    state = _seal(sealer, now=1000)
    _open(sealer, state, now=1060)
    with pytest.raises(InvalidState, match="expired"):
        _open(sealer, state, now=1061)


@pytest.mark.parametrize(("sealed_for", "opened_by"), [("ada", "bob"), ("ada", None), (None, "ada"), ("", None)])
def test_it_belongs_to_its_principal(sealed_for: str | None, opened_by: str | None) -> None:
    sealer = Sealer([KEY])
    with pytest.raises(InvalidState, match="principal"):
        _open(sealer, _seal(sealer, sealed_for), principal=opened_by)


@pytest.mark.parametrize(
    ("method", "params"),
    [("prompts/get", {"name": "run"}), ("tools/call", {"name": "other"}), ("tools/call", {"name": "run", "x": 1})],
)
def test_it_belongs_to_its_request(method: str, params: Any) -> None:
    sealer = Sealer([KEY])
    with pytest.raises(InvalidState, match="request"):
        _open(sealer, _seal(sealer), digest=request_digest(method, params))


def test_what_changes_between_rounds_is_not_part_of_the_request() -> None:
    changing = {"_meta": {"progressToken": 7}, "inputResponses": {}, "requestState": "x"}
    assert request_digest("tools/call", {"name": "run", **changing}) == DIGEST
    assert request_digest("tools/call", {"a": 1, "b": 2}) == request_digest("tools/call", {"b": 2, "a": 1})


def test_keys_rotate() -> None:
    old, both, new = Sealer([OLDER]), Sealer([KEY, OLDER]), Sealer([KEY])
    _open(both, _seal(old))
    _open(new, _seal(both))
    with pytest.raises(InvalidState, match="altered"):
        _open(new, _seal(old))


def test_a_random_key_is_its_own() -> None:
    with pytest.raises(InvalidState):
        _open(Sealer(), _seal(Sealer()))


@pytest.mark.parametrize("keys", [[], [b"short"], [KEY, b"short"]])
def test_weak_keys_are_refused(keys: list[bytes]) -> None:
    with pytest.raises(LocalError):
        Sealer(keys)


class _Shift:
    """Not a cipher anybody should use."""

    def __init__(self, shift: int) -> None:
        self.shift = shift

    def encrypt(self, data: bytes) -> bytes:
        return b"v1" + bytes((byte + self.shift) % 256 for byte in data)

    def decrypt(self, token: bytes) -> bytes:
        plain = bytes((byte - self.shift) % 256 for byte in token[2:])
        if not plain.startswith(b"{"):
            raise RuntimeError("wrong key")
        return plain


def test_a_cipher_hides_the_contents() -> None:
    open_sealer, sealer = Sealer([KEY]), Sealer([KEY], cipher=_Shift(3))
    assert b"accept" in base64.urlsafe_b64decode(_seal(open_sealer))
    state = _seal(sealer)
    assert b"accept" not in base64.urlsafe_b64decode(state)
    assert _open(sealer, state).answers == {"q-0": {"action": "accept"}}


def test_a_cipher_that_cannot_read_it_is_a_refusal_no_crash() -> None:
    with pytest.raises(InvalidState):
        _open(Sealer([KEY], cipher=_Shift(4)), _seal(Sealer([KEY], cipher=_Shift(3))))


def test_a_huge_state_is_refused_before_any_cryptography() -> None:
    with pytest.raises(InvalidState, match="too large"):
        _open(Sealer([KEY]), "A" * 300_000)


@pytest.mark.parametrize("kept", [{"big": "x" * 300_000}, {"odd": object()}, {"nan": float("nan")}])
def test_what_could_not_be_taken_back_is_not_sealed(kept: Any) -> None:
    with pytest.raises(LocalError):
        Sealer([KEY]).seal(Memory(kept=kept), digest=DIGEST, principal=None, now=0)


def test_a_question_is_known_by_what_it_asks_and_how_often() -> None:
    keys = {
        question_key("elicitation/create", {"message": "a"}, 0),
        question_key("elicitation/create", {"message": "a"}, 1),
        question_key("elicitation/create", {"message": "b"}, 0),
        question_key("roots/list", {"message": "a"}, 0),
    }
    assert len(keys) == 4
    assert question_key("m", {"a": 1, "b": 2}, 0) == question_key("m", {"b": 2, "a": 1}, 0)
