"""Seal and open `requestState`: what a server wants to remember between two rounds of one request, kept by the client.

The client may be hostile (2026-07-28 basic/patterns/mrtr, "Server Requirements"), so the state is signed with
HMAC-SHA256 and bound to an expiry, to the principal and to the request it belongs to. It is *not secret*: whoever
holds it can read it, unless a cipher is given. Single use is not promised; a caller who needs it must remember.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import os
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import attrs
import orjson

from trimcp.errors import LocalError, McpError
from trimcp.wire import jsonrpc

_TRANSIENT = frozenset({"_meta", "inputResponses", "requestState"})
# A state larger than this is refused before any cryptography: a header-sized secret box, not a database. JWTs in
# the wild stay under 8 KiB; answers to a few questions, a sampled text among them, fit in this.
_MAX_STATE = 256 * 1024


class InvalidState(McpError):
    """A `requestState` that was altered, has expired or belongs to someone or something else."""


class Cipher(Protocol):
    """Anything that encrypts and decrypts bytes; `cryptography.fernet.Fernet` fits as it is."""

    def encrypt(self, data: bytes) -> bytes: ...
    def decrypt(self, token: bytes) -> bytes: ...


@attrs.define(eq=False, repr=False)
class Memory:
    """What survives from round to round of one request.

    Attributes:
        answers: raw answers by question key.
        asked: the digest of the question last asked under each key.
        kept: results of `ctx.once`, by its key.
    """

    answers: dict[str, Any] = attrs.field(factory=dict)
    asked: dict[str, str] = attrs.field(factory=dict)
    kept: dict[str, Any] = attrs.field(factory=dict)


def _digest(value: Any) -> str:
    return hashlib.sha256(orjson.dumps(value, option=orjson.OPT_SORT_KEYS)).hexdigest()[:32]


def request_digest(method: str, params: Mapping[str, Any]) -> str:
    """Return what identifies a request across its rounds: method and params without what changes between them."""
    return _digest([method, {name: value for name, value in params.items() if name not in _TRANSIENT}])


def question_key(method: str, params: Mapping[str, Any], occurrence: int) -> str:
    """Return the key of the `occurrence`-th (from 0) asking of this very question within one run of a handler."""
    return f"{_digest([method, params])}-{occurrence}"


@attrs.define(eq=False, repr=False)
class Sealer:
    """Seals and opens request states with a list of keys: the first seals, all of them open (key rotation).

    Args:
        keys: secrets of at least 16 bytes each, newest first; shared by all workers of one server. None makes a
            random one, good for a single process only.
        lifetime: seconds a sealed state stays valid.
        cipher: encrypts the contents too, for states that should not be readable by the client.
    """

    keys: Sequence[bytes] | None = None
    lifetime: float = 3600.0
    cipher: Cipher | None = None
    _macs: list[bytes] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        keys = list(self.keys) if self.keys is not None else [os.urandom(32)]
        if not keys or any(len(key) < 16 for key in keys):
            raise LocalError("state keys must be at least 16 bytes each, newest first")
        self._macs = keys

    def seal(self, memory: Memory, *, digest: str, principal: str | None, now: float) -> str:
        """Return the state as a string for the client to echo. `now` is in seconds since the epoch.

        Raises:
            LocalError: there is too much to remember, or a result of `once` that is not JSON.
        """
        body = jsonrpc.encode(
            {
                "exp": int(now + self.lifetime),
                "req": digest,
                "who": principal,
                "answers": memory.answers,
                "asked": memory.asked,
                "kept": memory.kept,
            }
        )
        if self.cipher is not None:
            body = self.cipher.encrypt(body)
        mac = hmac.digest(self._macs[0], body, "sha256")
        state = base64.urlsafe_b64encode(mac + body).decode("ascii")
        if len(state) > _MAX_STATE:
            raise LocalError(f"the answers so far make a state of {len(state)} bytes; {_MAX_STATE} can be remembered")
        return state

    def open(self, state: str, *, digest: str, principal: str | None, now: float) -> Memory:
        """Return what `seal` was given.

        Raises:
            InvalidState: it was altered, has expired, or belongs to another principal or another request. Which of
                them is in the text, which is for our log and never for the peer.
        """
        if len(state) > _MAX_STATE:
            raise InvalidState("too large")
        try:
            blob = base64.b64decode(state.encode("ascii"), altchars=b"-_", validate=True)
        except (binascii.Error, UnicodeEncodeError):
            raise InvalidState("not base64") from None
        mac, body = blob[:32], blob[32:]
        # Every key is tried, in constant time each, so that timing says nothing about which one matched.
        matches = [hmac.compare_digest(mac, hmac.digest(key, body, "sha256")) for key in self._macs]
        if not any(matches):
            raise InvalidState("altered")
        if self.cipher is not None:
            try:
                body = self.cipher.decrypt(body)
            except Exception as error:  # each library has its own; all of them mean another key
                raise InvalidState("not ours to read") from error
        fields = orjson.loads(body)
        if fields["exp"] < now:
            raise InvalidState("expired")
        if fields["who"] != principal:
            raise InvalidState("another principal's")
        if fields["req"] != digest:
            raise InvalidState("another request's")
        return Memory(fields["answers"], fields["asked"], fields["kept"])
